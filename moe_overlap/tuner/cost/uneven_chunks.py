"""How much longer an interleaved pipeline takes because its chunks do not take equally long.

The closed form (pipeline.py) takes all chunks of a stage for their mean. Where some have a layer more, or the last one has the
head, stages wait for each other although each has as much to do: whoever has the long chunk holds up the others, which meet
theirs at another time, and what is in flight makes up for little of that. DeepSeek-V3 in 16 stages of three chunks takes a
quarter longer for it.

1. Passes run in megatron-core's order, each behind the one before it on its stage and the one that it gets its input from. That
   order knows no seconds: `_order` sorts it once by how many passes stand one behind another. Passes of one level, at most one of
   a stage, are played at once.
2. Beyond FEW rounds of micro-batches every further one takes as long as the last.
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

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved
from moe_overlap.tuner.cost.pipeline import StageTimes, step_seconds
from moe_overlap.tuner.cost.slots import Part

Floats = NDArray[np.float64]
FEW = 4
"""Rounds of micro-batches that are played; with three the test's worst layout errs by 1.9 %."""
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
    played = _played(seconds, few)
    if micro_batches > few:
        played = played + (micro_batches - few) / count * (played - _played(seconds, few - count))
    whole = seconds.sum(axis=2)
    times = [StageTimes(forward=forward, backward=backward) for forward, backward in whole]
    longer: Floats = np.maximum(1.0, played / step_seconds(times, [micro_batches] * count, virtual))
    return longer


def chunk_seconds(parts: Sequence[Part], counts: Floats, seconds: tuple[Floats, Floats], virtual: int) -> Floats:
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
    """The passes of all stages, level by level.

    Attributes:
        before, source: of each pass the number of the one before it on its stage, and of the one that it gets its input from; 0
            where there is none, and passes are counted from 1.
        taken: the row of its seconds among those of stages, directions and chunks.
        levels: where each level begins, and the end.
    """

    before: NDArray[np.intp]
    source: NDArray[np.intp]
    taken: NDArray[np.intp]
    levels: tuple[int, ...]


def _played(seconds: Floats, micro_batches: int) -> Floats:
    """[R] Seconds of all passes.

    Args:
        seconds: [S, D, V, R].
    """
    stages, _, virtual, choices = seconds.shape
    order, rows = _order(stages, virtual, micro_batches), seconds.reshape(-1, choices)
    ended = np.zeros((len(order.taken) + 1, choices))
    for begin, end in zip(order.levels, order.levels[1:], strict=False):
        own = slice(begin, end)
        free = np.maximum(ended[order.before[own]], ended[order.source[own]])
        ended[begin + 1 : end + 1] = free + rows[order.taken[own]]
    latest: Floats = ended.max(axis=0)
    return latest


@cache
def _order(stages: int, virtual: int, micro_batches: int) -> _Order:
    orders = [interleaved(stages, index, virtual, micro_batches) for index in range(stages)]
    level: dict[tuple[int, Step], int] = {}
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
    sizes = np.bincount([level[each] for each in passes])
    return _Order(
        before=np.array([0 if each in first else number[each[0], behind[each]] for each in passes]),
        source=np.array([0 if source is None else number[source] for source in sources]),
        taken=np.array(
            [(index * 2 + DIRECTIONS.index(step.direction)) * virtual + step.chunk for index, step in passes]
        ),
        levels=(0, *np.cumsum(sizes).tolist()),
    )


def _source(index: int, step: Step, stages: int, virtual: int) -> tuple[int, Step] | None:
    """The pass that a pass gets its input from; None where it is the data."""
    if step.direction == "forward":
        if index:
            return index - 1, step
        return (stages - 1, Step("forward", step.chunk - 1, step.micro_batch)) if step.chunk else None
    if index < stages - 1:
        return index + 1, step
    if step.chunk < virtual - 1:
        return 0, Step("backward", step.chunk + 1, step.micro_batch)
    return index, Step("forward", step.chunk, step.micro_batch)
