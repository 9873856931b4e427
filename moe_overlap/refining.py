"""Refine predictions of a job by traces of its runs: what `tools/autotune.py --refine` does, as a function.

A trace is that of `pretrain_moe.py --trace`: the last step of a run, which should not be its first one, too. It names its plan
and model. Both have to be the job's, overlap apart. The seconds of its spans give factors of prices
(`tuner/calibrate/observe.py`, `observe.py`); every plan of the job is then predicted with them. A cluster that was measured keeps
them in its database, where every later prediction of the job finds them; of a described one they count for this call.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import COMPUTING, Span
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import from_json
from moe_overlap.plan.trace import TraceFile, read_traces
from moe_overlap.predicting import Task, predicted_of
from moe_overlap.refined_job import job_key, layout_fields, model_fields
from moe_overlap.tuner.calibrate.observe import EXCHANGING, KindFit, Played, fit, observe
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Kind, Refined
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.search.layer.slots import shortened

MICRO_BATCHES = 4
"""That are simulated at least; of all others operators take as long."""
AGAIN = "write it with pretrain_moe.py --trace"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One trace.

    Attributes:
        before_seconds, after_seconds: its step as predicted without factors and with them.
        waiting: share of computation that a rank waits for slower ones.
    """

    path: Path
    plan: Plan
    seconds: float
    before_seconds: float
    after_seconds: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Refinement:
    """What traces changed."""

    kinds: tuple[KindFit, ...]
    steps: tuple[MeasuredStep, ...]


def refine(task: Task, traces: Sequence[str | Path]) -> tuple[Task, Refinement]:
    """The task with prices that traces refine; a measured cluster's database keeps them, in place of what it had of this job.

    Raises:
        ConfigError: a file is no trace, does not name its plan, or is of another job; or the database cannot be written.
    """
    task = with_prices(task, NOT_REFINED)
    runs = [(Path(path), *_read(Path(path), task)) for path in traces]
    observed = [observe(plan, spans, _pieces(_simulated(task, plan))) for _, plan, spans in runs]
    refined, kinds = fit(observed, lambda plan, prices: _played(_simulated(with_prices(task, prices), plan), plan))
    after = with_prices(task, refined)
    _keep(task, refined)
    steps = tuple(
        MeasuredStep(
            path=path,
            plan=plan,
            seconds=one.step_seconds,
            before_seconds=predicted_of(task, plan).predicted.step_seconds,
            after_seconds=predicted_of(after, plan).predicted.step_seconds,
            waiting=one.waiting,
        )
        for (path, plan, _), one in zip(runs, observed, strict=True)
    )
    return after, Refinement(tuple(kinds), steps)


def with_prices(task: Task, refined: Refined) -> Task:
    """The task at refined prices."""
    return dataclasses.replace(task, machine=dataclasses.replace(task.machine, refined=refined))


def _keep(task: Task, refined: Refined) -> None:
    measured = task.machine.cluster.measured
    if measured is None:
        return
    try:
        Database.load(Path(measured.database)).add_job(job_key(task.job.model, task.job.plan), refined)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError("database", measured.database, rule, "give a cluster whose database is yours") from None


def _read(path: Path, task: Task) -> tuple[Plan, dict[int, list[Span]]]:
    """The plan of a trace, in the form of the task's, and the spans by rank."""
    files = read_traces(path)
    for other in files[1:]:
        if other.about != files[0].about:
            raise ConfigError(str(other.path), "", f"is of another run than {path.name}", f"remove it, or {AGAIN}")
    plan = _plan_of(files[0], task)
    spans = {rank: ran for one in files for rank, ran in one.spans.items()}
    for index, stage in enumerate(plan.stages):
        if not spans.keys() & set(stage.devices.ranks):
            raise ConfigError(str(path), "", f"no rank of stage {index} is beside it", "bring the files of all ranks")
    numbers = {span.micro_batch for ran in spans.values() for span in ran}
    planned = plan.stages[0].gradient_accumulation_steps
    if len(numbers) != planned:
        rule = f"has {len(numbers)} micro-batches, its plan {planned}"
        raise ConfigError(str(path), "", rule, "measure a step of the whole batch")
    return plan, spans


