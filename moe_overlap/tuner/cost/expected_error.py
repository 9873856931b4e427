"""The expected error of a prediction, from runs that were left out when the constants were fitted.

`tuner/calibrate/fit` fits the constants several times, each time without a part of the calibration rows, and writes the
errors of the left-out rows to errors.json, by group: GPU type with precision and kind (dense or MoE), and wider groups. A
prediction uses the narrowest group with enough families of runs, and names it.

The interval. For a run of a new family, measured over predicted seconds lie within exp(± spread) in nine of ten cases:
1. A family counts once, by the mean square of its logarithmic errors, because an error for one model affects all its runs. Errors
   are not centred, so the bias of a group is part of its spread.
2. A mean square of few families is uncertain. So that of a group is averaged with that of its kind (dense or MoE), and that of a
   kind with that of all runs, as if `PRIOR_FAMILIES` families of the wider group belonged to it.
3. The spread is the root of that mean square times Student's 95 % quantile, with a degree of freedom per family (also of step 2).
4. A prediction has the largest spread of all groups that contain it, because a wide group may average out a narrow one's errors.
5. A prediction beyond the calibration has spread and mean error times `beyond`: the ratio of the errors of two kinds of left-out
   runs, those with a release, precision or feature that no remaining run has, and the others.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from moe_overlap.describe.cluster import Gpu
from moe_overlap.tuner.cost.hardware import precision_of, scope
from moe_overlap.tuner.cost.memory_errors import student_quantile

ENOUGH_FAMILIES = 5
"""Fewest families of a group whose error is used. A family is the runs of one model, GPU type and precision, whose errors are
correlated."""
PRIOR_FAMILIES = 5
LEVEL = 0.9
"""Share of runs within the interval."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of a group of runs.

    Attributes:
        relative: mean absolute relative error of predicted steps.
        rows: number of runs.
        families: number of families among them.
        group: name of the group.
        spread: half of the interval, as a logarithm of measured over predicted seconds.
    """

    relative: float
    rows: int
    families: int
    group: str
    spread: float = 0.0

    def interval(self, seconds: float) -> tuple[float, float]:
        """(low, high) seconds between which the step lies in nine of ten cases."""
        return seconds * math.exp(-self.spread), seconds * math.exp(self.spread)

    def holds(self, relative: float) -> bool:
        """Whether a run with this relative error lies in the interval."""
        return abs(math.log1p(relative)) <= self.spread

    def widened(self, factor: float) -> ExpectedError:
        """The error of a prediction beyond the calibration: mean error and spread times a factor."""
        return dataclasses.replace(self, relative=self.relative * factor, spread=self.spread * factor)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that was predicted with constants fitted without its family.

    Attributes:
        groups: groups of the run, narrowest first; the last but one is its kind, the last is all runs.
        relative: relative error of the predicted seconds.
        is_beyond: whether no remaining run has its release, its precision or one of its features.
    """

    groups: Sequence[str]
    family: Hashable
    relative: float
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Errors:
    """The contents of errors.json: expected errors by group.

    Attributes:
        beyond: factor on the errors of a prediction beyond the calibration; at least 1.
    """

    groups: Mapping[str, ExpectedError]
    beyond: float = 1.0

    def expected(self, gpu: Gpu, precision: str, is_moe: bool) -> ExpectedError | None:
        """The error of the narrowest group with enough families, with the largest spread of all groups of the run.

        None if no group has enough families.
        """
        names = group_names(gpu.name, gpu.architecture, precision, is_moe)
        groups = [self.groups[name] for name in names if name in self.groups]
        narrowest = next((group for group in groups if group.families >= ENOUGH_FAMILIES), None)
        if narrowest is None:
            return None
        return dataclasses.replace(narrowest, spread=max(group.spread for group in groups))


def group_names(gpu: str, architecture: str, precision: str, is_moe: bool) -> tuple[str, ...]:
    """The groups of a run, narrowest first."""
    kind, wide = scope("", is_moe).strip(), precision_of(precision)
    return (
        f"{gpu} {wide} {kind}",
        f"{gpu} {kind}",
        f"{architecture} {wide} {kind}",
        f"{architecture} {kind}",
        kind,
        ALL,
    )


def errors_of(runs: Iterable[LeftOut]) -> Errors:
    """The contents of errors.json, computed from the left-out runs."""
    by_group: dict[str, list[LeftOut]] = {}
    kinds: dict[str, str] = {}
    every = list(runs)
    for run in every:
        for name in run.groups:
            by_group.setdefault(name, []).append(run)
            kinds[name] = run.groups[-2] if name not in run.groups[-2:] else ALL
    groups: dict[str, ExpectedError] = {}
    squares: dict[str, tuple[float, int]] = {}
    # Wide groups first, because the mean squares of narrow ones are averaged with theirs (step 2).
    for name in sorted(by_group, key=lambda name: (name != ALL, name not in kinds.values(), name)):
        group_square, families = _mean_square(by_group[name])
        square, freedom = group_square, families
        if name != ALL:
            around, _ = squares[kinds[name]]
            square = (families * group_square + PRIOR_FAMILIES * around) / (families + PRIOR_FAMILIES)
            freedom = families + PRIOR_FAMILIES
        squares[name] = square, freedom
        sizes = [abs(run.relative) for run in by_group[name]]
        spread = student_quantile((1.0 + LEVEL) / 2.0, freedom) * math.sqrt(square)
        groups[name] = ExpectedError(round(sum(sizes) / len(sizes), 4), len(sizes), families, name, round(spread, 4))
    return Errors(dict(sorted(groups.items())), _beyond(every))


def _mean_square(runs: Sequence[LeftOut]) -> tuple[float, int]:
    """The mean square of logarithmic errors with every family counted once (step 1), and the number of families."""
    families: dict[Hashable, list[float]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(math.log1p(run.relative) ** 2)
    return sum(sum(squares) / len(squares) for squares in families.values()) / len(families), len(families)


def _beyond(runs: Sequence[LeftOut]) -> float:
    sides = [[run for run in runs if run.is_beyond == beyond] for beyond in (False, True)]
    if not all(sides):
        return 1.0
    calibrated, beyond = (_mean_square(side)[0] for side in sides)
    return round(max(1.0, math.sqrt(beyond / calibrated)), 2) if calibrated else 1.0


def errors_json(errors: Errors) -> str:
    """The text of errors.json."""
    rows = {}
    for name, group in errors.groups.items():
        rows[name] = {key: value for key, value in dataclasses.asdict(group).items() if key != "group"}
    return json.dumps({"beyond": errors.beyond, "groups": rows}, indent=1) + "\n"


@cache
def shipped_errors() -> Errors:
    """The expected errors in errors.json."""
    text = resources.files(__package__).joinpath("errors.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    groups = {name: ExpectedError(group=name, **row) for name, row in content["groups"].items()}
    return Errors(groups, content["beyond"])
