"""The expected error of a prediction, from published runs whose steps were compared with their predictions.

errors.json holds the compared runs, one a line, which `tuner/calibrate/fit` writes whenever it fits the constants: test runs, to
which nothing is fitted, and calibration runs, each predicted by constants that were fitted without its family (its model, GPU
type and precision). Everything below is computed from these runs.

1. Runs are grouped by GPU type, kind (dense or MoE) and, for MoE, routing: experts with equal loads by force, or with the loads
   that a router gives them. A group with fewer than `ENOUGH_RUNS` runs or `ENOUGH_FAMILIES` families is widened: to the GPU's
   architecture, to all GPUs, to any routing, to all runs. Errors within a family are correlated.
2. The error of a group is the larger of two means of absolute relative errors: that of its test runs and that of its left-out
   calibration runs.
3. The interval exp(± spread) around the predicted seconds has the smallest spread that holds nine of ten runs of the group. No
   distribution is assumed, and errors are not centred, so the bias of a group is part of its spread.
4. Beyond the calibration, mean and spread grow by `beyond`: the ratio of the errors of runs with a release, precision or feature
   that no run of their fit had to those of the other runs.
5. The *neighbours* of a run are the compared runs of its precision that are most like it: of its model on its GPU type, else of
   its model on any, else of its GPU type and kind. Where they lie outside the interval in the mean, the model misses them, and
   an answer says so.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from moe_overlap.describe.cluster import Gpu
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.cost.hardware import precision_of

ENOUGH_FAMILIES = 5
ENOUGH_RUNS = 10
"""With fewer runs nine of ten are all of them."""
LEVEL = 0.9
"""Share of runs within the interval."""
ALL = "all models"
Family = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of a group of runs.

    Attributes:
        relative: mean absolute relative error of predicted steps.
        rows: number of runs.
        families: number of families among them.
        group: name of the group.
        spread: half of the interval, as a logarithm of measured over predicted seconds.
        tested: number of test runs among `rows`; the others were left out of a fit.
    """

    relative: float
    rows: int
    families: int
    group: str
    spread: float = 0.0
    tested: int = 0

    def interval(self, seconds: float) -> tuple[float, float]:
        """(low, high) seconds between which the step lies in nine of ten cases."""
        return seconds * math.exp(-self.spread), seconds * math.exp(self.spread)

    def holds(self, relative: float) -> bool:
        """Whether a run with this relative error lies in the interval."""
        return abs(math.log1p(relative)) <= self.spread

    def widened(self, factor: float) -> ExpectedError:
        """The error of a prediction beyond the calibration: mean error and spread times a factor."""
        return dataclasses.replace(self, relative=self.relative * factor, spread=self.spread * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A published run, or the mean of repeated ones, with the error of its prediction.

    Attributes:
        rows: names of its rows in the tables of measurements, separated by spaces.
        routing: `forced` or `natural`; empty for a dense model.
        model, shape: name of its model, and `shape_of` it.
        is_test: whether nothing was fitted to it; else it was predicted by constants that were fitted without its family.
        release: release of its software, or releases of repeated runs, separated by spaces; empty if unknown.
        relative: relative error of the predicted seconds.
        is_beyond: whether no run of the fit has its release, its precision or one of its features.
    """

    rows: str
    gpu: str
    architecture: str
    precision: str
    routing: str
    model: str
    shape: tuple[int, ...]
    release: str
    is_test: bool
    relative: float
    is_beyond: bool = False

    @property
    def family(self) -> Family:
        """The model, GPU type and precision, whose runs err alike."""
        return self.model, self.gpu, self.precision

    @property
    def log_ratio(self) -> float:
        """The logarithm of measured over predicted seconds."""
        return -math.log1p(self.relative)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The compared runs that are most like a run.

    Attributes:
        kind: what they share with it: `model and GPU`, `model` or `GPU`.
    """

    kind: str
    runs: tuple[ComparedRun, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds, as the geometric mean."""
        return math.exp(sum(run.log_ratio for run in self.runs) / len(self.runs))

    def are_missed(self, expected: ExpectedError) -> bool:
        """Whether they lie outside the interval in the mean."""
        return not expected.holds(1.0 / self.ratio - 1.0)


@dataclass(frozen=True, slots=True)
class Errors:
    """The compared runs and their errors by group.

    Attributes:
        beyond: factor on the errors of a prediction beyond the calibration; at least 1.
    """

    runs: tuple[ComparedRun, ...]
    groups: Mapping[str, ExpectedError]
    beyond: float = 1.0

    def expected(self, gpu: Gpu, is_moe: bool, is_natural: bool = False) -> ExpectedError | None:
        """The error of the narrowest group with enough runs and families; None if no group has.

        Args:
            is_natural: whether a router decides the loads of the experts.
        """
        routing = ("natural" if is_natural else "forced") if is_moe else ""
        for name in group_names(gpu.name, gpu.architecture, routing):
            group = self.groups.get(name)
            if group is not None and group.rows >= ENOUGH_RUNS and group.families >= ENOUGH_FAMILIES:
                return group
        return None

    def neighbours(self, gpu: Gpu, precision: str, model: ModelDescription) -> Neighbours | None:
        """The compared runs that are most like one of `model` on `gpu`; None if there are none in this precision."""
        shape, is_moe = shape_of(model), model.num_experts > 0
        alike = [run for run in self.runs if precision_of(run.precision) == precision_of(precision)]
        nearest = {
            "model and GPU": [run for run in alike if (run.shape, run.gpu) == (shape, gpu.name)],
            "model": [run for run in alike if run.shape == shape],
            "GPU": [run for run in alike if run.gpu == gpu.name and bool(run.routing) == is_moe],
        }
        return next((Neighbours(kind, tuple(runs)) for kind, runs in nearest.items() if runs), None)


def shape_of(model: ModelDescription) -> tuple[int, ...]:
    """Sizes by which a model is recognised under any name: layers, widths, heads, experts."""
    return (
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size if not all(model.moe_layers) else 0,
        model.num_attention_heads,
        model.num_query_groups,
        model.num_experts,
        model.router_topk if model.num_experts else 0,
        model.moe_ffn_hidden_size if model.num_experts else 0,
    )


def group_names(gpu: str, architecture: str, routing: str) -> tuple[str, ...]:
    """The groups of a run, narrowest first.

    Args:
        routing: as `ComparedRun.routing`.
    """
    kind = "MoE models" if routing else "dense models"
    routed = {"": kind, "forced": f"{kind} with balanced routing", "natural": f"{kind} with natural routing"}[routing]
    return tuple(dict.fromkeys((f"{routed} on {gpu}", f"{routed} on {architecture} GPUs", routed, kind, ALL)))


def errors_of(runs: Iterable[ComparedRun]) -> Errors:
    """The errors by group of compared runs."""
    compared = tuple(runs)
    by_group: dict[str, list[ComparedRun]] = {}
    for run in compared:
        for name in group_names(run.gpu, run.architecture, run.routing):
            by_group.setdefault(name, []).append(run)
    groups = {name: _error_of(name, members) for name, members in sorted(by_group.items())}
    return Errors(compared, groups, _beyond(compared))


def _error_of(name: str, runs: Sequence[ComparedRun]) -> ExpectedError:
    """The error of a group (steps 2 and 3)."""
    means = []
    for is_test in (True, False):
        sizes = [abs(run.relative) for run in runs if run.is_test == is_test]
        means += [sum(sizes) / len(sizes)] if sizes else []
    ordered = sorted(abs(run.log_ratio) for run in runs)
    # Rounded first: 0.9 * 10 is above 9 as a float.
    held = math.ceil(round(LEVEL * len(ordered), 9))
    families, tested = len({run.family for run in runs}), sum(run.is_test for run in runs)
    return ExpectedError(max(means), len(runs), families, name, ordered[held - 1], tested)


def _beyond(runs: Sequence[ComparedRun]) -> float:
    """The factor of step 4, with every family counted once on each side."""
    sides = [[run for run in runs if run.is_beyond == beyond] for beyond in (False, True)]
    if not all(sides):
        return 1.0
    calibrated, beyond = map(_mean_square, sides)
    return round(max(1.0, math.sqrt(beyond / calibrated)), 2) if calibrated else 1.0


def _mean_square(runs: Sequence[ComparedRun]) -> float:
    families: dict[Family, list[float]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(run.log_ratio**2)
    return sum(sum(squares) / len(squares) for squares in families.values()) / len(families)


def errors_json(runs: Iterable[ComparedRun]) -> str:
    """The text of errors.json: a list of runs, one a line."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(run)) for run in runs)
    return f"[\n{lines}\n]\n"


def read_errors(text: str) -> Errors:
    """The errors by group of the text of errors.json."""
    content: list[dict[str, Any]] = json.loads(text)
    return errors_of(ComparedRun(**row | {"shape": tuple(row["shape"])}) for row in content)


@cache
def shipped_errors() -> Errors:
    """The errors of the runs in errors.json."""
    return read_errors(resources.files(__package__).joinpath("errors.json").read_text(encoding="utf-8"))
