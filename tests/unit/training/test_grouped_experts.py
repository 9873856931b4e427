"""The grouped experts against megatron-core's sequential ones: same parameters, same numbers."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import random as core_random
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training import cpu_backend
from megatron.training.model import build
from megatron.training.model.layers import expert_weights
from megatron.training.model.layers.local_modules import GroupedExperts
from moe_overlap.describe.errors import ConfigError

if cpu_backend.is_needed():
    cpu_backend.install()


@pytest.fixture(scope="module")
def group():
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
        )
    if cpu_backend.is_needed():
        core_random._CUDA_RNG_STATE_TRACKER = cpu_backend.make_rng_tracker()
        core_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    core_random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    return dist.group.WORLD


@pytest.mark.parametrize("counts", [[5, 3, 0, 8], [0, 0, 16, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize(
    ("gated", "limit", "offset"), [(True, None, 0.0), (False, None, 0.0), (True, 0.02, 1.0), (True, 0.02, 0.0)]
)
def test_grouped_equals_sequential(group, gated, counts, limit, offset):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=48,
        add_bias_linear=False,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu,
        activation_func_clamp_value=limit,
        glu_linear_offset=offset,
        bias_activation_fusion=False,
    )
    groups = ProcessGroupCollection(ep=group, expt_tp=group, expt_dp=group)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    sequential = SequentialMLP(4, config, parts, pg_collection=groups)
    grouped = GroupedExperts(4, config, parts, pg_collection=groups)
    grouped.load_state_dict(sequential.state_dict())
    rows, probs = torch.randn(sum(counts), 32), torch.rand(sum(counts))
    weight = torch.randn(sum(counts), 32)
    answers = []
    for experts in (sequential, grouped):
        x, p = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        out, bias = experts(x, torch.tensor(counts), p)
        assert bias is None
        (out * weight).sum().backward()
        answers.append([out, x.grad, p.grad, *(q.grad for _, q in sorted(experts.named_parameters()))])
    for mine, reference in zip(answers[1], answers[0], strict=True):
        if mine is None or reference is None:
            assert mine is reference or not (mine if mine is not None else reference).any()
        else:
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


class UnwrittenKernel(torch.autograd.Function):
    """torch's grouped product, but for the weight gradients of experts without rows: what memory held there."""

    product = torch.nn.functional.grouped_mm

    @staticmethod
    def forward(ctx, rows, weights, offs):
        ctx.save_for_backward(rows, weights, offs)
        return UnwrittenKernel.product(rows, weights, offs=offs)

    @staticmethod
    def backward(ctx, gradient):
        rows, weights, offs = ctx.saved_tensors
        to_weights = UnwrittenKernel.product(rows.t(), gradient, offs=offs)
        to_weights[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return UnwrittenKernel.product(gradient, weights.transpose(1, 2), offs=offs), to_weights, None


@pytest.mark.parametrize("is_guarded", [True, False])
def test_experts_without_rows_have_zero_gradients_whatever_the_kernel_writes(monkeypatch, is_guarded):
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda x, w, offs: UnwrittenKernel.apply(x, w, offs))
    monkeypatch.setattr(expert_weights, "leaves_gradients_unwritten", lambda device: is_guarded)
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    weights = [torch.randn(16, 8, requires_grad=True) for _ in ends]
    joined = expert_weights.joined_with_gradients(weights, ends)
    outputs = torch.nn.functional.grouped_mm(torch.randn(8, 8), joined.transpose(1, 2), offs=ends)
    outputs.backward(torch.randn(8, 16))
    gradients = [weight.grad for weight in weights]
    # Without the guard they have what memory held.
    assert [bool(gradient.isfinite().all()) for gradient in gradients] == [is_guarded, True, is_guarded, True]
    if is_guarded:
        assert [bool(gradient.any()) for gradient in gradients] == [False, True, False, True]


def test_deferred_gradients_of_experts_without_rows_are_zero(monkeypatch):
    """The product that the queue computes later writes into memory of its own, too."""
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda x, w, offs: torch.full((len(offs), len(x), w.shape[1]), float("nan"))
    )
    monkeypatch.setattr(expert_weights, "leaves_gradients_unwritten", lambda device: True)
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    gradients = GroupedExperts.weight_gradients(torch.randn(8, 16), torch.randn(8, 4), ends)
    assert gradients.shape == (4, 16, 4) and [bool((each == 0).all()) for each in gradients] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("capability", "is_grouped"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True)]
)
def test_gpus_without_the_kernel_multiply_expert_by_expert(monkeypatch, capability, is_grouped):
    """torch's fallback for them waits for the device in every product."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert build.multiplies_grouped(moe_config(96)) == is_grouped
    assert not build.multiplies_grouped(moe_config(96, bf16=False))
    if is_grouped:
        with pytest.raises(ConfigError, match="--moe-ffn-hidden-size 180: .*; use another --expert-tensor"):
            build.multiplies_grouped(moe_config(180))
        with pytest.raises(ConfigError, match="--hidden-size 36: .*; use a multiple of 8, or install"):
            build.multiplies_grouped(moe_config(96, hidden_size=36))
    else:
        assert not build.multiplies_grouped(moe_config(180))


def moe_config(width: int, bf16: bool = True, hidden_size: int = 32) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=width,
        add_bias_linear=False,
        bf16=bf16,
    )
