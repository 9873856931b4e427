"""What one partition of a micro-batch hands to the next at one gate.

Legend: S positions on this rank, B samples of the micro-batch, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_overlap.runtime.routing.balance import BalanceTotals


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """What a partition found: enough to route it again, for a recompute.

    Attributes:
        first_sample, last_sample: its samples, half-open.
        used_E: capacity used by the partitions before it.
    """

    first_sample: int
    last_sample: int
    used_E: Tensor


@dataclass(slots=True)
class RoutingState:
    """One micro-batch at one gate. Made by `Gate.begin`, given to `Gate.route` with each partition, in order of the samples.

    Routing a partition a second time (recompute) repeats its decisions from what it found and leaves the state as it is.

    Attributes:
        sequence, samples: S and B of the whole micro-batch on this rank.
        partitions: how many parts the samples come in; sizes may differ, zero included.
        used_E: int64, capacity used so far; without a capacity, tokens routed so far.
        totals: of the balancing losses and the z-loss; None when nothing is recorded (evaluation).
        counts_bias: whether kept tokens are counted for the expert bias.
        counts_load: whether the gate's meter counts them.
        seed, micro_batch: of the draws; micro-batches are numbered as `draws.first_micro_batch` says.
        padding_SB: bool, true where a token is padding and counts in no loss.
    """

    sequence: int
    samples: int
    partitions: int
    used_E: Tensor
    totals: BalanceTotals | None
    counts_bias: bool
    counts_load: bool = False
    seed: int = 0
    micro_batch: int = 0
    padding_SB: Tensor | None = None
    entries: list[PartitionEntry] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """T of the whole micro-batch: what capacity is computed from."""
        return self.sequence * self.samples

    @property
    def is_complete(self) -> bool:
        """Whether every partition has been routed."""
        return len(self.entries) == self.partitions

    def enter(self, partition: int, samples: int) -> tuple[PartitionEntry, bool]:
        """Where a partition stands.

        Args:
            partition: its number.
            samples: how many it has.
        Returns:
            (entry, whether it has been routed before).
        """
        if partition < len(self.entries):
            entry = self.entries[partition]
            assert samples == entry.last_sample - entry.first_sample, "a recompute routes the same samples"
            return entry, True
        assert partition == len(self.entries) < self.partitions, (
            f"partition {partition} after {len(self.entries)} of {self.partitions}"
        )
        first = self.entries[-1].last_sample if self.entries else 0
        is_last = partition == self.partitions - 1
        assert first + samples <= self.samples and (not is_last or first + samples == self.samples), (
            f"partition {partition} of {self.partitions} ends at sample {first + samples} of {self.samples}"
        )
        return PartitionEntry(first, first + samples, self.used_E), False

    def leave(self, entry: PartitionEntry, used_E: Tensor) -> None:
        """A partition was routed for the first time: hand on the capacity."""
        self.entries.append(entry)
        self.used_E = used_E
