"""The differences between a plan and the user's flags, decision by decision, each with its separate predicted effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_overlap.describe.cluster import GIB
from moe_overlap.report.answer import line
from moe_overlap.report.prediction import VISIBLE_BYTES, difference
from moe_overlap.tuner.cost.analytic import Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A decision in which the plan differs from the user's flags.

    Attributes:
        name: of the decision, such as "micro-batch".
        before, after: flag -> values, in the user's flags and in the plan; a flag in only one of them is removed or added.
        prediction: the prediction of the user's flags with only this change; None if a rule refuses them.
        rule: the rule that refuses them.
    """

    name: str
    before: Mapping[str, tuple[str, ...]]
    after: Mapping[str, tuple[str, ...]]
    prediction: Prediction | None
    rule: str = ""

    @property
    def sentence(self) -> str:
        """The flags that change: `--micro-batch-size 1 -> 2`, or `remove --recompute-granularity full`."""
        parts = []
        for flag in dict.fromkeys((*self.before, *self.after)):
            old, new = self.before.get(flag), self.after.get(flag)
            if new is None:
                parts.append(" ".join(("remove", flag, *(old or ()))))
            elif old is None:
                parts.append(" ".join(("add", flag, *new)))
            else:
                parts.append(f"{flag} {' '.join(old)} -> {' '.join(new)}")
        return ", ".join(parts)

    def gain(self, baseline: Prediction) -> float:
        """Seconds of a step that the change saves by itself; 0 if it is not possible by itself."""
        return (
            0.0 if self.prediction is None else baseline.predicted.step_seconds - self.prediction.predicted.step_seconds
        )

    def effect(self, baseline: Prediction) -> str:
        """The predicted effect of only this change, as text."""
        if self.prediction is None:
            return f"only together with others: {self.rule}"
        seconds = self.prediction.predicted.step_seconds - baseline.predicted.step_seconds
        memory = self.prediction.fullest.needed_bytes - baseline.fullest.needed_bytes
        fits = "" if self.prediction.fits else f"; {self.prediction.memory_verdict}"
        space = f"{memory / GIB:+.1f} GiB on the fullest stage" if abs(memory) >= VISIBLE_BYTES else "the same memory"
        # A change that costs time or memory by itself needs another reason.
        others = "" if seconds < 0 and self.prediction.fits else "; chosen for its effect together with the others"
        return f"alone {difference(seconds)} a step and {space}{fits}{others}"


def helpful(changes: Sequence[Change], baseline: Prediction) -> list[Change]:
    """The changes that save time by themselves, in order; those that do not fit by themselves come last."""
    gaining = [change for change in changes if change.gain(baseline) > 0.0]
    return sorted(gaining, key=lambda change: change.prediction is None or not change.prediction.fits)


def changes_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The changes as JSON, the largest gain first."""
    return [
        {
            "name": change.name,
            "before": [word for flag, values in change.before.items() for word in (flag, *values)],
            "after": [word for flag, values in change.after.items() for word in (flag, *values)],
            "alone_step_seconds": None if change.prediction is None else change.prediction.predicted.step_seconds,
            "alone_needed_bytes": None if change.prediction is None else change.prediction.fullest.needed_bytes,
            "alone_fits": None if change.prediction is None else change.prediction.fits,
            "rule": change.rule,
        }
        for change in changes
    ]


def change_lines(changes: Sequence[Change], baseline: Prediction) -> list[str]:
    """The lines on the changes, the largest gain first."""
    return [line("change", f"{change.sentence}: {change.effect(baseline)}") for change in changes]
