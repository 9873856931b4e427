"""Core attention without Transformer Engine, by torch's scaled_dot_product_attention: causal, over windows, with sinks.

Legend: S queries (this rank's part of the sequence), K keys, B batch, H heads, G key/value groups, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron.training.layers.context_parallel import GatherSequence, positions

SINK_WIDTH = 8
"""Elements by which heads grow to hold a sink; one carries it, the others keep the width a multiple of 8 for GPU kernels."""


class SdpaAttention(torch.nn.Module):
    """Core attention; the constructor is megatron-core's.

    The causal mask is implicit; a mask tensor (documents kept apart by --reset-attention-mask) replaces it. A window is a mask,
    alone or together with that tensor. Under context parallelism keys and values are gathered first (context_parallel.py).

    Attributes:
        window: tokens before a query that it attends to, or None for all.
        softmax_offset: [H of this rank] logits of the sinks, which take part in the softmax and have no value; None without.
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
        """As megatron-core's own attention has them; each tensor-parallel rank draws those of its heads."""
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
        """Sinks are split over the tensor-parallel ranks by heads."""
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
        """Where a query may look: [S, K] or [B, 1, S, K]; None for causal, which SDPA knows by itself."""
        if attention_mask is None:
            implicit = self.window is None and self.context_group is None
            return None if implicit else self._causal(keys, device)
        allowed = ~attention_mask
        return allowed if self.window is None else allowed & self._causal(keys, device)

    def _causal(self, keys: int, device: torch.device) -> Tensor:
        """[S, K]: not after the query, and with a window not too far before it."""
        size, rank = (1, 0) if self.context_group is None else (self.context_group.size(), self.context_group.rank())
        distance_SK = positions(keys, size, rank, device)[:, None] - torch.arange(keys, device=device)
        allowed = distance_SK >= 0
        return allowed if self.window is None else allowed & (distance_SK <= self.window)


def with_sinks(
    query_BHSD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, allowed: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention with one more key, which every query may look at, has the head's sink as its score and the value 0.

    Heads grow by SINK_WIDTH: a query carries its sink in the first new element, where the new key has a one and the others zero.

    Args:
        allowed: [..., S, K] where a query may look.
        sinks_H: scores of the sinks before they are scaled.
    Returns:
        Query, key, value and mask for scaled_dot_product_attention; of its output the first D elements count.
    """
    samples, _, queries, _ = query_BHSD.shape
    carried = F.pad(sinks_H.to(query_BHSD.dtype)[:, None, None], (0, SINK_WIDTH - 1)).expand(samples, -1, queries, -1)
    query = torch.cat([query_BHSD, carried], dim=3)
    key, value = (F.pad(x, (0, SINK_WIDTH, 0, 1)) for x in (key_BGKD, value_BGKD))
    key[:, :, -1, key_BGKD.shape[3]] = 1
    return query, key, value, F.pad(allowed, (0, 1), value=True)
