"""Stepping layer by layer is megatron-core's step, bitwise, in any order of the layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.training.checkpoint.optimizer_state import step_count
from megatron.training.optimizer import make_optimizer, wrap_chunks
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer, PreparedGradients, part_order
from moe_overlap.runtime.state.update import UpdateState
from tests.unit.runtime.fake_ranks import DeviceMode
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


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_the_norm_leaves_out_the_embedding_that_a_last_stage_copies(precision: str) -> None:
    made = small(f"{MOE} {precision}")
    chunks = wrap_chunks(made.config, made.plan, [made.adapted(SpanRecorder())], made.groups.collection)
    (copied,) = [p for name, p in chunks[0].named_parameters() if name.endswith("word_embeddings.weight")]
    copied.shared = True  # megatron-core's mark of a copy, as of tied weights on the last of several stages
    optimizer = make_optimizer(made.config, made.plan, chunks, made.groups.collection)
    norms = [float(p.float().norm()) for p in chunks[0].parameters() if p is not copied]
    found = MegatronLayerwiseOptimizer(optimizer, chunks, clip_grad=1.0).parameter_norm()
    assert found == pytest.approx(math.hypot(*norms), rel=1e-5)


class CountsByGroup(torch.optim.Optimizer):
    """An Adam that counts as the fused ones of Transformer Engine and apex: one step of each group with parameters per call."""

    def __init__(self, groups: list[dict[str, Any]], on_device: bool) -> None:
        super().__init__([torch.empty(0)], {})
        self.param_groups, self.on_device = groups, on_device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            if self.on_device:  # added to in place, where the count must not reach the host
                group.setdefault("step", torch.zeros((), dtype=torch.int)).add_(1)
            else:
                group["step"] = group.get("step", 0) + 1
            steps, (first, second) = int(group["step"]), group["betas"]
            for shard in group["params"]:
                state = self.state[shard]
                if not state:
                    state |= {name: torch.zeros_like(shard) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(shard.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(shard.grad, shard.grad, value=1 - second)
                root = (state["exp_avg_sq"] / (1 - second**steps)).sqrt() + group["eps"]
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.addcdiv_(state["exp_avg"] / (1 - first**steps), root, value=-group["lr"])


@pytest.mark.parametrize("on_device", [False, True])
def test_an_optimizer_that_counts_by_group_counts_steps_of_the_model(on_device: bool) -> None:
    """Each layer is corrected for the bias of as many steps as the model has made, and a checkpoint can say how many."""
    made = small(f"{MOE} {SHARED}")
    (reference, whole), (chunk, optimizer) = made.wrapped(), made.wrapped()
    for each in (whole, optimizer):
        for inner in each.chained_optimizers:
            inner.optimizer = CountsByGroup(inner.optimizer.param_groups, on_device)
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], made.config.optimizer.clip_grad)
    for seed, order in enumerate(ORDERS):
        run_backward(reference, seed)
        whole.zero_grad()
        whole.step()
        run_backward(chunk, seed)
        optimizer.zero_grad()
        layerwise.prepare()
        for part in order:
            layerwise.step(part)
        layerwise.publish()
        expected = dict(reference.named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in chunk.named_parameters())
        assert step_count(optimizer) == step_count(whole) == seed + 1


def test_gradients_that_stand_apart_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision-aware optimizer reads `decoupled_grad`, whose type may be another than the shard's."""
    made = small(MOE)
    chunk, optimizer = made.wrapped()
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], 1e-3)
    run_backward(chunk, 0)
    for inner in optimizer.chained_optimizers:
        monkeypatch.setattr(inner.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", True)
    norm = layerwise.prepare().norm
    shards = [shard for inner in optimizer.chained_optimizers for shard in inner.get_parameters()]
    assert all(shard.grad is None for shard in shards)
    clipped = sum(float(shard.decoupled_grad.square().sum()) for shard in shards) ** 0.5
    assert norm > 1e-2 and clipped == pytest.approx(1e-3, rel=1e-3)


def test_weights_that_are_no_views_of_the_gathered_buffer_are_copied_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """mxfp8 weights, whose buffer is that of the gradients: megatron-core has a copy of its own for them."""
    made = small(MOE)
    chunk, optimizer = made.wrapped()
    layerwise, called = MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0), []
    for inner in optimizer.chained_optimizers:
        monkeypatch.setattr(inner.config, "reuse_grad_buf_for_mxfp8_param_ag", True)
        for name in ("_copy_main_params_to_param_buffer", "_copy_main_params_to_model_params"):
            monkeypatch.setattr(inner, name, lambda name=name: called.append(name))
    run_backward(chunk, 0)
    layerwise.prepare()
    for part in layerwise.parts:
        layerwise.step(part)
    layerwise.publish()
    assert called == ["_copy_main_params_to_param_buffer"] * len(optimizer.chained_optimizers)


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


def test_the_host_waits_once_for_the_number_of_zeros() -> None:
    chunk, optimizer = small(MOE).wrapped()
    run_backward(chunk, 0)
    waits = []
    for counts in (False, True):
        layerwise, device = MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0, counts), DeviceMode()
        with device:
            layerwise.prepare()
        waits.append(len(device.waits))
    assert waits[1] == waits[0] + 1


def test_zero_grad_clears_every_gradient() -> None:
    made = small(MOE)
    chunk, optimizer = made.wrapped()
    layerwise = MegatronLayerwiseOptimizer(optimizer, [chunk], 1.0)
    run_backward(chunk, 0)
    layerwise.prepare()
    layerwise.zero_grad()
    assert not any(parameter.main_grad.any() for parameter in chunk.parameters())


@pytest.mark.parametrize("loss", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("norm", [1.0, math.nan, math.inf])
def test_weights_move_where_loss_and_norm_are_finite(loss: float, norm: float) -> None:
    state = UpdateState(loss=loss, gradients=PreparedGradients(norm, None))
    assert state.moves_weights == (loss == norm == 1.0)


def test_parts_are_sorted_by_depth() -> None:
    assert sorted(["head", "L10", "L9", "embedding"], key=part_order) == ["embedding", "L9", "L10", "head"]
