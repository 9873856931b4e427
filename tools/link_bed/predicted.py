"""What a plan is expected to do on a bed: its list at the prices of the cost model, or of a profile over timer compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.spans import Span
from moe_overlap.predicting import simulated
from moe_overlap.tuner.cost.simulate import simulate
from moe_overlap.tuner.cost.simulate_step import SimulatedStep
from moe_overlap.tuner.profile.links import Fitted
from tools.link_bed.profile import apply_profile, computation_of, is_update
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


@dataclass(frozen=True, slots=True)
class PricedList:
    """The passes of a list at the tuner's prices, for operators that sleep just as long.

    Attributes:
        sleeps: name and seconds of every operator, in the list's order.
        sent_bytes: of its all-to-alls, that leave the rank.
        seconds: of the passes, as the tuner simulates them.
        seconds_with_starts: the same, with the thread that computes starting every exchange.
    """

    sleeps: list[tuple[str, float]]
    sent_bytes: int
    seconds: float
    seconds_with_starts: float

    @property
    def computation(self) -> float:
        """Seconds of all operators."""
        return sum(seconds for _, seconds in self.sleeps)


def priced_list(step: SimulatedStep, starting: Fitted) -> PricedList:
    """What a simulated step of one stage computes, sends and takes.

    Args:
        starting: as above.
    """
    ((rank, prices),) = step.prices.items()
    made = [i for i in prices.made if not is_update(i.name)]
    starts = start_seconds(made, starting)
    alone = {i.id: prices.seconds(i) for i in made}
    plain = simulate({rank: made}, lambda _, i: alone[i.id], prices.slowed)
    started = simulate({rank: made}, lambda _, i: alone[i.id] + starts.get(i.id, 0.0), prices.slowed)
    sent = sum(i.bytes for i in made if i.channel.startswith("ep"))
    sleeps = [(i.name, alone[i.id]) for i in computation_of(made)]
    return PricedList(sleeps, sent, plain.step_seconds, started.step_seconds)


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
