"""Small models and plans for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Recompute, StagePlan

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
a_third = pytest.mark.parametrize("third", [0, *(pytest.param(rest, marks=pytest.mark.slow) for rest in (1, 2))])
"""For sweeps: `[third::3]` has every value of each axis whose length, and that of all behind it, 3 does not divide."""


def model(moe: str = "mm", **changes: Any) -> ModelDescription:
    """`moe`: a letter per layer, m for mixture of experts, d for dense."""
    values: dict[str, Any] = {
        "name": "tiny",
        "num_layers": len(moe),
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 16,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "learned_positions": False,
        "tied_embeddings": False,
        "rms_norm": True,
        "gated": True,
        "linear_bias": False,
        "qkv_bias": False,
        "qk_layernorm": False,
        "windows": (None,) * len(moe),
        "attention_sinks": False,
        "moe_layers": tuple(letter == "m" for letter in moe),
        "num_experts": 8 if "m" in moe else 0,
        "router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_latent_size": 0,
        "shared_expert_hidden_size": 0,
        "shared_expert_gate": False,
        "expert_bias": False,
        "latent_attention": None,
    }
    return ModelDescription(**{**values, **changes})


def plan(
    layers: int = 2,
    stages: int = 1,
    chunks: int = 1,
    micro_batches: int = 2,
    stage: dict[str, Any] | None = None,
    **run: Any,
) -> Plan:
    """A uniform plan; layers are shared evenly; `stage` changes every stage, `run` the plan."""
    sizes: dict[str, Any] = {
        "micro_batch_size": 2,
        "tensor": 1,
        "context": 1,
        "data": 1,
        "expert": 1,
        "expert_tensor": 1,
    }
    sizes |= {"zero_level": 1, "recompute": Recompute(), "offload": Offload()} | (stage or {})
    ranks = sizes["tensor"] * sizes["context"] * sizes["data"]
    each = layers // (stages * chunks)
    starts = [[(chunk * stages + index) * each for chunk in range(chunks)] for index in range(stages)]
    built = tuple(
        StagePlan(
            chunks=tuple((first, first + each) for first in starts[index]),
            devices=Devices(mesh=(1, ranks), ranks=tuple(range(index * ranks, (index + 1) * ranks))),
            gradient_accumulation_steps=micro_batches,
            **sizes,
        )
        for index in range(stages)
    )
    named = Named(name="tiny", sha256="0" * 64)
    values: dict[str, Any] = {
        "model": named,
        "cluster": named,
        "sequence_length": 256,
        "global_batch_size": sizes["micro_batch_size"] * sizes["data"] * micro_batches,
        "precision": "fp32",
        "pipeline_schedule": "1f1b" if chunks == 1 else "interleaved-1f1b",
        "embedding_stage": 0,
        "mtp_stage": None,
        "loss_stage": stages - 1,
        "stages": built,
        "transfers": (),
        "predicted": None,
    }
    return Plan(**{**values, **run})
