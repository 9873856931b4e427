"""Transformer Engine's own split of weight gradients, driven by the queue: stand-ins for its linears in a small model."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.weight_grad.queue import WeightGradQueue
from moe_overlap.runtime.weight_grad.split_linear import defer_weight_gradients, products_of
from tests.transformer_engine_stand_in import GroupedLinear, Linear
from tests.unit.runtime.one_process import MOE, loss_of, small

PLACES = ("linear_qkv", "linear_proj")


def model_of_linears(delayed: bool, fused: bool = False) -> torch.nn.Module:
    model = small(MOE).adapted(SpanRecorder())
    for layer in model.decoder.layers:
        for place in PLACES:
            old = getattr(layer.self_attention, place)
            outputs, inputs = old.weight.shape
            new = Linear(
                inputs,
                outputs,
                fuse_wgrad_accumulation=fused,
                bias=place == "linear_qkv",
                delay_wgrad_compute=delayed,
                device="cpu",
            )
            new.weight.data.copy_(old.weight.data)
            setattr(layer.self_attention, place, new)
    return model


def main_gradients(delayed: bool, deferred: bool, fused: bool = False, only: str = "") -> dict[str, torch.Tensor]:
    """Two micro-batches in DDP; where deferred, the gradients of both wait for the end of both."""
    model, queue = model_of_linears(delayed, fused), WeightGradQueue()
    if deferred:
        defer_weight_gradients(model, queue, lambda m: [p for p in products_of(m) if only in p[0]])
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, delay_wgrad_compute=deferred)
    ddp = DistributedDataParallel(model.config, ddp_config, model, pg_collection=small(MOE).groups.collection)
    with ddp.no_sync():
        for micro_batch in range(2):
            queue.begin_operator()
            loss_of(ddp, micro_batch).backward()
    for name in ("L0.attention.qkv.dW", "L1.attention.proj.dW") if deferred and not only else ():
        assert queue.run(name) == 2, "one entry for each backward pass"
    queue.run_all()
    queue.assert_empty()
    return {name: parameter.main_grad.clone() for name, parameter in ddp.named_parameters()}


@pytest.mark.parametrize("only", ["", "qkv"])
def test_the_queue_computes_what_the_library_puts_aside(only: str) -> None:
    at_once, later = main_gradients(False, False), main_gradients(True, True, only=only)
    assert at_once.keys() == later.keys()
    assert all(torch.equal(at_once[name], later[name]) for name in at_once)
    assert all(at_once[name].abs().sum() > 0 for name in at_once if "self_attention.linear" in name)


def test_fused_sums_reach_the_main_gradient_once() -> None:
    at_once, later = main_gradients(False, False), main_gradients(True, True, fused=True)
    assert all(torch.equal(at_once[name], later[name]) for name in at_once)


def test_a_grouped_linear_of_two_partitions_sums_both() -> None:
    torch.manual_seed(0)
    grouped = GroupedLinear(3, 4, 5, bias=False, delay_wgrad_compute=True)
    whole = GroupedLinear(3, 4, 5, bias=False)
    for weight, other in zip(grouped.weights, whole.weights, strict=True):
        weight.data.normal_()
        other.data.copy_(weight.data)
    queue = WeightGradQueue()
    defer_weight_gradients(grouped, queue, lambda module: [("L0.moe.experts.fc1.dW", module)])
    for splits in ([2, 0, 3], [1, 4, 0]):
        x = torch.randn(5, 4)
        for module in (grouped, whole):
            module(x.clone().requires_grad_(), splits)[0].square().sum().backward()
    assert all(weight.grad is None for weight in grouped.weights)
    queue.run_all()
    for weight, other in zip(grouped.weights, whole.weights, strict=True):
        assert torch.equal(weight.grad, other.grad)


def test_the_stand_in_knows_the_librarys_arguments_alone() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fuse'"):
        Linear(4, 4, fuse=True)
