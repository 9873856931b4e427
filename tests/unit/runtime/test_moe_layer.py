"""Our transformer and MoE layers against megatron-core's: same weights, same numbers; the seams for other parts work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from moe_overlap.runtime.megatron_core.moe_layer import (
    RecordedAlltoAllDispatcher,
    RecordedLayer,
    RecordedMoELayer,
    adapt_layer,
)
from moe_overlap.runtime.spans import SpanRecorder
from tests.unit.runtime.one_process import MOE, SHARED, SIZES, loss_of, small

VARIANTS = {
    "moe": MOE,
    "shared expert": f"{MOE} {SHARED}",
    "shared expert with a gate, allgather": f"{MOE} {SHARED} --moe-shared-expert-gate --moe-token-dispatcher-type allgather",
    "first layer dense": f"{MOE} {SHARED} --moe-layer-freq [0,1]",
    "dense, upstream's defaults": f"{SIZES} --attention-dropout 0 --hidden-dropout 0",
    "upstream's defaults with experts": f"{SIZES} --attention-dropout 0 --hidden-dropout 0 --num-experts 4",
    "sigmoid, bias, groups": f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0",
    "full recompute": f"{MOE} {SHARED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "moe recompute": f"{MOE} {SHARED} --recompute-granularity selective --recompute-modules moe",
}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_megatron_core(name: str) -> None:
    made = small(VARIANTS[name])
    stock, ours = made.stock(), made.adapted(SpanRecorder())
    ours.load_state_dict(stock.state_dict())
    for seed in range(2):  # the second time with what the first left behind
        reference, loss = loss_of(stock, seed), loss_of(ours, seed)
        assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
        reference.backward()
        loss.backward()
    expected, mine = gradients(stock), gradients(ours)
    assert mine.keys() == expected.keys() and len(mine) > 10
    for parameter, gradient in expected.items():
        difference = (mine[parameter] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert difference < 1e-5, parameter


def test_layers_are_the_recorded_ones() -> None:
    model = small(f"{MOE} --moe-layer-freq [0,1]").adapted(SpanRecorder())
    dense, moe = model.decoder.layers
    assert type(dense) is type(moe) is RecordedLayer
    assert (dense.operator, moe.mlp.operator) == ("L0", "L1.moe")
    assert type(moe.mlp) is RecordedMoELayer and not isinstance(dense.mlp, MoELayer)
    assert type(moe.mlp.token_dispatcher) is RecordedAlltoAllDispatcher
    gathered = small(f"{MOE} --moe-token-dispatcher-type allgather").adapted(SpanRecorder())
    assert type(gathered.decoder.layers[0].mlp.token_dispatcher) is MoEAllGatherTokenDispatcher


class CountingDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's, counting its calls."""

    dispatched = 0

    def token_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        self.dispatched += 1
        return super().token_dispatch(*args, **kwargs)


class RoundRobinRouter(TopKRouter):
    """Token i goes to the experts i and i + 1, whatever it says."""

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        experts = logits.shape[-1]
        place = torch.arange(logits[..., 0].numel())
        chosen = torch.nn.functional.one_hot(torch.stack([place, place + 1], -1) % experts, experts).sum(1)
        return torch.softmax(logits.reshape(-1, experts), -1) * chosen, chosen.bool()


def test_dispatcher_and_router_can_be_replaced() -> None:
    made, recorder = small(f"{MOE} {SHARED}"), SpanRecorder()
    ours = adapt_layer(recorder, made.groups.collection)

    def adapt(spec: Any) -> Any:
        spec.submodules.mlp.submodules.router = RoundRobinRouter
        adapted = ours(spec)
        adapted.submodules.mlp.params["make_dispatcher"] = CountingDispatcher
        return adapted

    model = made.adapted(recorder, adapt)
    layers = [layer.mlp for layer in model.decoder.layers]
    assert all(type(layer.router) is RoundRobinRouter for layer in layers)
    counts: list[list[int]] = []
    for layer in layers:
        layer.experts.register_forward_pre_hook(lambda _module, inputs: counts.append(inputs[1].tolist()))
    loss_of(model).backward()
    assert [layer.token_dispatcher.dispatched for layer in layers] == [1, 1]
    assert counts == [[16, 16, 16, 16]] * 2  # 32 tokens, two experts each, evenly
    assert all(layer.router.weight.grad.norm() > 0 for layer in layers)


def test_nothing_of_a_micro_batch_is_kept() -> None:
    model = small(f"{MOE} {SHARED}").adapted(SpanRecorder())
    loss_of(model).backward()
    for layer in model.decoder.layers:
        assert layer.mlp._shared_input is None and layer.mlp._shared_output is None


def test_evaluation_drops_nothing_and_leaves_training_as_it_was() -> None:
    model = small(f"{MOE} {SHARED} --hidden-dropout 0.5 --attention-dropout 0.5").adapted(SpanRecorder())
    model.eval()
    with torch.no_grad():
        first, second = loss_of(model).item(), loss_of(model).item()
    assert first == second
    model.train()
    trained = [loss_of(model) for _ in range(2)]
    assert trained[0].item() != trained[1].item()
    assert all(loss.requires_grad for loss in trained)
