"""Attention that megatron-core lacks, or has only with Transformer Engine.

Context parallelism: each sample's sequence is shared by the ranks of a group. It is cut into 2 · C chunks, and rank r of C holds
chunks r and 2C - 1 - r ("zig-zag"): under a causal mask every rank then has the same work. Queries stay; keys and values are
gathered (as in Llama 3, section 3.3.2, and megatron-core's `cp_comm_type="all_gather"`), which for grouped-query attention is
the smaller share.

Core attention (`SdpaAttention`): torch's scaled_dot_product_attention, causal, over windows, with sinks.

More tensor-parallel ranks than query groups (`FewGroupsAttention`): megatron-core splits the weights of queries, keys and values
evenly over the ranks, also across the borders of a group, gathers their product, and has each rank take its heads from it. Its
own layer asks `parallel_state` for the ranks, this one the layer's group.

Legend: S sequence or queries (this rank's share, unless marked as whole), K keys, B batch, H heads, G key/value groups, D head
width, C ranks of a context-parallel group, R rows of a group (its query heads, then key, then value).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from moe_overlap.describe.model import TOKEN_COUNT

# Context parallelism (S is the whole sequence)

_SEQUENCE_AXIS = {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "attention_mask": 2}


def positions(sequence_length: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """[S / C] positions in the sample of a rank's tokens, ascending."""
    chunks = torch.arange(sequence_length, device=device).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def part_of_batch(batch: Mapping[str, Any], size: int, rank: int) -> dict[str, Any]:
    """This rank's share of a micro-batch [B, S], and of an attention mask [B, 1, S, S] the rows of its queries."""
    if size == 1:
        return dict(batch)
    own_places = positions(batch["tokens"].shape[1], size, rank, batch["tokens"].device)
    cut = {
        name: value.index_select(_SEQUENCE_AXIS[name], own_places) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    return cut | {TOKEN_COUNT: batch["loss_mask"].float().sum()}


class GatherSequence(torch.autograd.Function):
    """[S / C, B, …] of every rank -> [S, B, …] in the order of the sample; backward sums all ranks' gradients of a share."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Gather over the group."""
        ctx.group = group
        size, length = group.size(), part.shape[0]
        gathered = part.new_empty((size * length, *part.shape[1:]))
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
        return gathered.index_select(0, _order(size * length, size, part.device).argsort())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum over the group, this rank's part."""
        size = ctx.group.size()
        by_rank = gradient.index_select(0, _order(gradient.shape[0], size, gradient.device)).contiguous()
        share = by_rank.new_empty((by_rank.shape[0] // size, *by_rank.shape[1:]))
        dist.reduce_scatter_tensor(share, by_rank, group=ctx.group)
        return share, None


def _order(sequence_length: int, size: int, device: torch.device) -> Tensor:
    """[S] positions in the sample, rank after rank: `positions` of all ranks, with a fixed number of kernels."""
    chunks = torch.arange(sequence_length, device=device).view(2 * size, -1)
    return torch.stack([chunks[:size], chunks[size:].flip(0)], dim=1).flatten()


# Core attention (S is this rank's queries)

SINK_WIDTH = 8
"""Elements that a sink adds to a head; the first holds the sink, the others keep the width a multiple of 8 for GPUs."""


class SdpaAttention(torch.nn.Module):
    """Core attention; the constructor is megatron-core's.

    The causal mask is implicit; a mask tensor (--reset-attention-mask) replaces it. A window is a mask, alone or combined with
    that tensor. Under context parallelism keys and values are gathered first.

    Attributes:
        window: number of tokens before a query that it attends to, None for all.
        softmax_offset: [H of this rank] logits of the sinks, which take part in the softmax and have no value; None without
        sinks.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **widths: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.groups = pg_collection
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed and config.window_size[0] >= 0 else None
        self._make_sinks()

    def _make_sinks(self) -> None:
        """Create the sinks as megatron-core's own attention does; each tensor-parallel rank draws those of its heads."""
        kind, config = self.config.softmax_type, self.config
        if kind == "vanilla":
            self.softmax_offset = None
            return
        heads = config.num_attention_heads // self.groups.tp.size()
        sinks_H = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        if kind == "off-by-one":
            self.softmax_offset = sinks_H
            return
        with get_cuda_rng_tracker().fork():
            config.init_method(sinks_H)
        self.softmax_offset = torch.nn.Parameter(sinks_H)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The sharded state: sinks are split over the tensor-parallel ranks by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def forward(
        self,
        query_SBHD: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend within each sample.

        Args:
            query_SBHD, key_SBGD, value_SBGD: this rank's heads and part of the sequence; the value's head width may differ.
            attention_mask: [B, 1, S, whole S], true where attention is forbidden, or None for causal.
        Returns:
            [S, B, H · D of the values].
        """
        assert packed_seq_params is None and attention_bias is None, "packed sequences do not reach this path"
        if self.context_group is not None:
            key_SBGD, value_SBGD = (GatherSequence.apply(x, self.context_group) for x in (key_SBGD, value_SBGD))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBHD, key_SBGD, value_SBGD))
        allowed = self._allowed(attention_mask, key.shape[2], key.device)
        scale, width = self.softmax_scale, value.shape[3]
        if self.softmax_offset is not None:
            scale = query.shape[3] ** -0.5 if scale is None else scale
            allowed = self._causal(key.shape[2], key.device) if allowed is None else allowed
            query, key, value, allowed = with_sinks(query, key, value, allowed, self.softmax_offset / scale)
        if allowed is not None and not masks_groups(key.device):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        dropout = self.dropout if self.training else 0.0
        arguments = {
            "attn_mask": allowed,
            "is_causal": allowed is None,
            "scale": scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if dropout and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                out_BHSD = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **arguments)
        else:
            out_BHSD = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **arguments)
        out_SBHD = out_BHSD[..., :width].permute(2, 0, 1, 3)
        return out_SBHD.reshape(query_SBHD.shape[0], query_SBHD.shape[1], -1)

    def _allowed(self, attention_mask: Tensor | None, keys: int, device: torch.device) -> Tensor | None:
        """The mask of keys that a query may attend to: [S, K] or [B, 1, S, K]; None for causal, which SDPA has built in."""
        if attention_mask is None:
            implicit = self.window is None and self.context_group is None
            return None if implicit else self._causal(keys, device)
        allowed = ~attention_mask
        return allowed if self.window is None else allowed & self._causal(keys, device)

    def _causal(self, keys: int, device: torch.device) -> Tensor:
        """[S, K] mask of keys that are not after the query and, with a window, inside it."""
        size, rank = (1, 0) if self.context_group is None else (self.context_group.size(), self.context_group.rank())
        distance_SK = positions(keys, size, rank, device)[:, None] - torch.arange(keys, device=device)
        allowed = distance_SK >= 0
        return allowed if self.window is None else allowed & (distance_SK <= self.window)


def with_sinks(
    query_BHSD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, allowed: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of attention with one more key, visible to every query, whose score is the head's sink and whose value is 0.

    Heads grow by SINK_WIDTH: a query holds its sink in the first new element, where the new key has a 1 and the others 0.

    Args:
        allowed: [..., S, K] mask of keys that a query may attend to.
        sinks_H: scores of the sinks before they are scaled.
    Returns:
        Query, key, value and mask for scaled_dot_product_attention; only the first D elements of its output count.
    """
    samples, _, queries, _ = query_BHSD.shape
    carried = F.pad(sinks_H.to(query_BHSD.dtype)[:, None, None], (0, SINK_WIDTH - 1)).expand(samples, -1, queries, -1)
    query = torch.cat([query_BHSD, carried], dim=3)
    key, value = (F.pad(x, (0, SINK_WIDTH, 0, 1)) for x in (key_BGKD, value_BGKD))
    key[:, :, -1, key_BGKD.shape[3]] = 1
    return query, key, value, F.pad(allowed, (0, 1), value=True)


def masks_groups(device: torch.device) -> bool:
    """Whether torch's fused attention accepts a mask together with grouped queries.

    On a GPU grouped queries have flash attention, which accepts no mask, and attention composed of single operators, which
    stores the scores of all heads [B, H, S, K] in fp32 (torch's documentation of `enable_gqa`). Copies of keys and values cost
    far less.
    """
    return device.type != "cuda"


# Few query groups


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
        gathered = all_gather_last_dim_from_tensor_parallel_region(part, group=self.tp_group)
        gathered_SBGRD = gathered.view(*gathered.shape[:2], groups, -1, self.hidden_size_per_attention_head)
        rows_SBRD = gathered_SBGRD[:, :, rank // sharers]
        heads = (rows_SBRD.shape[2] - 2) // sharers
        first = rank % sharers * heads
        query, key, value = rows_SBRD[:, :, first : first + heads], rows_SBRD[:, :, -2:-1], rows_SBRD[:, :, -1:]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value
