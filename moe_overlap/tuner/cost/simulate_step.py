"""A step of a plan, simulated: the instruction lists of one rank per stage at the prices of the cost model.

Beside each other, work is slowed down as the closed form says (`predict.concurrency`). Simulated steps and the closed form
(`pipeline.py`) agree where nothing overlaps, transfers between stages apart: the closed form lets a stage wait for each of them,
as megatron-core's pipeline does; the lists have them beside computation, so that a stage waits only where nothing else is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.live_memory import live_bytes
from moe_overlap.tuner.cost.predict import Machine, Priced, concurrency, price_family
from moe_overlap.tuner.cost.prepare import prepare
from moe_overlap.tuner.cost.simulate import Simulation, simulate


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
    families = prepare(plan, model, graphs, features, machine.load)
    place: dict[int, tuple[Priced, int]] = {}
    for family in families:
        priced = price_family(plan, model, family, machine, features)
        place.update({index: (priced, column) for column, index in enumerate(family.stages)})
    prices: dict[int, StagePrices] = {}
    for index, stage in enumerate(plan.stages):
        priced, column = place[index]
        here = StagePrices(plan, stage, graphs[index], priced, column, machine)
        saved = {f"L{layer}": here.saved_bytes(f"L{layer}") for layer in stage.layers}
        here.read(lower(plan, model, stage.devices.ranks[0], saved))
        prices[stage.devices.ranks[0]] = here
    lists: dict[int, Sequence[Instruction]] = {rank: one.made for rank, one in prices.items()}
    replicas = {rank: one.priced.setting.groups["dp_cp"] for rank, one in prices.items()}
    slowed = {rank: concurrency(machine, group)[1] for rank, group in replicas.items()}
    return SimulatedStep(simulate(lists, lambda rank, i: prices[rank].seconds(i), slowed), prices)
