"""Ranges of whole plans: predicted seconds against simulated lists, what the plan then says, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import moe_overlap.tuner.cost.analytic as cost_predict
import moe_overlap.tuner.cost.instruction_seconds as instruction_seconds
from moe_overlap.api import features_of, read_job
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering import lower
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.overlap import Gate, LayerOverlap, SearchLimits, StageOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.machine import Machine, machine_of
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer import partition_pipeline as range_prices
from moe_overlap.tuner.search.layer import partition_ranges as range_search
from moe_overlap.tuner.search.layer.partition_ranges import PartitionedPlan, partition_ranges
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.cost.test_cost_simulate_step import CLUSTER, OVERLAPPED

LIMITS = SearchLimits(max_partitions=4, group_seconds=0.0, range_limit=3)
GIB = float(1 << 30)


@dataclass(frozen=True)
class FreeEdges:
    """Prices of a stage, cutting and joining free of charge as in a simulated list."""

    of: StagePrices

    @property
    def machine(self) -> Machine:
        (group,) = self.of.machine.cluster.groups
        quick = dataclasses.replace(group, gpu=dataclasses.replace(group.gpu, memory_gb_per_s=1e30))
        constants = dataclasses.replace(self.of.machine.constants, kernel_seconds=0.0)
        cluster = dataclasses.replace(self.of.machine.cluster, groups=(quick,))
        return dataclasses.replace(self.of.machine, cluster=cluster, constants=constants)

    @property
    def slowed(self) -> Interference:
        return self.of.slowed

    def piece_seconds(self, name: str, pieces: int) -> float:
        return self.of.piece_seconds(name, pieces)


class Task:
    """A job whose layers a search cuts."""

    def __init__(self, words: str = "", **stage: Any) -> None:
        self.job = read_job([*OVERLAPPED, *words.split()], CLUSTER.gpus)
        self.plan, self.model = self.job.plan, self.job.model
        if stage:
            stages = (dataclasses.replace(one, **stage) for one in self.plan.stages)
            self.plan = dataclasses.replace(self.plan, stages=tuple(stages))
        self.machine, _ = machine_of(CLUSTER, CONSTANTS)

    def step(self, plan: Plan) -> SimulatedStep:
        graphs = by_hand(self.job.config, self.model, plan, self.job.flags)
        features = features_of(self.job.config, plan.precision, self.job.flags)
        problem = Problem(model=self.model, plan=plan, graphs=graphs, features=features, machine=self.machine)
        return simulate_step(plan, problem)

    def search(
        self,
        limits: SearchLimits = LIMITS,
        free: bool = False,
        gate: Gate | None = "topk",
        free_bytes: float = math.inf,
    ) -> PartitionedPlan:
        prices = self.step(self.plan).prices
        given = {rank: FreeEdges(one) if free else one for rank, one in prices.items()}
        return partition_ranges(
            gated(self.plan, self.model, gate), self.model, given, limits, [free_bytes] * len(given)
        )


def gated(plan: Plan, model: ModelDescription, gate: Gate | None) -> Plan:
    """A plan with a gate in every mixture of experts to which it gives none."""

    def with_gate(stage: StagePlan) -> StagePlan:
        entries = {entry.layer: entry for entry in stage.overlap.layers}
        experts = [entries.get(n, LayerOverlap(layer=n)) for n in stage.layers if model.moe_layers[n]]
        layers = tuple(dataclasses.replace(entry, gate=entry.gate or gate) for entry in experts)
        return dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=layers))

    return plan if gate is None else dataclasses.replace(plan, stages=tuple(map(with_gate, plan.stages)))


@functools.cache
def task(words: str = "--num-layers 6") -> Task:
    return Task(words)


SHARED = "--num-layers 6 --moe-shared-expert-intermediate-size 4096"
CASES = {
    "three groups": ("--num-layers 6", LIMITS),
    "whole chunk": ("--num-layers 6", SearchLimits(max_partitions=4, group_seconds=0.0, range_limit=99)),
    "one group": ("--num-layers 6", SearchLimits(max_partitions=2, group_seconds=0.0, range_limit=1)),
    "shared experts": (SHARED, LIMITS),
    "dense layers": ("--num-layers 6 --moe-layer-freq ([0,1,0,1,0,0])", LIMITS),
    "weight gradients": (f"{SHARED} --defer-weight-gradients --max-deferred-bytes 100000000000", LIMITS),
    "recomputed": (
        f"{SHARED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        LIMITS,
    ),
    "recomputed in part": (
        "--num-layers 6 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
        LIMITS,
    ),
    "tensor parallel": ("--num-layers 6 --tensor-model-parallel-size 2 --sequence-parallel", LIMITS),
    "a gate of all tokens": ("--num-layers 6 --moe-gate batch_prioritized --moe-expert-capacity-factor 1.0", LIMITS),
}


@pytest.mark.parametrize(("words", "limits"), CASES.values(), ids=CASES)
def test_predicted_seconds_are_those_of_the_simulated_list(
    words: str, limits: SearchLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds that ranges save by themselves are those saved in the list, which is valid and lowered; both without copies."""
    monkeypatch.setattr(instruction_seconds, "copied_bytes", lambda *_: {})
    monkeypatch.setattr(cost_predict, "point_to_point_seconds", lambda *_: np.zeros(()))
    job = task(words)
    gate: Gate = "batch_prioritized" if "prioritized" in words else "topk"
    found = job.search(limits, free=True, gate=gate)
    validate_plan(found.plan, job.model)
    (stage,) = found.stages
    assert stage.ranges and stage.excluded == () or gate != "topk"
    assert stage.seconds <= stage.separate_seconds + 1e-12 and stage.seconds < stage.uncut_seconds
    # Layers that are not cut start their all-to-alls as soon as they can; a run without a list waits for each of them.
    with monkeypatch.context() as at_once:
        if not job.plan.is_listed:
            at_once.setattr(lower, "in_issue_order", lambda plan, instructions: tuple(instructions))
        before = job.step(job.plan).simulation.step_seconds
    after = job.step(found.plan).simulation.step_seconds
    count = job.plan.stages[0].gradient_accumulation_steps
    assert before - after == pytest.approx(count * (stage.uncut_seconds - stage.seconds), rel=1e-6)


