"""How much longer an interleaved pipeline takes because its chunks do not take equally long.

The closed form (pipeline.py) takes all chunks of a stage for their mean. Where some have a layer more, or the last one has the
head, stages wait for each other although each has as much to do: whoever has the long chunk holds up the others, which meet
theirs at another time, and what is in flight makes up for little of that. DeepSeek-V3 in 16 stages of three chunks takes a
quarter longer for it.

1. Passes run in megatron-core's order, each behind the one before it on its stage and the one that it gets its input from. That
   order knows no seconds: `_order` sorts it once by how many passes stand one behind another. Passes of one level, at most one of
   a stage, are played at once.
2. Beyond FEW rounds of micro-batches every further one takes as long as the last one's forward passes came behind those before:
   these are in step by then, while the last backward passes, beside which nothing runs, are not.
3. The share by which that is longer than the closed form of the same passes is the answer; transfers and ends are left out.

Legend: S stages, V chunks of each, G micro-batches, D directions (forward, backward), R choices of recomputation.
Time: S · V · min(G, FEW · S) passes. `simulate/step.py` is the slow twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.lowering.pipeline_order import PipelineStep, interleaved
from moe_overlap.tuner.cost.pipeline import StageTimes, step_seconds
from moe_overlap.tuner.cost.stage_parts import StagePart

Floats = NDArray[np.float64]
FEW = 4
"""Rounds that are played, each of as many micro-batches as there are stages; with three, steps of chunks drawn at random
erred by up to 4.4 %."""
DIRECTIONS = ("forward", "backward")


def unevenness(stages: Sequence[Floats], micro_batches: int) -> Floats:
    """[R] How many times as long a step takes as the closed form says; 1 where chunks are equal or stages have one.

    Args:
        stages: [S] of [D, V, R] seconds of passes (`chunk_seconds`).
        micro_batches: of a step.
    """
    count, (_, virtual, choices) = len(stages), stages[0].shape
    if virtual == 1 or count == 1 or micro_batches % count:
        return np.ones(choices)
    seconds = np.stack(stages)
    few = min(micro_batches, FEW * count)
    played, further = _played(seconds, few)
    if micro_batches > few:
        played = played + (micro_batches - few) / count * further
    whole = seconds.sum(axis=2)
    times = [StageTimes(forward=forward, backward=backward) for forward, backward in whole]
    longer: Floats = np.maximum(1.0, played / step_seconds(times, [micro_batches] * count, virtual))
    return longer


def chunk_seconds(parts: Sequence[StagePart], counts: Floats, seconds: tuple[Floats, Floats], virtual: int) -> Floats:
    """[D, V, R] seconds of the passes of a stage's chunks.

    Args:
        parts: of the stage.
        counts: [parts, R] how often each is there.
        seconds: forward and backward, row -> of a pass through such a part.
    """
    chunks = np.zeros((len(seconds), virtual, counts.shape[1]))
    for part, count in zip(parts, counts, strict=True):
        for direction, of_rows in enumerate(seconds):
            chunks[direction, part.chunk] += count * of_rows[part.row]
    return chunks


@dataclass(frozen=True, slots=True)
class _Order:
    """The passes of all stages, level by level; they are counted from 1.

    Attributes:
        taken: the row of each pass's seconds among those of stages, directions and chunks.
        levels: for each level the number of its first pass; for each of its passes the number of the one before it on its stage,
            and of the one that it gets its input from, 0 where there is none.
        rounds: [2, S] the last forward passes of the last two rounds on every stage.
    """

    taken: NDArray[np.intp]
    levels: tuple[tuple[int, NDArray[np.intp], NDArray[np.intp]], ...]
    rounds: NDArray[np.intp]


def _played(seconds: Floats, micro_batches: int) -> tuple[Floats, Floats]:
    """[R] Seconds of all passes, and those by which the last round's forward passes end behind those of the round before.

    Args:
        seconds: [S, D, V, R].
    """
    stages, _, virtual, choices = seconds.shape
    order = _order(stages, virtual, micro_batches)
    ended = np.zeros((len(order.taken) + 1, choices))
    # What a pass takes stands where its end will: one array is read and written.
    np.take(seconds.reshape(-1, choices), order.taken, axis=0, out=ended[1:])
    for first, before, source in order.levels:
        ended[first : first + len(before)] += np.maximum(ended.take(before, axis=0), ended.take(source, axis=0))
    earlier, later = ended[order.rounds]
    return ended.max(axis=0), (later - earlier).max(axis=0)


@cache
def _order(stages: int, virtual: int, micro_batches: int) -> _Order:
    orders = [interleaved(stages, index, virtual, micro_batches) for index in range(stages)]
    level: dict[tuple[int, PipelineStep], int] = {}
    done = [0] * stages
    while any(place < len(order) for place, order in zip(done, orders, strict=True)):
        for index, order in enumerate(orders):
            while done[index] < len(order):
                step = order[done[index]]
                source = _source(index, step, stages, virtual)
                if source is not None and source not in level:
                    break
                before = level[index, order[done[index] - 1]] if done[index] else -1
                level[index, step] = 1 + max(before, -1 if source is None else level[source])
                done[index] += 1
    passes = sorted(level, key=lambda each: level[each])
    number = {each: place + 1 for place, each in enumerate(passes)}
    behind = {(index, step): order[place - 1] for index, order in enumerate(orders) for place, step in enumerate(order)}
    first = {(index, order[0]) for index, order in enumerate(orders)}
    sources = [_source(*each, stages, virtual) for each in passes]
    ends = np.cumsum(np.bincount([level[each] for each in passes]))[:-1]
    ahead = np.array([0 if each in first else number[each[0], behind[each]] for each in passes])
    given = np.array([0 if source is None else number[source] for source in sources])
    last = (micro_batches - 1, max(0, micro_batches - 1 - stages))
    return _Order(
        taken=np.array(
            [(index * 2 + DIRECTIONS.index(step.direction)) * virtual + step.chunk for index, step in passes]
        ),
        levels=tuple(
            (begin + 1, *of_level)
            for begin, *of_level in zip([0, *ends.tolist()], np.split(ahead, ends), np.split(given, ends), strict=True)
        ),
        rounds=np.array(
            [
                [number[index, PipelineStep("forward", virtual - 1, group)] for index in range(stages)]
                for group in reversed(last)
            ]
        ),
    )


def _source(index: int, step: PipelineStep, stages: int, virtual: int) -> tuple[int, PipelineStep] | None:
    """The pass that a pass gets its input from; None where it is the data."""
    if step.direction == "forward":
        if index:
            return index - 1, step
        return (stages - 1, PipelineStep("forward", step.chunk - 1, step.micro_batch)) if step.chunk else None
    if index < stages - 1:
        return index + 1, step
    if step.chunk < virtual - 1:
        return 0, PipelineStep("backward", step.chunk + 1, step.micro_batch)
    return index, PipelineStep("forward", step.chunk, step.micro_batch)
