"""Self-attention of more tensor-parallel ranks than query groups: multi-query attention under tensor parallelism.

megatron-core splits the weights of queries, keys and values evenly over the ranks, also across the borders of a group, gathers
their product, and has each rank take its heads from it. There `parallel_state` says which ranks; here the layer's group does.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

# Legend: S sequence, B batch, G query groups, R rows of a group (its query heads, then key, then value), D head width.


class FewGroupsAttention(SelfAttention):
    """megatron-core's self-attention where R ranks share a group: each has heads/R of its queries, and its key and value."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Queries [S, B, heads of this rank, D], key and value [S, B, 1, D]."""
        assert split_qkv and not output_gate
        groups, ranks, rank = self.config.num_query_groups, self.tp_group.size(), self.tp_group.rank()
        sharers = ranks // groups
        part, _ = self.linear_qkv(hidden_states)
        whole = all_gather_last_dim_from_tensor_parallel_region(part, group=self.tp_group)
        whole_SBGRD = whole.view(*whole.shape[:2], groups, -1, self.hidden_size_per_attention_head)
        rows_SBRD = whole_SBGRD[:, :, rank // sharers]
        heads = (rows_SBRD.shape[2] - 2) // sharers
        first = rank % sharers * heads
        query, key, value = rows_SBRD[:, :, first : first + heads], rows_SBRD[:, :, -2:-1], rows_SBRD[:, :, -1:]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value