def test_no_hand_set_ranges_are_shorter() -> None:
    """Every word and number of partitions, simulated: the found plan is the shortest."""
    job = task()
    limits = SearchLimits(max_partitions=4, group_seconds=0.0, range_limit=99)
    found = job.step(job.search(limits, free=True).plan).simulation.step_seconds
    words = "--num-layers 6 --moe-overlap-partitions {} --moe-overlap-range {}"
    by_hand_set = [task(words.format(parts, word)) for parts in (2, 4) for word in ("experts", "after", "around")]
    assert found <= min(one.step(one.plan).simulation.step_seconds for one in by_hand_set) * (1 + 1e-9)


def test_cutting_and_joining_cost_hidden_states_and_kernels() -> None:
    """Once in front of and once behind the pipeline of the range, forward and backward."""
    limits = SearchLimits(max_partitions=4, group_seconds=0.0, range_limit=99)
    free, charged = (task().search(limits, free=each).stages[0] for each in (True, False))
    assert [one.partitions for one in charged.ranges] == [one.partitions for one in free.ranges] == [4]
    hidden_bytes = 4 * 4096 * 2048 * 2
    edge = 2 * hidden_bytes / (CLUSTER.groups[0].gpu.memory_gb_per_s * 1e9 * 0.8) + 4 * 3e-6
    assert charged.seconds - free.seconds == pytest.approx(4 * edge)


def test_repeated_layers_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    simulate = range_prices.pipeline_seconds

    def counted(steps: Any, seconds: Any, *given: Any) -> float:
        # The bounds inside a pipeline, which name no slowdown, are not what is counted.
        if len(given) > 1:
            calls.append(given)
        return simulate(steps, seconds, *given)

    monkeypatch.setattr(range_prices, "pipeline_seconds", counted)
    few, many = (task(f"--num-layers {count}").search().stages[0] for count in (12, 48))
    assert many.simulated == few.simulated == len(calls) / 2
    assert few.evaluations < many.evaluations < 5 * few.evaluations
    # The ends of a chunk aside, every layer costs and saves the same.
    assert many.uncut_seconds == pytest.approx(4 * few.uncut_seconds)
    assert many.separate_seconds == pytest.approx(4 * few.separate_seconds, rel=0.01)


