"""Seconds of a pipeline of partitions: P(i, n, k) of the range search.

Terms. A step of a pipeline computes or exchanges, in k parts or, where it is not cut, whole. There are two streams, one for
computation and one for exchanges. What is issued in which order is the plan's: stage after stage, in a stage part after part
(plan/partition_order.py), uncut steps between stages.
Rules.
1. Each stream starts its steps in that order.
2. A part starts when its stream is free and what it reads is there: the same part of an earlier step, or all parts where
   one of the two steps is not cut.
3. While both streams work, each goes at a rate of 1 / (1 + slowdown).
Then, without slowdown, P >= the sum of each stream, P >= the longest path, and P grows with every step's seconds.

The order is not always the best one: `gap_to_best` compares it with all orders where there are few.

Source: Lancet, section 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.plan.partition_order import stage_major

MOST_PIECES = 20
"""Parts of stages for which all orders are looked at: a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a pipeline.

    Attributes:
        exchange: whether it runs on the stream of exchanges.
        after: places of the earlier steps whose results it reads.
        whole: not cut, whatever the number of parts.
    """

    exchange: bool
    after: tuple[int, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """A part of a step, in time."""

    step: int
    part: int
    start: float
    end: float


def pipeline_seconds(
    steps: Sequence[Step],
    seconds: Sequence[float],
    parts: int,
    slowdown: float = 0.0,
    prelude: float = 0.0,
    epilogue: float = 0.0,
) -> float:
    """P: seconds from the start of a pipeline to its end.

    Args:
        seconds: of one part of every step; of the whole step where it is not cut.
        slowdown: by how much two busy streams slow each other down.
        prelude, epilogue: seconds that cut what enters, before everything, and join what leaves, behind everything.
    """
    return prelude + max((one.end for one in run(steps, seconds, parts, slowdown)), default=0.0) + epilogue


def run(steps: Sequence[Step], seconds: Sequence[float], parts: int, slowdown: float = 0.0) -> list[Timed]:
    """Every part, in order of the ends. Arguments as above."""
    queues: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    counts = [1 if step.whole else parts for step in steps]
    places = range(len(steps))
    for place, piece in stage_major(places, counts.__getitem__, lambda place: steps[place].exchange, last_first=False):
        queues[steps[place].exchange].append((place, piece.index))
    left, done = [*counts], set[tuple[int, int]]()
    heads, running = [0, 0], dict[int, tuple[float, float]]()
    now, timed = 0.0, list[Timed]()
    while len(timed) < len(queues[0]) + len(queues[1]):
        for stream in (0, 1):
            if stream in running or heads[stream] == len(queues[stream]):
                continue
            place, part = queues[stream][heads[stream]]
            if _is_ready(steps, place, part, left, done):
                running[stream] = now, seconds[place]
        pace = 1.0 + slowdown if len(running) > 1 else 1.0
        first = min(running, key=lambda stream: running[stream][1])
        spent = running[first][1]
        now += spent * pace
        started, _ = running.pop(first)
        running = {stream: (since, work - spent) for stream, (since, work) in running.items()}
        place, part = queues[first][heads[first]]
        heads[first] += 1
        left[place] -= 1
        done.add((place, part))
        timed.append(Timed(place, part, started, now))
    return timed


def _is_ready(steps: Sequence[Step], place: int, part: int, left: Sequence[int], done: set[tuple[int, int]]) -> bool:
    """Rule 2."""
    return all(
        left[other] == 0 if steps[place].whole or steps[other].whole else (other, part) in done
        for other in steps[place].after
    )


def gap_to_best(steps: Sequence[Step], seconds: Sequence[float], parts: int) -> float | None:
    """How much longer the plan's order takes than the best one, as a share of the best; None where there are too many.

    Runs of steps on one stream stay together, as they do in a stage. No slowdown.
    """
    merged, sums = _joined(steps, seconds)
    if sum(1 if step.whole else parts for step in merged) > MOST_PIECES:
        return None
    ours = pipeline_seconds(merged, sums, parts)
    best = best_order_seconds(merged, sums, parts)
    return ours / best - 1.0 if best > 0 else 0.0


def best_order_seconds(steps: Sequence[Step], seconds: Sequence[float], parts: int) -> float:
    """The shortest time over all orders of both streams: every sequence of starts, cut off where it cannot win.

    Parts of a step are alike, so that it is enough to start them in ascending order.
    """
    counts = [1 if step.whole else parts for step in steps]
    best = pipeline_seconds(steps, seconds, parts)
    seen: set[tuple[object, ...]] = set()

    def ready(place: int, part: int, ends: tuple[tuple[float, ...], ...]) -> float | None:
        """When what it reads is there; None while that is not known."""
        latest = 0.0
        for other in steps[place].after:
            needed = counts[other] if steps[place].whole or steps[other].whole else part + 1
            if len(ends[other]) < needed:
                return None
            latest = max(latest, ends[other][needed - 1])
        return latest

    def visit(ends: tuple[tuple[float, ...], ...], free: tuple[float, float], work: tuple[float, float]) -> None:
        nonlocal best
        if (ends, free) in seen or max(free[0] + work[0], free[1] + work[1]) >= best:
            return
        seen.add((ends, free))
        if all(len(one) == count for one, count in zip(ends, counts, strict=True)):
            best = max(free)
            return
        for place, step in enumerate(steps):
            part = len(ends[place])
            start = ready(place, part, ends) if part < counts[place] else None
            if start is None:
                continue
            end = max(start, free[step.exchange]) + seconds[place]
            rest = work[step.exchange] - seconds[place]
            after = (*ends[:place], (*ends[place], end), *ends[place + 1 :])
            if step.exchange:
                visit(after, (free[0], end), (work[0], rest))
            else:
                visit(after, (end, free[1]), (rest, work[1]))

    sums = [
        sum(count * each for step, count, each in zip(steps, counts, seconds, strict=True) if step.exchange == exchange)
        for exchange in (False, True)
    ]
    visit(((),) * len(steps), (0.0, 0.0), (sums[0], sums[1]))
    return best


def _joined(steps: Sequence[Step], seconds: Sequence[float]) -> tuple[list[Step], list[float]]:
    """Runs of steps of one kind as one step each."""
    merged: list[Step] = []
    sums: list[float] = []
    place_of: list[int] = []
    for step, each in zip(steps, seconds, strict=True):
        here = {place_of[other] for other in step.after}
        if merged and (merged[-1].exchange, merged[-1].whole) == (step.exchange, step.whole):
            here = {*merged[-1].after, *here} - {len(merged) - 1}
            merged[-1] = Step(step.exchange, tuple(sorted(here)), step.whole)
            sums[-1] += each
        else:
            merged.append(Step(step.exchange, tuple(sorted(here)), step.whole))
            sums.append(each)
        place_of.append(len(merged) - 1)
    return merged, sums
