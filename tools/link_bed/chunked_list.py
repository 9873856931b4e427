"""The Tutel-style baseline as an instruction list: dispatch, experts and combine of every MoE layer in chunks of capacity.

All dispatches are issued, then per chunk the experts and its combine; backward the same with combine and dispatch exchanged
(Lancet, Fig. 5a). For timer compute, where a list needs no modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.list_builder import Draft, build_list
from moe_overlap.plan.operators import BACKWARD, COMBINE, DISPATCH, EXPERTS, parse_operator

CHUNKED_BUFFERS = ("received", "computed", "returned", "dcomputed", "dreceived", "drows")
"""What enters the first exchange of a pass is whole: `rows`, and `dreturned` on the way back."""


def chunk_list(instructions: Sequence[Instruction], degree: int) -> tuple[Instruction, ...]:
    """A list without partitions, its MoE layers pipelined over `degree` chunks."""
    return build_list(instructions[0].stage, _chunked(instructions, degree))


def _chunked(instructions: Sequence[Instruction], degree: int) -> Iterator[Draft]:
    for i in instructions:
        operator = parse_operator(i.name)
        backward = operator.suffix == BACKWARD
        first, last = (COMBINE, DISPATCH) if backward else (DISPATCH, COMBINE)
        if operator.part == first:
            for piece in range(degree):
                yield _draft(i, degree, piece)
        elif operator.part == EXPERTS:
            # The exchange behind the experts carries what they write; its own place in the list may be later.
            after = next(j for j in instructions[i.id :] if parse_operator(j.name).part == last)
            for piece in range(degree):
                yield _draft(i, degree, piece)
                yield _draft(after, degree, piece)
        elif operator.part != last:
            yield _draft(i, degree, None)


def _draft(i: Instruction, degree: int, piece: int | None) -> Draft:
    return Draft(
        kind=i.kind,
        name=i.name,
        channel=i.channel,
        chunk=i.chunk,
        micro_batch=i.micro_batch,
        partition=i.partition if piece is None else (piece,),
        reads=_cut(i.reads, degree, piece),
        writes=_cut(i.writes, degree, piece),
        bytes=i.bytes if piece is None else i.bytes * (piece + 1) // degree - i.bytes * piece // degree,
        peers=i.peers,
    )


def _cut(buffers: Iterable[str], degree: int, piece: int | None) -> tuple[str, ...]:
    """The pieces of chunked buffers that an instruction touches: its own, or all of them."""
    cut: list[str] = []
    for buffer in buffers:
        if buffer.split(".")[0] not in CHUNKED_BUFFERS:
            cut.append(buffer)
        else:
            cut += [f"{buffer}.p{n}" for n in (range(degree) if piece is None else (piece,))]
    return tuple(cut)
