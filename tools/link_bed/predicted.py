"""What a plan is expected to do on a bed: its lists at the prices of the cost model, or of a profile over timer compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.lower_layers import COUNT_CHANNEL
from moe_overlap.plan.spans import Span
from moe_overlap.predicting import simulated
from moe_overlap.tuner.cost.interference import NO_INTERFERENCE
from moe_overlap.tuner.cost.simulate import simulate
from moe_overlap.tuner.profile.links import Fitted
from tools.link_bed.machine import BedLinks
from tools.link_bed.profile import apply_profile, is_update
from tools.link_bed.recorded import recorded


def predicted_spans(
    words: Sequence[str], cluster: Cluster, links: BedLinks, profile: Mapping[str, float] | None
) -> dict[int, list[Span]]:
    """A step of the first rank of every stage, as its recorder would write it.

    Args:
        words: flags of the job and the plan.
        links: an exchange is started by the thread that computes; counts and transfers take what was measured.
        profile: seconds of operators that sleep, whose steps have no update; None: real computation.
    """
    step = simulated(words, cluster)
    lists = {
        rank: [i for i in prices.made if profile is None or not is_update(i.name)]
        for rank, prices in step.prices.items()
    }
    starts = {rank: start_seconds(made, links.starting) for rank, made in lists.items()}
    slept = {rank: apply_profile(profile, made) for rank, made in lists.items()} if profile is not None else None

    def seconds(rank: int, i: Instruction) -> float:
        if i.channel == COUNT_CHANNEL:
            return links.count_seconds
        if i.kind == "point-to-point" and links.transfers is not None:
            return links.transfers.latency_seconds + i.bytes / links.transfers.bytes_per_second
        computes = i.kind in ("compute", "weight-gradient")
        taken = slept[rank].of(i) if slept is not None and computes else step.prices[rank].seconds(i)
        return taken + starts[rank].get(i.id, 0.0)

    slowed = {rank: prices.slowed if profile is None else NO_INTERFERENCE for rank, prices in step.prices.items()}
    simulation = simulate(lists, seconds, slowed, links.queue_seconds, half_duplex=True)
    return {rank: recorded(made, simulation, rank) for rank, made in lists.items()}


def start_seconds(made: Sequence[Instruction], starting: Fitted) -> dict[int, float]:
    """What starting exchanges adds to the computation before them, by its instruction."""
    added: dict[int, float] = {}
    before = None
    for i in made:
        if i.channel == COMPUTE:
            before = i.id
        elif before is not None and i.channel.startswith("ep"):
            taken = starting.latency_seconds + i.bytes / starting.bytes_per_second
            added[before] = added.get(before, 0.0) + taken
    return added
