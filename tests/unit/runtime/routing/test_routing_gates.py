"""Tests of the routing gates: decisions against slow twins and megatron-core, the layer around them, the flags they refuse."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron.training.cli.config import MoEConfig
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.gates import GATE_FACTS, check_gate, require_partitionable
from moe_overlap.plan.overlap import Gate as GateName
from moe_overlap.runtime.routing.gate import gating_linear
from moe_overlap.runtime.routing.gates import GATES, RandomGate
from moe_overlap.runtime.routing.state import DrawClock, fold
from tests.unit.runtime.routing import reference
from tests.unit.runtime.routing.routing_cases import (
    EXPERTS,
    HIDDEN,
    SWITCH,
    config,
    gate,
    groups,
    integers,
    normal,
    route,
)

SEQUENCE, SAMPLES = 5, 6
VARIANTS = [
    {"moe_router_topk": 1},
    {"moe_router_topk": 3},
    {"moe_router_topk": 4, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_topk": 2, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_router_topk": 2, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "add_bias_linear": True},
    {
        "moe_router_topk": 2,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid",
    },
]


def in_drop_order(x_SBE: torch.Tensor) -> list:
    return x_SBE.transpose(0, 1).flatten(0, 1).tolist()


@pytest.mark.parametrize("fields", VARIANTS)
@pytest.mark.parametrize("precision", ["fp32", "fp64", None])
def test_topk_without_capacity_is_megatron_cores_router(fields: dict, precision: str | None) -> None:
    fields = fields | {"moe_router_dtype": precision, "params_dtype": torch.bfloat16, "bf16": True}
    stock, ours = TopKRouter(config(**fields), groups()), gate("topk", **fields)
    ours.load_state_dict(stock.state_dict())
    if stock.expert_bias is not None:
        for router in (stock, ours):
            router.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    answers = []
    for router in (stock, ours):
        hidden = normal(SEQUENCE, SAMPLES, HIDDEN).bfloat16().requires_grad_()
        probs, routed = router(hidden)
        (probs * normal(*probs.shape)).sum().backward()
        answers.append((routed, probs, hidden.grad, router.weight.grad))
    assert torch.equal(answers[0][0], answers[1][0])
    for expected, mine in zip(answers[0][1:], answers[1][1:], strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(
            mine.float(), expected.float(), rtol=1e-2 if mine.dtype == torch.bfloat16 else 1e-6, atol=1e-6
        )


def test_switch_is_the_argmax_weighed_by_its_softmax() -> None:
    logits = normal(SEQUENCE, SAMPLES, EXPERTS)
    routed = route(gate("switch"), logits, [SAMPLES])
    best = torch.softmax(logits, -1).max(-1)
    assert torch.equal(routed.map.int().argmax(-1), best.indices) and (routed.map.sum(-1) == 1).all()
    torch.testing.assert_close(routed.probs.sum(-1), best.values)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_batch_prioritized_equals_the_slow_twin(topk: int, factor: float, score: str) -> None:
    fields = {"moe_router_topk": topk, "moe_router_score_function": score, "moe_expert_capacity_factor": factor}
    made, logits = (
        gate("batch_prioritized", **fields),
        normal(SEQUENCE, SAMPLES, EXPERTS) + torch.linspace(0, 1, EXPERTS),
    )
    logits[1, 2] = logits[3, 0]  # equal priorities
    routed = route(made, logits, [SAMPLES])
    wanted = route(gate("topk", **(fields | {"moe_expert_capacity_factor": None})), logits, [SAMPLES]).map
    scores = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    if score == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    capacity = moe_utils.get_capacity(SEQUENCE * SAMPLES * topk, EXPERTS, factor)
    priority = in_drop_order((scores * wanted).sum(-1))
    assert in_drop_order(routed.map) == reference.dropped_by_priority(in_drop_order(wanted), priority, capacity)
    assert 0 < routed.map.sum() < wanted.sum()
    positional = route(gate("topk", **fields), logits, [SAMPLES]).map
    assert torch.equal(positional.sum((0, 1)), routed.map.sum((0, 1))) and not torch.equal(positional, routed.map)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 99.0])
def test_expert_choice_equals_the_slow_twin(factor: float) -> None:
    made, logits = gate("expert_choice", moe_expert_capacity_factor=factor), normal(SEQUENCE, SAMPLES, EXPERTS)
    logits[1, 2] = logits[3, 0]
    routed = route(made, logits, [SAMPLES])
    capacity = moe_utils.get_capacity(SEQUENCE * SAMPLES * 2, EXPERTS, factor)
    scores = torch.softmax(logits, -1)
    assert in_drop_order(routed.map) == reference.chosen_by_experts(in_drop_order(scores), capacity)
    assert routed.state.used_E.tolist() == [min(capacity, SEQUENCE * SAMPLES)] * EXPERTS
    torch.testing.assert_close(routed.probs, scores * routed.map)


@pytest.mark.parametrize(("name", "kind"), [("random", 0), ("hash", 1)])
def test_draws_equal_the_slow_twin(name: str, kind: int) -> None:
    made = gate(name, moe_router_topk=3)
    routed = route(made, normal(SEQUENCE, SAMPLES, EXPERTS), [2, 4], seed=7, micro_batch=5)
    key = fold(fold(kind, 7), 1)
    for position in range(SEQUENCE):
        for sample in range(SAMPLES):
            number = sample + 5 * SAMPLES if name == "random" else 0
            expected = reference.drawn(key, position, number, 3, EXPERTS)
            assert set(routed.map[position, sample].nonzero().flatten().tolist()) == expected


def test_draws_differ_where_they_should() -> None:
    logits = normal(64, 4, EXPERTS)
    first = route(gate("random"), logits, [4]).map
    other_layer = gate("random")
    other_layer.set_layer_number(2)
    for other in (
        route(gate("random"), logits, [4], seed=1),
        route(gate("random"), logits, [4], micro_batch=1),
        route(other_layer, logits, [4]),
    ):
        assert (other.map != first).any(-1).float().mean() > 0.8
    assert (first[:, 0] != first[:, 1]).any() and (first[0] != first[1]).any()
    assert torch.equal(
        route(gate("random"), logits[:, 2:], [2], micro_batch=1).map, first[:, 2:]
    )  # by sample, not batch
    load = route(gate("random"), normal(512, 16, EXPERTS), [16]).map.sum((0, 1)) / (512 * 16 * 2 / EXPERTS)
    assert load.min() > 0.9 and load.max() < 1.1
    fixed = route(gate("hash"), logits, [4]).map
    assert torch.equal(fixed, route(gate("hash"), logits * 2, [4], micro_batch=3).map)
    assert torch.equal(fixed[:, 0], fixed[:, 1])


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_positions_of_a_rank_are_those_of_the_sequence(rank: int, size: int) -> None:
    made = gate("hash")
    made.config.sequence_parallel = size > 1
    made.tp_group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    assert made.positions(4).tolist() == list(range(rank * 4, rank * 4 + 4))
    seen = []
    for context_rank in range(2):
        made.cp_group = SimpleNamespace(rank=lambda r=context_rank: r, size=lambda: 2)
        for tensor_rank in range(size):
            made.tp_group = SimpleNamespace(rank=lambda r=tensor_rank: r, size=lambda: size)
            seen += made.positions(8 // size).tolist()
    assert seen == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]


def test_random_needs_a_clock_only_without_a_state() -> None:
    hidden = integers(SEQUENCE, SAMPLES, HIDDEN)
    with pytest.raises(AssertionError, match="pass it a clock"):
        gate("random")(hidden)
    clock = DrawClock(seed=3)
    spec = ModuleSpec(module=RandomGate, params={"clock": clock})
    made = build_module(spec, config=config(), pg_collection=groups())
    first = made(hidden)[1]
    assert torch.equal(first, made(hidden)[1])
    clock.micro_batch = 1
    assert not torch.equal(first, made(hidden)[1])
    assert torch.equal(made(hidden)[1], made.route(hidden, made.begin(SEQUENCE, SAMPLES, seed=3, micro_batch=1), 0)[1])


@pytest.mark.parametrize("name", GATES)
def test_every_gate_learns(name: str) -> None:
    made = gate(name, moe_expert_capacity_factor=1.0)
    made.clock = DrawClock()
    hidden = normal(SEQUENCE, SAMPLES, HIDDEN).requires_grad_()
    probs, routed = made(hidden)
    assert probs.shape == routed.shape == (SEQUENCE * SAMPLES, EXPERTS) and routed.dtype == torch.bool
    assert not probs[~routed].any()
    (probs * normal(*probs.shape)).sum().backward()
    assert made.weight.grad.any() and hidden.grad.any()


def test_gating_without_transformer_engine_and_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    hidden, weight, bias = normal(3, 4, HIDDEN), normal(EXPERTS, HIDDEN, seed=1), normal(EXPERTS, seed=2)
    hidden, weight, bias = (x.double().requires_grad_() for x in (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda *x: gating_linear(*x, torch.float64), (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda *x: gating_linear(*x, None, torch.float64), (hidden, weight))
    called = []

    def recorded(*arguments):
        called.append(arguments[-1])
        return gating_linear(*arguments)

    GATES["topk"](config=config(moe_router_dtype="fp32"), pg_collection=groups(), linear=recorded)(normal(3, 4, HIDDEN))
    assert called == [torch.float32]


CONFLICTS = [
    ("switch", {}, "--moe-router-topk 2: the switch gate sends a token to one expert; add --moe-router-topk 1"),
    ("switch", {"moe_router_topk": 1}, "--moe-gate switch: weighs by the softmax .* add --moe-router-pre-softmax"),
    ("switch", SWITCH | {"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
    ("switch", SWITCH | {"moe_input_jitter_eps": 0.01}, "--moe-input-jitter-eps 0.01: .* drop the flag"),
    ("topk", {"moe_router_force_load_balancing": True}, "--moe-router-force-load-balancing: .* --moe-gate random"),
    ("topk", {"moe_router_load_balancing_type": ("sinkhorn",)}, "--moe-router-load-balancing-type sinkhorn"),
    ("batch_prioritized", {}, "--moe-gate batch_prioritized: .* add --moe-expert-capacity-factor"),
    ("expert_choice", {}, "--moe-gate expert_choice: .* add --moe-expert-capacity-factor"),
    ("random", {"moe_aux_loss_coeff": (0.01,)}, "--moe-aux-loss-coeff 0.01: balancing losses do not steer"),
    ("hash", {"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias: a bias does not steer"),
    ("random", {"moe_router_num_groups": 2}, "--moe-router-num-groups 2: --moe-gate random knows no groups"),
    (
        "expert_choice",
        {"moe_expert_capacity_factor": 1.0, "moe_router_score_function": "sigmoid"},
        "--moe-router-score-function sigmoid: --moe-gate expert_choice weighs by softmax",
    ),
    (
        "batch_prioritized",
        {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
        "--moe-token-drop-policy position: --moe-gate batch_prioritized drops by the score of the token",
    ),
    ("top2", {}, "--moe-gate top2: no such gate; use topk, switch"),
]


@pytest.mark.parametrize(("name", "fields", "message"), CONFLICTS)
def test_flags_that_disagree_are_refused(name: str, fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gate(name, MoEConfig(num_experts=8, **fields))


def test_drop_policy_disagrees_only_when_written() -> None:
    flags = MoEConfig(num_experts=8, moe_expert_capacity_factor=1.0)
    check_gate("topk", flags)
    check_gate("topk", MoEConfig(num_experts=8, moe_expert_capacity_factor=1.0, moe_token_drop_policy="position"))
    with pytest.raises(ConfigError, match="--moe-token-drop-policy probs: --moe-gate topk drops by position"):
        check_gate("topk", flags, flags={"--moe-token-drop-policy"})


def test_a_gate_checks_the_configuration_it_is_built_from() -> None:
    with pytest.raises(ConfigError, match="--moe-router-topk 2: the switch gate"):
        GATES["switch"](config=config(), pg_collection=groups())
    with pytest.raises(ConfigError, match="--moe-input-jitter-eps"):
        gate("topk", moe_input_jitter_eps=0.1)


def test_ranges() -> None:
    for word in ("experts", "after"):
        for name in GATES:
            require_partitionable(name, word)
    require_partitionable("topk", "around")
    with pytest.raises(ConfigError, match="--moe-overlap-range around: the gate batch_prioritized sorts the tokens"):
        require_partitionable("batch_prioritized", "around")


def test_names_are_those_of_the_plan_and_need_no_torch() -> None:
    assert tuple(GATES) == tuple(GATE_FACTS) == GateName.__args__
    code = "import sys, moe_overlap.plan.gates; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", GATES)
def test_megatron_cores_layer_runs_with_every_gate(name: str) -> None:
    """Its dispatcher takes the maps as they are: the output is the weighed sum over the experts."""
    fields = (SWITCH if name == "switch" else {}) | {"moe_expert_capacity_factor": 0.75}
    sizes = config(**fields, moe_token_dispatcher_type="alltoall", moe_ffn_hidden_size=HIDDEN)
    everyone = groups()
    everyone.ep = everyone.expt_tp = everyone.expt_dp = everyone.tp_ep = everyone.tp
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    parts = dataclasses.replace(spec.submodules, router=ModuleSpec(GATES[name], params={"clock": DrawClock()}))
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    layer = MoELayer(sizes, parts, layer_number=1, pg_collection=everyone)
    hidden = normal(SEQUENCE, SAMPLES, HIDDEN)
    output, _ = layer(hidden)
    probs, routed = layer.router(hidden)
    rows = hidden.reshape(-1, HIDDEN)
    expected = torch.zeros_like(rows)
    for expert, module in enumerate(layer.experts.local_experts):
        answer, _ = module(rows[routed[:, expert]], probs[routed[:, expert], expert])
        expected[routed[:, expert]] += answer
    torch.testing.assert_close(output.reshape(-1, HIDDEN), expected)
