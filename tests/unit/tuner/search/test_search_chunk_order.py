"""Pipelines of partitions: seconds against the plain recurrence, what must hold of them, and the best of all orders."""

from __future__ import annotations

import itertools
import random

import pytest

from moe_overlap.tuner.search.layer.partition_pipeline import (
    Step,
    best_order_seconds,
    gap_to_best,
    pipeline_seconds,
    run,
)

CASES = range(150)


def drawn(case: int, most: int = 7) -> tuple[list[Step], list[float], int]:
    """A random pipeline: reads from any earlier steps, some steps whole, some without seconds."""
    draw = random.Random(case)
    steps: list[Step] = []
    for place in range(draw.randint(1, most)):
        read = [place - 1] * (place > 0 and draw.random() < 0.7) + draw.sample(range(place), min(place, 1))
        steps.append(Step(draw.random() < 0.4, tuple(sorted(set(read))), draw.random() < 0.15))
    seconds = [draw.choice([0.0, 0.1, draw.random(), 3 * draw.random()]) for _ in steps]
    return steps, seconds, draw.randint(1, 4)


def recurrence(steps: list[Step], seconds: list[float], parts: int) -> float:
    """The twin: stage by stage, part by part, a start is the latest of what it reads and of its stream."""
    stages: list[list[int]] = []
    for place, step in enumerate(steps):
        before = steps[place - 1]
        new = place == 0 or step.uncut != before.uncut or (before.exchange and not step.exchange)
        if new:
            stages.append([])
        stages[-1].append(place)
    free, ends = [0.0, 0.0], dict[tuple[int, int], float]()
    for stage in stages:
        for part in range(1 if steps[stage[0]].uncut else parts):
            for place in stage:
                step, start = steps[place], free[steps[place].exchange]
                for other in step.after:
                    joined = step.uncut or steps[other].uncut
                    read = [end for (o, p), end in ends.items() if o == other and (joined or p == part)]
                    start = max(start, *read)
                free[step.exchange] = ends[place, part] = start + seconds[place]
    return max(free)


def longest_path(steps: list[Step], seconds: list[float]) -> float:
    ends: list[float] = []
    for step, each in zip(steps, seconds, strict=True):
        ends.append(each + max((ends[other] for other in step.after), default=0.0))
    return max(ends)


def stream_sums(steps: list[Step], seconds: list[float], parts: int) -> list[float]:
    sums = [0.0, 0.0]
    for step, each in zip(steps, seconds, strict=True):
        sums[step.exchange] += each * (1 if step.uncut else parts)
    return sums


def test_two_parts_by_hand() -> None:
    """Compute 2, all-to-all 3, compute 2: the first stage 0-2-4, all-to-alls 2-5-8, the last stage 5-7 and 8-10."""
    steps = [Step(False), Step(True, (0,)), Step(False, (1,))]
    assert [(one.step, one.part, one.start, one.end) for one in run(steps, [2, 3, 2], 2)] == [
        (0, 0, 0, 2),
        (0, 1, 2, 4),
        (1, 0, 2, 5),
        (2, 0, 5, 7),
        (1, 1, 5, 8),
        (2, 1, 8, 10),
    ]
    assert pipeline_seconds(steps, [2, 3, 2], 2, prelude=1, epilogue=0.5) == 11.5
    # 2, then 2 beside the exchange at half the pace while both run: the exchange has 1 to go at 6.
    assert pipeline_seconds(steps, [2, 3, 0], 2, slowdown=1.0) == 2 + 4 + 1 + 3


@pytest.mark.parametrize("case", CASES)
def test_seconds_are_those_of_the_recurrence(case: int) -> None:
    steps, seconds, parts = drawn(case)
    assert pipeline_seconds(steps, seconds, parts) == pytest.approx(recurrence(steps, seconds, parts))


def test_what_must_hold() -> None:
    for case in CASES:
        steps, seconds, parts = drawn(case)
        alone = pipeline_seconds(steps, seconds, parts)
        sums = stream_sums(steps, seconds, parts)
        least = max(*sums, longest_path(steps, seconds))
        assert least - 1e-9 <= alone <= sum(sums) + 1e-9
        assert alone - 1e-9 <= pipeline_seconds(steps, seconds, parts, slowdown=0.2) <= sum(sums) + 1e-9
        for place in range(len(steps)):
            longer = [each + 0.3 * (other == place) for other, each in enumerate(seconds)]
            assert pipeline_seconds(steps, longer, parts) >= alone - 1e-9