def test_the_plan_says_what_was_found_and_keeps_the_rest() -> None:
    job = task(f"{SHARED} --defer-weight-gradients")
    found = job.search()
    (overlap,), (stage,) = (tuple(one.overlap for one in found.plan.stages), found.stages)
    assert overlap.search_limits == LIMITS
    entries = {one.layer: one for one in overlap.layers}
    before = {one.layer: one for one in job.plan.stages[0].overlap.layers}
    assert entries.keys() == before.keys()
    for layer, entry in entries.items():
        kept = before[layer]
        assert (entry.gate, entry.dispatcher) == (kept.gate, kept.dispatcher) == ("topk", "irregular")
        assert entry.weight_gradient_slots == kept.weight_gradient_slots
    for one in stage.ranges:
        entry = entries[one.layer]
        assert (entry.mechanism, entry.partitions, entry.axis) == ("partitioned", one.partitions, "batch")
        assert (entry.first_operator, entry.last_operator) == (one.first_operator, one.last_operator)
        assert one.seconds < one.uncut_seconds
    (short,) = job.search(dataclasses.replace(LIMITS, max_partitions=2)).stages
    gaps = [one.order_gap for one in short.ranges if one.order_gap is not None]
    assert gaps and min(gaps) >= -1e-12
    # What was decided before is replaced.
    chunked = tuple(
        dataclasses.replace(one, mechanism="tutel", tutel_degree=2) for one in job.plan.stages[0].overlap.layers
    )
    overlap = dataclasses.replace(job.plan.stages[0].overlap, layers=chunked)
    again = Task(f"{SHARED} --defer-weight-gradients", overlap=overlap).search()
    assert again.plan.stages == found.plan.stages


def test_memory_lowers_the_number_of_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    job = task()
    many = job.search()
    assert {one.partitions for one in many.stages[0].ranges} == {4} and many.stages[0].lowered == ()
    with monkeypatch.context() as patch:
        patch.setattr(range_search._ChunkSearch, "held_bytes", lambda self, span, parts: parts * GIB)
        few = job.search(free_bytes=2 * GIB)
    assert {one.partitions for one in few.stages[0].ranges} == {2}
    assert {(one.most_partitions, one.needed_bytes) for one in few.stages[0].lowered} == {(2, 4 * GIB)}
    names = {(one.first_operator, one.last_operator) for one in few.stages[0].ranges}
    assert names == {(one.first_operator, one.last_operator) for one in few.stages[0].lowered}
    limits = few.plan.stages[0].overlap.search_limits
    assert limits is not None and dataclasses.replace(limits, lowered=()) == LIMITS
    said = {(one.first_operator, one.last_operator, one.max_partitions) for one in limits.lowered}
    assert said == {(*ends, 2) for ends in names}
    validate_plan(few.plan, job.model)
    none = job.search(free_bytes=0.0)
    assert none.stages[0].ranges == () and {one.mechanism for one in none.plan.stages[0].overlap.layers} == {"none"}
    assert {one.most_partitions for one in none.stages[0].lowered} == {1}
    limits = none.plan.stages[0].overlap.search_limits
    assert limits is not None and {one.max_partitions for one in limits.lowered} == {1}


def test_groups_of_more_seconds_leave_fewer_ranges() -> None:
    job = task("--num-layers 6 --moe-layer-freq ([0,0,1,0,0,1])")
    fine, coarse = (job.search(dataclasses.replace(LIMITS, group_seconds=each)).stages[0] for each in (0.0, 1.0))
    assert coarse.evaluations < fine.evaluations
    assert coarse.separate_seconds >= fine.separate_seconds - 1e-12


