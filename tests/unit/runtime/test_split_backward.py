"""Split backward passes in one process: the gradients of the undivided ones, bit by bit; what is refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.router import TopKRouter

from megatron.training.model.layers.local_modules import GroupedExperts
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import parse_operator
from moe_overlap.runtime.megatron_core.moe_layer import adapt_layer
from moe_overlap.runtime.routing.gates import TopKGate
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.weight_grad.queue import DeferralError, WeightGradQueue
from moe_overlap.runtime.weight_grad.split_linear import defer_weight_gradients, products_of
from tests.drained import drain_after_backward
from tests.unit.runtime.one_process import MOE, SHARED, SIZES, Small, loss_of, small

LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)
CASES = {
    "upstream defaults, tied": f"{SIZES} --attention-dropout 0 --hidden-dropout 0",
    "biases, every other layer dense": f"{SIZES} --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-layer-freq 2 "
    "--untie-embeddings-and-output-weights --moe-token-dispatcher-type alltoall",
    "shared expert": f"{MOE} {SHARED}",
    "gate in fp32, bf16": f"{MOE} --moe-router-dtype fp32 --bf16",
    "gate in fp64": f"{MOE} --moe-router-dtype fp64",
    "full recompute": f"{MOE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recomputed attention": f"{MOE} --recompute-granularity selective --recompute-modules core_attn",
    "recomputed experts": f"{MOE} {SHARED} --recompute-granularity selective --recompute-modules moe",
    "latent attention": f"{MOE.replace('--group-query-attention --num-query-groups 2', '')} {LATENT}",
}


def gradients(model: torch.nn.Module, queue: WeightGradQueue | None, passes: int = 2) -> dict[str, torch.Tensor | None]:
    """Sum over some micro-batches, put aside where there is a queue."""
    for micro_batch in range(passes):
        loss_of(model, micro_batch).backward()
        if queue is not None:
            queue.run_all()
            queue.assert_empty()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_bitwise(first: dict[str, torch.Tensor | None], second: dict[str, torch.Tensor | None]) -> None:
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        other = second[name]
        assert gradient is not None and other is not None, name
        assert torch.equal(gradient, other), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_undivided_backward(case):
    made = small(CASES[case])
    queue = WeightGradQueue()
    model = made.adapted(SpanRecorder())
    names = defer_weight_gradients(model, queue)
    assert all(str(parse_operator(name)) == name for name in names) and len(set(names)) == len(names)
    undivided = gradients(made.adapted(SpanRecorder()), None)
    assert_bitwise(undivided, gradients(model, queue))
    assert queue.peak_bytes > 0


def test_names_come_in_forward_order_and_a_tied_head_stays():
    made = small(f"{MOE} {SHARED} --moe-layer-freq 2")
    names = defer_weight_gradients(made.adapted(SpanRecorder()), WeightGradQueue())
    attention = [["L0.attention.qkv.dW", "L0.attention.proj.dW"], ["L1.attention.qkv.dW", "L1.attention.proj.dW"]]
    moe = ["L0.moe.gate.router.dW", "L0.moe.shared.fc1.dW", "L0.moe.shared.fc2.dW"]
    experts = ["L0.moe.experts.fc1.dW", "L0.moe.experts.fc2.dW"]
    dense = ["L1.mlp.fc1.dW", "L1.mlp.fc2.dW"]
    assert list(names) == [*attention[0], *moe, *experts, *attention[1], *dense, "head.loss.output.dW"]
    tied = small(MOE.replace("--untie-embeddings-and-output-weights", ""))
    names = defer_weight_gradients(tied.adapted(SpanRecorder()), WeightGradQueue())
    assert "head.loss.output.dW" not in names and "L1.moe.experts.fc2.dW" in names


def test_one_name_at_a_time_leaves_the_others_waiting():
    model = small(MOE).adapted(SpanRecorder())
    queue = WeightGradQueue()
    names = defer_weight_gradients(model, queue)
    loss_of(model).backward()
    weights = dict(model.named_parameters())
    proj, fc1 = weights["decoder.layers.0.self_attention.linear_proj.weight"], "mlp.experts.local_experts"
    assert proj.grad is None and weights["decoder.final_layernorm.weight"].grad is not None
    assert queue.run("L0.attention.proj.dW") == 1 and proj.grad is not None
    assert queue.run("L1.moe.experts.fc1.dW") == 4
    assert all(weights[f"decoder.layers.1.{fc1}.{e}.linear_fc1.weight"].grad is not None for e in range(4))
    with pytest.raises(DeferralError, match=r"head.loss.output.dW \(1\), L1.moe.experts.fc2.dW \(4\)"):
        queue.assert_empty()
    for name in names:
        queue.run(name)
    queue.assert_empty()


def changed(made: Small, change: Callable[[Any], None]) -> torch.nn.Module:
    """The model with parts of its MoE layers exchanged: `change` gets the MoE layer's submodules."""
    adapt = adapt_layer(SpanRecorder(), made.groups.collection)

    def adapted(spec):
        change(spec.submodules.mlp.submodules)
        return adapt(spec)

    return made.adapted(SpanRecorder(), adapted)


def grouped(made: Small) -> torch.nn.Module:
    """Experts as grouped products, whatever the machine."""

    def change(parts: Any) -> None:
        parts.experts.module = GroupedExperts

    return changed(made, change)


