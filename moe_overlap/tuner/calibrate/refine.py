"""Refine the prices of a problem with traces of its runs: `tools/autotune.py --refine` as a function.

Terms. A *trace* is a file of `pretrain_moe.py --trace`: the last step of a run, which should not also be its first one. It names
its plan and model; both must be the problem's, except for overlap. A *factor* scales the price of one kind of instruction.

1. Read every trace and compare it with the problem: same model, same layout, all stages and all micro-batches present.
2. Measure the seconds of every kind of instruction (observe.py).
3. Fit factors so that simulated steps of the measured plans spend as long on every kind; every plan of the problem is then
   priced with them.
4. A measured cluster stores the factors in its database, where every later prediction of the job finds them by `job_key`; for a
   described cluster they are used in this call only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import COMPUTING, Span
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import as_values, content_sha256, from_json
from moe_overlap.plan.trace import PREDICTED, TraceFile, read_traces
from moe_overlap.tuner.calibrate.observe import EXCHANGING, KindFit, SimulatedKind, fit, observe
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Kind, Refined
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.search.layer.slots import shortened

LEAST_MICRO_BATCHES = 4
"""Smallest number of micro-batches of a simulated step; operators take the same time in further ones."""
AGAIN = "write it with pretrain_moe.py --trace"
FREE_OF_PLAN = ("model", "cluster", "stages", "predicted", "host_runs_ahead")
FREE_OF_STAGE = ("overlap", "zero_level")
"""Fields in which a measured plan and the problem's may differ; the runtime shards as the flags say, in both."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One trace.

    Attributes:
        before_seconds, after_seconds: predicted seconds of its step without and with factors.
        waiting: seconds that a rank waits for slower ones, over those that it computes.
    """

    path: Path
    plan: Plan
    seconds: float
    before_seconds: float
    after_seconds: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Refinement:
    """The effect of traces on prices."""

    kinds: tuple[KindFit, ...]
    steps: tuple[MeasuredStep, ...]


def refine(problem: Problem, traces: Sequence[str | Path]) -> tuple[Problem, Refinement]:
    """The problem with refined prices; a measured cluster's database stores the factors, replacing earlier ones of the job.

    Raises:
        ConfigError: a file is no trace, does not name its plan, or is of another job; or the database cannot be written.
    """
    # Factors apply to prices without factors: fitted on top of earlier ones they would multiply with every call.
    before = problem.refined_by(NOT_REFINED)
    # Step 1.
    runs = [(Path(path), *_read(Path(path), before)) for path in traces]
    # Step 2: kinds in partitions have prices of their own, so the plan must say which spans are partitions.
    observed = [observe(plan, spans, _partitioned(_simulated(before, plan))) for _, plan, spans in runs]

    def simulate(plan: Plan, refined: Refined) -> dict[Kind, SimulatedKind]:
        return _seconds_by_kind(_simulated(before.refined_by(refined), plan), plan)

    # Steps 3 and 4.
    refined, kinds = fit(observed, simulate)
    after = before.refined_by(refined)
    # Under the key of the job: operators of another layout have other sizes, for which these factors do not hold.
    _keep(before, refined)
    steps = tuple(
        MeasuredStep(
            path=path,
            plan=plan,
            seconds=observation.step_seconds,
            before_seconds=predict_plan(plan, before).predicted.step_seconds,
            after_seconds=predict_plan(plan, after).predicted.step_seconds,
            waiting=observation.waiting,
        )
        for (path, plan, _), observation in zip(runs, observed, strict=True)
    )
    return after, Refinement(tuple(kinds), steps)


def job_key(model: ModelDescription, plan: Plan) -> str:
    """Hash of the facts that a trace and a prediction must share: model and layout, without overlap."""
    stages = [layout_fields(stage) for stage in plan.stages]
    return content_sha256({"model": model_fields(model), "plan": layout_fields(plan), "stages": stages})


def model_fields(model: ModelDescription) -> dict[str, Any]:
    """The fields of a model except its name, as plain JSON values."""
    fields: dict[str, Any] = as_values(model)
    return {name: value for name, value in fields.items() if name != "name"}


def layout_fields(record: Plan | StagePlan) -> dict[str, Any]:
    """The fields of a plan or a stage that must be equal, as plain JSON values."""
    free: Sequence[str] = FREE_OF_PLAN if isinstance(record, Plan) else FREE_OF_STAGE
    return {f.name: as_values(getattr(record, f.name)) for f in dataclasses.fields(record) if f.name not in free}


def _keep(problem: Problem, refined: Refined) -> None:
    """Write factors into the database of a measured cluster."""
    measured = problem.cluster.measured
    if measured is None:
        return
    try:
        Database.load(Path(measured.database)).add_job(job_key(problem.model, problem.plan), refined)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError("database", measured.database, rule, "give a cluster whose database is yours") from None


def _read(path: Path, problem: Problem) -> tuple[Plan, dict[int, list[Span]]]:
    """The plan of a trace, in the form of the problem's, and the spans by rank."""
    files = read_traces(path, "--refine")
    for other in files[1:]:
        if other.about != files[0].about:
            raise ConfigError(str(other.path), "", f"is of another run than {path.name}", f"remove it, or {AGAIN}")
    plan = _plan_of(files[0], problem)
    spans = {rank: of_rank for file in files for rank, of_rank in file.spans.items()}
    for index, stage in enumerate(plan.stages):
        if not spans.keys() & set(stage.devices.ranks):
            raise ConfigError(str(path), "", f"no rank of stage {index} is beside it", "bring the files of all ranks")
    numbers = {span.micro_batch for of_rank in spans.values() for span in of_rank}
    planned = plan.stages[0].gradient_accumulation_steps
    if len(numbers) != planned:
        rule = f"has {len(numbers)} micro-batches, its plan {planned}"
        raise ConfigError(str(path), "", rule, "measure a step of the whole batch")
    return plan, spans


