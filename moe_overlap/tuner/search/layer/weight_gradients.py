"""The weight-gradient schedule: which weight gradients of a plan run under which backward exchange, and which behind sends.

1. Lower and price the plan with every weight gradient deferred in program order; find its slots and what may run in them
   (slot_times.py, labels.py).
2. Assign weight gradients to exchanges, chunk by chunk (solve_assignment.py); problems that are equal are solved once.
3. Simulate the plan without deferral and with the slots filled in the ways of schedule_choices.py, each where it keeps the
   bytes; the fastest is returned. The problem counts what exchanges hide; it does not see what weight gradients hide that stay
   inside operators that run in parts, nor that their products are smaller there, nor what they save behind the sends.

Simulated steps have about a micro-batch for each stage, however many the plan has: more repeat what is steady. In a pipeline,
where something is saved once a step and something in every micro-batch, ways are compared by the predicted step of all
micro-batches (listed_step.py).

Source: Lancet, section 4.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.folded import run_alone, sample_blocks
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.listed_step import listed_seconds
from moe_overlap.tuner.cost.predict import Machine
from moe_overlap.tuner.cost.simulate_step import SimulatedStep, issued_in_order, price_stages, simulate_step
from moe_overlap.tuner.search.layer.assignment import Problem
from moe_overlap.tuner.search.layer.behind_sends import SendSlot, send_slots, with_rest_behind
from moe_overlap.tuner.search.layer.plan_slots import program_order, shortened, with_slots, without_pieces
from moe_overlap.tuner.search.layer.schedule_choices import Choice, Place, choices, seconds_behind, slots_of
from moe_overlap.tuner.search.layer.slot_times import DIGITS, ChunkProblem, chunk_problem, idle_seconds
from moe_overlap.tuner.search.layer.solve_assignment import Solution, solve

FEWEST_MICRO_BATCHES = 4
"""Of a simulated step, which otherwise has one for each stage: a multiple of the stages, as interleaved pipelines need it."""
UNBOUNDED = 1 << 62
"""Bytes to hold while it is found out what may stand where."""


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
        simulated_seconds: of the step of each, by which it was chosen: one of few micro-batches, or where something stands
            behind sends the whole one.
        behind_seconds: by stage, seconds of the weight gradients that one micro-batch has behind its sends.
    """

    plan: Plan
    chosen: Choice
    simulated_seconds: dict[Choice, float]
    chunks: tuple[ChunkSchedule, ...]
    behind_seconds: tuple[float, ...]


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

    def seconds_of(made: Plan) -> float:
        """Of a step of all micro-batches where ways compare otherwise in it than in a step of few."""
        if count <= micro_batches or not sends or made.transfers:
            return step_of(made).simulation.step_seconds
        return listed_seconds(made, model, graphs, machine, features)

    stages, count = range(len(plan.stages)), plan.stages[0].gradient_accumulation_steps
    micro_batches = _most_micro_batches(len(plan.stages))
    bare = with_slots(plan, [{} for _ in stages], 0)
    order = [with_rest_behind(program_order(plan, index, model), plan, index, model) for index in stages]
    if not any(order):
        nothing = (0.0,) * len(stages)
        return Schedule(bare, "without", {"without": step_of(bare).simulation.step_seconds}, (), nothing)
    deferred = with_slots(without_pieces(plan), order, UNBOUNDED)
    prices = _stage_prices(deferred, model, graphs, machine, features)
    problems = _problems(deferred, prices, limits.max_deferred_bytes)
    chunks = _solved(problems, limits)
    solutions = {(one.stage, one.chunk): one.solution for one in chunks}
    sends = _sends(deferred, model, prices, problems)
    share = (len(stages) - 1) / (count + len(stages) - 1)
    filled = choices(problems, sends, solutions, share)
    plans: dict[Choice, Plan] = {"without": bare}
    for choice, one in filled.items():
        slots = [slots_of(one, index) for index in stages]
        plans[choice] = with_slots(plan, slots, limits.max_deferred_bytes)
    seconds = {choice: seconds_of(made) for choice, made in plans.items()}
    chosen = min(plans, key=lambda choice: round(seconds[choice], DIGITS))
    behind_sends = tuple(seconds_behind(filled.get(chosen, {}), index) for index in stages)
    return Schedule(plans[chosen], chosen, seconds, tuple(chunks), behind_sends)


def _most_micro_batches(stages: int) -> int:
    """Of a simulated step: the fewest whole rounds of the stages that are enough."""
    return stages * -(-FEWEST_MICRO_BATCHES // stages)


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


def _stage_prices(
    deferred: Plan, model: ModelDescription, graphs: Mapping[int, CapturedModel], machine: Machine, features: Features
) -> list[StagePrices]:
    """Prices of every stage, which have read a list of a few passes; the arguments as `simulate_step` takes them."""
    prices = price_stages(deferred, model, graphs, machine, features)
    for index, here in enumerate(prices):
        rank = here.stage.devices.ranks[0]
        saved = {f"L{layer}": here.saved_bytes(f"L{layer}") for layer in here.stage.layers}
        here.read(issued_in_order(lower(deferred, model, rank, saved, blocks=sample_blocks(deferred, index))))
    return prices


def _problems(deferred: Plan, prices: Sequence[StagePrices], max_bytes: int) -> dict[Place, ChunkProblem]:
    """Step 1: how long exchanges keep a stage waiting that waits for no other.

    Args:
        deferred: with every weight gradient in program order; `prices` are its own.
    """
    problems: dict[Place, ChunkProblem] = {}
    for index, here in enumerate(prices):

        def seconds(i: Instruction, here: StagePrices = here) -> float:
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
