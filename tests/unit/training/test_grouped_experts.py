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
from megatron.training.model.layers.local_modules import GroupedExperts

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
