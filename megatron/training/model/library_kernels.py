"""Transformer Engine's kernels, switched on as Megatron-LM does.

    rotations of queries and keys     apply_rope_fusion      on in Megatron-LM unless --no-rope-fusion says otherwise
    rows of tokens sorted by expert   moe_permute_fusion     off in Megatron-LM by default; the same rows, in fewer passes

Without its kernel a rotation is about ten operators in each layer. Instruction lists sort rows themselves (runtime/dispatch) and
rotate in the joint projection of queries and keys (runtime/executor/rotary.py). Where something stands between projection and
rotation (norms of queries, latent attention) they use the library's kernel as well. The fields are set after the configuration's
constructor, which would refuse a kernel that the library lacks. Not yet run on hardware.
"""

from __future__ import annotations

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

SORTS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""Functions of the library that megatron-core requires together."""


def run_fused(tc: TransformerConfig, follows_lists: bool) -> None:
    """Turn on the available kernels for a model.

    Args:
        follows_lists: whether instruction lists run the model.
    """
    if _rotates(tc) and not (follows_lists and _rotates_in_projection(tc)):
        tc.apply_rope_fusion = True
    if tc.num_moe_experts and _sorts(tc) and not follows_lists:
        tc.moe_permute_fusion = True


def _rotates_in_projection(tc: TransformerConfig) -> bool:
    """Whether lists rotate queries and keys in their joint projection, as `rotate_projection` decides layer by layer."""
    shares_groups = (tc.num_query_groups or tc.num_attention_heads) < tc.tensor_model_parallel_size
    is_changed = tc.multi_latent_attention or tc.qk_layernorm or tc.attention_output_gate
    return not (is_changed or shares_groups)


def _rotates(tc: TransformerConfig) -> bool:
    """Whether there is a kernel that rotates the queries and keys of this attention."""
    if tc.multi_latent_attention:
        # A Triton kernel of megatron-core's, for the angles of YaRN only.
        return tc.rope_type == "yarn" and multi_latent_attention.fused_apply_mla_rope_for_q is not None
    # Not for interleaved pairs, which only later releases of the library support; they are rare.
    return rope_utils.fused_apply_rotary_pos_emb is not None and not tc.rotary_interleaved


def _sorts(tc: TransformerConfig) -> bool:
    """Whether a kernel sorts rows by expert; it supports neither a static capacity nor sums in a fixed order."""
    has_all = all(getattr(moe_utils, name, None) is not None for name in SORTS)
    return has_all and not (tc.moe_pad_expert_input_to_capacity or tc.deterministic_mode)
