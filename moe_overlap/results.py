"""`from moe_overlap import predict, tune, Cluster`: the command lines' shorthand, and results that a notebook shows.

`predict` and `tune` take what `api.predict`, `api.tune` and `plan_search.search_plan` take, and the shorthand of the tools: the
path of an argument file for its flags, and a type and a number of GPUs for a cluster.
"""

from __future__ import annotations

import dataclasses
import difflib
import html
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args, get_type_hints, overload

import moe_overlap.api as api
from moe_overlap.api import Options
from moe_overlap.describe.cluster import GIB, Cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError, one_of, require
from moe_overlap.describe.files import printable, write_whole
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import read_value, save_plan
from moe_overlap.plan_search.flags import Target
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import Leeway, PlanSearch, Tuned
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.answer import Answer, answer_lines, plan_sentence
from moe_overlap.report.prediction import prediction_json
from moe_overlap.report.search import answer_of, search_json
from moe_overlap.report.search_folder import write_answer
from moe_overlap.tuner.cost.analytic import Prediction

if TYPE_CHECKING:
    import pandas as pd

Arguments = str | Path | Sequence[str]
"""Megatron flags, or the path of a file that has them."""
PARAMETERS = ("gpu", "num_gpus", "target", "search_space", "time_limit")
"""Parameters of `tune`, which a misspelt option may mean."""
CALLED = ("graphs", "tell")
"""Options that are functions."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PredictedRun(Prediction):
    """A prediction with the plan and the machines that it is for."""

    plan: Plan
    cluster: Cluster
    leeway: Leeway

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.predicted.step_seconds

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which nine of ten such steps lie; None on a machine whose error is not known."""
        return _interval(self)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Predicted throughput."""
        return self.predicted.tokens_per_second_per_gpu

    @property
    def frame(self) -> pd.DataFrame:
        """One row: seconds with their interval, throughput, GiB of the fullest stage, and the breakdown in seconds."""
        return _frame([_row("predicted", plan_sentence(self.plan), self)])

    def to_dict(self) -> dict[str, Any]:
        """The figures that `tools/predict.py --json` prints."""
        return prediction_json(self)

    def write(self, folder: str | Path) -> list[str]:
        """Write plan.json and prediction.json; returns their names.

        Raises:
            ConfigError: they cannot be written.
        """
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            save_plan(dataclasses.replace(self.plan, predicted=self.predicted), place / "plan.json")
            text = json.dumps(self.to_dict(), indent=1) + "\n"
            write_whole(place / "prediction.json", text)
        except OSError as error:
            raise ConfigError("write", str(folder), f"cannot be written: {error.strerror}", "give another") from None
        return ["plan.json", "prediction.json"]

    def __repr__(self) -> str:
        """The answer that tools/predict.py prints."""
        answer = Answer(plan=self.plan, prediction=self, cluster=self.cluster, leeway=self.leeway)
        return "\n".join(answer_lines(answer))

    def _repr_html_(self) -> str:
        return _html(repr(self), self.frame)


@dataclass(frozen=True, slots=True, repr=False)
class TunedPlan:
    """The best plan of a search, and what it was chosen from.

    Attributes:
        search: everything that the search found.
    """

    search: PlanSearch

    @property
    def plan(self) -> Plan:
        """The chosen plan, with its overlap."""
        return self.search.plan

    @property
    def prediction(self) -> Prediction:
        """The prediction of the chosen plan."""
        return self.search.prediction

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step of the chosen plan."""
        return self.prediction.predicted.step_seconds

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which nine of ten steps of such plans lie; None on a machine whose error is not known."""
        return _interval(self.prediction)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Predicted throughput of the chosen plan."""
        return self.prediction.predicted.tokens_per_second_per_gpu

    @property
    def arguments(self) -> list[str]:
        """The flags that run the plan; those of a plan with overlap name plan.json, which `write` writes."""
        return list(self.search.written.arguments)

    @property
    def frame(self) -> pd.DataFrame:
        """The chosen plan, the runners-up and the frontier: seconds and GiB, and for the first two what `predict` has."""
        search = self.search
        rows = [_row("chosen", search.chosen.name, search.prediction)]
        rows += [_row("runner-up", other.name, other.prediction) for other in search.others]
        rows += [
            {
                "kind": "frontier",
                "name": plan.name,
                "step_seconds": plan.seconds,
                "needed_gib": plan.needed_bytes / GIB,
                "fits": True,
            }
            for plan in search.uniform.frontier
        ]
        return _frame(rows)

    def to_dict(self) -> dict[str, Any]:
        """The figures that `tools/autotune.py --json` prints."""
        return search_json(self.search)

    def write(self, folder: str | Path) -> list[str]:
        """Write flags, Slurm script, plan, page and trace, as tools/autotune.py does; returns their names.

        A warning names files of an earlier answer that get another name.

        Raises:
            ConfigError: they cannot be written.
        """
        return write_answer(Path(folder), self.search, warnings.warn)

    def __repr__(self) -> str:
        """The answer that tools/autotune.py prints, without files."""
        search = self.search
        return "\n".join(answer_lines(answer_of(search)))

    def _repr_html_(self) -> str:
        return _html(repr(self), self.frame)


