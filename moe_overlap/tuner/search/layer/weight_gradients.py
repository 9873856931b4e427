"""The weight-gradient schedule: which weight gradients of a plan run under which backward all-to-all, and which in bubble slots.

Problem. Fill the slots of a plan so that its simulated step is shortest and the bytes of deferred weight gradients fit.
Terms: slots.py, assignment.py, bubble_slots.py. A *choice* is one way to fill the slots of all chunks.
Steps.
1. Lower and price the plan with every weight gradient deferred in program order; find its slots and what may run in them
   (slots.py).
2. Assign weight gradients to all-to-alls, chunk by chunk (solve_assignment.py); problems that are equal are solved once.
3. Make the choices (`choices`): as solved; as solved with the rest in program order; all in program order; in a pipeline each
   also with the rest in bubble slots. A weight gradient that overshoots its all-to-all saves what it hides in every micro-batch;
   in a bubble slot it saves all it takes, but only at the ends of a step. So it stays under its all-to-all only if that hides a
   share of it. With P equal stages and M micro-batches a step takes M + P - 1 times what a micro-batch takes, and what runs in
   bubble slots is saved P - 1 times: the share is (P - 1) / (M + P - 1). Of a stage that does less than others it is up to 1.
4. Simulate the plan without deferral and with each choice that keeps the bytes; the fastest is returned. The problem counts what
   all-to-alls hide; it does not see what weight gradients hide that stay inside operators that run in partitions, nor that their
   products are smaller there, nor what they save in bubble slots.

Simulated steps have about a micro-batch for each stage, however many the plan has: more repeat what is steady. In a pipeline,
where something is saved once a step and something in every micro-batch, choices are compared by the predicted step of all
micro-batches (cost/simulate/step.py).

Source: Lancet, section 4; bubble slots are not in the paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.lower import lower_rank
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.simulate.compress import run_alone, sample_blocks
from moe_overlap.tuner.cost.simulate.step import (
    SimulatedStep,
    listed_seconds,
    price_stages,
    simulate_step,
)
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.assignment import Assignment, AssignmentProblem
from moe_overlap.tuner.search.layer.bubble_slots import SendSlot, behind, hiding, send_slots, with_rest_behind
from moe_overlap.tuner.search.layer.slots import (
    DIGITS,
    ChunkProblem,
    Slots,
    chunk_problem,
    enough_micro_batches,
    idle_seconds,
    named_slots,
    program_order,
    shortened,
    with_slots,
    without_pieces,
)
from moe_overlap.tuner.search.layer.solve_assignment import Solution, solve

Place = tuple[int, int]
"""Stage, chunk."""
Choice = Literal[
    "without",
    "solved",
    "solved, rest in program order",
    "program order",
    "solved, rest behind sends",
    "solved, rest in program order, then behind sends",
    "program order, then behind sends",
    "what saves more there behind sends",
    "what overshoots behind sends",
    "all behind sends",
]


@dataclass(frozen=True, slots=True)
class Filled:
    """A chunk's assignment, and where it has a slot behind its send the assignment of that slot's problem."""

    problem: ChunkProblem
    assignment: Assignment
    send: SendSlot | None = None
    behind: Assignment = ()


def choices(
    problems: Mapping[Place, ChunkProblem],
    sends: Mapping[Place, SendSlot],
    solutions: Mapping[Place, Solution],
    share: float,
) -> dict[Choice, dict[Place, Filled]]:
    """Step 3: the choices that keep the bytes, beside the plan without deferral; of equal ones the first.

    Args:
        share: (P - 1) / (M + P - 1), of equal stages.
    """
    solved = {place: solution.assignment for place, solution in solutions.items()}
    in_order: dict[Place, Assignment] = {
        place: tuple(gradient.first for gradient in chunk.problem.gradients) for place, chunk in problems.items()
    }
    completed: dict[Place, Assignment] = {
        place: tuple(
            first if slot is None else slot for slot, first in zip(solved[place], in_order[place], strict=True)
        )
        for place in problems
    }
    filled_by: dict[Choice, dict[Place, Filled]] = {}
    named: list[dict[int, Slots]] = []

    def add(choice: Choice, assignments: Mapping[Place, Assignment], least: float | None = None) -> None:
        if all(chunk.problem.is_feasible(assignments[place]) for place, chunk in problems.items()):
            filled = {
                place: _filled(chunk, sends.get(place), assignments[place], least) for place, chunk in problems.items()
            }
            # Choices often end in the same slots; each one less saves a simulated step.
            slots = {stage: slots_of(filled, stage) for stage, _ in problems}
            if any(slots.values()) and slots not in named:
                filled_by[choice] = filled
                named.append(slots)

    # The last argument is the least share of a weight gradient that its all-to-all must hide to keep it: 0 keeps all,
    # the break-even share of equal stages (step 3), 1 gives up all that overshoot, infinity gives up all.
    add("solved", solved)
    add("solved, rest in program order", completed)
    add("program order", in_order)
    if sends:
        add("solved, rest behind sends", solved, 0.0)
        add("solved, rest in program order, then behind sends", completed, 0.0)
        add("program order, then behind sends", in_order, 0.0)
        add("what saves more there behind sends", solved, share)
        add("what overshoots behind sends", solved, 1.0)
        add("all behind sends", solved, float("inf"))
    return filled_by


def slots_of(filled: Mapping[Place, Filled], stage: int) -> Slots:
    """The slots of a stage, by name."""
    of_stage = [chunk for place, chunk in filled.items() if place[0] == stage]
    slots = {
        layer: dict(named)
        for layer, named in named_slots((chunk.problem, chunk.assignment) for chunk in of_stage).items()
    }
    for chunk in of_stage:
        if chunk.send is not None and (names := chunk.send.named(chunk.behind)):
            slots.setdefault(chunk.send.layer, {})[chunk.send.name] = names
    return slots


def seconds_behind(filled: Mapping[Place, Filled], stage: int) -> float:
    """Seconds of the weight gradients that one micro-batch computes in the bubble slots of a stage."""
    of_stage = (chunk for place, chunk in filled.items() if place[0] == stage)
    return sum((chunk.send.seconds(chunk.behind) for chunk in of_stage if chunk.send is not None), 0.0)


def _filled(chunk: ChunkProblem, send: SendSlot | None, assignment: Assignment, least: float | None) -> Filled:
    """An assignment of a chunk, and with a share the rest behind its send."""
    if send is None or least is None:
        return Filled(chunk, assignment)
    kept = hiding(chunk.problem, assignment, least)
    return Filled(chunk, kept, send, behind(send, chunk.gradients, kept))


UNBOUNDED = 1 << 62
"""Bytes to hold while it is found out what may stand where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferralLimits:
    """Bytes and time that the search may use.

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
        simulated_seconds: of the step of each, by which it was chosen: one of few micro-batches, or the whole one where a
            bubble slot is filled.
        behind_seconds: by stage, seconds of the weight gradients that one micro-batch has behind its sends.
    """

    plan: Plan
    chosen: Choice
    simulated_seconds: dict[Choice, float]
    chunks: tuple[ChunkSchedule, ...]
    behind_seconds: tuple[float, ...]


