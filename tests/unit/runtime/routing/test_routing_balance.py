"""Balancing losses, z-loss and expert-bias counts: megatron-core's when whole, the same in partitions and in a recompute."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter

from tests.unit.runtime.routing import reference
from tests.unit.runtime.routing.routing_cases import EXPERTS, config, cuts, gate, groups, loss_scale, normal, route

SEQUENCE, SAMPLES = 6, 7
ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 1e-2,
}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES = {
    "batch": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "z": {"moe_z_loss_coeff": 1e-2},
    "all": ALL,
    "all, sigmoid and bias": ALL | SIGMOID,
    "all, pre-softmax, k 4": ALL | {"moe_router_topk": 4, "moe_router_pre_softmax": True},
}
WEIGHTS = normal(SEQUENCE, SAMPLES, EXPERTS, seed=99)


def logged() -> dict[str, float]:
    """Logged values since the last call."""
    values = {name: entry["values"].item() for name, entry in get_moe_layer_wise_logging_tracker().items()}
    get_moe_layer_wise_logging_tracker().clear()
    return values


def inputs(seed: int) -> torch.Tensor:
    return normal(SEQUENCE, SAMPLES, EXPERTS, seed=seed) + torch.linspace(0, 1, EXPERTS)


def padding() -> torch.Tensor:
    mask = torch.zeros(SEQUENCE, SAMPLES, dtype=torch.bool)
    mask[3:, 1], mask[1:, 6], mask[5, 2] = True, True, True
    return mask


def whole(router: TopKRouter, seed: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient of the logits after one micro-batch through `routing`."""
    logits = inputs(seed).requires_grad_()
    probs, _ = router.routing(logits, mask)
    (probs.reshape(WEIGHTS.shape) * WEIGHTS).sum().backward()
    return logits.grad


def in_partitions(made, seed: int, sizes: list[int], mask: torch.Tensor | None = None, recompute: bool = False):
    """The same through autograd segments: all forward passes, then backward from the last partition to the first."""
    state = made.begin(SEQUENCE, SAMPLES, len(sizes), padding_SB=mask)
    leaves = [part.clone().requires_grad_() for part in inputs(seed).split(sizes, dim=1)]
    if recompute:
        with torch.no_grad():
            for partition, leaf in enumerate(leaves):
                made.route_logits(leaf, state, partition)
        outs = [None] * len(sizes)
    else:
        outs = [made.route_logits(leaf, state, partition)[0] for partition, leaf in enumerate(leaves)]
    for partition in reversed(range(len(sizes))):
        out = outs[partition]
        if out is None:
            out = made.route_logits(leaves[partition], state, partition)[0]
        weights = WEIGHTS.split(sizes, dim=1)[partition]
        (out.reshape(weights.shape) * weights).sum().backward()
    return torch.cat([leaf.grad for leaf in leaves], dim=1)


def close(mine, expected, rel: float = 1e-6) -> None:
    assert (mine - expected).norm() <= rel * expected.norm()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_equals_megatron_core(name: str, scale: float) -> None:
    stock = TopKRouter(config(**CASES[name]), groups())
    stock.set_layer_number(1)
    ours = {partitions: gate("topk", **CASES[name]) for partitions in range(1, 9)}
    with loss_scale(scale):
        for seed in range(3):  # the global loss remembers earlier micro-batches
            expected, values = whole(stock, seed), logged()
            assert any(values.values())
            for partitions, made in ours.items():
                mine = in_partitions(made, seed, cuts(SAMPLES, partitions))
                close(mine, expected)
                assert logged() == pytest.approx(values, rel=1e-6)
    plain = whole(TopKRouter(config(), groups()), 2)
    assert (plain - expected).norm() > 1e-3 * scale * plain.norm()  # the losses are not lost in the rest
    if stock.local_tokens_per_expert is not None:
        for made in ours.values():
            assert torch.equal(made.local_tokens_per_expert, stock.local_tokens_per_expert)
            assert made.local_tokens_per_expert.sum() == 3 * SEQUENCE * SAMPLES * 2
    if stock.ga_steps is not None:
        for made in ours.values():
            assert torch.equal(made.global_tokens_per_expert, stock.global_tokens_per_expert) and made.ga_steps == 3


