"""The factor by which an interleaved pipeline is longer because its chunks do not take equally long.

The closed form (pipeline.py) gives every chunk of a stage the mean seconds. If some chunks have one layer more, or the last one
has the head, stages wait for each other even if their totals are equal: a stage in its long chunk delays the others, which have
their long chunks at other times, and micro-batches in flight compensate little. DeepSeek-V3 in 16 stages of three chunks takes a
quarter longer.

1. Passes run in megatron-core's order. Each waits for the previous pass of its stage and for the pass that computes its input.
   The order does not depend on seconds, so `_order` sorts it once into levels: the level of a pass is the length of the longest
   chain before it. The passes of one level, at most one per stage, are simulated at once.
2. FEW rounds of micro-batches are simulated. Each further round adds the time between the ends of the last two rounds' forward
   passes: these are periodic by then; the last backward passes, which overlap with nothing, are not.
3. The answer is the ratio to the closed form of the same passes. Transfers and the extra seconds of first and last passes are
   left out.

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
"""Number of simulated rounds; a round has one micro-batch per stage. With three rounds, steps of random chunks had errors of up
to 4.4 %."""
DIRECTIONS = ("forward", "backward")


def unevenness(stages: Sequence[Floats], micro_batches: int) -> Floats:
    """[R] Factor of a step over its closed form, at least 1; exactly 1 with one stage or one chunk per stage.

    Args:
        stages: [S] of [D, V, R] seconds of passes (`chunk_seconds`).
        micro_batches: number of micro-batches of a step.
    """
    count, (_, virtual, choices) = len(stages), stages[0].shape
    if virtual == 1 or count == 1 or micro_batches % count:
        return np.ones(choices)
    seconds = np.stack(stages)
    few = min(micro_batches, FEW * count)
    step, round_seconds = _simulated_passes(seconds, few)
    if micro_batches > few:
        step = step + (micro_batches - few) / count * round_seconds
    stage_seconds = seconds.sum(axis=2)
    times = [StageTimes(forward=forward, backward=backward) for forward, backward in stage_seconds]
    longer: Floats = np.maximum(1.0, step / step_seconds(times, [micro_batches] * count, virtual))
    return longer


def chunk_seconds(parts: Sequence[StagePart], counts: Floats, seconds: tuple[Floats, Floats], virtual: int) -> Floats:
    """[D, V, R] seconds of the passes of a stage's chunks.

    Args:
        parts: the parts of the stage.
        counts: [parts, R] number of times that the stage has each part.
        seconds: forward and backward seconds of a pass through a part, by row.
    """
    chunks = np.zeros((len(seconds), virtual, counts.shape[1]))
    for part, count in zip(parts, counts, strict=True):
        for direction, of_rows in enumerate(seconds):
            chunks[direction, part.chunk] += count * of_rows[part.row]
    return chunks


@dataclass(frozen=True, slots=True)
class _Order:
    """The passes of all stages, numbered from 1 by level.

    Attributes:
        seconds_rows: the row of each pass's seconds in the table of stages, directions and chunks.
        levels: for each level the number of its first pass; for each of its passes the numbers of the previous pass of its stage
            and of the pass that computes its input, 0 if there is none.
        rounds: [2, S] number of the last forward pass of each of the last two rounds, on every stage.
    """

    seconds_rows: NDArray[np.intp]
    levels: tuple[tuple[int, NDArray[np.intp], NDArray[np.intp]], ...]
    rounds: NDArray[np.intp]


def _simulated_passes(seconds: Floats, micro_batches: int) -> tuple[Floats, Floats]:
    """[R] Seconds of all passes, and the time between the ends of the last two rounds' forward passes.

    Args:
        seconds: [S, D, V, R].
    """
    stages, _, virtual, choices = seconds.shape
    order = _order(stages, virtual, micro_batches)
    ended = np.zeros((len(order.seconds_rows) + 1, choices))
    # `ended` first holds the seconds of each pass, then its end.
    np.take(seconds.reshape(-1, choices), order.seconds_rows, axis=0, out=ended[1:])
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
    passes = sorted(level, key=lambda chunk_pass: level[chunk_pass])
    number = {chunk_pass: place + 1 for place, chunk_pass in enumerate(passes)}
    previous = {
        (index, step): order[place - 1] for index, order in enumerate(orders) for place, step in enumerate(order)
    }
    first = {(index, order[0]) for index, order in enumerate(orders)}
    sources = [_source(*chunk_pass, stages, virtual) for chunk_pass in passes]
    ends = np.cumsum(np.bincount([level[chunk_pass] for chunk_pass in passes]))[:-1]
    ahead = np.array(
        [0 if chunk_pass in first else number[chunk_pass[0], previous[chunk_pass]] for chunk_pass in passes]
    )
    inputs = np.array([0 if source is None else number[source] for source in sources])
    last = (micro_batches - 1, max(0, micro_batches - 1 - stages))
    return _Order(
        seconds_rows=np.array(
            [(index * 2 + DIRECTIONS.index(step.direction)) * virtual + step.chunk for index, step in passes]
        ),
        levels=tuple(
            (begin + 1, *of_level)
            for begin, *of_level in zip([0, *ends.tolist()], np.split(ahead, ends), np.split(inputs, ends), strict=True)
        ),
        rounds=np.array(
            [
                [number[index, PipelineStep("forward", virtual - 1, group)] for index in range(stages)]
                for group in reversed(last)
            ]
        ),
    )


def _source(index: int, step: PipelineStep, stages: int, virtual: int) -> tuple[int, PipelineStep] | None:
    """The pass that computes the input of a pass; None if its input is data."""
    if step.direction == "forward":
        if index:
            return index - 1, step
        return (stages - 1, PipelineStep("forward", step.chunk - 1, step.micro_batch)) if step.chunk else None
    if index < stages - 1:
        return index + 1, step
    if step.chunk < virtual - 1:
        return 0, PipelineStep("backward", step.chunk + 1, step.micro_batch)
    return index, PipelineStep("forward", step.chunk, step.micro_batch)
