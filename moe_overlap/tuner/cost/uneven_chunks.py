"""How much longer an interleaved pipeline takes because its chunks do not take equally long.

The closed form (pipeline.py) takes all chunks of a stage for their mean. Where some have a layer more, or the last one has the
head, stages wait for each other although each has as much to do: whoever has the long chunk holds up the others, which meet
theirs at another time, and what is in flight makes up for little of that. DeepSeek-V3 in 16 stages of three chunks takes 18 %
longer for it.

1. Passes of chunks are multiples of the mean chunk, in steps of STEP: many layouts then have the same, and each is played once.
2. They are played in megatron-core's order, each behind the one before it on its stage and the one that it gets its input from.
   Beyond FEW rounds of micro-batches every further one takes as long as the last.
3. The share by which that is longer than the closed form of the same passes is the answer; transfers and ends are left out.

Legend: S stages, V chunks of each, G micro-batches, D directions (forward, backward), R choices of recomputation.
Time: S · V · min(G, FEW · S) passes. `simulate/step.py` is the slow twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved
from moe_overlap.tuner.cost.pipeline import StageTimes, step_seconds
from moe_overlap.tuner.cost.slots import Part

Floats = NDArray[np.float64]
STEP = 0.02
"""Of the mean chunk."""
FEW = 4
Passes = tuple[tuple[tuple[float, ...], ...], ...]
"""[D][S][V] seconds."""


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
    steps = np.rint(seconds / seconds.sum(axis=1).mean(axis=(0, 1)) / STEP).transpose(3, 1, 0, 2)
    return np.array([_longer(_as_passes(each), micro_batches) for each in steps])


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


def _as_passes(steps: Floats) -> Passes:
    return tuple(tuple(tuple(each * STEP for each in stage) for stage in direction) for direction in steps.tolist())


@cache
def _longer(passes: Passes, micro_batches: int) -> float:
    forward, backward = passes
    count = len(forward)
    few = min(micro_batches, FEW * count)
    played = _played(passes, few)
    if micro_batches > few:
        played += (micro_batches - few) / count * (played - _played(passes, few - count))
    times = [StageTimes(forward=sum(ahead), backward=sum(back)) for ahead, back in zip(forward, backward, strict=True)]
    return max(1.0, played / float(step_seconds(times, [micro_batches] * count, len(forward[0]))))


@cache
def _played(passes: Passes, micro_batches: int) -> float:
    """Seconds of all passes."""
    forward, backward = passes
    stages, virtual = len(forward), len(forward[0])
    orders = [_order(stages, index, virtual, micro_batches) for index in range(stages)]
    ended: dict[tuple[int, Step], float] = {}
    next_, free = [0] * stages, [0.0] * stages
    moves = True
    while moves:
        moves = False
        for index, order in enumerate(orders):
            now, place = free[index], next_[index]
            while place < len(order):
                step = order[place]
                source = _source(index, step, stages, virtual)
                there = 0.0 if source is None else ended.get(source)
                if there is None:
                    break
                taken = (backward if step.direction == "backward" else forward)[index][step.chunk]
                now = max(now, there) + taken
                ended[index, step] = now
                place += 1
            moves = moves or place > next_[index]
            free[index], next_[index] = now, place
    return max(free)


@cache
def _order(stages: int, index: int, virtual: int, micro_batches: int) -> tuple[Step, ...]:
    return interleaved(stages, index, virtual, micro_batches)


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
