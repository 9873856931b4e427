"""What a backward pass computes in front of its gradient sum, which comes from the host: closed form against the list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.plan import Offload
from moe_overlap.tuner.capture.graph import CapturedModel, Part
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.layer import lead_seconds
from moe_overlap.tuner.cost.simulate.step import simulate_step
from tests.validation.golden_graphs import golden_graphs
from tests.validation.golden_prices import DENSE, EIGHT, LATENT, MOE, SHARDED

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MICRO_BATCH = 1


def graphs_that_say_what_runs_again(*given: Any, **named: Any) -> dict[int, CapturedModel]:
    """In graphs written by hand all that is recomputed stands in front, and is not told apart."""
    found = golden_graphs(*given, **named)
    return {index: replace(graph, parts=tuple(map(_told_apart, graph.parts))) for index, graph in found.items()}


def _told_apart(part: Part) -> Part:
    again = range(forward := sum(op.phase == "forward" for op in part.ops), 2 * forward)
    is_full = part.variant == "full"
    ops = tuple(replace(op, is_recomputed=is_full and place in again) for place, op in enumerate(part.ops))
    return replace(part, ops=ops)


def list_of(words: str) -> StagePrices:
    """The list of the only stage, whose gradients are on the host, with its prices."""
    here = problem_of(words.split(), shipped_cluster("H100", 16), {"graphs": graphs_that_say_what_runs_again})
    (stage,) = here.plan.stages
    step = simulate_step(replace(here.plan, stages=(replace(stage, offload=Offload(gradients=1.0)),)), here)
    (prices,) = step.prices.values()
    return prices


def seconds_in_front(prices: StagePrices, part: str) -> float:
    """Seconds of a part's backward pass up to the first instruction that adds to its gradient."""
    seconds = 0.0
    for i in prices.made:
        operator = i.operator
        if operator.group != part or i.micro_batch != MICRO_BATCH or not operator.is_of_model:
            continue
        if operator.in_backward_pass:
            if any("gradient." in name for name in i.writes):
                return seconds
            seconds += prices.seconds(i)
    raise AssertionError(part)


@pytest.mark.parametrize("words", [f"{DENSE} {SHARDED}", f"{MOE} {EIGHT} {SHARDED}", f"{LATENT} {EIGHT} {SHARDED}"])
@pytest.mark.parametrize("again", ["", FULL])
def test_seconds_in_front_of_gradients_are_those_of_the_list(words: str, again: str) -> None:
    prices = list_of(f"{words} {again}")
    parts = [group for group in dict.fromkeys(i.operator.group for i in prices.made if i.micro_batch == 1) if group]
    setting, tables, costs = prices.priced.setting, prices.priced.family.tables, prices.priced.parts
    found = []
    for part in parts:
        row = prices.row(part)
        listed = seconds_in_front(prices, part)
        assert lead_seconds(tables[row], setting, costs[row]) == pytest.approx(listed, abs=1e-12), part
        found.append(listed)
    assert bool(again or "experts" in words) == (max(found) > 0)