def predict(
    args: Arguments,
    cluster: Cluster | None = None,
    *,
    gpu: str | None = None,
    num_gpus: int | None = None,
    **options: Unpack[Options],
) -> PredictedRun:
    """Seconds and bytes of a run.

    >>> from moe_overlap import predict
    >>> run = predict("examples/mixtral-8x7b.args", gpu="H100", num_gpus=64)
    >>> run.fits, run.plan.world_size
    (True, 64)
    >>> sum(run.breakdown.values()) - run.step_seconds < 1e-9
    True

    Args:
        args: Megatron flags as a list, or the path of a file that has them.
        cluster: the machines; or else `gpu` and `num_gpus`, as on the command line.
        options: precision, plan, decided, name, software, expert_load, memory_margin, graphs, tell, constants: as `api.Options`
            says of each.
    Raises:
        ConfigError: the flags, the machines or the options are wrong.
    """
    _check_options(options)
    arguments, machines = _arguments(args), _cluster(cluster, gpu, num_gpus)
    predicted = api.predict_job(arguments, machines, options)
    fields = {field.name: getattr(predicted.prediction, field.name) for field in dataclasses.fields(Prediction)}
    return PredictedRun(**fields, plan=predicted.problem.plan, cluster=machines, leeway=predicted.leeway)


@overload
def tune(
    args: Arguments,
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float = ...,
    traces: Sequence[str | Path] = ...,
    **options: Unpack[Options],
) -> Tuned: ...


@overload
def tune(
    args: Arguments,
    cluster: Cluster | None = None,
    limits: None = None,
    *,
    gpu: str | None = None,
    num_gpus: int | None = None,
    target: Target = ...,
    search_space: str | None = ...,
    time_limit: float | None = None,
    **options: Unpack[Options],
) -> TunedPlan: ...


