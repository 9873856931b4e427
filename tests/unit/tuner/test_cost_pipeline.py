"""The closed form of a step against playing the schedule, pass by pass."""

from __future__ import annotations

import pytest

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved, most_in_flight, one_f_one_b
from moe_overlap.tuner.cost.pipeline import StageTimes, StepSeconds, in_flight, step_seconds


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
