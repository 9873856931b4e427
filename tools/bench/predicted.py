"""The predicted step of a plan on a bed: its lists at the prices of the cost model, or of a profile over timer compute.

`recorded` writes a simulated step as the runtime's recorder would, so that the two can be laid over each other: the executor goes
through its list in order. The span of a communication begins where the executor starts it, though the link may still carry
another one, and ends where the executor has waited for it, which may be later than the arrival. Computation is recorded as it
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.api import simulated
from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.instructions import COMPUTE, EXPERT, OPTIMIZER, Instruction, Span
from moe_overlap.plan.lowering.layers import COUNT_CHANNEL
from moe_overlap.tuner.cost.interference import NO_INTERFERENCE, start_seconds
from moe_overlap.tuner.cost.simulate.engine import Simulation, simulate
from moe_overlap.tuner.cost.simulate.step import SimulatedStep
from tools.bench.machine import BedLinks
from tools.bench.profile import apply_profile, computation_of


def recorded(instructions: Sequence[Instruction], simulation: Simulation, rank: int) -> list[Span]:
    """Spans of one rank, in order of their starts.

    Args:
        instructions: the rank's list.
    """
    ran = {task.instruction.id: task for task in simulation.ran if task.rank == rank}
    spans: list[Span] = []
    under_way: dict[int, tuple[Instruction, float]] = {}
    now = 0.0

    def wait(number: int) -> None:
        nonlocal now
        if number not in under_way:
            return
        channel = under_way[number][0].channel
        for earlier in [n for n, (other, _) in under_way.items() if n <= number and other.channel == channel]:
            other, start = under_way.pop(earlier)
            now = max(now, ran[earlier].end)
            spans.append(_span(other, start, now))

    for i in instructions:
        for number in i.after:
            wait(number)
        if i.channel in (COMPUTE, OPTIMIZER):
            spans.append(_span(i, ran[i.id].start, ran[i.id].end))
            now = ran[i.id].end
        else:
            under_way[i.id] = (i, now)
    for number in list(under_way):
        wait(number)
    return sorted(spans, key=lambda span: (span.start, span.end))


def _span(i: Instruction, start: float, end: float) -> Span:
    return Span(i.name, i.channel_group, i.chunk or 0, i.micro_batch or 0, start, end)


def predicted_spans(
    flags: Sequence[str], cluster: Cluster, links: BedLinks, profile: Mapping[str, float] | None
) -> dict[int, list[Span]]:
    """A step of the first rank of every stage, as its recorder would write it.

    Args:
        flags: of the job and the plan.
        links: the thread that computes starts all-to-alls; counts and transfers take the measured seconds.
        profile: seconds of operators that sleep, whose steps have no update; None: real computation.
    """
    step = simulated(flags, cluster)
    lists = {
        rank: [i for i in prices.made if profile is None or not i.operator.is_update]
        for rank, prices in step.prices.items()
    }
    starts = {rank: start_seconds(instructions, links.starting) for rank, instructions in lists.items()}
    slept = (
        {rank: apply_profile(profile, instructions) for rank, instructions in lists.items()}
        if profile is not None
        else None
    )

    def seconds(rank: int, i: Instruction) -> float:
        if i.channel == COUNT_CHANNEL:
            return links.count_seconds
        if i.kind == "point-to-point" and links.transfers is not None:
            return links.transfers.latency_seconds + i.bytes / links.transfers.bytes_per_second
        computes = i.kind in ("compute", "weight-gradient")
        if slept is None or not computes:
            return step.prices[rank].seconds(i)
        return slept[rank].of(i) + starts[rank].get(i.id, 0.0)

    slowed = {rank: prices.slowed if profile is None else NO_INTERFERENCE for rank, prices in step.prices.items()}
    simulation = simulate(lists, seconds, slowed, links.queue_seconds, half_duplex=True)
    return {rank: recorded(instructions, simulation, rank) for rank, instructions in lists.items()}


@dataclass(frozen=True, slots=True)
class PricedList:
    """The passes of a list at the tuner's prices, for operators that sleep just as long.

    Attributes:
        sleeps: name and seconds of every operator, in the list's order.
        sent_bytes: of its all-to-alls, that leave the rank.
        seconds: the passes, as the tuner simulates them.
    """

    sleeps: list[tuple[str, float]]
    sent_bytes: int
    seconds: float

    @property
    def computation(self) -> float:
        """Seconds of all operators."""
        return sum(seconds for _, seconds in self.sleeps)


def priced_list(step: SimulatedStep) -> PricedList:
    """The list of a simulated step of one stage, priced. The start of all-to-alls is left to the run."""
    ((rank, prices),) = step.prices.items()
    instructions = [i for i in prices.made if not i.operator.is_update]
    simulation = simulate(
        {rank: instructions}, lambda _, i: prices.seconds(i), prices.slowed, prices.machine.queue_seconds
    )
    sent = sum(i.bytes for i in instructions if i.channel_group == EXPERT)
    sleeps = [(i.name, prices.seconds(i) - prices.starts.get(i.id, 0.0)) for i in computation_of(instructions)]
    return PricedList(sleeps, sent, simulation.step_seconds)
