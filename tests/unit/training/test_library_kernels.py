"""Kernels that megatron-core runs where the library has them: which a model gets, by stand-ins for the library's functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from megatron.training.model import build as model_builder
from megatron.training.model.library_kernels import SORTS, run_fused


def configured(**changes: Any) -> Any:
    """The fields that decide, of an MoE model with plain attention."""
    fields = {
        "multi_latent_attention": False,
        "rope_type": "rope",
        "rotary_interleaved": False,
        "num_moe_experts": 8,
        "moe_pad_expert_input_to_capacity": False,
        "deterministic_mode": False,
        "qk_layernorm": False,
        "attention_output_gate": False,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "tensor_model_parallel_size": 1,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def fused(follows_lists: bool = False, **changes: Any) -> tuple[bool, bool]:
    tc = configured(**changes)
    run_fused(tc, follows_lists)
    return tc.apply_rope_fusion, tc.moe_permute_fusion


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The functions are there."""
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    monkeypatch.setattr(multi_latent_attention, "fused_apply_mla_rope_for_q", object())
    for name in SORTS:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)
    return monkeypatch


def test_a_model_gets_the_kernels_that_the_library_has(library: pytest.MonkeyPatch) -> None:
    assert fused() == (True, True)
    assert fused(num_moe_experts=None) == (True, False)
    assert fused(rotary_interleaved=True) == (False, True)
    assert fused(multi_latent_attention=True) == (False, True)
    assert fused(multi_latent_attention=True, rope_type="yarn") == (True, True)
    assert fused(moe_pad_expert_input_to_capacity=True) == fused(deterministic_mode=True) == (True, False)
    # An older library: one of the sorts is not there.
    library.setattr(moe_utils, SORTS[-1], None)
    assert fused() == (True, False)
    library.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    assert fused() == (False, False)


def test_lists_have_the_rotation_that_their_own_does_not_reach(library: pytest.MonkeyPatch) -> None:
    """Qwen3 norms queries, DeepSeek-V3 compresses them: composed of ten operators, rotations would be 40 kernels a layer."""
    assert fused(follows_lists=True) == (False, False)
    assert fused(follows_lists=True, qk_layernorm=True) == (True, False)
    assert fused(follows_lists=True, multi_latent_attention=True, rope_type="yarn") == (True, False)
    assert fused(follows_lists=True, attention_output_gate=True) == (True, False)
    assert fused(follows_lists=True, tensor_model_parallel_size=4) == (True, False)
    assert fused(follows_lists=True, qk_layernorm=True, rotary_interleaved=True) == (False, False)


def test_without_the_library_nothing_is_asked_for() -> None:
    if rope_utils.fused_apply_rotary_pos_emb is None:
        assert fused() == (False, False)


@pytest.mark.parametrize("runs_lists", [False, True])
def test_instruction_lists_keep_their_own(library: pytest.MonkeyPatch, runs_lists: bool) -> None:
    tc = configured()
    library.setattr(model_builder, "transformer_config", lambda *_: tc)
    library.setattr(model_builder, "uses_transformer_engine", lambda: True)
    stage = SimpleNamespace(overlap=SimpleNamespace(layers=(), cuts_layers=False))
    plan: Any = SimpleNamespace(runs_lists=runs_lists, stages=(stage,))
    nothing: Any = None
    assert model_builder._configured(nothing, nothing, plan, 0, None) is tc
    assert (tc.apply_rope_fusion, tc.moe_permute_fusion) == (not runs_lists, not runs_lists)
