"""Tiles between neighbouring stages of unlike shape: which rank sends which samples and tokens to whom (`Plan.transfers`).

Terms. A *holding* is what a rank has of a boundary tensor [batch, sequence, hidden] (or needs of it): samples times tokens. A
stage with micro-batches of b samples on d data ranks has sample n on data rank n % (b · d) // b. Of the tokens a context rank has
one early and one late piece, 2 C pieces in all (causal attention costs more at the end of a sequence); its tensor ranks split
what it has, in that order, as they are sequence-parallel.

Contract. Ranks with equal holdings are replicas, and holdings that differ have no element in common. Every element that a rank
needs reaches it exactly once, from a rank that has it. Steps of `tiles_between`:
1. Of every rectangle that a rank needs, the part that a set of replicas has is a tile: Alpa's tile and its slices.
2. The replica that has sent the least so far sends it; of equals, the first.
Steps of `shared_among_replicas`, before that, where receivers are replicas (Alpa's local all-gather):
3. Each receives an equal share along the sequence, or along the batch where the tokens do not divide, over the link between the
   stages; an all-gather inside the receiving stage completes the tensor. So each element crosses the boundary once.

Stages of this project are sequence-parallel wherever they have several tensor ranks, so their ranks are no replicas, and
`transfer_between` gathers nothing. With `repeated` it answers for receivers whose tensor ranks all keep the whole.

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
    """The samples and the tokens of a rank, half-open ranges in the order in which it keeps them; it has their product."""

    rank: int
    batch: tuple[Range, ...]
    sequence: tuple[Range, ...]

    @property
    def place(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """The rank's samples and tokens, which its replicas hold too."""
        return self.batch, self.sequence


def holdings_of(stage: StagePlan, samples: int, sequence_length: int, repeated: bool = False) -> tuple[Holding, ...]:
    """The samples and tokens of a boundary tensor that every rank of a stage holds.

    Args:
        samples: a multiple of those of a micro-batch.
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
        own = tokens if repeated else share_of(tokens, tensor, stage.tensor)
        result.append(Holding(rank, batch, own))
    return tuple(result)


def tiles_between(sources: Sequence[Holding], targets: Sequence[Holding]) -> tuple[Tile, ...]:
    """Steps 1 and 2.

    Args:
        sources: holdings of the sending stage; together they have all that a target needs.
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


def _intersections(ones: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    pairs = ((max(a, c), min(b, d)) for a, b in ones for c, d in others)
    return [(first, last) for first, last in pairs if first < last]


def shared_among_replicas(targets: Sequence[Holding]) -> tuple[tuple[Holding, ...], AllGather | None]:
    """Step 3: what each target receives, and the all-gather that completes it; None where no two need the same.

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
                own = tuple(each for samples in batch for each in share_of((samples,), number, len(ranks)))
                received.append(Holding(rank, own, sequence))
    return tuple(received), AllGather(axis=axis, groups=groups)


def _axis_of_shares(
    replicas: dict[tuple[tuple[Range, ...], tuple[Range, ...]], list[int]],
) -> Literal["batch", "sequence"]:
    """The axis along which all replicas take equal shares."""
    if all(_length(sequence) % len(ranks) == 0 for (_, sequence), ranks in replicas.items()):
        return "sequence"
    # Shares are of every micro-batch: it is gathered when it has arrived.
    if all((last - first) % len(ranks) == 0 for (batch, _), ranks in replicas.items() for first, last in batch):
        return "batch"
    most = max(map(len, replicas.values()))
    rule = f"neither tokens nor samples of a micro-batch divide into {most} shares"
    raise ConfigError("transfers all_gather", f"{most} replicas", rule, "use a sequence that divides")


def _length(ranges: Sequence[Range]) -> int:
    return sum(last - first for first, last in ranges)


def transfer_between(plan: Plan, from_stage: int, repeated: tuple[bool, bool] = (False, False)) -> Transfer:
    """How the boundary tensor behind a stage crosses to the next.

    Args:
        repeated: whether the tensor ranks of the sending and of the receiving stage each keep the whole of their tokens.
    Raises:
        ConfigError: replicas cannot share what they need.
    """
    before, behind = plan.stages[from_stage], plan.stages[from_stage + 1]
    samples = boundary_batch(before, behind)
    sources = holdings_of(before, samples, plan.sequence_length, repeated[0])
    targets = holdings_of(behind, samples, plan.sequence_length, repeated[1])
    received, gather = shared_among_replicas(targets)
    tiles = tiles_between(sources, received)
    return Transfer(from_stage=from_stage, to_stage=from_stage + 1, tiles=tiles, all_gather=gather)


def with_transfers(plan: Plan) -> Plan:
    """A 1F1B plan with a transfer at every boundary of stages of unlike shape; equal neighbours send rank to rank."""
    unlike = [
        index
        for index, (before, behind) in enumerate(zip(plan.stages, plan.stages[1:], strict=False))
        if any(getattr(before, field) != getattr(behind, field) for field in SHAPE_FIELDS)
    ]
    return replace(plan, transfers=tuple(transfer_between(plan, index) for index in unlike))
