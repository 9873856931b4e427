"""The Tutel-style baseline: all-to-alls and experts pipelined over chunks of each expert's rows (Lancet, Fig. 5a).

The rows of every (source rank, expert) pair are cut into `degree` capacity chunks; chunk c of all pairs makes one small dispatch.
Both sides know the counts of all rows, hence those of every chunk: chunks need no all-to-all of counts.

The instruction list sets the order (plan/lowering/interleave.py): all dispatches, then each chunk's combine after its experts.
The backward pass is the mirror image. The limit of this baseline: gates, attention and all other operators outside the layer are
not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.irregular import Counts, Handle, IrregularDispatcher, Known
from moe_overlap.runtime.dispatch.row_order import numbers_of_stretches


@dataclass(frozen=True, slots=True)
class CapacityChunk:
    """One capacity chunk of a pass.

    Attributes:
        handle: the chunk's handle, with tags of its own.
        rows_N: indices of the chunk's rows among the permuted rows of the pass.
    """

    handle: Handle
    rows_N: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Select the chunk's rows from the rows [N, ...] of the pass."""
        return rows.index_select(0, self.rows_N)


def capacity_chunks(stages: IrregularDispatcher, handle: Handle, degree: int) -> list[CapacityChunk]:
    """Cut a pass into its chunks; waits for its counts. Chunks take tags, so all ranks cut their passes in the same order."""
    chunks = []
    for index in range(degree):
        counts = handle.counts.chunk(index, degree)
        rows_N = _rows_of_chunk(handle.counts, counts, index, degree, handle.row_sources_N.device)
        sources = handle.row_sources_N.index_select(0, rows_N)
        places = handle.row_tokens_N.index_select(0, rows_N)
        chunk_handle = replace(
            handle, row_sources_N=sources, row_tokens_N=places, tag=stages.take_tags(), arriving=Known(counts)
        )
        chunks.append(CapacityChunk(chunk_handle, rows_N))
    return chunks


def join_chunks(chunks: Sequence[CapacityChunk], parts: Sequence[Tensor], rows: int | None = None) -> Tensor:
    """Join the rows of all chunks, each at its index among the rows of the pass.

    Args:
        rows: number of rows of the result; by default the routed rows only, further rows are zero.
    """
    routed = sum(part.shape[0] for part in parts)
    joined = parts[0].new_zeros((routed if rows is None else rows, *parts[0].shape[1:]))
    for chunk, part in zip(chunks, parts, strict=True):
        if chunk.rows_N.is_cuda:
            # They were made on the stream of the dispatch.
            chunk.rows_N.record_stream(torch.cuda.current_stream())
        joined.index_copy_(0, chunk.rows_N, part)
    return joined


def _rows_of_chunk(counts: Counts, chunk: Counts, index: int, degree: int, device: torch.device) -> Tensor:
    """Indices of a chunk's rows among the permuted rows: a stretch of every expert's rows."""
    on_device, of_chunk = counts.for_device(), chunk.for_device()
    if on_device is None or of_chunk is None:
        rows = int(counts.to_expert_E[0])
        first = index * rows // degree
        numbers = torch.arange(counts.to_expert_E.size * rows, device=device).view(-1, rows)
        return numbers[:, first : first + int(chunk.to_expert_E[0])].flatten()
    rows_E, sizes_E = on_device[0], of_chunk[0]
    ends_E = rows_E.cumsum(0) - rows_E + (index + 1) * rows_E // degree
    return numbers_of_stretches(ends_E, sizes_E, torch.arange(sum(chunk.sent), device=device))
