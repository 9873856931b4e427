"""The weight-gradient schedule: which weight gradients of a plan run under which backward all-to-all, and which in bubble slots.

Problem. Fill the slots of a plan so that its simulated step is shortest and the bytes of deferred weight gradients fit.
Terms: slots.py, assignment.py, bubble_slots.py. A *choice* is one way to fill the slots of all chunks.
Steps.
1. Lower and price the plan with every weight gradient deferred in program order; find its slots and the weight gradients that
   each may hold (slots.py).
2. Assign weight gradients to all-to-alls, chunk by chunk (solve_assignment.py); equal problems are solved once.
3. Build the choices (`choices`): as solved; as solved, with the unassigned weight gradients in program order; all in program
   order; in a pipeline each of these also with bubble slots filled. Under an all-to-all a weight gradient saves its hidden
   seconds in every micro-batch; in a bubble slot it saves all its seconds, but only at the ends of a step. So it stays under an
   all-to-all that hides a large enough share of it. With P equal stages and M micro-batches a step takes M + P - 1 times the
   seconds of a micro-batch, and a weight gradient in a bubble slot is saved P - 1 times: the break-even share is
   (P - 1) / (M + P - 1). On a stage with less work than the others the break-even share is larger, up to 1.
4. Simulate the plan without deferral, and with each choice that fits the byte limit; return the fastest. Simulation is needed
   because the problem of step 2 counts only seconds hidden by all-to-alls. It ignores weight gradients that stay inside
   partitioned operators, where they also hide communication and run as smaller products, and the savings of bubble slots.

Simulated steps have about one micro-batch per stage, however many the plan has: more would only repeat the steady state. In a
pipeline some savings occur once per step and others in every micro-batch, so choices are compared by the predicted step of all
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
from moe_overlap.tuner.search.layer.bubble_slots import SendSlot, fill_send_slot, hiding, send_slots, with_bubble_slots
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
from moe_overlap.tuner.search.layer.solve_assignment import AssignmentSolution, solve

Place = tuple[int, int]
"""Stage, chunk."""
Choice = Literal[
    "without",
    "solved",
    "solved, rest in program order",
    "program order",
    "solved, rest in bubble slots",
    "solved, rest in program order, then bubble slots",
    "program order, then bubble slots",
    "below the break-even share in bubble slots",
    "overshooting ones in bubble slots",
    "all in bubble slots",
]


@dataclass(frozen=True, slots=True)
class Filled:
    """A chunk's assignment, and the assignment of its bubble slot's problem if the chunk has such a slot."""

    problem: ChunkProblem
    assignment: Assignment
    send: SendSlot | None = None
    send_assignment: Assignment = ()


def choices(
    problems: Mapping[Place, ChunkProblem],
    sends: Mapping[Place, SendSlot],
    solutions: Mapping[Place, AssignmentSolution],
    share: float,
) -> dict[Choice, dict[Place, Filled]]:
    """Step 3: the choices that fit the byte limit; among choices with equal slots only the first.

    Args:
        share: break-even share of equal stages, (P - 1) / (M + P - 1).
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
            # Choices often end in the same slots; dropping the copies saves simulated steps.
            slots = {stage: slots_of(filled, stage) for stage, _ in problems}
            if any(slots.values()) and slots not in named:
                filled_by[choice] = filled
                named.append(slots)

    # The last argument is the share of a weight gradient that its all-to-all must hide for it to stay there: 0 keeps all,
    # `share` is the break-even of equal stages (step 3), 1 drops all that overshoot their slot, infinity drops all.
    add("solved", solved)
    add("solved, rest in program order", completed)
    add("program order", in_order)
    if sends:
        add("solved, rest in bubble slots", solved, 0.0)
        add("solved, rest in program order, then bubble slots", completed, 0.0)
        add("program order, then bubble slots", in_order, 0.0)
        add("below the break-even share in bubble slots", solved, share)
        add("overshooting ones in bubble slots", solved, 1.0)
        add("all in bubble slots", solved, float("inf"))
    return filled_by


def slots_of(filled: Mapping[Place, Filled], stage: int) -> Slots:
    """The slots of a stage, by layer and name."""
    of_stage = [chunk for place, chunk in filled.items() if place[0] == stage]
    slots = {
        layer: dict(named)
        for layer, named in named_slots((chunk.problem, chunk.assignment) for chunk in of_stage).items()
    }
    for chunk in of_stage:
        if chunk.send is not None and (names := chunk.send.named(chunk.send_assignment)):
            slots.setdefault(chunk.send.layer, {})[chunk.send.name] = names
    return slots


