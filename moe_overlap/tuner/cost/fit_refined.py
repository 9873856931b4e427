"""Factors that make the simulated steps of measured plans take what was measured, kind by kind.

What runs beside something else is slowed down, in the measurement as in the simulation. So the factors of prices alone are found
by repetition: simulate at the factors so far, and multiply each by measured over simulated, until no kind moves.
Exchanges of which only a bound is known are shortened to it at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.operators import STATE_PREFIXES
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.observed import Observed
from moe_overlap.tuner.cost.refined import NOT_REFINED, Kind, Refined

ROUNDS = 12
CLOSE = 1e-3
"""Of measured over simulated, from 1, where the repetition ends."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a kind takes in a simulated step, as one rank has it."""

    seconds: float
    instructions: float


Play = Callable[[Plan, Refined], Mapping[Kind, Played]]


@dataclass(frozen=True, slots=True)
class KindFit:
    """One kind.

    Attributes:
        predicted_seconds, measured_seconds: of the steps of all traces; 0 where there are none.
        is_bound: it took at most as long.
        factor: of its price; None where that has none.
        is_taken: it has no price, and takes what was measured.
    """

    kind: Kind
    predicted_seconds: float
    measured_seconds: float
    is_bound: bool
    factor: float | None
    is_taken: bool


def fit(observed: Sequence[Observed], play: Play) -> tuple[Refined, list[KindFit]]:
    """Factors of all kinds together.

    Args:
        play: simulates a plan at refined prices.
    Returns:
        The factors, and every kind that was measured or predicted, the longest first.
    """
    first = [play(one.plan, NOT_REFINED) for one in observed]
    refined = Refined({}, _unpriced(observed, first))
    factors: dict[Kind, float] = {}
    bounds: set[Kind] = set()
    for _ in range(ROUNDS):
        real, simulated, bounds = _sums(observed, [play(one.plan, refined) for one in observed])
        moved = {kind: real[kind] / seconds for kind, seconds in simulated.items() if seconds and real.get(kind)}
        moved = {kind: min(1.0, ratio) if kind in bounds else ratio for kind, ratio in moved.items()}
        moved = {kind: ratio for kind, ratio in moved.items() if kind[0] not in refined.unpriced}
        factors = {kind: factors.get(kind, 1.0) * ratio for kind, ratio in moved.items()}
        refined = Refined(factors, refined.unpriced)
        if all(abs(ratio - 1.0) < CLOSE for ratio in moved.values()):
            break
    real, predicted, bounds = _sums(observed, first)
    kinds = [
        KindFit(
            kind,
            predicted.get(kind, 0.0),
            real.get(kind, 0.0),
            kind in bounds,
            factors.get(kind),
            kind[0] in refined.unpriced,
        )
        for kind in real.keys() | predicted.keys()
    ]
    return refined, sorted(kinds, key=lambda one: (-max(one.predicted_seconds, one.measured_seconds), one.kind))


def _sums(
    observed: Sequence[Observed], played: Sequence[Mapping[Kind, Played]]
) -> tuple[dict[Kind, float], dict[Kind, float], set[Kind]]:
    """Measured and simulated seconds of the steps that tell of a kind, and kinds of which only bounds are known.

    A bound tells nothing where another trace has more. What no trace tells of is simulated seconds of all.
    """
    measured = {kind for one in observed for kind in one.seconds}
    told = {kind for one in observed for kind in one.seconds if kind not in one.bounds}
    real: dict[Kind, float] = defaultdict(float)
    simulated: dict[Kind, float] = defaultdict(float)
    for one, here in zip(observed, played, strict=True):
        for kind in one.seconds.keys() | here.keys():
            tells = kind in one.seconds and (kind not in one.bounds or kind not in told)
            if tells:
                real[kind] += one.seconds[kind]
            if kind in here and (tells or kind not in measured):
                simulated[kind] += here[kind].seconds
    return dict(real), dict(simulated), measured - told


def _unpriced(observed: Sequence[Observed], played: Sequence[Mapping[Kind, Played]]) -> dict[str, float]:
    """Seconds of one instruction where the model has nothing: of what stands behind the passes."""
    real, simulated, _ = _sums(observed, played)
    found = {}
    for kind, seconds in real.items():
        count = sum(here[kind].instructions for here in played if kind in here)
        if kind[0].startswith(STATE_PREFIXES) and seconds and count and not simulated.get(kind):
            found[kind[0]] = seconds / count
    return found
