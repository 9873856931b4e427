"""Transfers over stage boundaries as point-to-point instructions: from rank to rank, or tile by tile between unlike stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import Home, boundary_channel, parse_buffer, placed
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.lowering.interleave import CutBuffers
from moe_overlap.plan.operators import OperatorKind, boundary_operator, parse_operator
from moe_overlap.plan.plan import AllGather, Plan, Transfer
from moe_overlap.plan.rules.resharding import Piece, Region, pieces_of


@dataclass(frozen=True, slots=True)
class TransferLowering:
    """Writes the transfers of one rank.

    Attributes:
        buffers: what stands in parts so far.
        _pieces: of a boundary, those of the rank.
    """

    plan: Plan
    model: ModelDescription
    stage_index: int
    rank: int
    buffers: CutBuffers
    _pieces: dict[tuple[int, int], tuple[Piece, ...]] = field(default_factory=dict)

    def write(
        self, action: OperatorKind, step: int, place: tuple[int, int], buffer: str, backward: bool = False
    ) -> Iterator[Draft]:
        """Sends or receives with the stage before (-1) or behind (+1); the boundary is named in forward direction.

        Args:
            action: SEND or RECEIVE.
            place: chunk and micro-batch.
        """
        other = (self.stage_index + step) % len(self.plan.stages)
        ends = (self.stage_index, other) if step > 0 else (other, self.stage_index)
        name = boundary_operator(action, *ends, backward)
        transfer = next((t for t in self.plan.transfers if (t.from_stage, t.to_stage) == ends), None)
        stage = self.plan.stages[self.stage_index]
        if transfer is None:
            # Equal stages: the rank at the same place holds the same samples and the same share of the sequence.
            peer = self.plan.stages[other].devices.ranks[stage.devices.ranks.index(self.rank)]
            sent = payload.boundary_bytes(self.plan, stage, self.model)
            yield self._draft(name, place, buffer, sent, peer)
            return
        gather = transfer.all_gather if action is OperatorKind.RECEIVE and not backward else None
        members = _group(gather, self.rank)
        # Replicas of a tensor each receive a slice over the slow link and gather the rest inside the stage (Alpa, section 6).
        arriving = str(replace(parse_buffer(buffer), home=Home.TILES)) if members else buffer
        width = self.model.hidden_size * payload.ACTIVATION_BYTES[self.plan.precision]
        for piece in self._of(transfer):
            mine = piece.source_micro_batch if piece.source == self.rank else piece.target_micro_batch
            if mine == place[1]:
                peer = piece.target if piece.source == self.rank else piece.source
                region = piece.source_region if piece.source == self.rank else piece.target_region
                yield self._draft(name, place, arriving, piece.tokens * width, peer, piece.index, region)
        if members:
            yield self._gather(boundary_operator(OperatorKind.GATHER, *ends), place, arriving, buffer, len(members))

    def _of(self, transfer: Transfer) -> tuple[Piece, ...]:
        ends = transfer.from_stage, transfer.to_stage
        if ends not in self._pieces:
            pieces = pieces_of(self.plan, transfer)
            self._pieces[ends] = tuple(piece for piece in pieces if self.rank in (piece.source, piece.target))
        return self._pieces[ends]

    def _draft(
        self,
        name: str,
        place: tuple[int, int],
        buffer: str,
        sent: int,
        peer: int,
        index: int | None = None,
        region: Region | None = None,
    ) -> Draft:
        chunk, micro_batch = place
        operator = parse_operator(name)
        sends = operator.kind is OperatorKind.SEND
        named = [placed(buffer, micro_batch)]
        reads, writes = self.buffers.name(*((named, []) if sends else ([], named)))
        return Draft(
            kind="point-to-point",
            name=name,
            channel=boundary_channel(operator),
            chunk=chunk,
            micro_batch=micro_batch,
            partition=() if index is None else (index,),
            reads=tuple(reads),
            writes=tuple(writes),
            # Bytes are those that leave a rank: counted on both sides a transfer would count twice.
            bytes=sent if sends else 0,
            peers=(peer,),
            region=() if region is None else (*region[0], *region[1]),
        )

    def _gather(self, name: str, place: tuple[int, int], tiles: str, buffer: str, size: int) -> Draft:
        chunk, micro_batch = place
        stage = self.plan.stages[self.stage_index]
        whole = payload.boundary_bytes(self.plan, stage, self.model)
        reads, writes = self.buffers.name([placed(tiles, micro_batch)], [placed(buffer, micro_batch)])
        return Draft(
            kind="collective",
            name=name,
            channel=name,
            chunk=chunk,
            micro_batch=micro_batch,
            reads=tuple(reads),
            writes=tuple(writes),
            # A ring all-gather sends every share but one.
            bytes=whole // size * (size - 1),
        )


def _group(gather: AllGather | None, rank: int) -> tuple[int, ...]:
    """The ranks that complete a tensor with this one; empty where none do."""
    groups = () if gather is None else gather.groups
    return next((group for group in groups if rank in group and len(group) > 1), ())
