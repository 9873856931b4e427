"""The steps of the last fit, in steps.json: they tie the shipped constants to the rows and to the prices.

The constants alone do not show that a fit produced them. With the steps a test recomputes the constants without prices
(test_fit.py); with prices it checks that the loss is unchanged and that no move of the fit lowers it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.tuner.calibrate.fit.grid import COMMON, START, START_COMMON, Grid, Steps
from moe_overlap.tuner.calibrate.fit.recorded_runs import measured_links
from moe_overlap.tuner.calibrate.fit.rows import MeasuredRow
from moe_overlap.tuner.cost.hardware import Constants, GpuConstants, scope

STEPS_FILE = Path(__file__).with_name("steps.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The end of a search: for the GPU types of the table, and for L4, which has only recorded runs.

    Attributes:
        loss: loss of the calibration rows of the table, including pulls.
    """

    loss: float
    table: Steps
    l4: Steps


@dataclass(frozen=True, slots=True)
class NamedRun:
    """An unpriced run, with the fields that select its constants."""

    gpu_type: str
    release: str = ""
    scope: str = ""


def fit_json(fit: Fit) -> str:
    """The file, the same bytes for the same steps."""
    content = {"loss": float(f"{fit.loss:.8g}"), "table": _nested(fit.table), "L4": _nested(fit.l4)}
    return json.dumps(content, indent=1) + "\n"


def last_fit(path: Path = STEPS_FILE) -> Fit:
    """The fit that the file is of."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Fit(loss=content["loss"], table=_flat(content["table"]), l4=_flat(content["L4"]))


def constants_of(fit: Fit, rows: Sequence[MeasuredRow]) -> Constants:
    """Constants of GPU types, of releases and common ones: START moved by the steps.

    Args:
        rows: the calibration rows, whose GPU types and releases there are constants of.
    """
    runs = [NamedRun(row.gpu_type, row["release"], scope(row["precision_class"], row.is_moe)) for row in rows]
    table = Grid.of(runs, START, START_COMMON).constants(fit.table)
    l4 = Grid.of([NamedRun("L4")], l4_start(table), table.common).constants(fit.l4)
    return dataclasses.replace(table, gpus=table.gpus | l4.gpus)


def l4_start(table: Constants) -> GpuConstants:
    """The start of the constants of L4, with measured links; two steps do not determine the constants of COMMON."""
    any_gpu = next(iter(table.gpus.values()))
    return dataclasses.replace(START, **measured_links() | {name: getattr(any_gpu, name) for name in COMMON})


def _nested(steps: Steps) -> dict[str, dict[str, dict[str, int]]]:
    """Level -> name -> constant -> steps."""
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for (level, name, constant), count in sorted(steps.items()):
        nested.setdefault(level, {}).setdefault(name, {})[constant] = count
    return nested


def _flat(nested: dict[str, dict[str, dict[str, int]]]) -> Steps:
    return {
        (level, name, constant): count
        for level, names in nested.items()
        for name, constants in names.items()
        for constant, count in constants.items()
    }
