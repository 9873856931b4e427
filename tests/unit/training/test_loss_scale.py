"""The loss scale: moved, saved and restored; and attention that holds its scores in fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.training.checkpoint.checkpointing import restore_scaler, scaler_state
from megatron.training.model.layers.attention import SdpaAttention
from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer
from tests.unit.runtime.one_process import MOE, loss_of, small

FP16 = f"{MOE} --fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 2"


def backward(chunk: Any, layerwise: MegatronLayerwiseOptimizer, seed: int = 0) -> None:
    layerwise.zero_grad()
    (loss_of(chunk, seed) * layerwise.loss_scale).backward()
    chunk.finish_grad_sync()


def made(flags: str = "") -> tuple[Any, Any, MegatronLayerwiseOptimizer]:
    chunk, optimizer = small(f"{FP16} {flags}").wrapped()
    return chunk, optimizer, MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0, count_zeros=True)


@pytest.mark.parametrize(
    "name", ["experts.local_experts.1.linear_fc1.weight", "layers.0.self_attention.linear_qkv.weight"]
)
def test_an_overflow_anywhere_moves_the_scale(name: str) -> None:
    chunk, optimizer, layerwise = made()
    for scale in (1024, 512):
        assert layerwise.loss_scale == scale == float(optimizer.get_loss_scale())
        backward(chunk, layerwise)
        (weight,) = (p for n, p in chunk.named_parameters() if n.endswith(name) and "layers.0." in n)
        weight.main_grad.view(-1)[3] = math.inf
        prepared = layerwise.prepare()
        assert math.isnan(prepared.norm) and prepared.zeros is None
    assert layerwise.loss_scale == 256


def test_norm_and_update_do_not_depend_on_the_scale() -> None:
    """Gradients are kept in fp32: a scale, a power of two, then changes nothing but what fp16 cannot hold."""
    norms, weights = [], []
    for scale in (1024, 4096):
        chunk, _, layerwise = made(f"--initial-loss-scale {scale} --accumulate-allreduce-grads-in-fp32")
        backward(chunk, layerwise)
        norms.append(layerwise.prepare().norm)
        for part in layerwise.parts:
            layerwise.step(part)
        layerwise.publish()
        weights.append(torch.cat([p.detach().float().view(-1) for p in chunk.parameters()]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and 0.1 < norms[0] < 100
    assert (
        weights[0] - weights[1]
    ).abs().max() < 2.5e-3  # Adam's first step is ±lr, and small gradients round to either


def test_state_is_restored_to_the_step() -> None:
    chunk, optimizer, layerwise = made()
    backward(chunk, layerwise)
    layerwise.prepare()
    state = scaler_state(optimizer)
    assert state == {"scale": 1024, "growth_tracker": 1, "hysteresis_tracker": 1}
    other_chunk, other, again = made()
    restore_scaler(other, state)
    backward(other_chunk, again)
    again.prepare()
    assert again.loss_scale == 2048 and scaler_state(other) == {
        "scale": 2048,
        "growth_tracker": 0,
        "hysteresis_tracker": 1,
    }


def test_a_window_that_is_shorter_now_ends_at_the_next_step() -> None:
    chunk, optimizer, layerwise = made()
    restore_scaler(optimizer, {"scale": 64.0, "growth_tracker": 700, "hysteresis_tracker": 3})
    assert scaler_state(optimizer) == {"scale": 64, "growth_tracker": 1, "hysteresis_tracker": 1}
    backward(chunk, layerwise)
    layerwise.prepare()
    assert layerwise.loss_scale == 128


def test_a_constant_scale_has_no_state_and_takes_none() -> None:
    _, optimizer, layerwise = made("--loss-scale 8")
    assert scaler_state(optimizer) is None and layerwise.loss_scale == 8
    restore_scaler(optimizer, {"scale": 64.0, "growth_tracker": 1, "hysteresis_tracker": 1})
    assert layerwise.loss_scale == 8
    _, unscaled = small(MOE).wrapped()
    assert scaler_state(unscaled) is None
    restore_scaler(unscaled, None)


def test_attention_holds_scores_in_fp32_that_fp16_cannot() -> None:
    """Therefore --attention-softmax-in-fp32 and --apply-query-key-layer-scaling change nothing."""
    attention = SdpaAttention(small(FP16).stock().config, 1, None, "self", softmax_scale=1.0)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(16, 2, 4, 64, generator=generator) for _ in range(3))
    query, key = (query * 100).half(), (key * 100).half()
    assert torch.einsum("sbhd,tbhd->bhst", query.float(), key.float()).abs().max() > 2 * torch.finfo(torch.half).max
    half = attention(query, key, value.half(), None)
    whole = attention(query.float(), key.float(), value.half().float(), None)
    assert (half.float() - whole).abs().max() < 2e-3
