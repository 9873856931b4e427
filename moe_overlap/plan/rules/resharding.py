"""Resharding between stages of unlike shape (`Plan.transfers`): which rank sends which samples to whom, and its invariants.

Terms. Samples of a step are numbered; a stage with micro-batches of b samples on each of d data ranks has sample n in micro-batch
n // (b · d), on data rank n % (b · d) // b. The *tiles* of a transfer cover the smallest number of samples with which a
micro-batch ends on both stages; every further block of as many samples uses the same tiles. A tile is cut at the end of each
micro-batch of either stage; each of the resulting *pieces* is one send.
Invariant. Every element of a boundary tensor crosses once.

Source: Alpa, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import SHAPE_FIELDS
from moe_overlap.plan.plan import AllGather, Plan, StagePlan, Tile, Transfer

Range = tuple[int, int]
"""Half-open."""
MOST_PIECES = 2_000_000
"""Most pieces of a step at a boundary. Every rank holds the list of all pieces (400 MB at most); a short plan may need any
number."""


Region = tuple[Range, Range]
"""Samples and tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer from rank to rank, forward; gradients go the same way back.

    Attributes:
        index: its number among the pieces of the boundary; both ends send and receive in this order.
        source_micro_batch, target_micro_batch: the micro-batch it belongs to on either side.
        source_region, target_region: its samples and tokens, as offsets into the micro-batch's shard of the rank on either side.
    """

    index: int
    source: int
    target: int
    source_micro_batch: int
    target_micro_batch: int
    source_region: Region
    target_region: Region

    @property
    def tokens(self) -> int:
        """Samples times length."""
        (first, last), (begin, end) = self.source_region
        return (last - first) * (end - begin)


def boundary_batch(source: StagePlan, target: StagePlan) -> int:
    """Samples after which a micro-batch ends on both sides of a boundary; the tiles of a transfer cover exactly these."""
    return lcm(samples_of(source), samples_of(target))


def samples_of(stage: StagePlan) -> int:
    """Samples of a micro-batch, over all data ranks."""
    return stage.micro_batch_size * stage.data


def pieces_of(plan: Plan, transfer: Transfer) -> tuple[Piece, ...]:
    """The pieces of a whole step, in the order of their samples."""
    source, target = plan.stages[transfer.from_stage], plan.stages[transfer.to_stage]
    round_samples = boundary_batch(source, target)
    cut = [
        (first, number, tile, _regions(plan, tile, (first, last), source, target))
        for number, tile in enumerate(transfer.tiles)
        for first, last in _cut(tile, source, target)
    ]
    pieces: list[Piece] = []
    for start in range(0, plan.global_batch_size, round_samples):
        # By samples, ties by the tile's number: both ends number the pieces alike, since NCCL matches sends and
        # receives by order.
        for first, _, tile, (source_region, target_region) in sorted(cut, key=lambda tile: tile[:2]):
            place = start + first
            piece = Piece(
                index=len(pieces),
                source=tile.source,
                target=tile.target,
                source_micro_batch=place // samples_of(source),
                target_micro_batch=place // samples_of(target),
                source_region=source_region,
                target_region=target_region,
            )
            pieces.append(piece)
    return tuple(pieces)


def _regions(plan: Plan, tile: Tile, samples: Range, source: StagePlan, target: StagePlan) -> tuple[Region, Region]:
    """Samples and tokens of a piece as offsets into its source's shard of a micro-batch, and into its target's."""
    count, length = samples[1] - samples[0], tile.sequence[1] - tile.sequence[0]

    def region_of(stage: StagePlan, rank: int) -> Region:
        sample = samples[0] % stage.micro_batch_size
        # None: the rank receives only a share of its tokens, in a separate tensor that an all-gather completes.
        token = place_among(tokens_of(stage, rank, plan.sequence_length), tile.sequence) or 0
        return (sample, sample + count), (token, token + length)

    return region_of(source, tile.source), region_of(target, tile.target)


def tokens_of(stage: StagePlan, rank: int, sequence_length: int) -> tuple[Range, ...]:
    """The tokens of a boundary tensor that a rank has, in its order: tensor ranks share those of a context rank."""
    place = stage.devices.ranks.index(rank)
    of_context = tokens_of_context_rank(stage.context, place // stage.tensor % stage.context, sequence_length)
    return share_of(of_context, place % stage.tensor, stage.tensor)


def place_among(ranges: Sequence[Range], part: Range) -> int | None:
    """Offset of `part` in the concatenation of `ranges`; None if none of them contains it."""
    passed = 0
    for first, last in ranges:
        if first <= part[0] and part[1] <= last:
            return passed + part[0] - first
        passed += last - first
    return None


def tokens_of_context_rank(size: int, rank: int, sequence_length: int) -> tuple[Range, ...]:
    """The early and the late piece of a context rank; the whole sequence where there is one."""
    if size == 1:
        return ((0, sequence_length),)
    piece = sequence_length // (2 * size)
    pieces = tuple((number * piece, (number + 1) * piece) for number in (rank, 2 * size - 1 - rank))
    return _joined(pieces)


def share_of(ranges: Sequence[Range], number: int, shares: int) -> tuple[Range, ...]:
    """Share `number` of the concatenated ranges, which are split into `shares` equal shares."""
    length = sum(last - first for first, last in ranges)
    assert length % shares == 0, (ranges, shares)
    begin, end = number * length // shares, (number + 1) * length // shares
    result, passed = [], 0
    for first, last in ranges:
        cut = max(first, first + begin - passed), min(last, first + end - passed)
        if cut[0] < cut[1]:
            result.append(cut)
        passed += last - first
    return tuple(result)


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The ranges, with adjacent ones merged."""
    result: list[Range] = []
    for first, last in ranges:
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], last)
        else:
            result.append((first, last))
    return tuple(result)


