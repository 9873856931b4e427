"""The error to expect of a prediction: what predictions of runs missed that their constants had not seen.

`tuner/calibrate/fit` fits the constants several times, each time without a part of the calibration rows, and writes the
errors of the rows it left out to errors.json, by group: GPU type, precision, and dense or MoE, and the wider groups around them.
A prediction takes the narrowest group with enough families of runs, and says which.

The interval. Measured over predicted seconds of a run of a new family lie within exp(± spread) in nine of ten cases:
1. A family counts once, by the mean square of its logarithmic errors: what is missed of a model is missed of all its runs. Errors
   are not centred, so that a bias of a group is part of its spread.
2. Few families say little of their spread, so the mean square of a group is drawn to that of its kind (dense or MoE), and a
   kind's to that of all runs, as if `PRIOR_FAMILIES` families of the wider group were among its own.
3. The spread is Student's 95 % quantile, of as many degrees of freedom as families count, times the root of that mean square.
4. A prediction has the largest spread of all groups around it: a wide group averages away what a narrow one shows.
5. A prediction beyond what was calibrated has the spread, and the mean error, times `beyond`: by how much left-out runs erred
   more whose release, precision or features none of the remaining runs had.
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
"""A group with fewer families says less about its error than a wider one. Runs of one model, GPU type and precision are a family:
what the model misses of one it misses of all."""
PRIOR_FAMILIES = 5
LEVEL = 0.9
"""Share of runs that the interval is to hold."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of a group of runs.

    Attributes:
        relative: the mean size of the relative errors of predicted steps.
        rows: the runs it is the mean of.
        families: of which so many differ in model, GPU type or precision.
        group: what the runs have in common.
        spread: half of the interval, as a logarithm of measured over predicted seconds.
    """

    relative: float
    rows: int
    families: int
    group: str
    spread: float = 0.0

    def interval(self, seconds: float) -> tuple[float, float]:
        """Between which seconds a predicted step lies in nine of ten cases."""
        return seconds * math.exp(-self.spread), seconds * math.exp(self.spread)

    def holds(self, relative: float) -> bool:
        """Whether a run whose prediction has this relative error lies in the interval."""
        return abs(math.log1p(relative)) <= self.spread

    def widened(self, factor: float) -> ExpectedError:
        """The error of a prediction beyond what was calibrated: both what it misses in the mean and its interval grow."""
        return dataclasses.replace(self, relative=self.relative * factor, spread=self.spread * factor)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run whose prediction's constants had seen none of its family.

    Attributes:
        groups: the run's, the narrowest first; the last but one is its kind, the last all runs.
        relative: error of the predicted seconds.
        is_beyond: whether the remaining runs lacked its release, its precision or one of its features.
    """

    groups: Sequence[str]
    family: Hashable
    relative: float
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Errors:
    """Expected errors by group, as errors.json has them.

    Attributes:
        beyond: factor of the errors of a prediction beyond what was calibrated; at least 1.
    """

    groups: Mapping[str, ExpectedError]
    beyond: float = 1.0

    def expected(self, gpu: Gpu, precision: str, is_moe: bool) -> ExpectedError | None:
        """The error of the narrowest group around a run that has enough families, with the largest spread of all around it.

        None where not even the widest has enough.
        """
        names = group_names(gpu.name, gpu.architecture, precision, is_moe)
        found = [self.groups[name] for name in names if name in self.groups]
        narrowest = next((group for group in found if group.families >= ENOUGH_FAMILIES), None)
        if narrowest is None:
            return None
        return dataclasses.replace(narrowest, spread=max(group.spread for group in found))


def group_names(gpu: str, architecture: str, precision: str, is_moe: bool) -> tuple[str, ...]:
    """The groups that a run belongs to, the narrowest first."""
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
    """The groups of errors.json, and how much wider an interval is beyond them."""
    by_group: dict[str, list[LeftOut]] = {}
    kinds: dict[str, str] = {}
    every = list(runs)
    for run in every:
        for name in run.groups:
            by_group.setdefault(name, []).append(run)
            kinds[name] = run.groups[-2] if name not in run.groups[-2:] else ALL
    groups: dict[str, ExpectedError] = {}
    squares: dict[str, tuple[float, int]] = {}
    # Wide groups first, as narrow ones are drawn to them.
    for name in sorted(by_group, key=lambda name: (name != ALL, name not in kinds.values(), name)):
        own, families = _mean_square(by_group[name])
        square, freedom = own, families
        if name != ALL:
            around, _ = squares[kinds[name]]
            square = (families * own + PRIOR_FAMILIES * around) / (families + PRIOR_FAMILIES)
            freedom = families + PRIOR_FAMILIES
        squares[name] = square, freedom
        sizes = [abs(run.relative) for run in by_group[name]]
        spread = student_quantile((1.0 + LEVEL) / 2.0, freedom) * math.sqrt(square)
        groups[name] = ExpectedError(round(sum(sizes) / len(sizes), 4), len(sizes), families, name, round(spread, 4))
    return Errors(dict(sorted(groups.items())), _beyond(every))


def _mean_square(runs: Sequence[LeftOut]) -> tuple[float, int]:
    """The mean square of logarithmic errors, in which every family counts once, and the number of families."""
    families: dict[Hashable, list[float]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(math.log1p(run.relative) ** 2)
    return sum(sum(each) / len(each) for each in families.values()) / len(families), len(families)


def _beyond(runs: Sequence[LeftOut]) -> float:
    sides = [[run for run in runs if run.is_beyond == beyond] for beyond in (False, True)]
    if not all(sides):
        return 1.0
    known, beyond = (_mean_square(side)[0] for side in sides)
    return round(max(1.0, math.sqrt(beyond / known)), 2) if known else 1.0


def errors_json(errors: Errors) -> str:
    """The text of errors.json."""
    rows = {}
    for name, group in errors.groups.items():
        rows[name] = {key: value for key, value in dataclasses.asdict(group).items() if key != "group"}
    return json.dumps({"beyond": errors.beyond, "groups": rows}, indent=1) + "\n"


@cache
def shipped_errors() -> Errors:
    """The expected errors of the constants that are shipped (errors.json)."""
    text = resources.files(__package__).joinpath("errors.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    groups = {name: ExpectedError(group=name, **row) for name, row in content["groups"].items()}
    return Errors(groups, content["beyond"])
