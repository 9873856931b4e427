"""The closed form of a step against the schedule, executed pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add

import numpy as np
import pytest

from moe_overlap.plan.lowering.pipeline_order import PipelineStep, interleaved, most_in_flight, one_f_one_b, paired
from moe_overlap.tuner.cost.pipeline import (
    PipelineRules,
    StageTimes,
    in_flight,
    lone_share,
    pipeline_seconds,
    spent_on,
    step_seconds,
    transfer_waits,
)


def closed(forward: list[float], backward: list[float], count: int, virtual: int, **edges: list[float]) -> float:
    """The closed form of a step; what first and last passes take beyond stable ones is 0 where it is not given."""
    times = [
        StageTimes(forward=f, backward=b, **{name: values[i] for name, values in edges.items()})
        for i, (f, b) in enumerate(zip(forward, backward, strict=True))
    ]
    return float(step_seconds(times, [count] * len(times), virtual))


def orders(stages: int, virtual: int, micro_batches: int) -> list[tuple[PipelineStep, ...]]:
    if virtual == 1:
        return [one_f_one_b(stages, stage, micro_batches) for stage in range(stages)]
    return [interleaved(stages, stage, virtual, micro_batches) for stage in range(stages)]


def scheduled_seconds(
    stages: int, virtual: int, micro_batches: int, forward: list[float], backward: list[float]
) -> float:
    """Seconds until the last pass ends: a pass starts when its stage is free and its input is there."""
    blocks = [[(step,) for step in order] for order in orders(stages, virtual, micro_batches)]
    return seconds_of_blocks(
        blocks,
        virtual,
        lambda stage, block: (forward if block[0].direction == "forward" else backward)[stage] / virtual,
    )


def seconds_of_blocks(
    blocks: Sequence[Sequence[Sequence[PipelineStep]]],
    virtual: int,
    seconds: Callable[[int, Sequence[PipelineStep]], float],
) -> float:
    """The same for blocks of passes, which hand on what they make when they end."""
    stages = len(blocks)
    ends: dict[tuple[int, PipelineStep], float] = {}
    free, places = [0.0] * stages, [0] * stages

    def ready(stage: int, step: PipelineStep) -> float | None:
        position = step.chunk * stages + stage + (-1 if step.direction == "forward" else 1)
        if not 0 <= position < stages * virtual:
            return 0.0
        return ends.get((position % stages, PipelineStep(step.direction, position // stages, step.micro_batch)))

    while any(places[stage] < len(blocks[stage]) for stage in range(stages)):
        for stage in range(stages):
            while places[stage] < len(blocks[stage]):
                block = blocks[stage][places[stage]]
                inputs = [ready(stage, step) for step in block]
                if None in inputs:
                    break
                free[stage] = max(free[stage], *inputs) + seconds(stage, block)  # type: ignore[type-var]
                ends |= {(stage, step): free[stage] for step in block}
                places[stage] += 1
    return max(free)


@pytest.mark.parametrize(
    ("stages", "virtual", "count"), [(1, 1, 1), (1, 1, 5), (2, 2, 8), (2, 8, 8), (4, 2, 16), (4, 4, 8), (8, 3, 32)]
)
@pytest.mark.parametrize("gained", [0.0, 0.2, 0.6])
def test_of_pairs_fill_and_drain_run_alone(stages: int, virtual: int, count: int, gained: float) -> None:
    """A pair is shorter than its two passes; the closed form takes the mean of all for each."""
    forward, backward = 1.0, 2.0
    alone, both = forward + backward, forward + backward - gained
    blocks = [paired(stages, stage, count, virtual) for stage in range(stages)]
    took = {("forward",): forward, ("backward",): backward, ("backward", "forward"): both}
    whole = seconds_of_blocks(blocks, virtual, lambda _, block: took[tuple(step.direction for step in block)] / virtual)
    share = lone_share(stages, virtual, count)
    mean = share * alone + (1.0 - share) * both
    found = closed([forward * mean / alone] * stages, [backward * mean / alone] * stages, count, virtual)
    assert found == pytest.approx(whole, rel=1e-9)
    assert share < 1.0 or count == 1


@pytest.mark.parametrize(
    ("stages", "virtual", "count"),
    [(1, 1, 4), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 16), (2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 4, 16), (3, 2, 9)],
)
def test_equal_stages_are_exact(stages: int, virtual: int, count: int) -> None:
    forward, backward = [1.0] * stages, [2.0] * stages
    assert closed(forward, backward, count, virtual) == pytest.approx(
        scheduled_seconds(stages, virtual, count, forward, backward)
    )


def errors(stages: int, virtual: int, rounds: float, spread: float) -> np.ndarray:
    """How far the closed form is from the schedule, as a share of it, where stages and their passes differ."""
    draw, found = np.random.default_rng(13), []
    for _ in range(25):
        forward = draw.uniform(1 - spread, 1 + spread, stages)
        backward = 2 * forward * draw.uniform(1 - spread / 2, 1 + spread / 2, stages)
        count = max(1, round(rounds * stages))
        given = (forward.tolist(), backward.tolist())
        found.append(closed(*given, count, virtual) / scheduled_seconds(stages, virtual, count, *given) - 1)
    return np.array(found)


@pytest.mark.parametrize("rounds", [0.5, 1, 3, 8])
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.8])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_unequal_stages_of_1f1b(stages: int, spread: float, rounds: float) -> None:
    """Exact for two stages, and for nearly all others; never above the schedule."""
    found = errors(stages, 1, rounds, spread)
    assert found.max() < 1e-12 and np.median(found) > -3e-3
    assert found.min() > (-1e-12 if stages == 2 else -0.01 if spread < 0.2 else -0.12)


@pytest.mark.parametrize("rounds", [3, 8])
@pytest.mark.parametrize("spread", [0.1, 0.3])
@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (2, 4), (4, 2)])
def test_unequal_stages_of_interleaved_pipelines(stages: int, virtual: int, spread: float, rounds: int) -> None:
    """Nearly exact; never above the schedule. With as many micro-batches as stages it is up to 6 % below."""
    found = errors(stages, virtual, rounds, spread)
    assert found.max() < 1e-12 and np.median(found) > -2e-3 and found.min() > -0.02


def test_a_slow_first_stage_hides_the_others() -> None:
    """Two stages: what the second one takes is hidden under the passes of the first, that go on meanwhile."""
    assert closed([3.0, 1.0], [6.0, 1.5], 10, 1) == 10 * 9.0
    assert closed([3.0, 2.0], [6.0, 2.5], 10, 1) == 10 * 9.0 + 1.5
    assert closed([1.0, 3.0], [1.5, 6.0], 10, 1) == 10 * 9.0 + 2.5


def test_without_forward_seconds_the_formula_is_that_of_alpa() -> None:
    draw = np.random.default_rng(12)
    for _ in range(50):
        stable = draw.uniform(0.1, 3, int(draw.integers(1, 7)))
        count = int(draw.integers(1, 20))
        expected = (count - 1) * stable.max() + stable.sum()
        assert closed([0.0] * len(stable), stable.tolist(), count, 1) == pytest.approx(expected)


def test_edges_of_later_stages_hide_in_the_bubble() -> None:
    forward, backward, half = [1.0] * 4, [2.0] * 4, [0.5] * 4
    bare = closed(forward, backward, 8, 1)
    assert closed(forward, backward, 8, 1, first=half) - bare == pytest.approx(0.5)
    assert closed(forward, backward, 8, 1, first=[0.0, 0.5, 0.5, 0.5]) == bare
    assert closed(forward, backward, 8, 1, tail=half) - bare == pytest.approx(0.5)


def test_a_step_is_what_it_is_spent_on() -> None:
    draw = np.random.default_rng(11)
    for _ in range(20):
        stages, virtual = [random_stage(draw) for _ in range(int(draw.integers(1, 6)))], int(draw.integers(1, 3))
        counts = [int(draw.integers(1, 9))] * len(stages)
        spent = spent_on(stages, counts, virtual)
        assert spent.total == step_seconds(stages, counts, virtual)
        assert spent.steady + spent.bubble + spent.edges == pytest.approx(spent.total)
        assert spent.steady == pytest.approx(counts[0] * max(stage.stable for stage in stages))
        assert spent.bubble >= 0.0


@pytest.mark.parametrize(
    ("stages", "virtual", "count"), [(1, 1, 4), (4, 1, 2), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 4, 16)]
)
def test_activations_in_flight_are_those_of_the_schedule(stages: int, virtual: int, count: int) -> None:
    for stage, order in enumerate(orders(stages, virtual, count)):
        held = most_in_flight([(step,) for step in order], (1,) * virtual)
        assert in_flight(stages, stage, count, (1,) * virtual) == held


@pytest.mark.parametrize("count", [4, 8, 32])
def test_layers_in_flight_where_chunks_differ(count: int) -> None:
    """Against the order of the schedule, pass by pass."""
    for stages, layers in ((2, (4, 2)), (2, (1, 3, 2)), (4, (2, 5)), (4, (3, 0, 1))):
        for stage, order in enumerate(orders(stages, len(layers), count)):
            held = most = 0
            for step in order:
                held += layers[step.chunk] * (1 if step.direction == "forward" else -1)
                most = max(most, held)
            assert in_flight(stages, stage, count, layers) == most / sum(layers)


def left_to_right(terms: Iterable[float]) -> float:
    """Python's `sum` up to 3.11: later ones compensate for rounding."""
    return reduce(add, terms, 0.0)


