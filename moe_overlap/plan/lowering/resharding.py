"""Transfers over stage boundaries as point-to-point instructions: rank to rank, or piece by piece between unlike stages.

Order. A stage receives before a pass and sends after it. With micro-batches of unlike size this order can deadlock: the earlier
stage sends a full micro-batch before it receives gradients, while the later stage first wants to send these gradients; streams
that share a hardware queue would block each other. Therefore the earlier stage adopts the order of the later one: if the later
stage sends a gradient before it receives a piece, the earlier stage receives that gradient before it sends the piece. Then all
lists finish even if every transfer blocks its rank. Proof, by induction from the last stage: its passes and transfers are totally
ordered. The previous stage has a total order over its own passes and the transfers of the boundary, and both orders contain these
transfers in the same sequence. The union of two orders that agree on their common elements has no cycle, so both stages together
have a total order; the next earlier stage adopts the order of its transfers from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import BufferRole, Home, Instruction, boundary_channel, parse_buffer, placed
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.lowering.interleave import CutBuffers
from moe_overlap.plan.lowering.pipeline_order import pipeline_blocks
from moe_overlap.plan.operators import OperatorKind, boundary_operator, parse_operator
from moe_overlap.plan.plan import AllGather, Plan
from moe_overlap.plan.rules.resharding import Piece, pieces_of

Boundary = tuple[int, int]
"""The two stages of a boundary, in forward direction."""
Pieces = Mapping[Boundary, Mapping[int, Sequence[Piece]]]
"""Boundary -> rank -> the pieces that the rank sends or receives there, in order."""


def pieces_by_rank(plan: Plan, stage: int | None = None) -> Pieces:
    """The pieces of every rank of a plan.

    Args:
        stage: restricts the result to the boundaries of this stage.
    """
    pieces: dict[Boundary, dict[int, list[Piece]]] = {}
    for transfer in plan.transfers:
        if stage in (None, transfer.from_stage, transfer.to_stage):
            of_rank = pieces.setdefault((transfer.from_stage, transfer.to_stage), defaultdict(list))
            for piece in pieces_of(plan, transfer):
                of_rank[piece.source].append(piece)
                of_rank[piece.target].append(piece)
    return pieces


@dataclass(frozen=True, slots=True)
class Crossing:
    """A transfer between a stage and the next one, seen from the earlier stage.

    Attributes:
        backward: whether it is a gradient that returns.
        micro_batch: number of the micro-batch on the earlier stage.
        piece: None between equal stages, where every rank sends its full boundary tensor.
    """

    backward: bool
    micro_batch: int
    piece: Piece | None

    def is_of(self, rank: int) -> bool:
        """Whether a rank of the earlier stage takes part."""
        return self.piece is None or self.piece.source == rank


def crossings_with_next(plan: Plan, stage: int, pieces: Pieces) -> tuple[Crossing, ...]:
    """The transfers of all ranks of a stage with the next stage, in the order of the next stage's passes."""
    takes: dict[int, list[Crossing]] = defaultdict(list)
    if (stage, stage + 1) in pieces:
        of_rank = pieces[stage, stage + 1]
        sent = [piece for rank in plan.stages[stage].devices.ranks for piece in of_rank.get(rank, ())]
        for piece in sorted(sent, key=lambda piece: piece.index):
            takes[piece.target_micro_batch].append(Crossing(False, piece.source_micro_batch, piece))
    else:
        takes |= {n: [Crossing(False, n, None)] for n in range(plan.stages[stage].gradient_accumulation_steps)}
    return tuple(
        replace(crossing, backward=step.direction == "backward")
        for (step,) in pipeline_blocks(plan, stage + 1)
        for crossing in takes[step.micro_batch]
    )


