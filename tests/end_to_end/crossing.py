"""A rank of test_boundary_on_links.py: a boundary tensor crosses from stage to stage by one of several ways, again and again.

    python -m tests.end_to_end.crossing SENDERS --reply-fd N

Orders are names of WAYS as JSON, a line each, on standard input; an answer is the seconds, and whether this rank has what it
needs. Ranks of a stage are replicas that each keep the whole tensor, so that there is something to gather.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_overlap.plan.plan import Tile
from moe_overlap.plan.tiles import Holding, shared_among_replicas, tiles_between

SAMPLES, TOKENS, HIDDEN = 4, 1024, 512
RECEIVERS = 2


class Crossing:
    """The ways over one boundary, on one rank."""

    def __init__(self, senders: int) -> None:
        whole = ((0, SAMPLES),), ((0, TOKENS),)
        ranks = range(senders + RECEIVERS)
        sources, targets = ([Holding(rank, *whole) for rank in part] for part in (ranks[:senders], ranks[senders:]))
        received, gather = shared_among_replicas(targets)
        assert gather is not None and gather.axis == "sequence"
        self._tiles = {"tiles": tiles_between(sources, received), "whole tiles": tiles_between(sources, targets)}
        self._shares = {holding.rank: holding.sequence for holding in received}
        self._targets, self._me = [target.rank for target in targets], dist.get_rank()
        self._led = dist.new_group([0, *self._targets])
        sent = torch.arange(SAMPLES * TOKENS * HIDDEN, dtype=torch.float32).view(SAMPLES, TOKENS, HIDDEN)
        self._sent = sent
        self._kept = sent.clone() if self._me < senders else torch.empty_like(sent)

    def cross(self, way: str) -> tuple[float, bool]:
        """Seconds of this rank, and whether it has the tensor."""
        receives = self._me in self._targets
        if receives:
            self._kept.zero_()
        dist.barrier()
        begun = time.monotonic()
        if way == "leader":
            if receives or self._me == 0:
                dist.broadcast(self._kept, 0, group=self._led)
        else:
            self._send(self._tiles[way])
            if way == "tiles" and receives:
                self._gather()
        return time.monotonic() - begun, torch.equal(self._kept, self._sent)

    def _send(self, tiles: Sequence[Tile]) -> None:
        """Receives first: gloo's ranks are then told at once where to write."""
        own = [tile for tile in tiles if tile.target == self._me]
        arriving = [torch.empty_like(self._kept[self._place(tile)]) for tile in own]
        work = [dist.irecv(into, tile.source, tag=n) for n, (tile, into) in enumerate(zip(own, arriving, strict=True))]
        for target in self._targets:
            leaving = [tile for tile in tiles if tile.source == self._me and tile.target == target]
            # A tag is the place among the tiles of its target, whoever sends them.
            tags = [n for n, tile in enumerate(t for t in tiles if t.target == target) if tile.source == self._me]
            work += [
                dist.isend(self._kept[self._place(tile)].contiguous(), target, tag=tag)
                for tile, tag in zip(leaving, tags, strict=True)
            ]
        for each in work:
            each.wait()
        for tile, into in zip(own, arriving, strict=True):
            self._kept[self._place(tile)] = into

    def _gather(self) -> None:
        """The other receivers' shares, point to point: gloo's own collective uses a link in one direction at a time."""
        others = [rank for rank in self._targets if rank != self._me]
        arriving = {rank: torch.empty_like(self._share(rank)) for rank in others}
        work = [dist.irecv(arriving[rank], rank) for rank in others]
        work += [dist.isend(self._share(self._me).contiguous(), rank) for rank in others]
        for each in work:
            each.wait()
        for rank, into in arriving.items():
            self._share(rank).copy_(into)

    def _share(self, rank: int) -> torch.Tensor:
        ((first, last),) = self._shares[rank]
        return self._kept[:, first:last]

    def _place(self, tile: Tile) -> tuple[slice, slice]:
        return slice(*tile.batch), slice(*tile.sequence)


def main() -> None:
    """Follow orders until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("senders", type=int)
    parser.add_argument("--reply-fd", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    crossing = Crossing(arguments.senders)
    with os.fdopen(arguments.reply_fd, "w", buffering=1) as replies:
        for line in sys.stdin:
            print(json.dumps(crossing.cross(json.loads(line)["way"])), file=replies)


if __name__ == "__main__":
    main()
