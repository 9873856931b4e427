"""Megatron-LM's overlap of two micro-batches: the closed form of a layer against its nodes, one after the other."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import pytest

from moe_overlap.api import predict
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.tuner.cost.layer import NodeSeconds, PartCost, PassCost, hide_all_to_alls, hide_in_nodes
from tests.unit.tuner.cost.test_cost_host import partly_concurrent
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand

OPTIONS: dict[str, Any] = {"graphs": by_hand, "constants": CONSTANTS}
LAYERS = 40
APART = partly_concurrent(0.0)
"""Computation and communication do not slow each other down."""


def scheduled_seconds(forward: PassCost, backward: PassCost, delays: bool) -> float:
    """Seconds that one more pair of layers takes, in the order of `TransformerLayerSchedulePlan.run`: two streams that wait."""
    f, b = forward.nodes, backward.nodes
    rest_f, rest_b = (each.device_seconds - each.nodes.experts for each in (forward, backward))
    late = (b.expert_gradients, b.other_gradients) if delays else (0.0, 0.0)
    computing = sending = 0.0
    ends: list[float] = []
    combined = attended = 0.0
    """Ends of the forward combine and of the backward attention of the pair before."""
    for _ in range(LAYERS):
        sending = combine_b = max(sending, attended) + backward.exchange_seconds - b.dispatch
        computing = attention_f = max(computing, combined) + rest_f
        computing = experts_b = max(computing, combine_b) + b.experts - late[0]
        sending = dispatch_f = max(sending, attention_f) + f.dispatch
        computing += late[0]
        sending = dispatch_b = max(sending, experts_b) + b.dispatch
        computing = experts_f = max(computing, dispatch_f) + f.experts
        sending = combined = max(sending, experts_f) + forward.exchange_seconds - f.dispatch
        computing = attended = max(computing, dispatch_b) + rest_b - late[1]
        computing += late[1]
        ends.append(computing)
    return (ends[-1] - ends[LAYERS // 2]) / (LAYERS - 1 - LAYERS // 2)


def a_pass(draw: random.Random, gradients: float) -> PassCost:
    experts, rest, dispatch, combine = (draw.choice((0.3, 1.0, 3.0)) * draw.random() for _ in range(4))
    return PassCost(
        device_seconds=experts + rest,
        host_seconds=0.0,
        exposed={"expert": dispatch + combine},
        exchange_seconds=dispatch + combine,
        nodes=NodeSeconds(
            dispatch=dispatch,
            experts=experts,
            expert_gradients=gradients * experts,
            other_gradients=gradients * rest,
        ),
    )


def test_a_layer_takes_what_its_nodes_take() -> None:
    draw = random.Random(3)
    gained = []
    for _ in range(200):
        forward, backward = a_pass(draw, 0.0), a_pass(draw, 0.5)
        cost = PartCost(forward=forward, backward=backward, provenance={})
        found = {}
        for delays in (False, True):
            hidden = hide_in_nodes(cost, APART, delays)
            assert hidden.seconds == pytest.approx(scheduled_seconds(forward, backward, delays))
            found[delays] = hidden.seconds
        # In whatever order, no computation and no communication runs twice at a time; and what is late is never in the way.
        assert hide_all_to_alls(cost, APART).seconds <= found[True] + 1e-12 <= found[False] + 2e-12
        gained.append(found[True] < 0.99 * found[False])
    assert sum(gained) > 20


def test_passes_that_run_alone_hide_nothing() -> None:
    """Of four micro-batches the first forward and the last backward pass have no other beside them, of one both."""
    draw = random.Random(7)
    cost = PartCost(forward=a_pass(draw, 0.0), backward=a_pass(draw, 0.5), provenance={})
    pair, plain = hide_in_nodes(cost, APART, True).seconds, cost.seconds
    assert pair < 0.95 * plain
    assert hide_in_nodes(cost, APART, True, 0.25).seconds == pytest.approx(0.75 * pair + 0.25 * plain)
    assert hide_in_nodes(cost, APART, True, 1.0).seconds == pytest.approx(plain)
    # On a host that is slower than the device a pass alone waits for the host, not for its all-to-alls besides.
    slow = dataclasses.replace(cost, forward=dataclasses.replace(cost.forward, host_seconds=2.0 * cost.forward.seconds))
    for hide in (partial(hide_in_nodes, delays=True), hide_all_to_alls):
        assert hide(slow, APART, unpaired=1.0).seconds == pytest.approx(slow.seconds)
        assert hide(slow, APART, unpaired=0.5).seconds <= slow.seconds


def test_a_single_stage_has_a_first_and_a_last_micro_batch() -> None:
    flags = "--pipeline-model-parallel-size 1 --expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm".split()
    few, many = (
        predict([*JOB, *flags, "--global-batch-size", str(batch)], shipped_cluster("H100", 64), **OPTIONS)
        for batch in (64, 64 * 16)
    )
    without = [word for word in flags if not word.startswith("--overlap")]
    plain = predict([*JOB, *without, "--global-batch-size", "64"], shipped_cluster("H100", 64), **OPTIONS)
    exposed = [each.breakdown["exposed_expert_seconds"] for each in (few, many, plain)]
    # One micro-batch overlaps with nothing; of sixteen one in all is exposed, and what is longer than computation.
    assert exposed[0] == pytest.approx(exposed[2], rel=1e-4) and exposed[2] * 0.999 < exposed[1] < 8 * exposed[2]


def test_a_part_that_sends_nothing_stays_what_it_is() -> None:
    one = PassCost(device_seconds=1.0, host_seconds=2.0)
    cost = PartCost(forward=one, backward=one, provenance={})
    assert hide_in_nodes(cost, APART, True) is cost


def test_a_slow_host_hides_what_it_launches_meanwhile() -> None:
    """Four times as slow as the device: its pace is that of all nodes."""
    draw = random.Random(5)
    forward, backward = a_pass(draw, 0.0), a_pass(draw, 0.5)
    slow = [dataclasses.replace(each, host_seconds=4 * each.device_seconds) for each in (forward, backward)]
    fast = [
        dataclasses.replace(
            each,
            device_seconds=4 * each.device_seconds,
            nodes=dataclasses.replace(each.nodes, experts=4 * each.nodes.experts),
        )
        for each in (forward, backward)
    ]
    of_host, of_device = (
        hide_in_nodes(PartCost(forward=one, backward=other, provenance={}), APART, False) for one, other in (slow, fast)
    )
    assert of_host.seconds == pytest.approx(of_device.seconds)