def test_padding_counts_in_no_loss() -> None:
    stock, mask = TopKRouter(config(**ALL), groups()), padding()
    stock.set_layer_number(1)
    expected, values = whole(stock, 0, mask), logged()
    for partitions in range(1, 9):
        made = gate("topk", **ALL)
        close(in_partitions(made, 0, cuts(SAMPLES, partitions), mask), expected)
        assert logged() == pytest.approx(values, rel=1e-6)


def test_padding_counts_in_no_bias() -> None:
    made, mask = gate("topk", **SIGMOID), padding()
    routed = route(made, inputs(0), cuts(SAMPLES, 3), padding_SB=mask)
    assert torch.equal(made.local_tokens_per_expert, routed.map[~mask].sum(0).float())


@pytest.mark.parametrize("factor", [0.5, 1.0, None])
def test_recompute_repeats_and_leaves_no_second_trace(factor: float | None) -> None:
    fields = ALL | SIGMOID | {"moe_expert_capacity_factor": factor}
    sizes = cuts(SAMPLES, 3)
    plain, twice = gate("topk", **fields), gate("topk", **fields)
    expected, values = in_partitions(plain, 0, sizes), logged()
    assert torch.equal(in_partitions(twice, 0, sizes, recompute=True), expected)
    assert logged() == values
    assert torch.equal(twice.local_tokens_per_expert, plain.local_tokens_per_expert)
    assert twice.ga_steps == 1


@pytest.mark.parametrize("name", ["topk", "batch_prioritized"])
def test_dropped_tokens_stay_in_the_losses_and_leave_the_bias(name: str) -> None:
    made = gate(name, **(ALL | SIGMOID | {"moe_expert_capacity_factor": 0.5}))
    free = gate("topk", **(ALL | SIGMOID))
    route(free, inputs(0), [SAMPLES])
    values = logged()
    routed = route(made, inputs(0), [SAMPLES])
    assert logged() == values
    assert torch.equal(made.local_tokens_per_expert, routed.map.sum((0, 1)).float())
    assert made.local_tokens_per_expert.sum() < free.local_tokens_per_expert.sum()


def test_values_are_those_of_the_slow_twins() -> None:
    made = gate("topk", **ALL)
    values = route(made, inputs(0), cuts(SAMPLES, 4)).state.totals.values
    scores = torch.softmax(inputs(0), -1)
    counts = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1).long()
    tokens = SEQUENCE * SAMPLES
    batch = reference.balance_loss(counts.sum((0, 1)).tolist(), scores.sum((0, 1)).tolist(), tokens, 2)
    each = [
        reference.balance_loss(counts[:, b].sum(0).tolist(), scores[:, b].sum(0).tolist(), SEQUENCE, 2)
        for b in range(SAMPLES)
    ]
    assert values["load_balancing_loss"].item() == pytest.approx(batch, rel=1e-6)
    assert values["global_load_balancing_loss"].item() == pytest.approx(batch, rel=1e-6)
    assert values["seq_load_balancing_loss"].item() == pytest.approx(sum(each) / SAMPLES, rel=1e-6)
    squares = reference.z_loss(inputs(0).reshape(-1, EXPERTS).tolist())
    assert values["z_loss"].item() == pytest.approx(squares, rel=1e-6)


def test_evaluation_and_the_first_pass_of_a_recompute_leave_no_trace() -> None:
    made = gate("topk", **(ALL | SIGMOID))
    with torch.no_grad():
        made.routing(inputs(0))
    made.eval()
    route(made, inputs(0), [SAMPLES])
    assert not any(logged().values()) and not made.local_tokens_per_expert.any() and made.ga_steps == 0


def test_backward_before_the_last_partition_is_an_error() -> None:
    made = gate("topk", **CASES["batch"])
    state = made.begin(SEQUENCE, SAMPLES, 2)
    logits = inputs(0)[:, :4].requires_grad_()
    probs, _ = made.route_logits(logits, state, 0)
    with pytest.raises(AssertionError, match="before the last partition"):
        probs.sum().backward()
