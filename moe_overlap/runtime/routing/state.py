"""The state that one partition of a micro-batch passes to the next at one gate: used capacity, seed of the draws, loss sums.

Contract: routing partitions p = 0, 1, … one after the other, each with the state after the previous ones, keeps the same tokens,
fills the same slots and draws the same experts as routing the whole micro-batch at once. Source: Lancet, sections 2.3 and 6
(capacity passing). Three sections:

- Capacity and the positional drop. There are two orders of tokens: megatron-core flattens [S, B] position by position (token s·B
  + b); the drop counts sample by sample (token b·S + s). Only in the second order is a partition of the samples a prefix of the
  remaining tokens, and only then does passing on the used capacity give the drops of the whole micro-batch.
- Draws by index. A generator's draws depend on the order of the calls, so cutting or recomputing a micro-batch would change
  them. Here each (token, expert) gets a 64-bit number that is a function of its indices alone; a token's k experts are those with
  the smallest numbers, a uniform subset. Mixing is SplitMix64's finalizer (Steele, Lea and Flood 2014; Stafford's constants).
- `RoutingState`, which holds both for one micro-batch.

T tokens, S positions of a sequence on this rank, B samples of the micro-batch, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_overlap.runtime.routing.balance import BalanceTotals


def expert_slots(map_TE: Tensor, used_E: Tensor) -> Tensor:
    """Number every routed token at its expert, as if capacity were unlimited.

    Args:
        map_TE: bool, tokens in the order of the drop. A token chooses an expert once, so the order of its choices is free.
        used_E: int64, slots taken by earlier partitions.
    Returns:
        [T, E] int64; -1 if a token does not go.
    """
    slots_TE = map_TE.cumsum(0) - 1 + used_E
    return slots_TE.masked_fill(~map_TE, -1)


def drop_beyond_capacity(map_TE: Tensor, used_E: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Keep the first tokens of each expert, up to its remaining capacity.

    Args:
        map_TE: bool, tokens in the order of the drop.
        used_E: int64, slots taken by earlier partitions of the micro-batch.
        capacity: an expert's capacity for the whole micro-batch; None keeps every token.
    Returns:
        (kept_TE, used_E after these tokens). Without a capacity, used_E is the count.
    """
    if capacity is None:
        return map_TE, used_E + map_TE.sum(0)
    slots_TE = expert_slots(map_TE, used_E)
    kept_TE = (slots_TE >= 0) & (slots_TE < capacity)
    # Refused tokens fill no slot: a full expert has used its capacity, however many wanted it.
    return kept_TE, (used_E + map_TE.sum(0)).clamp(max=capacity)