def by_hand(
    stages: list[StageTimes], optimizer: list[float], one_way: list[float], counts: list[int], rules: PipelineRules
) -> float:
    """The docstring of pipeline.py in Python's own floats, in the order in which it adds."""
    waits, filling = transfer_waits(one_way, rules.virtual, rules.transfer_slowdown)
    v, size = rules.virtual, len(stages)
    chains = []
    for s, count in enumerate(counts):
        shares = [max(1.0, each / count) / v for each in counts]
        f = [(stage.forward + wait / 2) * x for stage, wait, x in zip(stages, waits, shares, strict=True)]
        b = [(stage.backward + wait / 2) * x for stage, wait, x in zip(stages, waits, shares, strict=True)]
        delays, gone, left = [stages[0].first], [b[0] + stages[0].tail], [stages[0].tail]
        for i in range(1, size):
            delays.append(max(delays[-1], stages[i].first - left_to_right(f[:i])))
            left.append(max(stages[i].tail, gone[-1]))
            gone.append(b[i] + left[-1])
        rounds = (v - 1) * min(size, count)
        warm = min((2 if v > 1 else 1) * (size - 1 - s), count * v - 1 - rounds)
        steady = count * v - 1 - rounds - warm
        around = (v - 1) * left_to_right(f)
        cycles = max(rounds * b[s], (v - 1) * left_to_right(b)) if rounds else 0.0
        there = back = 0.0
        for i in range(size - 1, s, -1):
            there, back = there + f[i], back + b[i]
        entered, given = [], float("-inf")
        for i, stage in enumerate(stages):
            ended, busy = left_to_right(f[: i + 1]) + delays[i], f[i] + stage.first
            if rounds:
                busy = busy + rounds * f[i]
                ended = max(ended + (max(around, rounds * f[i]) if i else around), busy)
                ended = given = max(ended, given + f[i])
            entered.append(max(ended, busy))
        own, last = entered[s] + warm * f[s], there + gone[-1]
        behind = gone[-1] if s == size - 1 else b[s] + warm * b[s] + left[s]
        begun = max(own, entered[-1] + back)
        if steady:
            chains.append(cycles + (begun + steady * (f[s] + b[s]) + max(behind, last)))
        else:
            chains.append(cycles + max(begun + behind, own + last))
    return max(chains) + filling + (max(optimizer) + rules.fixed)


