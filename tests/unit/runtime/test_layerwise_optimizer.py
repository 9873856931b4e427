"""Stepping layer by layer is megatron-core's step, bitwise, in any order of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer, part_order
from tests.unit.runtime.one_process import MOE, SHARED, loss_of, small

VARIANTS = {
    "adam": "",
    "adam, no clipping": "--clip-grad 0",
    "adam, clipped hard": "--clip-grad 0.01",
    "sgd": "--optimizer sgd --lr 1e-1",
    "adam, bf16": "--bf16",
    "adam, fp16": "--fp16 --initial-loss-scale 1024",
    "sgd, fp16, fp32 gradients": "--optimizer sgd --lr 1e-1 --fp16 --loss-scale 64 --accumulate-allreduce-grads-in-fp32",
    "sgd, bf16, no clipping": "--optimizer sgd --lr 1e-1 --bf16 --clip-grad 0",
}
ORDERS = [
    ("embedding", "L0", "L1", "head"),
    ("head", "L1", "L0", "embedding"),
    ("L1", "embedding", "head", "L0"),
    ("L0", "head", "embedding", "L1"),
]


def run_backward(chunk: Any, seed: int, scale: float = 1.0) -> None:
    chunk.zero_grad_buffer()
    (loss_of(chunk, seed) * scale).backward()
    chunk.finish_grad_sync()


def state_of(optimizer: Any) -> list[torch.Tensor]:
    """Moments of every parameter, by parameter group and place in it."""
    states = [
        inner.optimizer.state[parameter]
        for inner in optimizer.chained_optimizers
        for group in inner.optimizer.param_groups
        for parameter in group["params"]
    ]
    return [value for state in states for _, value in sorted(state.items()) if torch.is_tensor(value)]


@pytest.mark.parametrize("name", VARIANTS)
def test_layer_by_layer_equals_a_whole_step(name: str) -> None:
    made = small(f"{MOE} {SHARED} {VARIANTS[name]}")
    reference, whole = made.wrapped()
    chunk, optimizer = made.wrapped()
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], made.config.optimizer.clip_grad, count_zeros=True)
    assert layerwise.parts == ("embedding", "L0", "L1", "head")
    start = {parameter: value.clone() for parameter, value in chunk.named_parameters()}
    for seed, order in enumerate(ORDERS):
        run_backward(reference, seed, layerwise.loss_scale)
        zeros = sum(int((parameter.main_grad == 0).sum()) for parameter in reference.parameters())
        whole.zero_grad()
        _, norm, _ = whole.step()
        run_backward(chunk, seed, layerwise.loss_scale)
        optimizer.zero_grad()
        prepared = layerwise.prepare()
        for part in order:
            layerwise.step(part)
        layerwise.publish()
        assert (prepared.norm, prepared.zeros) == (norm, zeros) and norm > 0 and zeros > 0
        expected = dict(reference.named_parameters())
        for parameter, value in chunk.named_parameters():
            assert torch.equal(value, expected[parameter]), parameter
    moved = [name for name, value in chunk.named_parameters() if not torch.equal(value, start[name])]
    assert len(moved) == len(start)
    mine, theirs = state_of(optimizer), state_of(whole)
    assert len(mine) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    norms = [value.float().norm() ** 2 for value in chunk.parameters()]
    in_half = made.config.optimizer.bf16 or made.config.precision.fp16
    rounding = 1e-2 if in_half else 1e-5  # the shards are fp32, the parameters bf16 or fp16
    assert layerwise.parameter_norm() == pytest.approx(float(sum(norms)) ** 0.5, rel=rounding)


def test_one_part_moves_alone_and_the_rest_is_asked_for() -> None:
    made = small(MOE)
    chunk, optimizer = made.wrapped()
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0)
    before = {name: value.clone() for name, value in chunk.named_parameters()}
    run_backward(chunk, 0)
    assert layerwise.prepare().zeros is None
    layerwise.step("L1")
    for inner in optimizer.chained_optimizers:
        inner._copy_main_params_to_model_params()
    moved = {name for name, value in chunk.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "layers.1." in name}
    with pytest.raises(AssertionError, match=r"parts without a step: \['L0', 'embedding', 'head'\]"):
        layerwise.publish()
    with pytest.raises(AssertionError, match="L1 was stepped before"):
        layerwise.step("L1")
    layerwise.prepare()  # a new step forgets the old one
    layerwise.step("L1")


def test_zero_gradients_are_counted() -> None:
    made = small(MOE)
    chunk, optimizer = made.wrapped()
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0, count_zeros=True)
    chunk.zero_grad_buffer()
    counted = layerwise.prepare()
    assert counted.norm == 0.0 and counted.zeros == sum(parameter.numel() for parameter in chunk.parameters())


def test_zero_grad_clears_every_gradient() -> None:
    made = small(MOE)
    chunk, optimizer = made.wrapped()
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0)
    run_backward(chunk, 0)
    layerwise.prepare()
    layerwise.zero_grad()
    assert not any(parameter.main_grad.any() for parameter in chunk.parameters())


def test_parts_are_sorted_by_depth() -> None:
    assert sorted(["head", "L10", "L9", "embedding"], key=part_order) == ["embedding", "L9", "L10", "head"]