class TransferLowering:
    """Writes the transfers of one rank.

    Args:
        buffers: the partitions of the buffers written so far.
        pieces: `pieces_by_rank` of the rank's stage.
        in_order: whether a full step is written, pass by pass; only then can the rank adopt the order of the next stage.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelDescription,
        stage_index: int,
        rank: int,
        buffers: CutBuffers,
        pieces: Pieces,
        in_order: bool,
    ) -> None:
        self.plan, self.model, self.stage_index, self.rank = plan, model, stage_index, rank
        self._buffers, self._pieces = buffers, pieces
        self._stage = plan.stages[stage_index]
        self._width = model.hidden_size * payload.ACTIVATION_BYTES[plan.precision]
        follows = in_order and bool(plan.transfers) and stage_index + 1 < len(plan.stages)
        self._next_crossings = crossings_with_next(plan, stage_index, pieces) if follows else ()
        self._last_of = {
            (crossing.backward, crossing.micro_batch): n for n, crossing in enumerate(self._next_crossings)
        }
        self._written = 0

    def write(
        self, action: OperatorKind, step: int, place: tuple[int, int], buffer: str, backward: bool = False
    ) -> Iterator[Draft]:
        """Sends to, or receives from, the previous (-1) or the next stage (+1).

        Args:
            action: SEND or RECEIVE.
            step: -1 or +1.
            place: chunk and micro-batch.
        """
        other = (self.stage_index + step) % len(self.plan.stages)
        ends = (self.stage_index, other) if step > 0 else (other, self.stage_index)
        if step > 0 and self._next_crossings:
            yield from self._up_to((backward, place[1]), ends, place[0], buffer)
            return
        name = boundary_operator(action, *ends, backward)
        if ends not in self._pieces:
            yield self._undivided(name, place, buffer)
            return
        transfer = next(t for t in self.plan.transfers if (t.from_stage, t.to_stage) == ends)
        gather = transfer.all_gather if action is OperatorKind.RECEIVE and not backward else None
        members = _group(gather, self.rank)
        # Replicas of a tensor each receive a share over the slow link and gather the rest inside the stage (Alpa, section 6).
        arriving = str(replace(parse_buffer(buffer), home=Home.TILES)) if members else buffer
        for piece in self._pieces[ends].get(self.rank, ()):
            if micro_batch_of(piece, self.rank) == place[1]:
                yield self._piece(name, place, arriving, piece)
        if members:
            yield self._gather(boundary_operator(OperatorKind.GATHER, *ends), place, arriving, buffer, len(members))

    def _up_to(self, last: tuple[bool, int], ends: Boundary, chunk: int, buffer: str) -> Iterator[Draft]:
        """The sends and receives with the next stage, in that stage's order, up to the last transfer of a pass.

        Args:
            last: direction and micro-batch of the pass: (is backward, micro-batch).
            buffer: hidden states that cross the boundary, or their gradient.
        """
        until, hidden = self._last_of[last] + 1, replace(parse_buffer(buffer), role=BufferRole.HIDDEN)
        moved = {False: str(hidden), True: str(replace(hidden, role=BufferRole.D_HIDDEN))}
        # Up to the last transfer of all ranks: between two collectives of the stage every rank writes the same crossings.
        for crossing in filter(lambda crossing: crossing.is_of(self.rank), self._next_crossings[self._written : until]):
            action = OperatorKind.RECEIVE if crossing.backward else OperatorKind.SEND
            name = boundary_operator(action, *ends, crossing.backward)
            place, tensor = (chunk, crossing.micro_batch), moved[crossing.backward]
            if crossing.piece is None:
                yield self._undivided(name, place, tensor)
            else:
                yield self._piece(name, place, tensor, crossing.piece)
        self._written = max(self._written, until)

    def _undivided(self, name: str, place: tuple[int, int], buffer: str) -> Draft:
        """A boundary tensor between equal stages: the rank at the same place holds the same samples and tokens."""
        ends = parse_operator(name).stages
        assert ends is not None
        other = ends[1] if ends[0] == self.stage_index else ends[0]
        peer = self.plan.stages[other].devices.ranks[self._stage.devices.ranks.index(self.rank)]
        return self._draft(name, place, buffer, payload.boundary_bytes(self.plan, self._stage, self.model), peer)

    def _piece(self, name: str, place: tuple[int, int], buffer: str, piece: Piece) -> Draft:
        peer, region = end_of(piece, self.rank)
        return self._draft(name, place, buffer, piece.tokens * self._width, peer, (piece.index,), region)

    def _draft(
        self,
        name: str,
        place: tuple[int, int],
        buffer: str,
        sent: int,
        peer: int,
        partition: tuple[int, ...] = (),
        region: tuple[int, ...] = (),
    ) -> Draft:
        chunk, micro_batch = place
        operator = parse_operator(name)
        sends = operator.kind is OperatorKind.SEND
        named = [placed(buffer, micro_batch)]
        reads, writes = self._buffers.name(*((named, []) if sends else ([], named)))
        return Draft(
            kind="point-to-point",
            name=name,
            channel=boundary_channel(operator),
            chunk=chunk,
            micro_batch=micro_batch,
            partition=partition,
            reads=tuple(reads),
            writes=tuple(writes),
            # Only the sender counts bytes; otherwise a transfer would count twice.
            bytes=sent if sends else 0,
            peers=(peer,),
            region=region,
        )

    def _gather(self, name: str, place: tuple[int, int], tiles: str, buffer: str, size: int) -> Draft:
        chunk, micro_batch = place
        boundary_bytes = payload.boundary_bytes(self.plan, self._stage, self.model)
        reads, writes = self._buffers.name([placed(tiles, micro_batch)], [placed(buffer, micro_batch)])
        return Draft(
            kind="collective",
            name=name,
            channel=name,
            chunk=chunk,
            micro_batch=micro_batch,
            reads=tuple(reads),
            writes=tuple(writes),
            # In a ring all-gather a rank sends every share but one.
            bytes=boundary_bytes // size * (size - 1),
        )


def end_of(piece: Piece, rank: int) -> tuple[int, tuple[int, ...]]:
    """The other rank of a piece, and the piece's `region` (see `Instruction`) in the shard of `rank`."""
    sends = piece.source == rank
    samples, tokens = piece.source_region if sends else piece.target_region
    return piece.target if sends else piece.source, (*samples, *tokens)