def random_stage(draw: np.random.Generator, size: int | None = None) -> StageTimes:
    return StageTimes(
        forward=draw.uniform(0.5, 2, size),
        backward=draw.uniform(1, 3, size),
        first=draw.uniform(0, 2, size),
        tail=draw.uniform(0, 2, size),
    )


def test_many_pipelines_at_once_are_each_of_them_alone_to_the_bit() -> None:
    """And both are the formula by hand."""
    draw = np.random.default_rng(14)
    for _ in range(40):
        count, n = int(draw.integers(1, 6)), 7
        rules = PipelineRules(virtual=int(draw.integers(1, 4)), transfer_slowdown=draw.choice([None, 0.15]), fixed=0.01)
        counts = [int(draw.integers(1, 9))] * count if draw.random() < 0.7 else draw.integers(1, 9, count).tolist()
        stages = [random_stage(draw, n) for _ in range(count)]
        optimizer = [draw.uniform(0, 1, n) for _ in range(count)]
        one_way = [draw.uniform(0, 0.1, n) for _ in range(count - 1)]
        many = pipeline_seconds(stages, optimizer, one_way, counts, rules)
        for i in range(n):
            alone = [
                StageTimes(**{f.name: float(getattr(stage, f.name)[i]) for f in fields(stage)}) for stage in stages
            ]
            figures = ([float(o[i]) for o in optimizer], [float(w[i]) for w in one_way], counts, rules)
            assert (
                pipeline_seconds(alone, *figures).total == np.broadcast_to(many.total, n)[i] == by_hand(alone, *figures)
            )


def test_no_column_of_a_stage_makes_a_step_shorter_by_growing() -> None:
    """The ground on which dominated points of a stage may be dropped."""
    draw = np.random.default_rng(15)
    for _ in range(200):
        count = int(draw.integers(1, 6))
        rules = PipelineRules(virtual=int(draw.integers(1, 4)), transfer_slowdown=draw.choice([None, 0.15]))
        stages = [random_stage(draw) for _ in range(count)]
        optimizer, one_way = draw.uniform(0, 1, count).tolist(), draw.uniform(0, 0.3, count - 1).tolist()
        micro_batches = [int(draw.integers(1, 9))] * count
        before = pipeline_seconds(stages, optimizer, one_way, micro_batches, rules).total
        place = int(draw.integers(count))
        for field in fields(StageTimes):
            grown = replace(stages[place], **{field.name: getattr(stages[place], field.name) + 0.7})
            more = [*stages[:place], grown, *stages[place + 1 :]]
            assert pipeline_seconds(more, optimizer, one_way, micro_batches, rules).total >= before - 1e-12
        for figures in (optimizer, one_way):
            if place < len(figures):
                figures[place] += 0.7
                assert pipeline_seconds(stages, optimizer, one_way, micro_batches, rules).total >= before - 1e-12