def check_owners(plan: Plan, transfer: Transfer, subject: str) -> None:
    """ConfigError for the first tile with samples or tokens that its source or its target does not hold."""
    source, target = plan.stages[transfer.from_stage], plan.stages[transfer.to_stage]
    for index, tile in enumerate(transfer.tiles):
        for field, stage in (("source", source), ("target", target)):
            rank = getattr(tile, field)
            tokens = tokens_of(stage, rank, plan.sequence_length)
            # With an all-gather each replica receives only a share of its tokens.
            if transfer.all_gather is None and place_among(tokens, tile.sequence) is None:
                shown = " and ".join(f"[{first}, {last})" for first, last in tokens)
                rule = f"tokens [{tile.sequence[0]}, {tile.sequence[1]}) are not among its own, {shown}"
                raise ConfigError(f"{subject}.tiles[{index}].{field}", rank, rule, "name a rank that has the tokens")
        for first, _ in _cut(tile, source, target):
            for field, stage in (("source", source), ("target", target)):
                rank = getattr(tile, field)
                # Tensor and context ranks are numbered fastest: they hold the same samples.
                has = stage.devices.ranks.index(rank) // (stage.tensor * stage.context)
                owner = first % samples_of(stage) // stage.micro_batch_size
                if owner != has:
                    rule = f"sample {first} belongs to data rank {owner}, but the {field} is data rank {has}"
                    raise ConfigError(
                        f"{subject}.tiles[{index}].{field}", rank, rule, "name a rank that has the samples"
                    )


