"""Invariants of stage boundaries: every element of a boundary tensor crosses once."""

from __future__ import annotations

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import SHAPE_FIELDS
from moe_overlap.plan.plan import AllGather, Plan, StagePlan, Tile, Transfer
from moe_overlap.plan.tiles import boundary_batch, check_owners


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
                raise ConfigError(f"{place}.{field}", rank, f"not a rank of stage {number}", "name one of its ranks")
        for field, extent in extents.items():
            first, last = getattr(tile, field)
            if not 0 <= first < last <= extent:
                rule = f"a range inside [0, {extent}] is needed, not empty"
                raise ConfigError(f"{place}.{field}", f"[{first}, {last}]", rule, "write [first, last)")
    if pair := _overlapping(transfer.tiles):
        rule = f"overlaps tiles[{pair[0]}]; every element crosses once"
        raise ConfigError(f"{subject}.tiles[{pair[1]}]", "", rule, "cut the tiles apart")
    covered = sum((t.batch[1] - t.batch[0]) * (t.sequence[1] - t.sequence[0]) for t in transfer.tiles)
    whole = extents["batch"] * extents["sequence"]
    if covered != whole:
        rule = (
            f"the tiles cover {covered} of {whole} (batch {extents['batch']} · sequence {extents['sequence']}) places"
        )
        raise ConfigError(f"{subject}.tiles", "", rule, "let every element cross once")
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
