"""Tests of the router meters: a decision counts once, whole or in partitions, against a count made token by token."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from moe_overlap.runtime.routing.meter import RouterMeters
from tests.unit.runtime.routing.routing_cases import EXPERTS, HIDDEN, config, cuts, gate, groups, normal, route

SEQUENCE, SAMPLES = 7, 6
TOKENS = SEQUENCE * SAMPLES


def metered(router: torch.nn.Module) -> RouterMeters:
    """Meters on one router, as in a model of one layer."""
    model = torch.nn.Module()
    model.decoder = torch.nn.ModuleList([router])
    return RouterMeters([model], 1, EXPERTS, torch.device("cpu"))


def stock(**fields: object) -> TopKRouter:
    router = TopKRouter(config=config(moe_router_topk=2, **fields), pg_collection=groups())
    router.set_layer_number(1)
    router.weight.data = normal(*router.weight.shape, seed=3)
    return router


def token_by_token(logits: torch.Tensor) -> tuple[list[int], float]:
    """Choices by expert and mean entropy of softmax top-2, in plain Python."""
    chosen, entropy = [0] * EXPERTS, 0.0
    for row in logits.reshape(-1, EXPERTS).tolist():
        for expert in sorted(range(EXPERTS), key=lambda e: -row[e])[:2]:
            chosen[expert] += 1
        total = sum(math.exp(value) for value in row)
        entropy -= sum(math.exp(value) / total * math.log(math.exp(value) / total) for value in row)
    return chosen, entropy / TOKENS


def test_the_router_of_megatron_core() -> None:
    router = stock()
    meters, hidden = metered(router), normal(SEQUENCE, SAMPLES, HIDDEN)
    chosen, entropy = token_by_token(router.gating(hidden))
    for _ in range(2):
        router(hidden)
    with torch.no_grad():
        router(hidden)  # the first pass of a recompute, or an evaluation
    router.eval()
    router(hidden)
    (load,) = meters.collect(5, 6)
    assert (load.first_step, load.last_step, load.layer, load.tokens) == (5, 6, 0, 2 * TOKENS)
    assert load.load == tuple(2 * count for count in chosen) and not any(load.dropped)
    assert load.entropy == pytest.approx(entropy, rel=1e-5)
    assert meters.collect(7, 7) == []


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_drops_of_megatron_core(padded: bool, bias: bool) -> None:
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True} if bias else {}
    router = stock(moe_expert_capacity_factor=0.75, moe_pad_expert_input_to_capacity=padded, **fields)
    if bias:
        router.expert_bias.copy_(torch.linspace(-2, 2, EXPERTS))
    meters = metered(router)
    probs, _ = router(normal(SEQUENCE, SAMPLES, HIDDEN))
    (load,) = meters.collect(1, 1)
    assert load.load == tuple((probs != 0).sum(0).tolist())  # padding to capacity has no weight
    assert sum(load.load) + sum(load.dropped) == 2 * TOKENS and any(load.dropped)
    capacity = math.ceil(TOKENS * 2 / EXPERTS * 0.75)
    assert all(kept == capacity for kept, lost in zip(load.load, load.dropped, strict=True) if lost)


@pytest.mark.parametrize("name", ["topk", "random", "batch_prioritized", "expert_choice"])
def test_our_gates(name: str) -> None:
    made = gate(name, moe_router_topk=2, moe_expert_capacity_factor=0.5)
    meters, logits = metered(made), normal(SEQUENCE, SAMPLES, EXPERTS)
    whole = route(made, logits, [SAMPLES])
    (load,) = meters.collect(1, 1)
    assert load.load == tuple(whole.map.sum((0, 1)).tolist()) and load.tokens == TOKENS
    if name == "expert_choice":
        assert not any(load.dropped)  # nobody asked for a place
        return
    assert sum(load.load) + sum(load.dropped) == 2 * TOKENS and any(load.dropped)
    if name == "topk":
        chosen, entropy = token_by_token(logits)
        assert [kept + lost for kept, lost in zip(load.load, load.dropped, strict=True)] == chosen
        assert load.entropy == pytest.approx(entropy, rel=1e-5)
    if made.partitionable_before:
        for parts in (2, 4):
            route(made, logits, cuts(SAMPLES, parts))
            (cut,) = meters.collect(1, 1)
            assert (cut.load, cut.dropped, cut.tokens) == (load.load, load.dropped, load.tokens)
            assert cut.entropy == pytest.approx(load.entropy)


def test_what_is_routed_again_or_evaluated_counts_once() -> None:
    made = gate("topk", moe_router_topk=2)
    meters, logits = metered(made), normal(SEQUENCE, SAMPLES, EXPERTS)
    state = made.begin(SEQUENCE, SAMPLES)
    for _ in range(3):
        made.route_logits(logits, state, 0)
    route(made, logits, [SAMPLES], recording=False)
    made.eval()
    route(made, logits, [SAMPLES])
    (load,) = meters.collect(1, 1)
    assert load.tokens == TOKENS and sum(load.load) == 2 * TOKENS
