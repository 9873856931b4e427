"""Prices corrected by what was measured of the same job: factors by kind of operator that multiply what instructions take alone.

`fit_refined.py` finds them from traces; `StagePrices` applies them, so that every plan of a job is priced with the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_overlap.plan.operators import BACKWARD, RECOMPUTE, WEIGHT_GRADIENT

Kind = tuple[str, bool]
"""An operator without its place (`operators.kind_of`), and whether its instructions are pieces of it."""


@dataclass(frozen=True, slots=True)
class Refined:
    """Factors of one job.

    Attributes:
        factors: measured over predicted.
        unpriced: seconds of one instruction of a kind that the cost model has at nothing.
    """

    factors: Mapping[Kind, float] = field(default_factory=dict)
    unpriced: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, is_cut: bool, alone: float) -> float:
        """Of an instruction, refined."""
        return alone * self.factor(kind, is_cut) if alone else self.unpriced.get(kind, 0.0)

    def factor(self, kind: str, is_cut: bool) -> float:
        """Of a kind; 1 where nothing like it was measured.

        What was not measured in pieces counts as the whole did, and the reverse; a weight gradient or a recomputation that had
        no span of its own stood in the span of its backward operator.
        """
        kinds = [kind]
        for suffix in (WEIGHT_GRADIENT, RECOMPUTE):
            if kind.endswith(f".{suffix}"):
                kinds.append(kind.removesuffix(suffix) + BACKWARD)
        found = (self.factors.get((one, cut)) for one in kinds for cut in (is_cut, not is_cut))
        return next((factor for factor in found if factor is not None), 1.0)


NOT_REFINED = Refined()