def _plan_of(file: TraceFile, task: Task) -> Plan:
    """Of a trace's run; ConfigError where it is not the task's, overlap apart."""
    source, job = str(file.path), task.job
    if not all(isinstance(file.about.get(name), dict) for name in ("plan", "model")):
        raise ConfigError(source, "", "does not say which plan was measured", AGAIN)
    model = {name: value for name, value in file.about["model"].items() if name != "name"}
    _require_same(f"{source} model", model, model_fields(job.model))
    plan = from_json(json.dumps(file.about["plan"]), source)
    validate_plan(plan, job.model, source)
    _require_same(f"{source} plan", layout_fields(plan), layout_fields(job.plan))
    if len(plan.stages) != len(job.plan.stages):
        raise ConfigError(f"{source} plan stages", len(plan.stages), f"the flags say {len(job.plan.stages)}", AGAIN)
    stages: list[StagePlan] = []
    for index, (mine, asked) in enumerate(zip(plan.stages, job.plan.stages, strict=True)):
        _require_same(f"{source} stages[{index}]", layout_fields(mine), layout_fields(asked))
        for layer in mine.overlap.layers:
            gate = job.config.overlap.moe_gate or "topk"
            if layer.gate != gate:
                raise ConfigError(f"{source} gate", layer.gate, f"plans of these flags have {gate}", "add --moe-gate")
        stages.append(dataclasses.replace(asked, overlap=mine.overlap))
    return dataclasses.replace(job.plan, stages=tuple(stages))


def _require_same(place: str, measured: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name in (*measured, *(name for name in asked if name not in measured)):
        if measured.get(name) != asked.get(name):
            rule = f"the flags say {asked.get(name)}: the trace is of another job"
            raise ConfigError(f"{place} {name}", measured.get(name, ""), rule, "give a trace of these flags")


def _simulated(task: Task, plan: Plan) -> SimulatedStep:
    """A step of a few micro-batches."""
    few = shortened(plan, max(MICRO_BATCHES, 2 * len(plan.stages)))
    return simulate_step(few, task.job.model, task.graphs, task.machine, task.features)


def _pieces(step: SimulatedStep) -> set[str]:
    """Names of what runs in pieces."""
    return {i.name for here in step.prices.values() for i in here.made if here.is_cut(i)}


def _played(step: SimulatedStep, plan: Plan) -> dict[Kind, Played]:
    """What is compared with spans: kinds of a simulated step, at the number of micro-batches that the plan has."""
    simulated = {one.rank for one in step.simulation.ran}
    found: dict[Kind, Played] = {}
    for one in step.simulation.ran:
        i = one.instruction
        if i.channel_group not in (*COMPUTING, *EXCHANGING):
            continue
        stage = plan.stages[i.stage]
        here = step.prices[stage.devices.ranks[0]]
        share = 1.0 / len(simulated & set(stage.devices.ranks))
        if i.micro_batch is not None:
            share *= stage.gradient_accumulation_steps / here.stage.gradient_accumulation_steps
        kind = (kind_of(i.name), here.is_cut(i))
        before = found.get(kind, Played(0.0, 0.0))
        found[kind] = Played(before.seconds + share * (one.end - one.start), before.instructions + share)
    return found


def refinement_json(refinement: Refinement) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "kinds": [
            {
                "kind": one.kind[0],
                "in_pieces": one.kind[1],
                "predicted_seconds": one.predicted_seconds,
                "measured_seconds": one.measured_seconds,
                "at_most": one.is_bound,
                "factor": one.factor,
                "taken_as_measured": one.is_taken,
            }
            for one in refinement.kinds
        ],
        "steps": [
            {
                "trace": str(step.path),
                "measured_seconds": step.seconds,
                "predicted_seconds": step.before_seconds,
                "refined_seconds": step.after_seconds,
                "waiting": step.waiting,
            }
            for step in refinement.steps
        ],
    }


def refinement_lines(refinement: Refinement) -> list[str]:
    """The answer for a reader: kinds that were measured and predicted, what was only one of them, and the steps."""
    both = [one for one in refinement.kinds if one.predicted_seconds and one.measured_seconds]
    lines = [f"{'kind':<34}{'predicted ms':>14}{'measured ms':>13}{'factor':>10}"]
    for one in both:
        name = f"{one.kind[0]}{', in pieces' if one.kind[1] else ''}"
        most = " (at most: it was hidden)" if one.is_bound else ""
        seconds = f"{one.predicted_seconds * 1e3:>14.2f}{one.measured_seconds * 1e3:>13.2f}"
        lines.append(f"{name:<34}{seconds}{one.factor or 1.0:>10.2f}{most}")
    lacking = [one for one in refinement.kinds if one not in both]
    for what, kinds in (
        ("not measured, priced as before", [one for one in lacking if one.predicted_seconds]),
        ("not predicted, taken as measured", [one for one in lacking if one.is_taken]),
        ("not predicted", [one for one in lacking if one.measured_seconds and not one.is_taken]),
    ):
        lines += [f"{what}: {', '.join(sorted({one.kind[0] for one in kinds}))}"] if kinds else []
    for step in refinement.steps:
        before, after = (seconds / step.seconds - 1.0 for seconds in (step.before_seconds, step.after_seconds))
        lines.append(
            f"refined    {step.path}: step of {step.seconds:.4f} s, predicted {step.before_seconds:.4f} s ({before:+.1%}), "
            f"now {step.after_seconds:.4f} s ({after:+.1%}); ranks wait for slower ones {step.waiting:.1%} of what they compute"
        )
    return lines
