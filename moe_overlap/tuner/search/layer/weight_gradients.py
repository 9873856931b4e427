"""The weight-gradient schedule: which weight gradients of a plan run under which backward exchange.

1. Lower and price the plan with every weight gradient deferred in program order; find its slots and what may run in them
   (slot_times.py, labels.py).
2. Assign weight gradients to slots, chunk by chunk (solve_assignment.py); problems that are equal are solved once.
3. Simulate the plan without deferral, in program order, as solved, and as solved with the rest in program order, each where it
   keeps the bytes; the fastest is returned. The problem counts what slots hide; it does not see what weight gradients hide that
   stay inside operators that run in parts, nor that their products are smaller there.

Simulated steps have about a micro-batch for each stage, however many the plan has: more repeat what is steady.

Idle time outside slots, such as the bubble of a pipeline, takes weight gradients in the assignment problem, but no plan can say
so: a slot of a plan is a backward exchange, and what it holds runs in the same pass. The report says how much there is.

Source: Lancet, section 4.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.predict import Machine
from moe_overlap.tuner.cost.simulate import Ran, simulate
from moe_overlap.tuner.cost.simulate_step import SimulatedStep, simulate_step
from moe_overlap.tuner.search.layer.assignment import Assignment, Problem
from moe_overlap.tuner.search.layer.plan_slots import named_slots, program_order, shortened, with_slots, without_pieces
from moe_overlap.tuner.search.layer.slot_times import DIGITS, ChunkProblem, chunk_problem, idle_seconds
from moe_overlap.tuner.search.layer.solve_assignment import Solution, solve

Place = tuple[int, int]
"""Stage, chunk."""
FEWEST_MICRO_BATCHES = 4
"""Of a simulated step, which otherwise has one for each stage: a multiple of the stages, as interleaved pipelines need it."""
UNBOUNDED = 1 << 62
"""Bytes to hold while it is found out what may stand where."""
Choice = Literal["without", "solved", "solved, rest in program order", "program order"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferralLimits:
    """What the search may use.

    Attributes:
        max_deferred_bytes: most bytes that deferred weight gradients of a stage may hold.
        solver_seconds: for all assignments together.
        gap: share of the bound at which an assignment is good enough.
    """

    max_deferred_bytes: int
    solver_seconds: float = 5.0
    gap: float = 1e-3


@dataclass(frozen=True, slots=True)
class ChunkSchedule:
    """One chunk.

    Attributes:
        slot_seconds: what each slot could hide, the mean over micro-batches.
        solution: its value, the greedy one, the bound and the gap, in seconds of one backward pass.
        solved_as: the chunk, as (stage, chunk), whose equal problem was solved; itself where it was the first.
    """

    stage: int
    chunk: int
    slot_seconds: dict[str, float]
    solution: Solution
    solved_as: Place


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan with its slots filled.

    Attributes:
        chosen: which of the simulated plans it is.
        simulated_seconds: of the step of each, with few micro-batches.
        bubble_seconds: by stage, idle seconds of that step without deferral that no slot reaches.
    """

    plan: Plan
    chosen: Choice
    simulated_seconds: dict[Choice, float]
    chunks: tuple[ChunkSchedule, ...]
    bubble_seconds: tuple[float, ...]


def schedule_weight_gradients(
    plan: Plan,
    model: ModelDescription,
    graphs: Mapping[int, CapturedModel],
    machine: Machine,
    features: Features,
    limits: DeferralLimits,
) -> Schedule:
    """Fill the slots of a plan; what it says of them so far does not count, everything else stays, `predicted` included.

    Args:
        plan: a valid plan; the others as `simulate_step` takes them. Layers it has an entry for keep their gate and dispatcher;
            those it has none for get one without, which runs only where the flags name no gate either.
    Raises:
        ConfigError: limits that allow nothing, or a field of the plan that is not lowered yet.
    """
    _check(limits)

    def step_of(made: Plan) -> SimulatedStep:
        return simulate_step(shortened(made, micro_batches), model, graphs, machine, features)

    stages = range(len(plan.stages))
    micro_batches = _most_micro_batches(len(plan.stages))
    bare = with_slots(plan, [{} for _ in stages], 0)
    undeferred = step_of(bare)
    seconds: dict[Choice, float] = {"without": undeferred.simulation.step_seconds}
    order = [program_order(plan, index, model) for index in stages]
    if not any(order):
        return Schedule(bare, "without", seconds, (), _bubbles(undeferred, [[] for _ in stages]))
    deferred = with_slots(without_pieces(plan), order, UNBOUNDED)
    problems = _problems(deferred, step_of(deferred), machine, limits.max_deferred_bytes)
    chunks = _solved(problems, limits)
    plans: dict[Choice, Plan] = {"without": bare}
    for choice, assignments in _choices(problems, chunks).items():
        if all(one.problem.is_feasible(assignments[place]) for place, one in problems.items()):
            slots = [
                named_slots((one, assignments[place]) for place, one in problems.items() if place[0] == index)
                for index in stages
            ]
            plans[choice] = with_slots(plan, slots, limits.max_deferred_bytes)
            seconds[choice] = step_of(plans[choice]).simulation.step_seconds
    chosen = min(plans, key=lambda choice: round(seconds[choice], DIGITS))
    by_stage = [[one for one in chunks if one.stage == index] for index in stages]
    return Schedule(plans[chosen], chosen, seconds, tuple(chunks), _bubbles(undeferred, by_stage))


