"""The answer of the first run: a plain and a tuned training, each predicted and measured, as JSON, as a table and as a page.

`RunFacts` are the figures of one training, `Facts` the figures of both; `table` and `page` read nothing else, so a recorded run
can be shown again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from moe_overlap.commands.compare import relative_differences
from moe_overlap.report.html import STYLE

WARM_UP_STEPS = 2
"""Steps of a training that its figures leave out: the first ones also reserve memory, and track it."""
SAME_LOSS = 1e-5
"""Relative difference up to which losses in single precision count as equal: sums are taken in another order."""
SAME_SPEED = 0.02
"""Share of a step below which a difference between two trainings says nothing."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One training.

    Attributes:
        predicted_seconds: of its step.
        predicted_exposed_seconds: of communication that no computation covers.
        rows: of `--log-json`, one for each step.
    """

    predicted_seconds: float
    predicted_exposed_seconds: float
    rows: Sequence[Mapping[str, Any]]

    @property
    def step_seconds(self) -> float:
        """Median of the measured steps."""
        return self._median("step_seconds")

    @property
    def exposed_seconds(self) -> float:
        """Median of the measured exposed communication of a step."""
        return self._median("exposed_comm_seconds")

    @property
    def losses(self) -> dict[int, float]:
        """step -> loss."""
        return {int(row["step"]): float(row["loss"]) for row in self.rows}

    def _median(self, name: str) -> float:
        rows = self.rows[WARM_UP_STEPS:] or self.rows
        return statistics.median(float(row[name]) for row in rows)


@dataclass(frozen=True, slots=True)
class Facts:
    """Both trainings.

    Attributes:
        setting: lines that say what ran where.
        chosen: name of the tuned overlap.
    """

    setting: Sequence[str]
    chosen: str
    plain: RunFacts
    tuned: RunFacts

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of the losses of all steps that both trainings made."""
        return max(relative_differences(self.plain.losses, self.tuned.losses).values())


def facts_json(facts: Facts) -> dict[str, Any]:
    """Everything, as `facts_of` reads it."""
    return {
        "setting": list(facts.setting),
        "chosen": facts.chosen,
        **{
            name: {
                "predicted_step_seconds": run.predicted_seconds,
                "predicted_exposed_comm_seconds": run.predicted_exposed_seconds,
                "measured_step_seconds": run.step_seconds,
                "measured_exposed_comm_seconds": run.exposed_seconds,
                "steps": [dict(row) for row in run.rows],
            }
            for name, run in (("plain", facts.plain), ("tuned", facts.tuned))
        },
        "largest_relative_loss_difference": facts.loss_difference,
    }


def facts_of(record: Mapping[str, Any]) -> Facts:
    """The facts that `facts_json` has written."""
    plain, tuned = (
        RunFacts(
            record[name]["predicted_step_seconds"],
            record[name]["predicted_exposed_comm_seconds"],
            record[name]["steps"],
        )
        for name in ("plain", "tuned")
    )
    return Facts(record["setting"], record["chosen"], plain, tuned)


def table(facts: Facts) -> list[str]:
    """The table and what follows from it."""
    plain, tuned = facts.plain, facts.tuned
    shared = sorted(plain.losses.keys() & tuned.losses.keys())
    last = shared[-1]
    rows = [
        ("", "plain", "tuned", "plain / tuned"),
        ("step, predicted", *_seconds(plain.predicted_seconds, tuned.predicted_seconds)),
        ("step, measured", *_seconds(plain.step_seconds, tuned.step_seconds)),
        ("error of the prediction", _error(plain), _error(tuned), ""),
        (
            "exposed communication, predicted",
            *_seconds(plain.predicted_exposed_seconds, tuned.predicted_exposed_seconds),
        ),
        ("exposed communication, measured", *_seconds(plain.exposed_seconds, tuned.exposed_seconds)),
        (f"loss of step {last}", f"{plain.losses[last]:.5f}", f"{tuned.losses[last]:.5f}", ""),
    ]
    lines = [f"{name:<34}{first:>11}{second:>11}{third:>15}".rstrip() for name, first, second, third in rows]
    return [*lines, *verdict(facts)]


def verdict(facts: Facts) -> list[str]:
    """Whether the plan is worth its while here, and whether it trains the same model."""
    plain, tuned = facts.plain, facts.tuned
    difference, shared = facts.loss_difference, plain.losses.keys() & tuned.losses.keys()
    same = f"over {len(shared)} steps losses differ by at most {difference:.0e} of their value (limit {SAME_LOSS:.0e})"
    loss = f"{'same training' if difference <= SAME_LOSS else 'NOT the same training'}: {same}"
    gained = plain.step_seconds / tuned.step_seconds - 1.0
    if tuned.predicted_seconds >= plain.predicted_seconds:
        speed = "nothing is predicted to be faster than plain here: the two trainings execute the same plan"
    elif gained > SAME_SPEED:
        speed = f"faster: {gained:.0%} more steps in the same time"
    elif gained < -SAME_SPEED:
        speed = f"NOT faster on this machine: {-gained:.0%} fewer steps in the same time, against the prediction"
    else:
        speed = "no difference on this machine beyond what steps vary by"
    return [speed, loss]


def page(facts: Facts, picture: str) -> str:
    """`report.html`: the table and the picture, in one file that loads nothing.

    Args:
        picture: an SVG.
    """
    title = "The first run: plain and tuned, predicted and measured"
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    settings, answer = ("\n".join(map(escape, lines)) for lines in (facts.setting, table(facts)))
    about = (
        "One step of rank 0. Communication is exposed while no computation of the rank is under way. The plan cuts the "
        "tokens into parts, so that one part travels while another is computed, and puts weight gradients under all-to-alls."
    )
    body = f"<h1>{escape(title)}</h1><pre>{settings}</pre><pre>{answer}</pre><p>{escape(about)}</p>{picture}"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _seconds(plain: float, tuned: float) -> tuple[str, str, str]:
    return f"{plain:.3f} s", f"{tuned:.3f} s", f"{plain / tuned:.2f}" if tuned > 0 else ""


def _error(run: RunFacts) -> str:
    return f"{run.predicted_seconds / run.step_seconds - 1.0:+.0%}"
