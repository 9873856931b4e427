"""The closed form of a step against playing the schedule, pass by pass."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved, most_in_flight, one_f_one_b
from moe_overlap.tuner.cost.pipeline import (
    PipelineRules,
    StageTimes,
    StepSeconds,
    in_flight,
    pipeline_seconds,
    step_seconds,
    transfer_waits,
)


def closed(
    forward: list[float],
    backward: list[float],
    count: int,
    virtual: int,
    first: list[float] | None = None,
    tail: list[float] | None = None,
) -> StepSeconds:
    """The closed form of a step; seconds of first and last micro-batches beyond stable ones are 0 where they are not given."""
    nothing = [0.0] * len(forward)
    times = [
        StageTimes(forward=f, backward=b, first=more, tail=behind)
        for f, b, more, behind in zip(forward, backward, first or nothing, tail or nothing, strict=True)
    ]
    return step_seconds(times, [count] * len(times), virtual)


def orders(stages: int, virtual: int, micro_batches: int) -> list[tuple[Step, ...]]:
    if virtual == 1:
        return [one_f_one_b(stages, stage, micro_batches) for stage in range(stages)]
    return [interleaved(stages, stage, virtual, micro_batches) for stage in range(stages)]


def played(stages: int, virtual: int, micro_batches: int, forward: list[float], backward: list[float]) -> float:
    """Seconds until the last pass ends: a pass starts when its stage is free and its input is there."""
    waiting = orders(stages, virtual, micro_batches)
    ends: dict[tuple[int, Step], float] = {}
    free, places = [0.0] * stages, [0] * stages
    while any(places[stage] < len(waiting[stage]) for stage in range(stages)):
        for stage in range(stages):
            while places[stage] < len(waiting[stage]):
                step = waiting[stage][places[stage]]
                position = step.chunk * stages + stage + (-1 if step.direction == "forward" else 1)
                ready = 0.0
                if 0 <= position < stages * virtual:
                    before = (position % stages, Step(step.direction, position // stages, step.micro_batch))
                    if before not in ends:
                        break
                    ready = ends[before]
                took = (forward if step.direction == "forward" else backward)[stage] / virtual
                free[stage] = ends[(stage, step)] = max(free[stage], ready) + took
                places[stage] += 1
    return max(free)


@pytest.mark.parametrize(
    ("stages", "virtual", "count"), [(1, 1, 4), (2, 1, 2), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 4, 16)]
)
def test_equal_stages_are_exact(stages: int, virtual: int, count: int) -> None:
    forward, backward = [1.0] * stages, [2.0] * stages
    assert closed(forward, backward, count, virtual).total == pytest.approx(
        played(stages, virtual, count, forward, backward)
    )


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slower_stage_sets_the_pace(slow: int) -> None:
    forward, backward = [1.0] * 4, [2.0] * 4
    forward[slow], backward[slow] = 1.3, 2.6
    assert closed(forward, backward, 32, 1).total == pytest.approx(played(4, 1, 32, forward, backward), rel=0.03)


def test_edges_of_later_stages_hide_in_the_bubble() -> None:
    forward, backward, half = [1.0] * 4, [2.0] * 4, [0.5] * 4
    assert closed(forward, backward, 8, 1, first=half).edges == pytest.approx(0.5)
    assert closed(forward, backward, 8, 1, first=[0.0, 0.5, 0.5, 0.5]).edges == 0
    assert closed(forward, backward, 8, 1, tail=half).edges == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("stages", "virtual", "count"), [(1, 1, 4), (4, 1, 2), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 4, 16)]
)
def test_activations_in_flight_are_those_of_the_schedule(stages: int, virtual: int, count: int) -> None:
    for stage, order in enumerate(orders(stages, virtual, count)):
        held = most_in_flight([(step,) for step in order])
        assert in_flight(virtual, stages, stage, count) == held / virtual


def by_hand(
    stages: list[StageTimes], optimizer: list[float], one_way: list[float], counts: list[int], rules: PipelineRules
) -> float:
    """The docstring of pipeline.py in Python's own floats, in the order in which it adds."""
    waits, filling = transfer_waits(one_way, rules.virtual, rules.beside)
    forward = [stage.forward + wait / 2 for stage, wait in zip(stages, waits, strict=True)]
    backward = [stage.backward + wait / 2 for stage, wait in zip(stages, waits, strict=True)]
    stable, v = [f + b for f, b in zip(forward, backward, strict=True)], rules.virtual
    work = [count * seconds for count, seconds in zip(counts, stable, strict=True)]
    slowest = work.index(max(work))
    shares = [max(1.0, count / counts[slowest]) * seconds for count, seconds in zip(counts, stable, strict=True)]
    bubble = sum(shares[:slowest] + shares[slowest + 1 :])
    delay, passed = stages[0].first, forward[0] / v
    for f, stage in zip(forward[1:], stages[1:], strict=True):
        delay = max(delay + stage.waited / v, stage.first - passed)
        passed += f / v
    tail, drained, before = float("-inf"), 0.0, sum(backward) / v
    for b, stage in zip(backward[::-1], stages[::-1], strict=True):
        drained += stage.drain / v
        before -= b / v
        tail = max(tail, drained + stage.tail - before)
    step = work[slowest] + bubble / v + (delay + stages[-1].turn + tail)
    return step + filling + (max(optimizer) + rules.fixed)


def random_stage(draw: np.random.Generator, size: int | None = None) -> StageTimes:
    return StageTimes(
        forward=draw.uniform(0.5, 2, size),
        backward=draw.uniform(1, 3, size),
        **{name: draw.uniform(0, 2, size) for name in ("first", "waited", "turn", "drain", "tail")},
    )


def test_many_pipelines_at_once_are_each_of_them_alone_to_the_bit() -> None:
    """And both are the formula by hand."""
    draw = np.random.default_rng(14)
    for _ in range(40):
        count, n = int(draw.integers(1, 6)), 7
        rules = PipelineRules(virtual=int(draw.integers(1, 4)), beside=draw.choice([None, 0.15]), fixed=0.01)
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
        rules = PipelineRules(virtual=int(draw.integers(1, 4)), beside=draw.choice([None, 0.15]))
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