def schedule_weight_gradients(
    plan: Plan,
    problem: Problem,
    limits: DeferralLimits,
    step_seconds: Callable[[Plan], float] | None = None,
) -> Schedule:
    """Fill the slots of a plan; what it says of them so far does not count, everything else stays, `predicted` included.

    Args:
        plan: a valid plan; the others as `simulate_step` takes them. Layers it has an entry for keep their gate and dispatcher;
            those it has none for get one without, which runs only where the flags name no gate either.
        step_seconds: of all micro-batches of a plan, where the caller knows some; default `listed_seconds`.
    Raises:
        ConfigError: limits that allow nothing, or a field of the plan that is not lowered yet.
    """
    _check(limits)

    def step_of(candidate: Plan) -> SimulatedStep:
        return simulate_step(shortened(candidate, micro_batches), problem)

    def seconds_of(candidate: Plan) -> float:
        """Seconds of a step: of all micro-batches where choices compare otherwise in it than in a step of few."""
        if count <= micro_batches or not sends or candidate.transfers:
            return step_of(candidate).simulation.step_seconds
        return listed_seconds(candidate, problem) if step_seconds is None else step_seconds(candidate)

    model = problem.model
    stages, count = range(len(plan.stages)), plan.stages[0].gradient_accumulation_steps
    # As many as the pipeline has stages show its ends and its steady state; all of them would only repeat the latter.
    micro_batches = enough_micro_batches(len(plan.stages))
    bare = with_slots(plan, [{} for _ in stages], 0)
    order = [with_rest_behind(program_order(plan, index, model), plan, index, model) for index in stages]
    if not any(order):
        nothing = (0.0,) * len(stages)
        return Schedule(bare, "without", {"without": step_of(bare).simulation.step_seconds}, (), nothing)
    # Step 1. Unbounded, or lowering would run some of them early for lack of memory, and those had no labels.
    deferred = with_slots(without_pieces(plan), order, UNBOUNDED)
    prices = _stage_prices(deferred, problem)
    problems = _problems(prices, limits.max_deferred_bytes)
    chunks = _solved(problems, limits)
    solutions = {(one.stage, one.chunk): one.solution for one in chunks}
    sends = _sends(deferred, model, prices, problems)
    # The break-even share of step 3.
    share = (len(stages) - 1) / (count + len(stages) - 1)
    filled = choices(problems, sends, solutions, share)
    # Step 4. `without` comes first: it wins where no choice is faster.
    plans: dict[Choice, Plan] = {"without": bare}
    for choice, one in filled.items():
        slots = [slots_of(one, index) for index in stages]
        plans[choice] = with_slots(plan, slots, limits.max_deferred_bytes)
    seconds = {choice: seconds_of(made) for choice, made in plans.items()}
    # To the nanosecond, so that rounding in sums of floats does not choose among equal plans.
    chosen = min(plans, key=lambda choice: round(seconds[choice], DIGITS))
    in_bubble_slots = tuple(seconds_behind(filled.get(chosen, {}), index) for index in stages)
    return Schedule(plans[chosen], chosen, seconds, tuple(chunks), in_bubble_slots)