def bubble_slot_seconds(filled: Mapping[Place, Filled], stage: int) -> float:
    """Seconds of the weight gradients that one micro-batch computes in the bubble slots of a stage."""
    of_stage = (chunk for place, chunk in filled.items() if place[0] == stage)
    return sum((chunk.send.seconds(chunk.send_assignment) for chunk in of_stage if chunk.send is not None), 0.0)


def _filled(chunk: ChunkProblem, send: SendSlot | None, assignment: Assignment, least: float | None) -> Filled:
    """An assignment of a chunk; weight gradients whose hidden share is below `least` move to the bubble slot (None: none)."""
    if send is None or least is None:
        return Filled(chunk, assignment)
    hidden = hiding(chunk.problem, assignment, least)
    return Filled(chunk, hidden, send, fill_send_slot(send, chunk.gradients, hidden))


UNBOUNDED = 1 << 62
"""Byte limit of the plan that step 1 lowers: none, so that lowering defers every weight gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferralLimits:
    """Limits of the search.

    Attributes:
        max_deferred_bytes: most bytes that deferred weight gradients of a stage may hold.
        solver_seconds: time limit for all assignments together.
        gap: relative gap to the bound at which the solver stops.
    """

    max_deferred_bytes: int
    solver_seconds: float = 5.0
    gap: float = 1e-3


@dataclass(frozen=True, slots=True)
class ChunkSchedule:
    """The solved assignment of one chunk.

    Attributes:
        slot_seconds: seconds that each slot can hide, averaged over micro-batches.
        solution: hidden seconds of the assignment and of the greedy one, bound and gap, all of one backward pass.
        solved_as: (stage, chunk) of the first chunk with an equal problem, whose solution this is.
    """

    stage: int
    chunk: int
    slot_seconds: dict[str, float]
    solution: AssignmentSolution
    solved_as: Place


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan with its slots filled.

    Attributes:
        chosen: the choice that won.
        simulated_seconds: choice -> seconds of the step by which it was compared: a step of few micro-batches, or the complete
            one if the plan has bubble slots.
        bubble_slot_seconds: by stage, seconds of the weight gradients that one micro-batch computes in bubble slots.
    """

    plan: Plan
    chosen: Choice
    simulated_seconds: dict[Choice, float]
    chunks: tuple[ChunkSchedule, ...]
    bubble_slot_seconds: tuple[float, ...]


def schedule_weight_gradients(
    plan: Plan,
    problem: Problem,
    limits: DeferralLimits,
    step_seconds: Callable[[Plan], float] | None = None,
) -> Schedule:
    """Fill the slots of a plan. Slots that it already has are replaced; everything else stays, `predicted` included.

    Args:
        plan: a valid plan. Layers with an entry keep their gate and dispatcher; other layers get an entry without a gate,
            which can only be executed if the flags name no gate either.
        problem: as `simulate_step` takes it.
        step_seconds: predicts the step of a plan with all its micro-batches; the caller's may reuse earlier predictions. Default
            `listed_seconds`.
    Raises:
        ConfigError: a limit is out of range, or the plan has a field that cannot be lowered.
    """
    _check(limits)

    def step_of(candidate: Plan) -> SimulatedStep:
        return simulate_step(shortened(candidate, micro_batches), problem)

    def seconds_of(candidate: Plan) -> float:
        """Seconds of a step: of few micro-batches, or of all where the ranking of choices depends on their number."""
        if count <= micro_batches or not sends or candidate.transfers:
            return step_of(candidate).simulation.step_seconds
        return listed_seconds(candidate, problem) if step_seconds is None else step_seconds(candidate)

    model = problem.model
    stages, count = range(len(plan.stages)), plan.stages[0].gradient_accumulation_steps
    # About as many micro-batches as stages: enough to show how the pipeline fills, its steady state, and how it drains.
    micro_batches = enough_micro_batches(len(plan.stages))
    bare = with_slots(plan, [{} for _ in stages], 0)
    order = [with_bubble_slots(program_order(plan, index, model), plan, index, model) for index in stages]
    if not any(order):
        nothing = (0.0,) * len(stages)
        return Schedule(bare, "without", {"without": step_of(bare).simulation.step_seconds}, (), nothing)
    # Step 1. No byte limit here: under one, lowering computes some weight gradients early, and those would get no label.
    deferred = with_slots(without_pieces(plan), order, UNBOUNDED)
    prices = _stage_prices(deferred, problem)
    problems = _problems(prices, limits.max_deferred_bytes)
    # Step 2.
    chunks = _solved(problems, limits)
    solutions = {(chunk.stage, chunk.chunk): chunk.solution for chunk in chunks}
    sends = _sends(deferred, model, prices, problems)
    # Step 3, with its break-even share.
    share = (len(stages) - 1) / (count + len(stages) - 1)
    filled = choices(problems, sends, solutions, share)
    # Step 4. `without` comes first: it wins where no choice is faster.
    plans: dict[Choice, Plan] = {"without": bare}
    for choice, assigned in filled.items():
        slots = [slots_of(assigned, index) for index in stages]
        plans[choice] = with_slots(plan, slots, limits.max_deferred_bytes)
    seconds = {choice: seconds_of(candidate) for choice, candidate in plans.items()}
    # Compared to the nanosecond, so that float rounding does not decide between equal plans.
    chosen = min(plans, key=lambda choice: round(seconds[choice], DIGITS))
    in_bubble_slots = tuple(bubble_slot_seconds(filled.get(chosen, {}), index) for index in stages)
    return Schedule(plans[chosen], chosen, seconds, tuple(chunks), in_bubble_slots)


