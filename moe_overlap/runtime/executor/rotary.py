"""Rotary positions of queries and keys in few kernels, from a table that is computed once.

megatron-core computes cosines and sines in every layer, for queries and for keys, and composes the rotation of ten operators
(models/common/embeddings/rope_utils.py). A rotation mixes the two halves x[0] and x[1] of a head:

    y[i] = x[0] · table[i, 0] + x[1] · table[i, 1]      table: cosines where i = j, else sines, of x[1] negative

That is one broadcast product and one sum; the backward pass takes the transposed table. Forward, queries and keys are rotated
together in the output of the joint projection; backward, each gradient is written into the gradient of that output.

The result equals megatron-core's bit for bit (a test). Interleaved pairs, Transformer Engine's fused rotation, and projections
that are normed, gated or shared by ranks keep megatron-core's rotation.

S sequence, B batch, G key/value groups of this rank, R query heads of a group, D head width, W rotated elements of a head
(W <= D), h = W / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor


def rotary_table(angles: Tensor, config: Any) -> Tensor:
    """Factors [S, 1, 1, 1, 2, 2, h] of the halves, in the model's precision and with YaRN's scale.

    Args:
        angles: [S, 1, 1, W].
    """
    scale = _yarn_get_concentration_factor_from_config(config)
    cos, sin = ((x * scale).to(config.params_dtype).chunk(2, dim=-1) for x in (torch.cos(angles), torch.sin(angles)))
    rows = [torch.stack([cos[0], -sin[0]], dim=-2), torch.stack([sin[1], cos[1]], dim=-2)]
    return torch.stack(rows, dim=-3).unsqueeze(3)


def rotate_projection(attention: Any, table: Tensor) -> bool:
    """Make a self-attention return rotated queries and keys; its callers must then pass no angles.

    Returns:
        Whether it does: not with another rotation, nor with one that does not directly follow the joint projection.
    """
    config = attention.config
    if type(attention) is not SelfAttention:
        return False
    norms = attention.q_layernorm, attention.k_layernorm
    is_plain = all(norm is None or isinstance(norm, IdentityOp) for norm in norms)
    is_other = config.rotary_interleaved or config.apply_rope_fusion or config.fused_single_qkv_rope
    if not is_plain or is_other or config.attention_output_gate or config.test_mode:
        return False
    # Ranks that share a query group select their queries only after the split.
    if config.num_query_groups < attention.world_size:
        return False
    if config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]:
        return False
    width = attention.hidden_size_per_attention_head

    def rotated(hidden_SBH: Tensor, _other: None, *, split_qkv: bool, output_gate: bool) -> tuple[Tensor, ...]:
        assert split_qkv and not output_gate
        # The method of the class: another executor of this model may have replaced the instance's.
        mixed_SBGX, _ = SelfAttention.get_query_key_value_tensors(attention, hidden_SBH, split_qkv=False)
        assert mixed_SBGX.dtype == table.dtype, "the table has the precision of the projection"
        heads: tuple[Tensor, ...] = RotateProjection.apply(mixed_SBGX.unflatten(3, (-1, width)), table)
        return heads

    # Replaced on the instance: megatron-core's code around the projection stays as it is.
    if "get_query_key_value_tensors" not in vars(attention):
        attention.register_forward_pre_hook(_refuse_angles, with_kwargs=True)
    attention.get_query_key_value_tensors = rotated
    return True


def _refuse_angles(_module: Any, _inputs: Any, named: dict[str, Any]) -> None:
    assert named.get("rotary_pos_emb") is None, (
        "queries and keys are rotated already: a second rotation would be silently wrong"
    )


class RotateProjection(torch.autograd.Function):
    """RotateProjection.apply(mixed [S, B, G, R + 2, D], table) -> queries [S, B, G · R, D], keys and values [S, B, G, D]."""

    @staticmethod
    def forward(ctx: Any, mixed_SBGXD: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.table, ctx.shape = table, mixed_SBGXD.shape
        both, value = mixed_SBGXD[..., :-1, :], mixed_SBGXD[..., -1, :]
        rotated = both.new_empty(both.shape)
        _rotate(both, table, rotated)
        return rotated[..., :-1, :].flatten(2, 3), rotated[..., -1, :], value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dquery, dkey, dvalue = gradients
        groups, heads = ctx.shape[2:4]
        dmixed = dquery.new_empty(ctx.shape)
        # The inverse of a rotation is its transpose.
        back = ctx.table.transpose(-3, -2)
        _rotate(dquery.unflatten(2, (groups, heads - 2)), back, dmixed[..., :-2, :])
        _rotate(dkey.unsqueeze(3), back, dmixed[..., -2:-1, :])
        dmixed[..., -1, :].copy_(dvalue)
        return dmixed, None


def _rotate(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Write heads [S, B, G, heads, D], each mixed by the table, to `out`."""
    half = table.shape[-1]
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :].copy_(x[..., 2 * half :])
        x, out = x[..., : 2 * half], out[..., : 2 * half]
    first, second = (x.unflatten(-1, (1, 2, half)) * table).unbind(-2)
    torch.add(first, second, out=out.unflatten(-1, (2, half)))
