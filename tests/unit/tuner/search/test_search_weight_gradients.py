"""Weight-gradient schedules of whole plans, on graphs written by hand: valid, lowered, never slower; and what they report."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import NamedTuple

import pytest

from moe_overlap.api import read_job, simulated
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.slots import ancestors, related, with_slots
from moe_overlap.tuner.search.layer.weight_gradients import DeferralLimits, Schedule, schedule_weight_gradients
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand
from tests.unit.tuner.cost.test_cost_simulate_step import CLUSTER, OVERLAPPED

PLENTY = 1 << 40
VARIANTS = {
    "whole": "",
    "two stages": "--pipeline-model-parallel-size 2",
    "interleaved stages": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
    "parts": "--moe-overlap-partitions 2",
    "chunks": "--moe-overlap-capacity-chunks 2 --moe-expert-capacity-factor 1.0",
    "micro-batches": "--moe-overlap-micro-batches 2 --global-batch-size 256",
    "pieces": "--moe-overlap-partitions 2 --overlap-grad-reduce --ddp-bucket-size 40000000",
    "sharded": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
}


class Case(NamedTuple):
    found: Schedule
    step: SimulatedStep
    model: ModelDescription


@cache
def scheduled(words: str, max_bytes: int = PLENTY, job: tuple[str, ...] = tuple(OVERLAPPED)) -> Case:
    """The schedule of a job, and its step as the flags have it."""
    flags = [*job, *words.split()]
    step = simulated(flags, CLUSTER, graphs=by_hand, constants=CONSTANTS)
    model = read_job(flags, CLUSTER.gpus).model
    limits = DeferralLimits(max_deferred_bytes=max_bytes, solver_seconds=0.3)
    return Case(with_limits(step, model, limits), step, model)


def with_limits(step: SimulatedStep, model: ModelDescription, limits: DeferralLimits) -> Schedule:
    return schedule_weight_gradients(step.prices[0].plan, problem_like(step, model), limits)


def problem_like(step: SimulatedStep, model: ModelDescription) -> Problem:
    prices = step.prices[0]
    return Problem(
        model=model,
        plan=prices.plan,
        graphs={index: one.graph for index, one in enumerate(step.prices.values())},
        features=prices.priced.setting.features,
        machine=prices.machine,
    )


def simulated_step(plan: Plan, case: Case) -> SimulatedStep:
    return simulate_step(plan, problem_like(case.step, case.model))


def slots(plan: Plan) -> list[dict[str, tuple[str, ...]]]:
    return [layer.weight_gradient_slots for stage in plan.stages for layer in stage.overlap.layers]


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_a_schedule_is_valid_and_not_slower(words: str) -> None:
    case = found, step, model = scheduled(words)
    validate_plan(found.plan, model)
    for stage in found.plan.stages:
        made = lower(found.plan, model, stage.devices.ranks[0])
        named = {i.name for i in made if i.kind == "weight-gradient"}
        planned = {
            name for layer in stage.overlap.layers for names in layer.weight_gradient_slots.values() for name in names
        }
        assert named == planned
    again = simulated_step(found.plan, case)
    assert again.simulation.step_seconds == found.simulated_seconds[found.chosen]
    assert again.simulation.step_seconds <= step.simulation.step_seconds
    assert found.simulated_seconds["without"] == pytest.approx(step.simulation.step_seconds)
    assert len(found.chunks) == sum(len(stage.chunks) for stage in found.plan.stages)
    for chunk in found.chunks:
        solution = chunk.solution
        assert solution.greedy_value <= solution.value <= solution.bound
        assert solution.bound <= sum(chunk.slot_seconds.values()) + 1e-9
        assert 0 <= solution.gap < 0.1


def test_what_is_hidden_is_what_the_step_loses() -> None:
    """One micro-batch at a time, whole all-to-alls: the simulated gain is the hidden seconds, slowed down on both sides."""
    found, step, _ = scheduled("")
    (chunk,) = found.chunks
    gain = step.simulation.step_seconds - found.simulated_seconds["solved"]
    passes = found.plan.stages[0].gradient_accumulation_steps
    slowdown = CONSTANTS.gpus["H100"].overlap_slowdown
    assert gain == pytest.approx(passes * chunk.solution.value * (1 - slowdown), rel=1e-6)
    assert chunk.solution.value > 0
    exchange = next(i for i in step.prices[0].instructions if i.name == "L3.moe.combine.backward")
    assert chunk.slot_seconds[exchange.name] == pytest.approx(step.prices[0].seconds(exchange), rel=1e-6)


def test_bytes_bound_what_is_held() -> None:
    values, held = [], []
    for max_bytes in (PLENTY, 2 << 30, 1 << 30, 1):
        found, _, _ = scheduled("", max_bytes)
        (chunk,) = found.chunks
        values.append(chunk.solution.value)
        held.append(chunk.solution.held_bytes)
        assert held[-1] <= max_bytes
        assert found.plan.stages[0].overlap.max_deferred_bytes == (max_bytes if held[-1] else 0)
    assert values == sorted(values, reverse=True) and values[0] > values[2] > values[3] == 0
    assert found.chosen == "without"


def test_what_is_deferred_enters_the_memory_of_a_step() -> None:
    found, step, _ = scheduled("")
    again = simulated_step(found.plan, scheduled(""))
    name = next(i.name for i in again.prices[0].instructions if i.kind == "weight-gradient" and "experts" in i.name)
    one = again.prices[0].deferred_bytes(name)
    tokens, hidden, ffn = 4 * 4096 * 4, 2048, 4096
    # Both products of the experts, for the graph does not name their weights: inputs and gradients of outputs, in bf16.
    assert one == tokens * (hidden + 2 * ffn + ffn + hidden) * 2
    assert again.prices[0].buffer_bytes(f"saved.{name.removesuffix('.dW')}.m0") == one
    peaks = [max(size for _, size in made.kept_bytes(0)) for made in (step, again)]
    assert peaks[0] < peaks[1] <= peaks[0] + found.chunks[0].solution.held_bytes * 1.01


def test_equal_chunks_are_solved_once() -> None:
    found, _, _ = scheduled(VARIANTS["interleaved stages"])
    assert len(found.chunks) == 4
    assert len({chunk.solved_as for chunk in found.chunks}) < 4
    for chunk in found.chunks:
        (origin,) = (other for other in found.chunks if (other.stage, other.chunk) == chunk.solved_as)
        assert chunk.solution is origin.solution


def test_slots_that_were_there_do_not_count() -> None:
    there = scheduled("--defer-weight-gradients")
    before, again, found = map(slots, (there.step.prices[0].plan, there.found.plan, scheduled("").found.plan))
    assert before != again == found


def test_layers_for_which_nothing_was_decided_get_an_entry() -> None:
    """Whole, and among several micro-batches where the stage has them in flight."""
    for words, mechanism in (("", "none"), (VARIANTS["micro-batches"], "cross_micro_batch")):
        found, step, model = scheduled(words)
        plan = step.prices[0].plan
        (stage,) = plan.stages
        empty = dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=()))
        there = {4: found.plan.stages[0].overlap.layers[4].weight_gradient_slots}
        filled = with_slots(dataclasses.replace(plan, stages=(empty,)), [there], 1 << 40)
        validate_plan(filled, model)
        assert filled.stages[0].overlap.layers == (
            LayerOverlap(layer=4, mechanism=mechanism, weight_gradient_slots=there[4]),  # type: ignore[arg-type]
        )


def test_simulated_steps_are_short_and_the_plan_is_whole() -> None:
    few, many = (scheduled(f"--global-batch-size {128 * count}").found for count in (4, 8))
    assert many.plan.stages[0].gradient_accumulation_steps == 8
    assert many.simulated_seconds == few.simulated_seconds
    assert slots(many.plan) == slots(few.plan)


def test_without_exchanges_there_is_nothing_to_defer() -> None:
    words = tuple(word for word in JOB if not word.startswith("--overlap"))
    found, step, _ = scheduled("--expert-model-parallel-size 1 --pipeline-model-parallel-size 1", job=words)
    assert (found.chosen, found.chunks) == ("without", ())
    assert found.plan == step.prices[0].plan
    assert set(found.simulated_seconds) == {"without"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_deferred_bytes": 0}, "max_deferred_bytes 0: must be at least 1; give 1 or more"),
        ({"solver_seconds": -1.0}, "solver_seconds -1.0: must be at least 0; give 0 or more"),
        ({"gap": float("nan")}, "gap nan: must be at least 0; give 0 or more"),
    ],
)
def test_limits_that_allow_nothing(changes: dict[str, float], message: str) -> None:
    _, step, model = scheduled("")
    limits = dataclasses.replace(DeferralLimits(max_deferred_bytes=1), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        with_limits(step, model, limits)
    assert str(raised.value) == message


def test_a_captured_layer_has_labels_too() -> None:
    """Reachability over operators: what nothing waits for runs under the all-to-alls, what stands between them does not."""
    part = scheduled("").step.prices[0].graph.part("moe")
    before = ancestors([op.after for op in part.ops])
    exchanges = [op.id for op in part.ops if op.collective is not None and op.phase == "backward"]
    free = [op.id for op in part.ops if op.is_weight_gradient and not op.after]
    chained = [op.id for op in part.ops if op.is_weight_gradient and op.after]
    assert len(exchanges) == 2 and free and chained
    for a in exchanges:
        assert not any(related(before, a, w) for w in free)
        assert all(related(before, a, w) for w in chained if part.ops[w].operator == "moe.experts")
