"""A bed as a cluster of measured machines, a node for each rank: its operators and links in a database that is kept."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.tuner.cost.exchange_costs import COUNTS, QUEUED_COUNTS, STARTS, costs_of
from moe_overlap.tuner.profile.cluster_file import measured_cluster
from moe_overlap.tuner.profile.database import Database, LinkKey
from moe_overlap.tuner.profile.device import this_device
from moe_overlap.tuner.profile.keys import OperatorKey
from moe_overlap.tuner.profile.links import Fitted, fit_links
from moe_overlap.tuner.profile.lookup import CALL_SECONDS, IN_STEP
from moe_overlap.tuner.profile.vocabulary import can_be_measured
from tools.link_bed.host_time import measure_host_time
from tools.link_bed.launch import ENVIRONMENT, Tell
from tools.link_bed.orders import ORDER_COUNTS, ORDER_LINKS, ORDER_SLOWDOWN, TRANSFERS, order_of

EXCHANGE_BYTES = tuple(1 << power for power in range(20, 24))
GATHER_BYTES = (1 << 23, 1 << 24)
"""As large as the gradients of the job: gloo's larger gathers are half duplex, its smaller ones now and then."""
MEASURED_LINKS = {"all_to_all": EXCHANGE_BYTES, "all_gather": GATHER_BYTES, "reduce_scatter": GATHER_BYTES}
SLOWDOWN_BYTES = QUEUE_BYTES = 1 << 22
SECONDS_EACH = 0.02

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class BedLinks:
    """Of a bed, beside the rates of its links.

    Attributes:
        starting: seconds of the processor to start an exchange, by the bytes that leave.
        transfers: seconds of a transfer to the next stage, by its bytes; None where there is one stage.
        count_seconds, queue_seconds: of an exchange of counts, and how much longer it takes behind rows.
    """

    starting: Fitted
    transfers: Fitted | None
    count_seconds: float
    queue_seconds: float


class MeasuredBed:
    """The database of a bed, filled by its ranks.

    Args:
        path: of the cluster description; the database stands beside it.
        ranks: of the bed.
        stages: of its pipeline, whose ranks share the experts of their layers.
        tell: reaches the ranks.
    Raises:
        ConfigError: the database cannot be written.
    """

    def __init__(self, path: Path, ranks: int, stages: int, tell: Tell, say: Say) -> None:
        self._path, self._ranks, self._stages, self._tell, self._say = path, ranks, stages, tell, say
        device = dataclasses.replace(this_device("cpu"), threads=int(ENVIRONMENT["OMP_NUM_THREADS"]))
        self.database = Database.open(path.with_suffix(".measured.jsonl"), device)

    def measure_operators(self, keys: Sequence[OperatorKey]) -> None:
        """Those that the database lacks."""
        missing = [key for key in keys if key not in self.database.operators and can_be_measured(key)]
        if not missing and "kernel_seconds" in self.database.rates:
            return
        self._say(f"measuring {len(missing)} operators")
        self._tell(**order_of(self.database, missing, SECONDS_EACH))
        self.database = Database.load(self.database.path)

    def measure_links(self, links: Mapping[str, Sequence[int]] = MEASURED_LINKS) -> None:
        """Exchanges and what starting them takes, collectives of the update, transfers between stages, counts, and what
        exchanges cost products beside them.

        Args:
            links: kind of collective -> sizes, in bytes that a rank holds.
        """
        kinds = {**links, **({TRANSFERS: EXCHANGE_BYTES} if self._stages > 1 else {})}
        for kind, sizes in kinds.items():
            for size in sizes:
                key = LinkKey(kind, "network", self._size_of(kind), size)
                if key in self.database.links:
                    continue
                self._say(f"measuring {kind} of {size / (1 << 20):g} MiB")
                answers = self._tell(do=ORDER_LINKS, kind=kind, held_bytes=size)
                self.database.add_link(key, max(seconds for seconds, _ in answers))
                if kind == "all_to_all":
                    started = statistics.fmean(start for _, start in answers)
                    self.database.add_link(dataclasses.replace(key, kind=STARTS), started)
        counts, queued = (
            LinkKey(kind, "network", self._size_of(kind), QUEUE_BYTES) for kind in (COUNTS, QUEUED_COUNTS)
        )
        if queued not in self.database.links:
            self._say("measuring counts")
            answers = self._tell(do=ORDER_COUNTS, held_bytes=QUEUE_BYTES)
            for key, taken in zip((counts, queued), zip(*answers, strict=True), strict=True):
                self.database.add_link(key, max(taken))
        if "overlap_slowdown" not in self.database.rates:
            lost = statistics.fmean(self._tell(do=ORDER_SLOWDOWN, held_bytes=SLOWDOWN_BYTES))
            self.database.add_rate("overlap_slowdown", max(lost, 1e-6))

    def measure_host_time(self) -> None:
        """What a step takes beside its operators; the ranks have the jobs of `calibrating`."""
        if IN_STEP not in self.database.rates or CALL_SECONDS not in self.database.rates:
            self._say("measuring the host's time")
            measure_host_time(self.database, self.cluster(), self._tell)

    def cluster(self) -> Cluster:
        """The description, written to its file."""
        content = measured_cluster(self.database, self._path.stem, nodes=self._ranks, ranks_per_node=1)
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return load_cluster(self._path)

    def links(self) -> BedLinks:
        """As measured."""
        costs = costs_of(self.database.links)
        assert costs is not None, "measure_links has measured all kinds"
        transfers = fit_links(self.database.links, (TRANSFERS,), "network")
        return BedLinks(costs.starting, transfers, costs.count_seconds, costs.queue_seconds)

    def _size_of(self, kind: str) -> int:
        """Ranks of the group that a kind of communication joins."""
        if kind in MEASURED_LINKS and kind != "all_to_all":
            return self._ranks
        return 2 if kind == TRANSFERS else self._ranks // self._stages
