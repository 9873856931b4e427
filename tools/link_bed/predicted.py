"""What a plan is expected to do on a bed: its list at the prices of the cost model, or of a profile over timer compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.spans import Span
from moe_overlap.predicting import simulated
from moe_overlap.tuner.cost.simulate import simulate
from moe_overlap.tuner.profile.links import Fitted
from tools.link_bed.profile import apply_profile, is_update
from tools.link_bed.recorded import recorded


def predicted_spans(
    words: Sequence[str], cluster: Cluster, starting: Fitted, profile: Mapping[str, float] | None
) -> list[Span]:
    """A step of one rank, as its recorder would write it.

    Args:
        words: flags of the job and the plan.
        starting: an exchange is started by the thread that computes: seconds by the bytes that leave.
        profile: seconds of operators that sleep, whose steps have no update; None: real computation.
    """
    step = simulated(words, cluster)
    ((rank, prices),) = step.prices.items()
    made = [i for i in prices.made if profile is None or not is_update(i.name)]
    starts = start_seconds(made, starting)
    slept = None if profile is None else apply_profile(profile, made)

    def seconds(_: int, i: Instruction) -> float:
        computes = i.kind in ("compute", "weight-gradient")
        return (slept.of(i) if slept is not None and computes else prices.seconds(i)) + starts.get(i.id, 0.0)

    slowed = prices.slowed if profile is None else None
    return recorded(made, simulate({rank: made}, seconds, slowed), rank)


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