def every_order(steps: list[Step], seconds: list[float], parts: int) -> float:
    """The twin of the best order: every permutation of both streams."""
    pieces = [(place, part) for place, step in enumerate(steps) for part in range(1 if step.uncut else parts)]
    streams = [[piece for piece in pieces if steps[piece[0]].exchange == exchange] for exchange in (False, True)]
    best = float("inf")
    for orders in itertools.product(*(itertools.permutations(stream) for stream in streams)):
        ends: dict[tuple[int, int], float] = {}
        heads, free = [0, 0], [0.0, 0.0]
        moved = True
        while moved:
            moved = False
            for stream, order in enumerate(orders):
                if heads[stream] == len(order):
                    continue
                place, part = order[heads[stream]]
                read = [
                    (other, p)
                    for other in steps[place].after
                    for o, p in pieces
                    if o == other and (p == part or steps[place].uncut or steps[other].uncut)
                ]
                if all(piece in ends for piece in read):
                    start = max([free[stream], *(ends[piece] for piece in read)])
                    free[stream] = ends[place, part] = start + seconds[place]
                    heads[stream] += 1
                    moved = True
        if len(ends) == len(pieces):
            best = min(best, max(free))
    return best


def test_the_best_order_is_the_best_of_all() -> None:
    """Equivalent partitions need not be told apart."""
    seen = 0
    for case in CASES:
        steps, seconds, parts = drawn(case, most=4)
        if sum(1 if step.uncut else parts for step in steps) > 6:
            continue
        seen += 1
        assert best_order_seconds(steps, seconds, parts) == pytest.approx(every_order(steps, seconds, parts))
    assert seen > 60


def every_state(steps: list[Step], seconds: list[float], parts: int) -> float:
    """The same for chains of more pieces: all states that starts in any order lead to, parts ascending, none cut off."""
    states = {(((),) * len(steps), (0.0, 0.0))}
    for _ in range(len(steps) * parts):
        following = set()
        for ends, free in states:
            for place, step in enumerate(steps):
                part = len(ends[place])
                if part < parts and (place == 0 or len(ends[place - 1]) > part):
                    read = ends[place - 1][part] if place else 0.0
                    end = max(read, free[step.exchange]) + seconds[place]
                    after = (*ends[:place], (*ends[place], end), *ends[place + 1 :])
                    following.add((after, (free[0], end) if step.exchange else (end, free[1])))
        states = following
    return min(max(free) for _, free in states)


def test_the_gap_of_the_order() -> None:
    steps = [Step(place % 2 == 1, (place - 1,) if place else ()) for place in range(5)]
    gaps, small = [], 0
    for case in range(60):
        draw = random.Random(case)
        seconds = [draw.uniform(0.2, 2.0) for _ in steps]
        gap = gap_to_best(steps, seconds, 3)
        assert gap is not None
        gaps.append(gap)
        if 0.001 < gap < 0.04 and small < 3:
            small += 1
            best = every_state(steps, seconds, 3)
            assert pipeline_seconds(steps, seconds, 3) / best - 1 == pytest.approx(gap)
    assert min(gaps) >= -1e-12 and 0.05 < max(gaps) < 0.3 and small == 3
    # Runs of one stream stay together: twice the operators, as many pieces.
    doubled = [Step(place % 4 > 1, (place - 1,) if place else ()) for place in range(10)]
    pieces = [share * each for place, each in enumerate(seconds) for share in ((0.3, 0.7), (0.6, 0.4))[place % 2]]
    assert gap_to_best(doubled, pieces, 3) == pytest.approx(gap_to_best(steps, seconds, 3))
    assert gap_to_best(steps, [1.0] * 5, 5) is None


def test_nothing_and_no_seconds() -> None:
    assert pipeline_seconds([], [], 3, prelude=1.0) == 1.0
    steps = [Step(False), Step(True, (0,)), Step(False, (1,))]
    assert pipeline_seconds(steps, [0.0] * 3, 4) == 0.0
    assert gap_to_best(steps, [0.0] * 3, 4) == 0.0
    whole = [Step(False, (), True), Step(True, (0,)), Step(False, (1,), True)]
    assert pipeline_seconds(whole, [1.0, 2.0, 1.0], 3) == 1 + 3 * 2 + 1