def passes_ahead(plan: Plan, stage: int) -> int:
    """Warm-up forward passes of a stage under 1F1B with stages of any shape; the forward pass paired with the first backward pass
    is not counted.

    A stage keeps enough samples in flight that the next stage never waits for a forward pass: the next stage's samples in flight,
    the remainder by which micro-batches of the two stages end apart, and one more micro-batch. With equal stages this is one pass
    per later stage.
    """
    samples = samples_of(plan.stages[-1])
    for source, target in zip(plan.stages[-2:None:-1], plan.stages[:stage:-1], strict=False):
        size, next_size = samples_of(source), samples_of(target)
        # Micro-batches of the two stages end out of step by at most next_size - gcd samples; whole micro-batches of
        # this stage cover that, and one more is in flight.
        samples = -(-(samples + next_size - gcd(size, next_size)) // size) * size + size
    return samples // samples_of(plan.stages[stage]) - 1


def _cut(tile: Tile, source: StagePlan, target: StagePlan) -> list[tuple[int, int]]:
    """The tile's range of samples, cut at every end of a rank's micro-batch on either side."""
    first, last = tile.batch
    sizes = source.micro_batch_size, target.micro_batch_size
    edges = {n for size in sizes for n in range((first // size + 1) * size, last, size)}
    ends = [*sorted(edges), last]
    return list(zip([first, *ends[:-1]], ends, strict=True))


def _cuts(tile: Tile, source: StagePlan, target: StagePlan) -> int:
    """Number of ranges that `_cut` returns."""
    first, last = tile.batch
    sizes = source.micro_batch_size, target.micro_batch_size

    def edges(size: int) -> int:
        return (last - 1) // size - first // size

    # An end on both sides counts once.
    return 1 + edges(sizes[0]) + edges(sizes[1]) - edges(lcm(*sizes))


def validate_transfers(plan: Plan, source: str = "plan.json") -> None:
    """Check `transfers` against the stages; ConfigError for the first fault."""
    neighbours = [(index, index + 1) for index in range(len(plan.stages) - 1)]
    if plan.pipeline_schedule == "interleaved-1f1b":
        neighbours.append((len(plan.stages) - 1, 0))
    seen: dict[tuple[int, int], int] = {}
    for index, transfer in enumerate(plan.transfers):
        subject = f"{source} transfers[{index}]"
        ends = (transfer.from_stage, transfer.to_stage)
        if ends not in neighbours:
            shown = f"{ends[0]} -> {ends[1]}"
            raise ConfigError(f"{subject}.to_stage", shown, "these stages have no common boundary", "join neighbours")
        if ends in seen:
            rule = f"transfers[{seen[ends]}] is for the same boundary"
            raise ConfigError(f"{subject}.to_stage", f"{ends[0]} -> {ends[1]}", rule, "remove one")
        seen[ends] = index
        _check_tiles(plan, transfer, subject)
        if transfer.all_gather is not None:
            _check_all_gather(transfer.all_gather, plan.stages[transfer.to_stage], f"{subject}.all_gather")
    for from_stage, to_stage in neighbours:
        for field in SHAPE_FIELDS:
            ours, theirs = (getattr(plan.stages[index], field) for index in (from_stage, to_stage))
            if ours != theirs and (from_stage, to_stage) not in seen:
                rule = f"stages {from_stage} and {to_stage} differ in {field} ({ours}, {theirs}), and no transfer joins them"
                raise ConfigError(f"{source} transfers", "", rule, "add one that says which rank sends what")


def _check_tiles(plan: Plan, transfer: Transfer, subject: str) -> None:
    source, target = plan.stages[transfer.from_stage], plan.stages[transfer.to_stage]
    extents = {"batch": boundary_batch(source, target), "sequence": plan.sequence_length}
    for index, tile in enumerate(transfer.tiles):
        place = f"{subject}.tiles[{index}]"
        for field, stage, number in (("source", source, transfer.from_stage), ("target", target, transfer.to_stage)):
            rank = getattr(tile, field)
            if rank not in stage.devices.ranks:
                raise ConfigError(f"{place}.{field}", rank, f"no rank of stages[{number}]", "name one of its ranks")
        for field, extent in extents.items():
            first, last = getattr(tile, field)
            if not 0 <= first < last <= extent:
                rule = f"a range inside [0, {extent}] is needed, not empty"
                raise ConfigError(f"{place}.{field}", f"[{first}, {last}]", rule, "write [first, last)")
    if pair := _overlapping(transfer.tiles):
        rule = f"overlaps tiles[{pair[0]}]; every element crosses once"
        raise ConfigError(f"{subject}.tiles[{pair[1]}]", "", rule, "cut the tiles apart")
    # Disjoint tiles inside a rectangle cover it exactly if their areas add up to its own.
    covered = sum((t.batch[1] - t.batch[0]) * (t.sequence[1] - t.sequence[0]) for t in transfer.tiles)
    elements = extents["batch"] * extents["sequence"]
    if covered != elements:
        rule = f"the tiles cover {covered} of {elements} (batch {extents['batch']} · sequence {extents['sequence']}) places"
        raise ConfigError(f"{subject}.tiles", "", rule, "let every element cross once")
    rounds = -(-plan.global_batch_size // extents["batch"])
    pieces = rounds * sum(_cuts(tile, source, target) for tile in transfer.tiles)
    if pieces > MOST_PIECES:
        rule = f"ends of micro-batches cut a step into {pieces} pieces, more than {MOST_PIECES}"
        raise ConfigError(f"{subject}.tiles", "", rule, "raise micro_batch_size, or lower global_batch_size")
    check_owners(plan, transfer, subject)


def _overlapping(tiles: tuple[Tile, ...]) -> tuple[int, int] | None:
    """Places of two tiles with a common element, the earlier first; a sweep along the batch."""
    order = sorted(range(len(tiles)), key=lambda index: tiles[index].batch)
    open_tiles: list[int] = []
    for index in order:
        tile = tiles[index]
        open_tiles = [other for other in open_tiles if tiles[other].batch[1] > tile.batch[0]]
        for other in open_tiles:
            if tiles[other].sequence[0] < tile.sequence[1] and tile.sequence[0] < tiles[other].sequence[1]:
                return min(index, other), max(index, other)
        open_tiles.append(index)
    return None


def _check_all_gather(gather: AllGather, stage: StagePlan, subject: str) -> None:
    """Groups are disjoint and inside the receiving stage."""
    seen: set[int] = set()
    for index, group in enumerate(gather.groups):
        for rank in group:
            if rank not in stage.devices.ranks:
                raise ConfigError(
                    f"{subject}.groups[{index}]", rank, "not a rank of the receiving stage", "name its ranks"
                )
            if rank in seen:
                raise ConfigError(f"{subject}.groups[{index}]", rank, "stands in two groups", "list every rank once")
            seen.add(rank)
