"""Tiles between neighbouring stages of unlike shape: which rank sends which samples and tokens to whom (`Plan.transfers`).

Terms. A *holding* is the shard of a boundary tensor [batch, sequence, hidden] that a rank has or needs: samples times tokens. A
stage with micro-batches of b samples on d data ranks has sample n on data rank n % (b · d) // b. A context rank has one early and
one late piece of the sequence, of 2 C pieces in all (causal attention costs more at the end of a sequence); its tensor ranks are
sequence-parallel and split these pieces, in order.

Contract. Ranks with equal holdings are replicas; different holdings are disjoint. Every element that a rank needs reaches it
exactly once, from a rank that has it. Steps of `tiles_between`:
1. The intersection of a rectangle that a rank needs with the holding of a set of replicas is a tile (Alpa's tile and its slices).
2. The replica that has sent the least so far sends it; of equals, the first.
Step of `shared_among_replicas`, before those two, if receivers are replicas (Alpa's local all-gather):
3. Each replica receives an equal share along the sequence, or along the batch if the tokens do not divide, over the link between
   the stages; an all-gather inside the receiving stage completes the tensor. So each element crosses the boundary once.

Stages of this project are sequence-parallel if they have several tensor ranks, so their ranks are no replicas and
`transfer_between` adds no all-gather. With `repeated` it describes stages whose tensor ranks each hold all tokens.

Source: Alpa, section 6 (cross-mesh resharding).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import SHAPE_FIELDS
from moe_overlap.plan.plan import AllGather, Plan, StagePlan, Tile, Transfer
from moe_overlap.plan.rules.resharding import Range, boundary_batch, samples_of, share_of, tokens_of_context_rank


@dataclass(frozen=True, slots=True)
class Holding:
    """The shard of a rank: the product of its samples and its tokens, each as half-open ranges in storage order."""

    rank: int
    batch: tuple[Range, ...]
    sequence: tuple[Range, ...]

    @property
    def place(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Samples and tokens; equal for replicas."""
        return self.batch, self.sequence


def holdings_of(stage: StagePlan, samples: int, sequence_length: int, repeated: bool = False) -> tuple[Holding, ...]:
    """The shard of a boundary tensor of every rank of a stage.

    Args:
        samples: a multiple of the samples of a micro-batch.
        repeated: every tensor rank has all tokens of its context rank: no sequence parallelism.
    """
    size, every = stage.micro_batch_size, samples_of(stage)
    assert samples % every == 0, (samples, every)
    result = []
    for place, rank in enumerate(stage.devices.ranks):
        tensor, context = place % stage.tensor, place // stage.tensor % stage.context
        data = place // (stage.tensor * stage.context)
        batch = tuple((start + data * size, start + (data + 1) * size) for start in range(0, samples, every))
        tokens = tokens_of_context_rank(stage.context, context, sequence_length)
        shard = tokens if repeated else share_of(tokens, tensor, stage.tensor)
        result.append(Holding(rank, batch, shard))
    return tuple(result)


def tiles_between(sources: Sequence[Holding], targets: Sequence[Holding]) -> tuple[Tile, ...]:
    """Steps 1 and 2.

    Args:
        sources: holdings of the sending stage; together they cover every target.
    """
    replicas: dict[tuple[tuple[Range, ...], tuple[Range, ...]], list[int]] = defaultdict(list)
    for source in sources:
        replicas[source.place].append(source.rank)
    sent = dict.fromkeys((source.rank for source in sources), 0)
    tiles = []
    for target in targets:
        for (batches, sequences), ranks in replicas.items():
            for batch in _intersections(batches, target.batch):
                for sequence in _intersections(sequences, target.sequence):
                    sender = min(ranks, key=lambda rank: sent[rank])
                    sent[sender] += (batch[1] - batch[0]) * (sequence[1] - sequence[0])
                    tiles.append(Tile(source=sender, target=target.rank, batch=batch, sequence=sequence))
    return tuple(sorted(tiles, key=lambda tile: (tile.batch, tile.sequence, tile.target)))


def _intersections(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return [(first, last) for first, last in pairs if first < last]


def shared_among_replicas(targets: Sequence[Holding]) -> tuple[tuple[Holding, ...], AllGather | None]:
    """Step 3: the share that each target receives, and the all-gather that completes it; None if no two targets are replicas.

    Raises:
        ConfigError: neither tokens nor samples divide into equal shares.
    """
    replicas: dict[tuple[tuple[Range, ...], tuple[Range, ...]], list[int]] = defaultdict(list)
    for target in targets:
        replicas[target.place].append(target.rank)
    groups = tuple(tuple(ranks) for ranks in replicas.values() if len(ranks) > 1)
    if not groups:
        return tuple(targets), None
    axis = _axis_of_shares(replicas)
    received = []
    for (batch, sequence), ranks in replicas.items():
        for number, rank in enumerate(ranks):
            if axis == "sequence":
                received.append(Holding(rank, batch, share_of(sequence, number, len(ranks))))
            else:
                shard = tuple(share for samples in batch for share in share_of((samples,), number, len(ranks)))
                received.append(Holding(rank, shard, sequence))
    return tuple(received), AllGather(axis=axis, groups=groups)


def _axis_of_shares(
    replicas: dict[tuple[tuple[Range, ...], tuple[Range, ...]], list[int]],
) -> Literal["batch", "sequence"]:
    """The axis along which all replicas can take equal shares; ConfigError if neither divides."""
    if all(_length(sequence) % len(ranks) == 0 for (_, sequence), ranks in replicas.items()):
        return "sequence"
    # Every micro-batch is shared and gathered separately, so the samples of each must divide.
    if all((last - first) % len(ranks) == 0 for (batch, _), ranks in replicas.items() for first, last in batch):
        return "batch"
    most = max(map(len, replicas.values()))
    rule = f"neither tokens nor samples of a micro-batch divide into {most} shares"
    raise ConfigError("transfers all_gather", f"{most} replicas", rule, "use a sequence that divides")


def _length(ranges: Sequence[Range]) -> int:
    return sum(last - first for first, last in ranges)


def transfer_between(plan: Plan, from_stage: int, repeated: tuple[bool, bool] = (False, False)) -> Transfer:
    """The transfer of the boundary tensor from a stage to the next.

    Args:
        repeated: for the sending and the receiving stage, whether each tensor rank holds all tokens of its context rank.
    Raises:
        ConfigError: neither tokens nor samples divide among replicas.
    """
    sender, receiver = plan.stages[from_stage], plan.stages[from_stage + 1]
    samples = boundary_batch(sender, receiver)
    sources = holdings_of(sender, samples, plan.sequence_length, repeated[0])
    targets = holdings_of(receiver, samples, plan.sequence_length, repeated[1])
    received, gather = shared_among_replicas(targets)
    tiles = tiles_between(sources, received)
    return Transfer(from_stage=from_stage, to_stage=from_stage + 1, tiles=tiles, all_gather=gather)


def with_transfers(plan: Plan) -> Plan:
    """A 1F1B plan with a transfer at every boundary between stages of unlike shape; equal neighbours need none."""
    unlike = [
        index
        for index, (source, target) in enumerate(zip(plan.stages, plan.stages[1:], strict=False))
        if any(getattr(source, field) != getattr(target, field) for field in SHAPE_FIELDS)
    ]
    return replace(plan, transfers=tuple(transfer_between(plan, index) for index in unlike))
