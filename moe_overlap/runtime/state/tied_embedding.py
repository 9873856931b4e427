"""A tied embedding at both ends of a pipeline whose stages have different shapes.

Contract. The embedding on the first stage and the output weight on the stage of the loss are one parameter: they begin equal,
and every update moves both by the sum of the gradients of all ranks at both ends. megatron-core sums them rank to rank after the
replicas' reduction, but ends with different numbers of replicas cut their reduced gradients into different shares. So:
1. `share` copies the first stage's weight to the other end.
2. `exchange` sums, before replicas reduce, the gradients of all ranks of both ends that hold a row, and divides by the replicas
   of this end: the sum that DDP then takes over the replicas is the total on either end.
Both work on blocks of rows (groups.py), since ends with different tensor parallelism hold different numbers of rows, and are
collective over the ranks of both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from moe_overlap.runtime.groups import StageGroups


class TiedEmbedding:
    """The tied weight on a rank of either end.

    Args:
        chunks: the rank's model chunks; the first holds the embedding, or the last the output weight.
        groups: this rank's groups, with the group of the ends.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], groups: StageGroups) -> None:
        assert groups.ends, "no end of the pipeline"
        model: Any = get_attr_wrapped_model(
            chunks[0 if groups.stage == 0 else -1], "pre_process", return_model_obj=True
        )
        self._weight = model.shared_embedding_or_output_weight()
        self._ends, self._replicas = groups.ends, groups.collection.dp_cp.size()

    @torch.no_grad()
    def share(self) -> None:
        """Step 1."""
        for rows in self._ends:
            dist.broadcast(self._weight.data.chunk(rows.blocks)[rows.block], group_src=0, group=rows.group)

    @torch.no_grad()
    def exchange(self) -> None:
        """Step 2."""
        for rows in self._ends:
            dist.all_reduce(self._weight.main_grad.chunk(rows.blocks)[rows.block], group=rows.group)
        self._weight.main_grad /= self._replicas
