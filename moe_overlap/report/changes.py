"""The changes that a plan makes to a user's own flags, one decision at a time, with the predicted effect of each alone."""

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
    """A decision that the plan makes otherwise than the user's flags.

    Attributes:
        name: of the decision, such as "micro-batch".
        before, after: flags with their values; what stands in one of them only is removed or added.
        alone: the user's flags with this change and no other; None where rules refuse them.
        rule: why they do.
    """

    name: str
    before: Mapping[str, tuple[str, ...]]
    after: Mapping[str, tuple[str, ...]]
    alone: Prediction | None
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
        """Seconds of a step that the change saves alone; 0 where it cannot be made alone."""
        return 0.0 if self.alone is None else baseline.predicted.step_seconds - self.alone.predicted.step_seconds

    def effect(self, baseline: Prediction) -> str:
        """The predicted effect of the change alone, as text."""
        if self.alone is None:
            return f"only together with others: {self.rule}"
        seconds = self.alone.predicted.step_seconds - baseline.predicted.step_seconds
        memory = self.alone.fullest.needed_bytes - baseline.fullest.needed_bytes
        fits = "" if self.alone.fits else f"; {self.alone.memory_verdict}"
        space = f"{memory / GIB:+.1f} GiB on the fullest stage" if abs(memory) >= VISIBLE_BYTES else "as much memory"
        # What costs something alone is no reason for itself.
        others = "" if seconds < 0 and self.alone.fits else "; chosen for what it gives together with the others"
        return f"alone {difference(seconds)} a step and {space}{fits}{others}"


def helpful(changes: Sequence[Change], baseline: Prediction) -> list[Change]:
    """The changes that save seconds alone, in their order; those that alone do not fit come last."""
    gaining = [change for change in changes if change.gain(baseline) > 0.0]
    return sorted(gaining, key=lambda change: change.alone is None or not change.alone.fits)


def changes_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The changes for programs, the largest gain first."""
    return [
        {
            "name": change.name,
            "before": [word for flag, values in change.before.items() for word in (flag, *values)],
            "after": [word for flag, values in change.after.items() for word in (flag, *values)],
            "alone_step_seconds": None if change.alone is None else change.alone.predicted.step_seconds,
            "alone_needed_bytes": None if change.alone is None else change.alone.fullest.needed_bytes,
            "alone_fits": None if change.alone is None else change.alone.fits,
            "rule": change.rule,
        }
        for change in changes
    ]


def change_lines(changes: Sequence[Change], baseline: Prediction) -> list[str]:
    """The changes for a reader, the largest gain first."""
    return [line("change", f"{change.sentence}: {change.effect(baseline)}") for change in changes]
