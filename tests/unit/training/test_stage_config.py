"""A stage is built from its StagePlan: where the flags say something else, megatron-core is told what the plan says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.sizes import describe_model
from megatron.training.model import stage_config
from megatron.training.model.stage_config import transformer_config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, Recompute
from tests.unit.plan import plan_samples

FACTS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --swiglu "
    "--position-embedding-type rope --disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 32 --sequence-parallel"
)
SAYS_OTHERWISE = (
    "--tensor-model-parallel-size 8 --context-parallel-size 4 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4 --micro-batch-size 7"
)
FIRST = {"tensor": 2, "context": 1, "data": 2, "expert": 2, "expert_tensor": 2}
SECOND = {"tensor": 4, "context": 2, "data": 1, "expert": 4, "expert_tensor": 1}
EXPECTED: tuple[dict[str, Any], ...] = (
    {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    {
        "tensor_model_parallel_size": 4,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
        "recompute_method": None,
        "recompute_num_layers": None,
    },
)


def job(flags: str, **changes: Any) -> tuple[Config, ModelDescription, Plan]:
    """Flags that disagree with a plan of two unlike stages, which nothing but `transformer_config` is asked to accept."""
    config = parse(f"{FACTS} {SAYS_OTHERWISE} {flags}".split()).config
    model = describe_model(parse(FACTS.split()).config, 257)
    plan = plan_samples.plan(layers=4, stages=2, **changes)
    first, second = plan.stages
    stages = (
        dataclasses.replace(first, recompute=Recompute(layers=1, granularity="full"), **FIRST),
        dataclasses.replace(second, recompute=Recompute(layers=2, granularity="selective", modules=("moe",)), **SECOND),
    )
    return config, model, dataclasses.replace(plan, stages=stages)


@pytest.mark.parametrize("stage", [0, 1])
def test_layout_and_recomputation_are_those_of_the_stage(stage: int) -> None:
    config, model, plan = job("")
    built = transformer_config(config, model, plan, stage)
    assert {name: getattr(built, name) for name in EXPECTED[stage]} == EXPECTED[stage]
    assert built.pipeline_model_parallel_size == 2 and built.virtual_pipeline_model_parallel_size is None
    assert built.num_layers == 4 and built.sequence_parallel


@pytest.mark.parametrize("flag", ["", "--bf16", "--fp16"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision_is_that_of_the_plan(flag: str, precision: str, dtype: torch.dtype) -> None:
    config, model, plan = job(flag, precision=precision)
    built = transformer_config(config, model, plan, 0)
    assert (built.params_dtype, built.pipeline_dtype) == (dtype, dtype)
    assert (built.bf16, built.fp16) == (dtype == torch.bfloat16, dtype == torch.float16)


def test_narrow_products_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    # megatron-core asks for the version of Transformer Engine, which need not be here.
    monkeypatch.setattr(stage_config, "TransformerConfig", lambda **fields: fields)
    for precision, expected in (("bf16", None), ("fp8", "hybrid")):
        config, model, plan = job("--bf16 --fp8-format hybrid", precision=precision)
        fields: Any = transformer_config(config, model, plan, 0)
        assert fields.get("fp8") == expected and "fp4" not in fields


@pytest.mark.parametrize(
    ("flags", "experts", "fused"),
    [
        ("", 8, False),  # megatron-core's experts fuse no GELU, with a bias or without
        ("--swiglu", 8, True),
        ("--disable-bias-linear", 8, False),
        ("", None, True),
        ("--disable-bias-linear", None, False),
    ],
)
def test_fusions_on_a_gpu_are_those_that_megatron_core_has(
    monkeypatch: pytest.MonkeyPatch, flags: str, experts: int | None, fused: bool
) -> None:
    words = [word for word in FACTS.split() if word not in ("--swiglu", "--disable-bias-linear", "--sequence-parallel")]
    if experts is None:
        at = words.index("--num-experts")
        words[at : at + 4] = []
    config = parse([*words, *flags.split(), "--micro-batch-size", "2"]).config
    model, plan = describe_model(config, 257), plan_samples.plan(layers=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    built = transformer_config(config, model, plan, 0)
    assert built.bias_activation_fusion == fused
    # Experts add their biases themselves, and megatron-core's grouped ones assert that the sum is not fused with dropout.
    assert built.bias_dropout_fusion == (experts is None or built.add_bias_linear is False)