def test_what_may_not_be_cut_is_excluded_with_the_reason() -> None:
    job = task()

    def reasons(found: PartitionedPlan) -> list[tuple[str, str]]:
        (stage,), (planned,) = found.stages, found.plan.stages
        assert stage.ranges == () and stage.seconds == pytest.approx(stage.uncut_seconds)
        whole = tuple(LayerOverlap(layer=entry.layer, gate="topk") for entry in planned.overlap.layers)
        assert planned.overlap == StageOverlap(layers=whole, search_limits=LIMITS)
        return list(stage.excluded)

    experts = "L0.moe.gate … L0.moe.merge"
    (only,) = reasons(job.search(gate=None))
    assert only == (experts, "gate null: only a gate of ours hands capacity to the next partition")
    (only,) = reasons(task("--num-layers 6 --micro-batch-size 1").search())
    assert only == (
        experts,
        "no number of partitions up to 4 divides the micro-batch of 1: enlarge the micro-batch",
    )
    assert reasons(task("--num-layers 6 --expert-model-parallel-size 1").search()) == []
    prices = job.step(job.plan).prices
    predicting = dataclasses.replace(gated(job.plan, job.model, "topk"), mtp_stage=0)
    (only,) = reasons(partition_ranges(predicting, job.model, prices, LIMITS, [math.inf]))
    assert only == (experts, "mtp_stage 0: multi-token prediction is not overlapped, and here layers are")
    whole = task("--num-layers 6 --moe-gate batch_prioritized --moe-expert-capacity-factor 1.0")
    (stage,) = whole.search(gate="batch_prioritized").stages
    assert [reason for _, reason in stage.excluded] == [
        "first_operator L0.attention: the gate batch_prioritized needs the whole micro-batch: nothing before it can run in "
        "partitions",
        "gate batch_prioritized: needs the whole micro-batch, and the layer runs in the partitions of layers[0]",
    ]


def test_a_gate_of_all_tokens_runs_alone_in_front_of_its_range() -> None:
    whole = task("--num-layers 6 --moe-gate batch_prioritized --moe-expert-capacity-factor 1.0")
    (stage,) = whole.search(gate="batch_prioritized").stages
    assert all(one.first_operator.endswith("moe.gate") for one in stage.ranges) and stage.ranges


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("max_partitions", 0, "--overlap-max-partitions"),
        ("range_limit", 0, "--overlap-range-limit"),
        ("group_seconds", -1.0, "--overlap-group-seconds"),
        ("group_seconds", math.nan, "--overlap-group-seconds"),
    ],
)
def test_limits_that_make_no_sense(field: str, value: float, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} .*: must be at least") as error:
        task().search(dataclasses.replace(LIMITS, **{field: value}))
    assert error.value.subject == flag


def test_interleaved_micro_batches_are_refused() -> None:
    job = task("--num-layers 6 --moe-overlap-micro-batches 2 --global-batch-size 256")
    with pytest.raises(ConfigError, match="micro_batches_in_flight 2: ranges are priced for one micro-batch"):
        job.search()


@pytest.mark.parametrize("chunks", [1, 2])
def test_ranges_stay_in_the_chunks_of_a_pipeline(chunks: int) -> None:
    """And a pipeline with them is shorter."""
    words = "--num-layers 8 --global-batch-size 512 --pipeline-model-parallel-size 2 --expert-model-parallel-size 16"
    job = task(words + (" --num-layers-per-virtual-pipeline-stage 2" if chunks == 2 else ""))
    found = job.search(dataclasses.replace(LIMITS, range_limit=99))
    validate_plan(found.plan, job.model)
    for stage, answer in zip(found.plan.stages, found.stages, strict=True):
        assert len(stage.chunks) == chunks
        cut = set()
        for one in answer.ranges:
            ends = [parse_operator(name).layer for name in (one.first_operator, one.last_operator)]
            (home,) = {chunk for chunk in stage.chunks for layer in ends if layer in range(*chunk)}
            cut.add(home)
        assert cut == set(stage.chunks)
    assert job.step(found.plan).simulation.step_seconds < 0.9 * job.step(job.plan).simulation.step_seconds