def tune(
    args: Arguments,
    cluster: Cluster | None = None,
    limits: SearchLimits | None = None,
    solver_seconds: float = 5.0,
    traces: Sequence[str | Path] = (),
    *,
    gpu: str | None = None,
    num_gpus: int | None = None,
    target: Target = "moe-overlap",
    search_space: str | None = None,
    time_limit: float | None = None,
    **options: Unpack[Options],
) -> TunedPlan | Tuned:
    """The best plan of a run; with `limits` only the overlap of the layout that the flags have (`api.tune`).

    >>> from moe_overlap import tune
    >>> tuned = tune("examples/mixtral-8x7b.args", gpu="H100", num_gpus=64, target="megatron-lm")
    >>> tuned.prediction.fits
    True
    >>> tuned.frame.kind[0], bool(tuned.frame.step_seconds[0] == tuned.step_seconds)
    ('chosen', True)

    Args:
        args, cluster, gpu, num_gpus, options: as `predict` takes them.
        limits, solver_seconds, traces: of the search for an overlap alone.
        target, search_space, time_limit: of the search for a plan, as tools/autotune.py takes them.
    Raises:
        ConfigError: as `search_plan` and `api.tune`.
    """
    _check_options(options)
    require(target in get_args(Target), "target", target, "unknown choice", f"use {one_of(get_args(Target))}")
    arguments, machines = _arguments(args), _cluster(cluster, gpu, num_gpus)
    if limits is not None:
        return api.tune(arguments, machines, limits, solver_seconds, traces, **options)
    if traces:
        raise ConfigError("traces", str(traces[0]), "they refine the overlap of one layout", "give limits as well")
    if time_limit is not None and not (isinstance(time_limit, int | float) and time_limit > 0):
        raise ConfigError("time_limit", time_limit, "must be greater than 0 seconds", "drop it to search all")
    settings = SearchSettings(target=target, space=search_space, seconds=math.inf if time_limit is None else time_limit)
    return TunedPlan(search_plan(arguments, machines, settings, **options))


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown options and values of other types: Python itself accepts both.

    Raises:
        ConfigError: the first option that is wrong.
    """
    hints = get_type_hints(Options)
    for name, value in options.items():
        if name not in hints:
            near = difflib.get_close_matches(name, [*hints, *PARAMETERS], 1)
            of_tune = f"{name} is an option of tune; use {one_of(tuple(hints))}"
            fix = (
                of_tune if name in PARAMETERS else f"did you mean {near[0]}?" if near else f"use {one_of(tuple(hints))}"
            )
            raise ConfigError(name, printable(repr(value)), "is no option", fix)
        if name in CALLED:
            require(value is None or callable(value), name, printable(repr(value)), "is no function", "give a function")
        else:
            read_value(hints[name], os.fspath(value) if isinstance(value, Path) else value, name)


def _arguments(args: Arguments) -> list[str]:
    """The flags; a single text is the path of a file.

    Raises:
        ConfigError: they are no list of texts.
    """
    if isinstance(args, Mapping) or not isinstance(args, Sequence | Path):
        rule = f"is of type {type(args).__name__}, and flags are a list of texts"
        raise ConfigError("args", printable(repr(args)), rule, 'give ["--num-layers", "4", ...], or the path of a file')
    if not isinstance(args, str | Path):
        for word in args:
            if not isinstance(word, str):
                rule = f"is of type {type(word).__name__}, and flags are text"
                raise ConfigError("args", printable(repr(word)), rule, f'write "{word}"')
    if isinstance(args, Path) or (isinstance(args, str) and not args.startswith("@")):
        return [f"@{args}"]
    return [args] if isinstance(args, str) else list(args)


def _cluster(cluster: Cluster | None, gpu: str | None, num_gpus: int | None) -> Cluster:
    """The machines, from either form of them."""
    if cluster is not None:
        if not isinstance(cluster, Cluster):
            fix = "use moe_overlap.describe.cluster.load_cluster(path), or gpu and num_gpus"
            raise ConfigError("cluster", printable(repr(cluster)), "is no Cluster", fix)
        if gpu is not None or num_gpus is not None:
            raise ConfigError("cluster", cluster.name, "stands beside gpu or num_gpus", "use one of them")
        return cluster
    if gpu is None or num_gpus is None:
        raise ConfigError("gpu", gpu or "", "the machines are unknown", "give gpu and num_gpus, or cluster")
    if not isinstance(gpu, str):
        raise ConfigError("gpu", printable(repr(gpu)), "is no name of a GPU", 'give a text such as "H100"')
    try:
        # A bool is a number to Python: num_gpus=True would answer for one GPU.
        count = -1 if isinstance(num_gpus, bool) else index(num_gpus)
    except TypeError:
        count = -1
    if count < 1:
        raise ConfigError("num_gpus", printable(repr(num_gpus)), "is no whole number from 1", "give one such as 8")
    return shipped_cluster(gpu, count, "gpu")


# Tables


def _interval(prediction: Prediction) -> tuple[float, float] | None:
    expected = prediction.expected_error
    return None if expected is None else expected.interval(prediction.predicted.step_seconds)


def _row(kind: str, name: str, prediction: Prediction) -> dict[str, Any]:
    predicted = prediction.predicted
    low, high = _interval(prediction) or (math.nan, math.nan)
    return {
        "kind": kind,
        "name": name,
        "step_seconds": predicted.step_seconds,
        "low_seconds": low,
        "high_seconds": high,
        "tokens_per_second_per_gpu": predicted.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": predicted.model_tflops_per_gpu,
        "mfu": prediction.mfu,
        "needed_gib": prediction.fullest.needed_bytes / GIB,
        "fits": prediction.fits,
        **prediction.breakdown,
    }


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    # A prediction without a table does not wait for pandas.
    import pandas as pd

    return pd.DataFrame(rows)


def _html(text: str, frame: pd.DataFrame) -> str:
    return f"<pre>{html.escape(text)}</pre>\n{frame.to_html(index=False, float_format='{:.4g}'.format)}"
