"""The differences between a plan and the user's flags, decision by decision, each with its separate predicted effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_overlap.plan_search.results import Change
from moe_overlap.report.answer import line
from moe_overlap.tuner.cost.analytic import Prediction


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
