"""Routing partition by partition gives the integers of routing at once; what needs the whole micro-batch refuses."""

from __future__ import annotations

import math

import pytest
import torch

from moe_overlap.describe.errors import ConfigError
from moe_overlap.runtime.routing.gates import GATES
from moe_overlap.runtime.routing.state import expert_slots, sample_major
from tests.unit.runtime.routing.routing_cases import (
    EXPERTS,
    HIDDEN,
    PARTITIONABLE,
    SWITCH,
    cuts,
    gate,
    integers,
    normal,
    route,
)

SEQUENCE, SAMPLES = 7, 9
FACTORS = (0.5, 1.0, 1.25, None)
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES = [
    *(("topk", {"moe_router_topk": k}) for k in (1, 2, 3, 4)),
    ("topk", {"moe_router_topk": 2, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5}),
    ("topk", {"moe_router_topk": 2, "moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    ("topk", {"moe_router_topk": 3, **SIGMOID}),
    ("topk", {"moe_router_topk": 2, "moe_router_num_groups": 4, "moe_router_group_topk": 2, **SIGMOID}),
    ("switch", SWITCH),
    *((name, {"moe_router_topk": k}) for name in ("random", "hash") for k in (1, 3)),
]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("name", "fields"), CASES)
def test_equals_the_whole(name: str, fields: dict, factor: float | None) -> None:
    made = gate(name, moe_expert_capacity_factor=factor, **fields)
    if made.expert_bias is not None:
        made.expert_bias.copy_(torch.linspace(-0.4, 0.4, EXPERTS))
    logits = normal(SEQUENCE, SAMPLES, EXPERTS) + torch.linspace(0, 1, EXPERTS)
    whole = route(made, logits, [SAMPLES], micro_batch=3)
    assert whole.map.sum() == SEQUENCE * SAMPLES * made.topk or factor is not None
    if factor == 0.5:
        assert whole.map.sum() < SEQUENCE * SAMPLES * made.topk
    for sizes in [*(cuts(SAMPLES, k) for k in range(2, 9)), [4, 0, 4, 1], [0, 9]]:
        parts = route(made, logits, sizes, micro_batch=3)
        assert torch.equal(parts.map, whole.map), sizes
        assert torch.equal(parts.probs, whole.probs), sizes
        assert torch.equal(parts.state.used_E, whole.state.used_E) and parts.state.is_complete
        assert torch.equal(filled_slots(parts, sizes), filled_slots(whole, [SAMPLES]))


def filled_slots(routed, sizes: list[int]) -> torch.Tensor:
    """Slot of each kept token from what its partition found: [B · S, E]."""
    parts = []
    for entry, part in zip(routed.state.entries, routed.map.split(sizes, dim=1), strict=True):
        parts.append(expert_slots(sample_major(part.reshape(-1, EXPERTS), part.shape[1]), entry.used_E))
    return torch.cat(parts)


@pytest.mark.parametrize("name", PARTITIONABLE)
def test_hidden_states_and_gradients_are_exact_on_integers(name: str) -> None:
    hidden = integers(SEQUENCE, SAMPLES, HIDDEN)
    answers = []
    for sizes in ([SAMPLES], [2, 2, 2, 2, 1], [5, 4]):
        made = gate(name, moe_expert_capacity_factor=1.0)
        x = hidden.clone().requires_grad_()
        state = made.begin(SEQUENCE, SAMPLES, len(sizes))
        maps = []
        for partition, part in enumerate(x.split(sizes, dim=1)):
            probs, routed = made.route(part, state, partition)
            (probs * 3).sum().backward()
            maps.append(routed.reshape(SEQUENCE, sizes[partition], EXPERTS))
        answers.append((torch.cat(maps, 1), x.grad, made.weight.grad))
    for maps, grad, weight_grad in answers[1:]:
        assert torch.equal(maps, answers[0][0]) and torch.equal(grad, answers[0][1])
        torch.testing.assert_close(weight_grad, answers[0][2], rtol=1e-5, atol=1e-6)


def test_a_share_of_the_capacity_per_partition_differs() -> None:
    """The negative control: what naive micro-batching does (Lancet, figure 5b)."""
    made = gate("topk", moe_expert_capacity_factor=1.0)
    logits = normal(SEQUENCE, SAMPLES, EXPERTS) + torch.linspace(0, 1, EXPERTS)
    whole = route(made, logits, [SAMPLES])
    for partitions in range(2, 9):
        naive = []
        for part in logits.split(cuts(SAMPLES, partitions), dim=1):
            naive.append(route(made, part, [part.shape[1]]).map)  # each computes its capacity from its own tokens
        assert not torch.equal(torch.cat(naive, 1), whole.map)


def test_no_more_rows_are_routed_than_tokens_choose_and_experts_take() -> None:
    made = gate("topk", moe_expert_capacity_factor=1.25)
    state, chosen = made.begin(SEQUENCE, SAMPLES, 2), SEQUENCE * SAMPLES * made.topk
    assert made.most_rows(2 * SEQUENCE, state) == 2 * SEQUENCE * made.topk
    scarce = gate("topk", moe_expert_capacity_factor=0.5)
    assert scarce.most_rows(SEQUENCE * SAMPLES, scarce.begin(SEQUENCE, SAMPLES, 1)) < chosen


def test_position_by_position_order_would_differ() -> None:
    """Why tokens are counted sample by sample: megatron-core's order makes a partition of samples no prefix."""
    made = gate("topk", moe_expert_capacity_factor=0.5)
    logits = normal(SEQUENCE, SAMPLES, EXPERTS)
    whole = route(made, logits, [SAMPLES])
    free = route(gate("topk"), logits, [SAMPLES]).map.reshape(-1, EXPERTS)
    capacity = math.ceil(SEQUENCE * SAMPLES * 2 / EXPERTS * 0.5)
    strided = free & (free.cumsum(0) <= capacity)
    assert torch.equal(strided.sum(0), whole.map.sum((0, 1)))
    assert not torch.equal(strided, whole.map.reshape(-1, EXPERTS))


def test_a_batch_of_one_and_one_expert_for_all() -> None:
    made = gate("topk", moe_expert_capacity_factor=1.0)
    one = route(made, normal(SEQUENCE, 1, EXPERTS), [1])
    assert torch.equal(one.map, route(made, normal(SEQUENCE, 1, EXPERTS), [0, 1]).map)
    logits = torch.zeros(SEQUENCE, SAMPLES, EXPERTS)
    logits[..., 2], logits[..., 5] = 9.0, 8.0
    crowded = route(made, logits, [2, 2, 2, 2, 1])
    capacity = math.ceil(SEQUENCE * SAMPLES * 2 / EXPERTS)
    assert crowded.map.sum((0, 1)).tolist() == [0, 0, capacity, 0, 0, capacity, 0, 0]
    assert crowded.map[:, :2, 2].all() and not crowded.map[:, -1].any()


@pytest.mark.parametrize("name", ["batch_prioritized", "expert_choice"])
def test_what_needs_the_whole_micro_batch_refuses(name: str) -> None:
    made = gate(name, moe_expert_capacity_factor=1.0)
    assert not made.partitionable_before
    with pytest.raises(ConfigError, match=f"--moe-overlap-range around: the gate {name} .* use after or experts"):
        made.begin(SEQUENCE, SAMPLES, 2)


def test_partitions_are_declared() -> None:
    assert [name for name, made in GATES.items() if made.partitionable_before] == list(PARTITIONABLE)


def test_order_of_partitions_is_checked() -> None:
    made, logits = gate("topk"), normal(SEQUENCE, SAMPLES, EXPERTS)
    state = made.begin(SEQUENCE, SAMPLES, 2)
    with pytest.raises(AssertionError, match="partition 1 after 0 of 2"):
        made.route_logits(logits, state, 1)
    made.route_logits(logits[:, :4], state, 0)
    with pytest.raises(AssertionError, match="ends at sample 5 of 9"):
        made.route_logits(logits[:, :1], state, 1)
