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


def only_stage(flags: str) -> StagePrices:
    """The only stage of a job, with its instruction list, whose gradients are on the host."""
    problem = problem_of(flags.split(), shipped_cluster("H100", 16), {"graphs": graphs_that_say_what_runs_again})
    (stage,) = problem.plan.stages
    plan = replace(problem.plan, stages=(replace(stage, offload=Offload(gradients=1.0)),))
    (prices,) = simulate_step(plan, problem).prices.values()
    return prices


def seconds_in_front(prices: StagePrices, group: str) -> float:
    """Seconds of a parameter group's backward pass up to the first instruction that adds to its gradient."""
    seconds = 0.0
    for instruction in prices.instructions:
        operator = instruction.operator
        if operator.group != group or instruction.micro_batch != MICRO_BATCH or not operator.is_of_model:
            continue
        if operator.in_backward_pass:
            if any("gradient." in name for name in instruction.writes):
                return seconds
            seconds += prices.seconds(instruction)
    raise AssertionError(group)


@pytest.mark.parametrize("flags", [f"{DENSE} {SHARDED}", f"{MOE} {EIGHT} {SHARDED}", f"{LATENT} {EIGHT} {SHARDED}"])
@pytest.mark.parametrize("recomputation", ["", FULL])
def test_seconds_in_front_of_gradients_are_those_of_the_list(flags: str, recomputation: str) -> None:
    prices = only_stage(f"{flags} {recomputation}")
    computed = (
        instruction.operator.group for instruction in prices.instructions if instruction.micro_batch == MICRO_BATCH
    )
    setting, tables, costs = prices.priced.setting, prices.priced.family.tables, prices.priced.parts
    expected = {group: seconds_in_front(prices, group) for group in dict.fromkeys(computed) if group}
    for group, seconds in expected.items():
        row = prices.row(group)
        assert lead_seconds(tables[row], setting, costs[row]) == pytest.approx(seconds, abs=1e-12), group
    assert bool(recomputation or "experts" in flags) == (max(expected.values()) > 0)
