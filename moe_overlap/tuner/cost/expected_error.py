"""The error to expect of a prediction: what predictions of runs missed that their constants had not seen.

`tests/validation/fit.py` fits the constants several times, each time without a part of the calibration rows, and writes the
errors of the rows it left out to errors.json, by group: GPU type, precision, and dense or MoE, and the wider groups around them.
A prediction takes the narrowest group with enough families of runs, and says which.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from moe_overlap.describe.cluster import Gpu
from moe_overlap.tuner.cost.hardware import precision_of, scope

ENOUGH_FAMILIES = 5
"""A group with fewer families says less about its error than a wider one. Runs of one model, GPU type and precision are a family:
what the model misses of one it misses of all."""


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of a group of runs.

    Attributes:
        relative: the mean size of the relative errors of predicted steps.
        rows: the runs it is the mean of.
        families: of which so many differ in model, GPU type or precision.
        group: what the runs have in common.
    """

    relative: float
    rows: int
    families: int
    group: str


def group_names(gpu: str, architecture: str, precision: str, is_moe: bool) -> tuple[str, ...]:
    """The groups that a run belongs to, the narrowest first."""
    kind, wide = scope("", is_moe).strip(), precision_of(precision)
    return (
        f"{gpu} {wide} {kind}",
        f"{gpu} {kind}",
        f"{architecture} {wide} {kind}",
        f"{architecture} {kind}",
        kind,
        "all",
    )


def group_errors(runs: Iterable[tuple[Sequence[str], Hashable, float]]) -> dict[str, ExpectedError]:
    """The groups of errors.json.

    Args:
        runs: the groups of a run, its family, and the relative error of a prediction whose constants had not seen either.
    """
    sizes: dict[str, list[float]] = {}
    families: dict[str, set[Hashable]] = {}
    for names, family, error in runs:
        for name in names:
            sizes.setdefault(name, []).append(abs(error))
            families.setdefault(name, set()).add(family)
    return {
        name: ExpectedError(round(sum(each) / len(each), 4), len(each), len(families[name]), name)
        for name, each in sorted(sizes.items())
    }


def errors_json(groups: Mapping[str, ExpectedError]) -> str:
    """The text of errors.json."""
    rows = {
        name: {"relative": group.relative, "rows": group.rows, "families": group.families}
        for name, group in groups.items()
    }
    return json.dumps(rows, indent=1) + "\n"


@cache
def shipped_errors() -> Mapping[str, ExpectedError]:
    """The groups of errors.json."""
    text = resources.files(__package__).joinpath("errors.json").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return {name: ExpectedError(row["relative"], row["rows"], row["families"], name) for name, row in content.items()}


def expected_error(groups: Mapping[str, ExpectedError], gpu: Gpu, precision: str, is_moe: bool) -> ExpectedError | None:
    """The error of the narrowest group around a run that has enough families; None where not even the widest has."""
    names = group_names(gpu.name, gpu.architecture, precision, is_moe)
    return next((groups[name] for name in names if name in groups and groups[name].families >= ENOUGH_FAMILIES), None)