def _check(limits: DeferralLimits) -> None:
    for field, least in (("max_deferred_bytes", 1), ("solver_seconds", 0), ("gap", 0)):
        value = getattr(limits, field)
        if not value >= least:
            raise ConfigError(field, value, f"must be at least {least}", f"give {least} or more")


def _sends(
    deferred: Plan, model: ModelDescription, prices: Sequence[StagePrices], problems: Mapping[Place, ChunkProblem]
) -> dict[Place, SendSlot]:
    """The slots behind the sends of all chunks; the arguments as `_problems` has them and finds them."""
    found = {}
    for index, here in enumerate(prices):
        of_stage = {chunk: one for (stage, chunk), one in problems.items() if stage == index}
        slots = send_slots(deferred, index, model, here, of_stage)
        found.update({(index, chunk): slot for chunk, slot in slots.items()})
    return found


def _stage_prices(deferred: Plan, problem: Problem) -> list[StagePrices]:
    """Prices of every stage, which have read a list of a few passes; the arguments as `simulate_step` takes them."""
    prices = price_stages(deferred, problem)
    for index, of_stage in enumerate(prices):
        rank = of_stage.stage.devices.ranks[0]
        saved = {f"L{layer}": of_stage.saved_bytes(f"L{layer}") for layer in of_stage.stage.layers}
        of_stage.read(lower_rank(deferred, problem.model, rank, saved, blocks=sample_blocks(deferred, index)))
    return prices


def _problems(prices: Sequence[StagePrices], max_bytes: int) -> dict[Place, ChunkProblem]:
    """Step 1: how long all-to-alls keep a stage waiting that waits for no other.

    Args:
        prices: of the plan with every weight gradient in program order.
    """
    problems: dict[Place, ChunkProblem] = {}
    for index, here in enumerate(prices):

        def seconds(i: Instruction, here: StagePrices = here) -> float:
            # They must not fill the time that is to be measured (`idle_seconds`).
            return 0.0 if i.kind == "weight-gradient" else here.seconds(i)

        free = run_alone(here.made, here.stage.devices.ranks[0], seconds, here.slowed, here.machine.queue_seconds)
        layers = here.stage.overlap.layers
        slot_of = {
            name: slot for layer in layers for slot, names in layer.weight_gradient_slots.items() for name in names
        }
        idle = idle_seconds(free.ran, slot_of)
        for chunk in range(len(here.stage.chunks)):
            problems[index, chunk] = chunk_problem(here, chunk, idle, max_bytes)
    return problems


def _solved(problems: Mapping[Place, ChunkProblem], limits: DeferralLimits) -> list[ChunkSchedule]:
    """Step 2: the time that is left is shared evenly among the problems that are left."""
    different = len({chunk.problem for chunk in problems.values()})
    deadline = time.monotonic() + limits.solver_seconds
    known: dict[AssignmentProblem, tuple[Solution, Place]] = {}
    chunks = []
    for place, chunk in problems.items():
        # Problems are values: equal layers in equal chunks make equal ones, whatever their names.
        if chunk.problem not in known:
            seconds = max(0.0, deadline - time.monotonic()) / (different - len(known))
            known[chunk.problem] = solve(chunk.problem, chunk.layers, seconds, limits.gap), place
        slot_seconds = dict(zip(chunk.slots, chunk.problem.slots, strict=True))
        chunks.append(ChunkSchedule(*place, slot_seconds, *known[chunk.problem]))
    return chunks
