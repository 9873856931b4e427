"""Resharding between stages of unlike shape (`Plan.transfers`): which rank sends which samples to whom, and its invariants.

Terms. Samples of a step are numbered; a stage with micro-batches of b samples on each of d data ranks has sample n in micro-batch
n // (b · d), on data rank n % (b · d) // b. The *tiles* of a transfer cover the samples after which both stages stand at the
end of a micro-batch; they repeat. A tile is cut where a micro-batch of either stage ends: its *pieces* are sent at once.
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
"""Most pieces of a step at a boundary. Every rank makes all of them, in 400 MB; a plan of a few lines may ask for any number."""


Region = tuple[Range, Range]
"""Samples and tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer from rank to rank, forward; gradients go the same way back.

    Attributes:
        index: its number among the pieces of the boundary, which is the order everywhere.
        source_micro_batch, target_micro_batch: the micro-batch it belongs to on either side.
        source_region, target_region: its samples and tokens among those of the micro-batch that the rank of either side has.
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


def boundary_batch(before: StagePlan, behind: StagePlan) -> int:
    """Samples after which both sides of a boundary stand at a micro-batch's end; the tiles of a transfer cover as many."""
    return lcm(samples_of(before), samples_of(behind))


def samples_of(stage: StagePlan) -> int:
    """Samples of a micro-batch, over all data ranks."""
    return stage.micro_batch_size * stage.data


def pieces_of(plan: Plan, transfer: Transfer) -> tuple[Piece, ...]:
    """The pieces of a whole step, in the order of their samples."""
    before, behind = plan.stages[transfer.from_stage], plan.stages[transfer.to_stage]
    round_samples = boundary_batch(before, behind)
    cut = [
        (first, number, tile, _regions(plan, tile, (first, last), before, behind))
        for number, tile in enumerate(transfer.tiles)
        for first, last in _cut(tile, before, behind)
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
                source_micro_batch=place // samples_of(before),
                target_micro_batch=place // samples_of(behind),
                source_region=source_region,
                target_region=target_region,
            )
            pieces.append(piece)
    return tuple(pieces)


def _regions(plan: Plan, tile: Tile, samples: Range, before: StagePlan, behind: StagePlan) -> tuple[Region, Region]:
    """A piece among what its source has of a micro-batch, and among what its target has."""
    count, length = samples[1] - samples[0], tile.sequence[1] - tile.sequence[0]

    def among(stage: StagePlan, rank: int) -> Region:
        sample = samples[0] % stage.micro_batch_size
        # None: the rank's share of what an all-gather completes, which stands in a tensor of its own.
        token = place_among(tokens_of(stage, rank, plan.sequence_length), tile.sequence) or 0
        return (sample, sample + count), (token, token + length)

    return among(before, tile.source), among(behind, tile.target)


def tokens_of(stage: StagePlan, rank: int, sequence_length: int) -> tuple[Range, ...]:
    """The tokens of a boundary tensor that a rank has, in its order: tensor ranks share those of a context rank."""
    place = stage.devices.ranks.index(rank)
    of_context = tokens_of_context_rank(stage.context, place // stage.tensor % stage.context, sequence_length)
    return share_of(of_context, place % stage.tensor, stage.tensor)


def place_among(ranges: Sequence[Range], wanted: Range) -> int | None:
    """Returns the offset of a range in the concatenation of other ranges; None where none of them holds it."""
    passed = 0
    for first, last in ranges:
        if first <= wanted[0] and wanted[1] <= last:
            return passed + wanted[0] - first
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
    """One of equal shares of what stands in ranges, one after the other."""
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
    """Ranges of which one begins where the one before ends, as one."""
    result: list[Range] = []
    for first, last in ranges:
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], last)
        else:
            result.append((first, last))
    return tuple(result)