def _plan_of(file: TraceFile, problem: Problem) -> Plan:
    """The plan of a trace's run.

    Raises:
        ConfigError: it differs from the problem's in more than overlap.
    """
    source = str(file.path)
    if not all(isinstance(file.about.get(name), dict) for name in ("plan", "model")):
        raise ConfigError(source, "", "does not say which plan was measured", AGAIN)
    if file.about.get(PREDICTED):
        raise ConfigError(source, "", "is a prediction, not a measurement", AGAIN)
    model = {name: value for name, value in file.about["model"].items() if name != "name"}
    _require_same(f"{source} model", model, model_fields(problem.model))
    plan = from_json(json.dumps(file.about["plan"]), source)
    validate_plan(plan, problem.model, source)
    _require_same(f"{source} plan", layout_fields(plan), layout_fields(problem.plan))
    if len(plan.stages) != len(problem.plan.stages):
        rule = f"the flags say {len(problem.plan.stages)}"
        raise ConfigError(f"{source} plan stages", len(plan.stages), rule, AGAIN)
    stages: list[StagePlan] = []
    for index, (measured, planned) in enumerate(zip(plan.stages, problem.plan.stages, strict=True)):
        _require_same(f"{source} stages[{index}]", layout_fields(measured), layout_fields(planned))
        for layer in measured.overlap.layers:
            gate = problem.listed.gate
            if layer.gate != gate:
                raise ConfigError(f"{source} gate", layer.gate, f"plans of these flags have {gate}", "add --moe-gate")
        # The flags' stage with the measured overlap: other differences, such as the sharding, do not change the run, which
        # follows the flags.
        stages.append(dataclasses.replace(planned, overlap=measured.overlap))
    return dataclasses.replace(problem.plan, stages=tuple(stages))


def _require_same(place: str, measured: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in (*measured, *(name for name in expected if name not in measured)):
        if measured.get(name) != expected.get(name):
            rule = f"the flags say {expected.get(name)}: the trace is of another job"
            raise ConfigError(f"{place} {name}", measured.get(name, ""), rule, "give a trace of these flags")


def _simulated(problem: Problem, plan: Plan) -> SimulatedStep:
    """A step of a few micro-batches."""
    return simulate_step(shortened(plan, max(LEAST_MICRO_BATCHES, 2 * len(plan.stages))), problem)


def _partitioned(step: SimulatedStep) -> set[str]:
    """Names of the operators that run in partitions or in capacity chunks."""
    return {i.name for prices in step.prices.values() for i in prices.instructions if prices.is_cut(i)}


def _seconds_by_kind(step: SimulatedStep, plan: Plan) -> dict[Kind, SimulatedKind]:
    """Simulated seconds of every kind, scaled to the micro-batches of the plan, for comparison with measured ones."""
    simulated = {executed.rank for executed in step.simulation.ran}
    kinds: dict[Kind, SimulatedKind] = {}
    for executed in step.simulation.ran:
        i = executed.instruction
        if i.channel_group not in (*COMPUTING, *EXCHANGING):
            continue
        stage = plan.stages[i.stage]
        prices = step.prices[stage.devices.ranks[0]]
        # The ranks of a stage count as one; skipped micro-batches are represented by the simulated ones.
        share = 1.0 / len(simulated & set(stage.devices.ranks))
        if i.micro_batch is not None:
            share *= stage.gradient_accumulation_steps / prices.stage.gradient_accumulation_steps
        kind = (kind_of(i.name), prices.is_cut(i))
        before = kinds.get(kind, SimulatedKind(0.0, 0.0))
        seconds = before.seconds + share * (executed.end - executed.start)
        kinds[kind] = SimulatedKind(seconds, before.instructions + share)
    return kinds
