"""A step of a plan, simulated: the instruction lists of one rank per stage at the prices of the cost model; of all ranks where
stages of unlike shape send tiles to each other.

Beside each other, work is slowed down as the closed form says (`predict.concurrency`). Simulated steps and the closed form
(`pipeline.py`) agree where nothing overlaps. Lists of megatron-core's 1F1B wait for their transfers, as it does; those of its
interleaved pipeline, of stages that follow their own lists and of unlike stages have them beside computation. Where the executor
follows lists, it starts one instruction after the other (`issued_in_order`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.fused_kernels import refuse_unpriced
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.live_memory import live_bytes
from moe_overlap.tuner.cost.predict import Machine, Priced, price_family
from moe_overlap.tuner.cost.prepare import prepare
from moe_overlap.tuner.cost.simulate import Simulation, simulate

MOVES = ("collective", "point-to-point")


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """When everything runs.

    Attributes:
        prices: by rank, the first of every stage.
    """

    simulation: Simulation
    prices: dict[int, StagePrices]

    def kept_bytes(self, rank: int) -> list[tuple[float, float]]:
        """When what a rank keeps changes, and the bytes from then on: states, and activations for backward passes."""
        return live_bytes([one for one in self.simulation.ran if one.rank == rank], self.prices[rank].buffer_bytes)


def simulate_step(
    plan: Plan, model: ModelDescription, graphs: Mapping[int, CapturedModel], machine: Machine, features: Features
) -> SimulatedStep:
    """Lower, price and simulate a plan.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    listed = any(stage.overlap.is_listed for stage in plan.stages)
    waits = plan.pipeline_schedule == "1f1b" and not listed and not plan.transfers
    of_stage = price_stages(plan, model, graphs, machine, features)
    lists: dict[int, Sequence[Instruction]] = {}
    for stage, here in zip(plan.stages, of_stage, strict=True):
        saved = {f"L{layer}": here.saved_bytes(f"L{layer}") for layer in stage.layers}
        for rank in stage.devices.ranks if plan.transfers else stage.devices.ranks[:1]:
            made = lower(plan, model, rank, saved)
            lists[rank] = issued_in_order(made) if listed else waiting_for_transfers(made) if waits else made
        here.read(lists[stage.devices.ranks[0]])
    slowed = {rank: of_stage[plan.stage_of(rank)].slowed for rank in lists}
    simulation = simulate(lists, lambda _, i: of_stage[i.stage].seconds(i), slowed, machine.queue_seconds)
    return SimulatedStep(simulation, {here.stage.devices.ranks[0]: here for here in of_stage})


def price_stages(
    plan: Plan, model: ModelDescription, graphs: Mapping[int, CapturedModel], machine: Machine, features: Features
) -> list[StagePrices]:
    """Prices of the instructions of every stage, whose lists they have not read yet.

    Raises:
        ConfigError: a fused layer has no block left to compute, or its GPU's number of blocks is not known.
    """
    refuse_unpriced(plan, machine.cluster)
    place: dict[int, tuple[Priced, int]] = {}
    for family in prepare(plan, model, graphs, features, machine.load):
        priced = price_family(plan, model, family, machine, features)
        place.update({index: (priced, column) for column, index in enumerate(family.stages)})
    return [StagePrices(plan, stage, graphs[index], *place[index], machine) for index, stage in enumerate(plan.stages)]


def waiting_for_transfers(made: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """A list whose transfers wait for the computation before them, and computation for the transfers before it."""
    waiting: list[Instruction] = []
    computed: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    for i in made:
        before: tuple[int, ...] = ()
        if i.kind == "point-to-point":
            before, moved = computed, (*moved, i.id)
        elif i.channel == COMPUTE:
            before, computed, moved = moved, (i.id,), ()
        waiting.append(replace(i, after=tuple(sorted({*i.after, *before}))) if before else i)
    return tuple(waiting)


def issued_in_order(made: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """A list as the executor goes through it. A communication begins behind the computation before it: a receive is not posted
    earlier, and nothing is sent to a stage that has not posted it. Where starting one waits for another, such as a dispatch for
    its counts, so does the computation behind it.
    """
    waiting: list[Instruction] = []
    moves = {i.id for i in made if i.kind in MOVES}
    computed: tuple[int, ...] = ()
    waited: set[int] = set()
    for i in made:
        before: set[int] = set()
        if i.channel == COMPUTE:
            before, waited, computed = waited, set(), (i.id,)
        elif i.kind in MOVES:
            before = set(computed)
            waited |= moves.intersection(i.after)
        waiting.append(replace(i, after=tuple(sorted({*i.after, *before}))) if before else i)
    return tuple(waiting)