def _most_micro_batches(stages: int) -> int:
    """Of a simulated step: the fewest whole rounds of the stages that are enough."""
    return stages * -(-FEWEST_MICRO_BATCHES // stages)


def _check(limits: DeferralLimits) -> None:
    for field, least in (("max_deferred_bytes", 1), ("solver_seconds", 0), ("gap", 0)):
        value = getattr(limits, field)
        if not value >= least:
            raise ConfigError(field, value, f"must be at least {least}", f"give {least} or more")


def _choices(
    problems: Mapping[Place, ChunkProblem], chunks: Sequence[ChunkSchedule]
) -> dict[Choice, dict[Place, Assignment]]:
    """What is simulated beside the plan without deferral; of equal ones the first counts."""
    solved = {(one.stage, one.chunk): one.solution.assignment for one in chunks}
    in_order: dict[Place, Assignment] = {
        place: tuple(gradient.first for gradient in one.problem.gradients) for place, one in problems.items()
    }
    completed: dict[Place, Assignment] = {
        place: tuple(
            first if slot is None else slot for slot, first in zip(solved[place], in_order[place], strict=True)
        )
        for place in problems
    }
    return {"solved": solved, "solved, rest in program order": completed, "program order": in_order}


def _problems(deferred: Plan, step: SimulatedStep, machine: Machine, max_bytes: int) -> dict[Place, ChunkProblem]:
    """Step 1.

    Args:
        deferred: with every weight gradient in program order; `step` is its own.
    """
    free = simulate(
        {rank: prices.made for rank, prices in step.prices.items()},
        lambda rank, i: 0.0 if i.kind == "weight-gradient" else step.prices[rank].seconds(i),
        {rank: prices.slowed for rank, prices in step.prices.items()},
        machine.queue_seconds,
    )
    problems: dict[Place, ChunkProblem] = {}
    for index, (rank, prices) in enumerate(step.prices.items()):
        layers = deferred.stages[index].overlap.layers
        slot_of = {
            name: slot for layer in layers for slot, names in layer.weight_gradient_slots.items() for name in names
        }
        idle = idle_seconds([one for one in free.ran if one.rank == rank], slot_of)
        for chunk in range(len(deferred.stages[index].chunks)):
            problems[index, chunk] = chunk_problem(prices, chunk, idle, max_bytes)
    return problems


def _solved(problems: Mapping[Place, ChunkProblem], limits: DeferralLimits) -> list[ChunkSchedule]:
    """Step 2: the time that is left is shared evenly among the problems that are left."""
    different = len({one.problem for one in problems.values()})
    deadline = time.monotonic() + limits.solver_seconds
    known: dict[Problem, tuple[Solution, Place]] = {}
    chunks = []
    for place, one in problems.items():
        if one.problem not in known:
            seconds = max(0.0, deadline - time.monotonic()) / (different - len(known))
            known[one.problem] = solve(one.problem, one.layers, seconds, limits.gap), place
        slot_seconds = dict(zip(one.slots, one.problem.slots, strict=True))
        chunks.append(ChunkSchedule(*place, slot_seconds, *known[one.problem]))
    return chunks


def _bubbles(step: SimulatedStep, by_stage: Sequence[Sequence[ChunkSchedule]]) -> tuple[float, ...]:
    """By stage, what is idle in a step and in no slot."""
    found = []
    for (rank, prices), chunks in zip(step.prices.items(), by_stage, strict=True):
        busy = sum(_busy(one) for one in step.simulation.ran if one.rank == rank)
        passes = prices.stage.gradient_accumulation_steps
        reached = passes * sum(sum(chunk.slot_seconds.values()) for chunk in chunks)
        found.append(max(0.0, step.simulation.step_seconds - busy - reached))
    return tuple(found)


def _busy(one: Ran) -> float:
    return one.end - one.start if one.instruction.channel == COMPUTE else 0.0