@pytest.mark.parametrize("flags", ["--moe-router-dtype fp32 --bf16", "--moe-router-dtype fp64"])
def test_a_gate_of_ours(flags):
    def change(parts: Any) -> None:
        parts.router = TopKGate

    made, queue = small(f"{MOE} {flags}"), WeightGradQueue()
    model = changed(made, change)
    assert "L0.moe.gate.router.dW" in defer_weight_gradients(model, queue)
    loss_of(model).backward()
    assert queue.run("L0.moe.gate.router.dW") == 1
    queue.run_all()
    model.zero_grad()
    assert_bitwise(gradients(changed(made, change), None), gradients(model, queue))


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_grouped_experts(precision):
    made = small(f"{MOE} {precision}")
    model, queue = grouped(made), WeightGradQueue()
    defer_weight_gradients(model, queue)
    loss_of(model).backward()
    assert queue.run("L0.moe.experts.fc1.dW") == 1, "one product for all experts"
    queue.run_all()
    model.zero_grad()
    assert_bitwise(gradients(grouped(made), None), gradients(model, queue))


def wrapped(made: Small, model: torch.nn.Module, delayed: bool = True) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, delay_wgrad_compute=delayed)
    core = model if hasattr(model, "decoder") else model.module
    return DistributedDataParallel(core.config, ddp, model, pg_collection=made.groups.collection)


def test_a_product_that_adds_to_the_main_gradient_itself(monkeypatch):
    """APEX's kernel, in torch: no gradient of its own may reach DDP beside it."""

    def accumulate(x_TI, dy_TO, main_OI):
        main_OI.add_(dy_TO.t().matmul(x_TI))

    kernel = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
    made, found = small(MOE), []
    for deferred in (False, True):
        model, queue = made.adapted(SpanRecorder()), WeightGradQueue()
        for module in model.modules():
            if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
                module.gradient_accumulation_fusion = True
        if deferred:
            defer_weight_gradients(model, queue)
        ddp = wrapped(made, model)
        for micro_batch in range(2):
            loss_of(ddp, micro_batch).backward()
            queue.run_all()
        found.append({name: parameter.main_grad for name, parameter in ddp.named_parameters()})
    assert_bitwise(found[0], found[1])
    assert all(gradient.abs().sum() > 0 for name, gradient in found[1].items() if "experts" not in name)


def test_ddp_without_its_half_of_the_bargain_is_noticed():
    made, queue = small(MOE), WeightGradQueue()
    model = made.adapted(SpanRecorder())
    defer_weight_gradients(model, queue)
    ddp = wrapped(made, model, delayed=False)
    loss_of(ddp).backward()
    with pytest.raises(DeferralError, match="head.loss.output.dW: DDP was made without delay_wgrad_compute"):
        queue.run_all()


def test_a_gradient_that_is_overwritten_before_its_turn_is_noticed():
    model, queue = small(MOE).adapted(SpanRecorder()), WeightGradQueue()
    defer_weight_gradients(model, queue)
    seen: list[torch.Tensor] = []

    def watch(_module, _inputs, output):
        output[0].register_hook(seen.append)

    model.decoder.layers[0].self_attention.linear_proj.register_forward_hook(watch)
    loss_of(model).backward()
    seen[0].mul_(2)
    with pytest.raises(DeferralError, match="L0.attention.proj.dW: its input or output gradient was overwritten"):
        queue.run_all()


def test_what_cannot_be_split_is_refused_by_name():
    model = small(MOE).adapted(SpanRecorder())
    model.decoder.layers[1].self_attention.linear_qkv = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="--defer-weight-gradients: L1.attention.qkv.dW is a torch.nn.*Linear, whose"):
        defer_weight_gradients(model, WeightGradQueue())


def test_a_gate_with_logits_of_its_own_and_frozen_weights_stay_as_they_are():
    class OwnGate(TopKRouter):
        def gating(self, input):
            return super().gating(input) * 1.0

    made, queue = small(MOE), WeightGradQueue()

    def change(parts: Any) -> None:
        parts.router = OwnGate

    def frozen() -> Any:
        model: Any = changed(made, change)
        model.decoder.layers[0].self_attention.linear_qkv.weight.requires_grad_(False)
        return model

    model = frozen()
    names = defer_weight_gradients(model, queue)
    assert {name for name, _ in products_of(model)} - set(names) == {
        "L0.moe.gate.router.dW",
        "L1.moe.gate.router.dW",
        "L0.attention.qkv.dW",
    }
    reference = gradients(frozen(), None)
    deferred = gradients(model, queue)
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert deferred.pop(qkv) is None and reference.pop(qkv) is None
    assert_bitwise(reference, deferred)


def test_dropout_draws_the_same_numbers():
    made = small(f"{SIZES} --num-experts 4 --moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights")
    found = []
    for deferred in (False, True):
        model, queue = made.adapted(SpanRecorder()), WeightGradQueue()
        if deferred:
            defer_weight_gradients(model, queue)
            drain_after_backward(model, queue)
        torch.manual_seed(7)
        found.append(gradients(model, None))
        queue.assert_empty()
    assert_bitwise(found[0], found[1])
