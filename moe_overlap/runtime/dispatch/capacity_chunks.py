"""The Tutel-style baseline: all-to-alls and experts pipelined over chunks of each expert's rows (Lancet, Fig. 5a).

The rows of every (source rank, expert) pair are cut into `degree` capacity chunks; chunk c of all pairs makes one small dispatch.
Both sides know the counts of the whole, hence those of every chunk: chunks need no all-to-all of counts.

    1. all dispatches are started, in order of their chunk
    2. per chunk: wait for its rows, run the experts, start its combine
    3. wait for the combines

The backward pass is the mirror image: combine gradients, experts' backward, dispatch gradients. Gates, attention and everything
else outside the layer stay whole, which is the limit of this baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import TUTEL_DEGREES
from moe_overlap.runtime.dispatch.irregular import Counts, Handle, IrregularDispatcher, Known

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [M, H], rows per expert [L] on the host, probabilities [M]) -> output [M, H]."""


@dataclass(frozen=True, slots=True)
class CapacityChunk:
    """One capacity chunk of a pass.

    Attributes:
        handle: the chunk's own handle, with tags of its own.
        rows_N: places of the chunk's rows among the permuted rows of the whole.
    """

    handle: Handle
    rows_N: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Select the chunk's rows [N, ...] of the whole."""
        return rows.index_select(0, self.rows_N)


def capacity_chunks(stages: IrregularDispatcher, handle: Handle, degree: int) -> list[CapacityChunk]:
    """Cut a pass into its chunks; waits for its counts. Chunks take tags, so all ranks cut their passes in the same order."""
    chunks = []
    for index in range(degree):
        counts = handle.counts.chunk(index, degree)
        rows_N = _rows_of_chunk(handle.counts, index, degree, handle.row_sources_N.device)
        sources = handle.row_sources_N.index_select(0, rows_N)
        places = handle.row_places_N.index_select(0, rows_N)
        own = replace(
            handle, row_sources_N=sources, row_places_N=places, tag=stages.take_tags(), arriving=Known(counts)
        )
        chunks.append(CapacityChunk(own, rows_N))
    return chunks


def join_chunks(chunks: Sequence[CapacityChunk], parts: Sequence[Tensor], rows: int | None = None) -> Tensor:
    """Join the rows of all chunks, each where it stands in the whole.

    Args:
        rows: number of rows of the whole; rows past the routed ones, which the default leaves out, are zero.
    """
    routed = sum(part.shape[0] for part in parts)
    whole = parts[0].new_zeros((routed if rows is None else rows, *parts[0].shape[1:]))
    for chunk, part in zip(chunks, parts, strict=True):
        whole.index_copy_(0, chunk.rows_N, part)
    return whole


class CapacityChunks:
    """Dispatch, experts and combine of a layer in `degree` chunks.

    Args:
        stages: the dispatcher that moves the rows.
        experts: this rank's experts; called once per chunk, their gradients add up.
        degree: 1, 2, 4 or 8.
    Raises:
        ConfigError: another degree.
    """

    def __init__(self, stages: IrregularDispatcher, experts: Experts, degree: int) -> None:
        if degree not in TUTEL_DEGREES:
            raise ConfigError("tutel_degree", degree, "must be 1, 2, 4 or 8", "choose one of them")
        self.stages, self.experts, self.degree = stages, experts, degree

    def layer(self, hidden_TH: Tensor, probs_TE: Tensor, map_TE: Tensor, name: str = "moe") -> Tensor:
        """The routed part of a MoE layer: [T, H] from tokens, probabilities [T, E] and map [T, E]."""
        rows, handle = self.stages.permute(hidden_TH, probs_TE, map_TE, name)
        self.stages.start_counts(handle)
        return self.stages.unpermute(self.run(rows, handle), handle)

    def run(self, rows_NX: Tensor, handle: Handle) -> Tensor:
        """Dispatch, experts and combine: packed rows [N, X] to the rows [routed, H] that come back."""
        if torch.is_grad_enabled() and not rows_NX.requires_grad:
            rows_NX = rows_NX.detach().requires_grad_()  # the experts' weights have gradients all the same
        returned: Tensor = _Pipelined.apply(rows_NX, self, handle)
        return returned


def _rows_of_chunk(counts: Counts, index: int, degree: int, device: torch.device) -> Tensor:
    """Places of a chunk's rows among the permuted rows: a stretch of every expert's rows."""
    # The same cut as `Counts.chunk`: the rows sent are those the receiver expects.
    places, start = [], 0
    for rows in counts.to_expert:
        first, last = start + index * rows // degree, start + (index + 1) * rows // degree
        # Made on the device: a copy of it from the host would wait for all that is queued there.
        places.append(torch.arange(first, last, device=device))
        start += rows
    return torch.cat(places)


class _Pipelined(torch.autograd.Function):
    """_Pipelined.apply(rows, pipeline, handle): numbered as in the contract above."""

    @staticmethod
    def forward(ctx: Any, rows_NX: Tensor, pipeline: CapacityChunks, handle: Handle) -> Tensor:
        stages, chunks = pipeline.stages, capacity_chunks(pipeline.stages, handle, pipeline.degree)
        keep_graph = ctx.needs_input_grad[0]
        # 1.
        dispatches = [stages.start_dispatch(c.of(rows_NX), c.handle) for c in chunks]
        # 2.
        combines, ctx.graphs = [], []
        for chunk, dispatch in zip(chunks, dispatches, strict=True):
            received = dispatch.wait().detach().requires_grad_(keep_graph)
            with torch.set_grad_enabled(keep_graph):
                output = stages.unsort(pipeline.experts(*stages.sort(received, chunk.handle)), chunk.handle)
            # Before the next chunk's experts, under which it is hidden.
            combines.append(stages.start_combine(output, chunk.handle))
            if keep_graph:
                ctx.graphs.append((received, output))
        # 3.
        ctx.stages, ctx.chunks, ctx.rows = stages, chunks, rows_NX.shape[0]
        return join_chunks(chunks, [combine.wait() for combine in combines])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        stages, chunks = ctx.stages, ctx.chunks
        pending = [stages.start_combine_backward(c.of(gradients[0]), c.handle) for c in chunks]
        returns = []
        for chunk, combine in zip(chunks, pending, strict=True):
            received, output = ctx.graphs.pop(0)
            gradient = combine.wait()
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            # Experts that did not touch their rows leave no gradient; the peers wait for rows all the same.
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            returns.append(stages.start_dispatch_backward(gradient, chunk.handle))
        return join_chunks(chunks, [returned.wait() for returned in returns], ctx.rows), None, None
