"""--reset-attention-mask with Transformer Engine, whose causal attention reads no mask: a stand-in leaves it out as well."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron.training.model import build
from megatron.training.model.layers.attention import SdpaAttention
from megatron.training.model.layers.local_modules import TorchNorm
from tests.unit.runtime.one_process import MOE, SEQUENCE, VOCABULARY, batch, small

DOCUMENT = 5
"""Position at which the second document of a sample begins."""


class CausalAttention(SdpaAttention):
    """Causal, whatever mask it is given."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
        return super().forward(query, key, value, None, **others)


def engine_spec(**arguments: Any) -> Any:
    """The spec of a layer whose attention is the stand-in."""
    spec = get_gpt_layer_local_spec(**arguments)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    parts.self_attention.submodules.core_attention = CausalAttention
    return spec


def changed_positions(flags: str) -> list[bool]:
    """Where the loss changes with the first token, where a mask keeps two documents apart."""
    model = small(f"{MOE} {flags}").stock().eval()
    tokens, positions, labels = batch()
    forbidden = positions.new_ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool().expand(len(tokens), -1, -1, -1).clone()
    forbidden[:, :, DOCUMENT:, :DOCUMENT] = True
    before = model(tokens, positions, forbidden, labels=labels)
    tokens[:, 0] = (tokens[:, 0] + 1) % VOCABULARY
    difference = (model(tokens, positions, forbidden, labels=labels) - before).abs().amax(0) > 0
    return [bool(changed) for changed in difference]


def test_documents_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "uses_transformer_engine", lambda: True)
    monkeypatch.setattr(build, "get_gpt_layer_with_transformer_engine_spec", engine_spec)
    monkeypatch.setattr(build, "_block_norm", lambda: TorchNorm)
    assert all(changed_positions("")), "the stand-in looks across documents"
    apart = changed_positions("--reset-attention-mask")
    assert all(apart[:DOCUMENT]) and not any(apart[DOCUMENT:])