def drop_by_priority(map_TE: Tensor, priority_T: Tensor, used_E: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Keep the tokens of highest priority, up to each expert's remaining capacity; equal ones stay in order.

    Needs the whole micro-batch: a later token of high priority displaces an earlier one.

    Source: Riquelme et al. 2021 (batch prioritized routing), with a token's choices together as in Lancet; the original fills
    all first choices before all second ones.
    """
    # Stable: equal priorities keep their order on every rank and device.
    order_T = torch.argsort(priority_T, descending=True, stable=True)
    sorted_kept_TE, used_E = drop_beyond_capacity(map_TE[order_T], used_E, capacity)
    kept_TE = torch.empty_like(map_TE)
    kept_TE[order_T] = sorted_kept_TE
    return kept_TE, used_E


def sample_major(x_TE: Tensor, samples: int) -> Tensor:
    """Reorder tokens from megatron-core's order to the order of the drop.

    Args:
        x_TE: [T, …], token s·B + b.
        samples: B.
    Returns:
        [T, …], token b·S + s.
    """
    return _swap(x_TE, x_TE.shape[0] // max(samples, 1), samples)


def position_major(x_TE: Tensor, samples: int) -> Tensor:
    """Reorder tokens from the order of the drop back to megatron-core's."""
    return _swap(x_TE, samples, x_TE.shape[0] // max(samples, 1))


def _swap(x_TE: Tensor, outer: int, inner: int) -> Tensor:
    return x_TE.unflatten(0, (outer, inner)).transpose(0, 1).flatten(0, 1) if x_TE.shape[0] else x_TE


_BITS = 0xFFFFFFFFFFFFFFFF
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_GOLDEN = 0x9E3779B97F4A7C15


_MICRO_BATCHES_PER_STEP = 1 << 16
"""An upper bound; no step has as many."""


@dataclass(slots=True)
class DrawClock:
    """Seed and micro-batch of the draws in a forward pass of megatron-core; the runner sets the micro-batch before each pass."""

    seed: int = 0
    micro_batch: int = 0
    """Number in the run, from `first_micro_batch`."""


def first_micro_batch(step: int) -> int:
    """Number of a step's first micro-batch in the run; unique even if steps have different numbers of micro-batches."""
    return step * _MICRO_BATCHES_PER_STEP


def fold(key: int, value: int) -> int:
    """Mix one more index into an unsigned 64-bit key."""
    # value + 1: index 0 has to move the key, too. An odd factor maps different indices to different sums.
    key = (key + (value + 1) * _GOLDEN) & _BITS
    for shift, factor in _ROUNDS:
        key = ((key ^ (key >> shift)) * factor) & _BITS
    return key ^ (key >> _LAST_SHIFT)


def fold_tensor(key: Tensor, value: Tensor) -> Tensor:
    """`fold` on int64 tensors, which wrap as unsigned numbers do; broadcasts."""
    key = key + (value + 1) * _signed(_GOLDEN)
    for shift, factor in _ROUNDS:
        key = (key ^ _shift_right(key, shift)) * _signed(factor)
    return key ^ _shift_right(key, _LAST_SHIFT)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """Logical shift: torch's fills with the sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def draw_experts(key: int, positions_S: Tensor, samples_B: Tensor, topk: int, experts: int) -> Tensor:
    """Draw k different experts for every token.

    Args:
        key: derived from seed, layer and all else that the tokens share.
        positions_S: int64, positions in the whole sequence.
        samples_B: int64, numbers of the samples; a single zero gives every sample the same draws.
    Returns:
        [S, B or 1, K] int64.
    """
    # Made on the device from a number: a copy from the host would wait for the stream.
    start = torch.full((), _signed(key), dtype=torch.int64, device=positions_S.device)
    key_SB = fold_tensor(fold_tensor(start, samples_B)[None, :], positions_S[:, None])
    numbers_SBE = fold_tensor(key_SB[:, :, None], torch.arange(experts, device=positions_S.device))
    return numbers_SBE.topk(topk, dim=-1, largest=False).indices


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """The state before a partition: enough to route it again, for a recomputation.

    Attributes:
        first_sample, last_sample: its samples, half-open.
        used_E: capacity used by the partitions before it.
    """

    first_sample: int
    last_sample: int
    used_E: Tensor


@dataclass(slots=True)
class RoutingState:
    """One micro-batch at one gate, from `Gate.begin`; `Gate.route` takes it with each partition, in order of the samples.

    Routing a partition a second time (recomputation) repeats its decisions from its entry and leaves the state as it is.

    Attributes:
        sequence, samples: S and B of the whole micro-batch on this rank.
        partitions: number of parts of the samples; sizes may differ, zero included.
        used_E: int64, capacity used so far; without a capacity, tokens routed so far.
        totals: sums of the balancing losses and the z-loss; None when nothing is recorded (evaluation).
        counts_bias: whether kept tokens are counted for the expert bias.
        counts_load: whether the gate's meter counts them.
        seed, micro_batch: seed and micro-batch of the draws; `first_micro_batch` says how micro-batches are numbered.
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
        """T of the whole micro-batch; determines the capacity."""
        return self.sequence * self.samples

    @property
    def is_complete(self) -> bool:
        """Whether every partition has been routed."""
        return len(self.entries) == self.partitions

    def enter(self, partition: int, samples: int) -> tuple[PartitionEntry, bool]:
        """Find or open the entry of a partition.

        Args:
            partition: its number.
            samples: number of its samples.
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
        # The tensor is not copied: `leave` replaces it and nothing writes into it.
        return PartitionEntry(first, first + samples, self.used_E), False

    def leave(self, entry: PartitionEntry, used_E: Tensor) -> None:
        """Close a partition that was routed for the first time: the next one continues from the capacity it has used."""
        self.entries.append(entry)
        self.used_E = used_E