def check_owners(plan: Plan, transfer: Transfer, subject: str) -> None:
    """ConfigError for the first tile with samples or tokens that its source or its target does not have."""
    before, behind = plan.stages[transfer.from_stage], plan.stages[transfer.to_stage]
    for index, tile in enumerate(transfer.tiles):
        for field, stage in (("source", before), ("target", behind)):
            rank = getattr(tile, field)
            kept = tokens_of(stage, rank, plan.sequence_length)
            # Replicas that complete a tensor receive shares of what each of them needs.
            if transfer.all_gather is None and place_among(kept, tile.sequence) is None:
                shown = " and ".join(f"[{first}, {last})" for first, last in kept)
                rule = f"tokens [{tile.sequence[0]}, {tile.sequence[1]}) are not among its own, {shown}"
                raise ConfigError(f"{subject}.tiles[{index}].{field}", rank, rule, "name a rank that has the tokens")
        for first, _ in _cut(tile, before, behind):
            for field, stage in (("source", before), ("target", behind)):
                rank = getattr(tile, field)
                # Tensor and context ranks are numbered fastest: they hold the same samples.
                has = stage.devices.ranks.index(rank) // (stage.tensor * stage.context)
                owner = first % samples_of(stage) // stage.micro_batch_size
                if owner != has:
                    rule = f"sample {first} is that of data rank {owner}, and it is data rank {has}"
                    raise ConfigError(
                        f"{subject}.tiles[{index}].{field}", rank, rule, "name a rank that has the samples"
                    )


def passes_ahead(plan: Plan, stage: int) -> int:
    """Forward passes of a stage before its first backward pass beside the one that this follows: 1F1B, whatever the shapes.

    A stage has so many samples in flight that the stage behind never waits for those of a backward pass: all of that stage's, the
    rest of a micro-batch that ends elsewhere, and one micro-batch more. Equal stages: one pass for every stage behind.
    """
    samples = samples_of(plan.stages[-1])
    for before, behind in zip(plan.stages[-2:None:-1], plan.stages[:stage:-1], strict=False):
        size, size_behind = samples_of(before), samples_of(behind)
        # Micro-batches of the two stages end out of step by at most size_behind - gcd samples; whole micro-batches of
        # this stage cover that, and one more is under way.
        samples = -(-(samples + size_behind - gcd(size, size_behind)) // size) * size + size
    return samples // samples_of(plan.stages[stage]) - 1


def _cut(tile: Tile, before: StagePlan, behind: StagePlan) -> list[tuple[int, int]]:
    """Ranges of samples between the ends of either side's rows: what a rank has of a micro-batch."""
    first, last = tile.batch
    sizes = before.micro_batch_size, behind.micro_batch_size
    edges = {n for size in sizes for n in range((first // size + 1) * size, last, size)}
    ends = [*sorted(edges), last]
    return list(zip([first, *ends[:-1]], ends, strict=True))


def _cuts(tile: Tile, before: StagePlan, behind: StagePlan) -> int:
    """The number of ranges that `_cut` makes."""
    first, last = tile.batch
    sizes = before.micro_batch_size, behind.micro_batch_size

    def edges(size: int) -> int:
        return (last - 1) // size - first // size

    # Where both sides have an end it counts once.
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
    for before, behind in neighbours:
        for field in SHAPE_FIELDS:
            ours, theirs = (getattr(plan.stages[index], field) for index in (before, behind))
            if ours != theirs and (before, behind) not in seen:
                rule = f"stages {before} and {behind} differ in {field} ({ours}, {theirs}), and no transfer joins them"
                raise ConfigError(f"{source} transfers", "", rule, "add one that says which rank sends what")


def _check_tiles(plan: Plan, transfer: Transfer, subject: str) -> None:
    before, behind = plan.stages[transfer.from_stage], plan.stages[transfer.to_stage]
    extents = {"batch": boundary_batch(before, behind), "sequence": plan.sequence_length}
    for index, tile in enumerate(transfer.tiles):
        place = f"{subject}.tiles[{index}]"
        for field, stage, number in (("source", before, transfer.from_stage), ("target", behind, transfer.to_stage)):
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
    whole = extents["batch"] * extents["sequence"]
    if covered != whole:
        rule = (
            f"the tiles cover {covered} of {whole} (batch {extents['batch']} · sequence {extents['sequence']}) places"
        )
        raise ConfigError(f"{subject}.tiles", "", rule, "let every element cross once")
    rounds = -(-plan.global_batch_size // extents["batch"])
    pieces = rounds * sum(_cuts(tile, before, behind) for tile in transfer.tiles)
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
