"""What exchanges cost beside their rows, where it was measured: the thread that computes starts them, and counts wait in a queue.

On gloo the processor that computes also starts exchanges, and counts, in a group of their own, wait behind what rows have in the
queue of a link. Where neither was measured nothing is charged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.instructions import COMPUTE, EXPERT, Instruction
from moe_overlap.tuner.profile.cluster_file import Fitted, fit_line
from moe_overlap.tuner.profile.database import Database, LinkKey

STARTS = "start_all_to_all"
"""Kind of link whose seconds are those that starting an exchange keeps the processor."""
COUNTS, QUEUED_COUNTS = "counts", "counts_behind_rows"
"""Kinds of links whose seconds are those of an exchange of counts, with a link to itself and behind rows of that many bytes."""


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """Beside rows.

    Attributes:
        starting: seconds of the processor to start an exchange, by the bytes that leave.
        count_seconds, queue_seconds: of an exchange of counts, and how much longer it takes behind rows.
    """

    starting: Fitted
    count_seconds: float
    queue_seconds: float


def exchange_costs(cluster: Cluster) -> ExchangeCosts | None:
    """Of a measured cluster; None where its database does not have all of them.

    Raises:
        ConfigError: the database cannot be read.
    """
    return None if cluster.measured is None else costs_of(Database.load(Path(cluster.measured.database)).links)


def costs_of(links: Mapping[LinkKey, float]) -> ExchangeCosts | None:
    """Of measured links; None where a kind is missing."""
    of_kind = {
        kind: {key: taken for key, taken in links.items() if key.kind == kind}
        for kind in (STARTS, COUNTS, QUEUED_COUNTS)
    }
    if not all(of_kind.values()):
        return None
    sent = [key.held_bytes * (key.ranks - 1) / key.ranks for key in of_kind[STARTS]]
    alone, queued = (max(of_kind[kind].values()) for kind in (COUNTS, QUEUED_COUNTS))
    return ExchangeCosts(fit_line(sent, list(of_kind[STARTS].values())), alone, max(0.0, queued - alone))


def start_seconds(made: Sequence[Instruction], starting: Fitted) -> dict[int, float]:
    """What starting exchanges adds to the computation before them, by its instruction."""
    added: dict[int, float] = {}
    before = None
    for i in made:
        if i.channel == COMPUTE:
            before = i.id
        elif before is not None and i.channel_group == EXPERT:
            taken = starting.latency_seconds + i.bytes / starting.bytes_per_second
            added[before] = added.get(before, 0.0) + taken
    return added