def micro_batch_of(piece: Piece, rank: int) -> int:
    """The micro-batch of a piece on the side of `rank`."""
    return piece.source_micro_batch if piece.source == rank else piece.target_micro_batch


def shape_of(plan: Plan, pieces: Pieces, rank: int) -> tuple[object, ...]:
    """Key of a rank: lists of ranks with equal keys differ only in peers, regions and numbers of pieces."""
    gathers = tuple(len(_group(transfer.all_gather, rank)) for transfer in plan.transfers)
    sizes = (
        tuple((piece.source_micro_batch, piece.target_micro_batch, piece.tokens) for piece in of_rank.get(rank, ()))
        for of_rank in pieces.values()
    )
    return (gathers, *sizes)


def readdressed(
    instructions: Sequence[Instruction], plan: Plan, pieces: Pieces, rank: int, other: int
) -> tuple[Instruction, ...]:
    """The list of `rank`, readdressed for another rank of its stage whose `shape_of` is equal."""
    place = plan.stages[plan.stage_of(other)].devices.ranks.index(other)
    counterpart = {
        (boundary, piece.index): target
        for boundary, of_rank in pieces.items()
        for piece, target in zip(of_rank.get(rank, ()), of_rank.get(other, ()), strict=True)
    }

    def to_other(i: Instruction) -> Instruction:
        if i.kind != "point-to-point":
            return i
        if not i.region:
            return replace(i, peers=(plan.stages[plan.stage_of(i.peers[0])].devices.ranks[place],))
        boundary = i.operator.stages
        assert boundary is not None
        piece = counterpart[boundary, i.partition[0]]
        peer, region = end_of(piece, other)
        return replace(i, peers=(peer,), partition=(piece.index,), region=region)

    return tuple(map(to_other, instructions))


def _group(gather: AllGather | None, rank: int) -> tuple[int, ...]:
    """The ranks of an all-gather with `rank`; empty without an all-gather."""
    groups = () if gather is None else gather.groups
    return next((group for group in groups if rank in group and len(group) > 1), ())