def _check(limits: DeferralLimits) -> None:
    for field, least in (("max_deferred_bytes", 1), ("solver_seconds", 0), ("gap", 0)):
        value = getattr(limits, field)
        if not value >= least:
            raise ConfigError(field, value, f"must be at least {least}", f"give {least} or more")


def _sends(
    deferred: Plan, model: ModelDescription, prices: Sequence[StagePrices], problems: Mapping[Place, ChunkProblem]
) -> dict[Place, SendSlot]:
    """The bubble slots of all chunks; `prices` and `problems` are argument and result of `_problems`."""
    slots = {}
    for index, stage_prices in enumerate(prices):
        of_stage = {chunk: chunk_problem for (stage, chunk), chunk_problem in problems.items() if stage == index}
        of_chunk = send_slots(deferred, index, model, stage_prices, of_stage)
        slots.update({(index, chunk): slot for chunk, slot in of_chunk.items()})
    return slots


def _stage_prices(deferred: Plan, problem: Problem) -> list[StagePrices]:
    """Prices of every stage, each with the list of a few passes read in."""
    prices = price_stages(deferred, problem)
    for index, of_stage in enumerate(prices):
        rank = of_stage.stage.devices.ranks[0]
        saved = {f"L{layer}": of_stage.saved_bytes(f"L{layer}") for layer in of_stage.stage.layers}
        of_stage.read(lower_rank(deferred, problem.model, rank, saved, blocks=sample_blocks(deferred, index)))
    return prices


def _problems(prices: Sequence[StagePrices], max_bytes: int) -> dict[Place, ChunkProblem]:
    """Step 1: the assignment problems of all chunks; idle seconds of each stage are those of the stage simulated by itself.

    Args:
        prices: of the plan with every weight gradient deferred in program order.
    """
    problems: dict[Place, ChunkProblem] = {}
    for index, stage_prices in enumerate(prices):

        def seconds(i: Instruction, stage_prices: StagePrices = stage_prices) -> float:
            # Weight gradients take no time here: the idle seconds are those that they can fill (`idle_seconds`).
            return 0.0 if i.kind == "weight-gradient" else stage_prices.seconds(i)

        rank, queue_seconds = stage_prices.stage.devices.ranks[0], stage_prices.machine.queue_seconds
        free = run_alone(stage_prices.instructions, rank, seconds, stage_prices.slowed, queue_seconds)
        layers = stage_prices.stage.overlap.layers
        slot_of = {
            name: slot for layer in layers for slot, names in layer.weight_gradient_slots.items() for name in names
        }
        idle = idle_seconds(free.ran, slot_of)
        for chunk in range(len(stage_prices.stage.chunks)):
            problems[index, chunk] = chunk_problem(stage_prices, chunk, idle, max_bytes)
    return problems


def _solved(problems: Mapping[Place, ChunkProblem], limits: DeferralLimits) -> list[ChunkSchedule]:
    """Step 2: solve each different problem once; each gets an equal share of the remaining time."""
    different = len({chunk.problem for chunk in problems.values()})
    deadline = time.monotonic() + limits.solver_seconds
    solved: dict[AssignmentProblem, tuple[AssignmentSolution, Place]] = {}
    chunks = []
    for place, chunk in problems.items():
        # Problems hash by value, without names: equal chunks have equal problems.
        if chunk.problem not in solved:
            seconds = max(0.0, deadline - time.monotonic()) / (different - len(solved))
            solved[chunk.problem] = solve(chunk.problem, chunk.layers, seconds, limits.gap), place
        slot_seconds = dict(zip(chunk.slots, chunk.problem.slots, strict=True))
        chunks.append(ChunkSchedule(*place, slot_seconds, *solved[chunk.problem]))
    return chunks
