"""The order in which one stage runs forward and backward passes: 1F1B and interleaved 1F1B, as megatron-core runs them.

A step prints as `0F3`: chunk 0, forward, micro-batch 3.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.resharding import passes_ahead


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One pass of one micro-batch through one chunk."""

    direction: Literal["forward", "backward"]
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{'F' if self.direction == 'forward' else 'B'}{self.micro_batch}"


def one_f_one_b(stages: int, stage: int, micro_batches: int) -> tuple[PipelineStep, ...]:
    """1F1B: `stages - stage - 1` warm-up forward passes, then forward and backward alternate, then the rest backward."""
    return _run_ahead(stages - stage - 1, micro_batches)


def _run_ahead(ahead: int, micro_batches: int) -> tuple[PipelineStep, ...]:
    forward = [PipelineStep("forward", 0, m) for m in range(micro_batches)]
    backward = [PipelineStep("backward", 0, m) for m in range(micro_batches)]
    return _one_and_one(forward, backward, ahead)


def interleaved(stages: int, stage: int, chunks: int, micro_batches: int) -> tuple[PipelineStep, ...]:
    """Interleaved 1F1B: groups of as many micro-batches as there are stages pass chunk after chunk.

    Raises:
        ConfigError: the number of micro-batches is not a multiple of the stages.
    """
    return _one_and_one(*_chunk_passes(stages, chunks, micro_batches), _chunks_ahead(stages, stage, chunks))


def _chunk_passes(stages: int, chunks: int, micro_batches: int) -> tuple[list[PipelineStep], list[PipelineStep]]:
    """Forward and backward passes of a stage, each in the order of interleaved 1F1B."""
    check_interleaving(stages, micro_batches)
    units = []
    for first in range(0, micro_batches, stages):
        units += [(chunk, m) for chunk in range(chunks) for m in range(first, first + stages)]
    # Gradients pass the chunks from the last to the first.
    return (
        [PipelineStep("forward", chunk, m) for chunk, m in units],
        [PipelineStep("backward", chunks - 1 - chunk, m) for chunk, m in units],
    )


def _chunks_ahead(stages: int, stage: int, chunks: int) -> int:
    """megatron-core's warm-up: the first group passes all chunks but the last, each later stage adds a hop in both directions."""
    return 2 * (stages - stage - 1) + (chunks - 1) * stages


def check_interleaving(stages: int, micro_batches: int, subject: str = "gradient_accumulation_steps") -> None:
    """ConfigError if megatron-core's interleaved schedule does not support the number of micro-batches."""
    if micro_batches < stages or micro_batches % stages:
        rule = f"interleaving over {stages} stages needs full groups of {stages} micro-batches"
        raise ConfigError(subject, micro_batches, rule, f"use a multiple of {stages}")


def _one_and_one(forward: list[PipelineStep], backward: list[PipelineStep], ahead: int) -> tuple[PipelineStep, ...]:
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for i in range(ahead, len(forward)):
        order += [forward[i], backward[i - ahead]]
    return tuple(order + backward[len(forward) - ahead :])


def pipeline_blocks(plan: Plan, stage: int) -> tuple[tuple[PipelineStep, ...], ...]:
    """The order of one stage of a plan in blocks: a single pass, or a backward and a forward pass to interleave."""
    stage_plan, stages = plan.stages[stage], len(plan.stages)
    chunks, micro_batches = len(stage_plan.chunks), stage_plan.gradient_accumulation_steps
    if stage_plan.overlap.micro_batches_in_flight > 1:
        return paired(stages, stage, micro_batches, chunks)
    if plan.transfers:
        order = _run_ahead(passes_ahead(plan, stage), micro_batches)
    elif plan.pipeline_schedule == "1f1b":
        order = one_f_one_b(stages, stage, micro_batches)
    else:
        order = interleaved(stages, stage, chunks, micro_batches)
    return tuple((step,) for step in order)


def paired(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[PipelineStep, ...], ...]:
    """1F1B (interleaved 1F1B with several chunks) in which every backward pass is paired with the forward pass that follows it.

    A stage sends the results of a pair at its end, so each earlier stage needs two more warm-up passes instead of one: otherwise
    the forward pass of a pair would wait for a pair of the previous stage that has not started. Interleaved 1F1B already has as
    many. One more warm-up pass is needed as the partner of the first backward pass. megatron-core's warm-up with
    --overlap-moe-expert-parallel-comm is the same.

    Raises:
        ConfigError: with several chunks, the number of micro-batches is not a multiple of the stages.
    """
    if chunks == 1:
        forward = [PipelineStep("forward", 0, m) for m in range(micro_batches)]
        backward = [PipelineStep("backward", 0, m) for m in range(micro_batches)]
    else:
        forward, backward = _chunk_passes(stages, chunks, micro_batches)
    ahead = min(_chunks_ahead(stages, stage, chunks) + 1, len(forward))
    pairs = zip(backward, forward[ahead:], strict=False)
    return (*((step,) for step in forward[:ahead]), *pairs, *((step,) for step in backward[len(forward) - ahead :]))


def most_in_flight(blocks: Sequence[Sequence[PipelineStep]], layers: Sequence[int]) -> float:
    """Largest number of micro-batches whose activations a stage holds at once, in units of a pass through all its layers.

    Activations are held from a forward pass to its backward pass. In a pair, the backward pass frees layer by layer what the
    forward pass allocates, so a pair holds no more than one pass.

    Args:
        layers: number of layers of each chunk; without any layers all chunks count equally.
    """
    weights = layers if any(layers) else [1] * len(layers)
    held = most = 0
    for block in blocks:
        held += sum((1 if step.direction == "forward" else -1) * weights[step.chunk] for step in block)
        most = max(most, held)
    return most / sum(weights)


@cache
def held_in_pairs(stages: int, stage: int, micro_batches: int, layers: tuple[int, ...]) -> float:
    """The `most_in_flight` of `paired`, from its first rounds: the schedule is periodic, so later rounds hold no more.

    Args:
        layers: number of layers of each chunk.
    """
    few = min(micro_batches, 4 * stages + micro_batches % stages)
    return most_in_flight(paired(stages, stage, few, len(layers)), layers)


def format_grid(orders: Sequence[Sequence[PipelineStep]], mark: tuple[int, int] | None = None) -> str:
    """The orders as text: a row per rank, a column per step; the cell `mark` (rank, step) is in brackets."""
    columns = max((len(order) for order in orders), default=0) + 1
    rows = []
    for rank, order in enumerate(orders):
        cells = [str(order[i]) if i < len(order) else "" for i in range(columns)]
        if mark is not None and mark[0] == rank:
            cells[mark[1]] = f"[{cells[mark[1]]}]"
        rows.append(cells)
    width = max((len(cell) for row in rows for cell in row), default=0)
    head = len(f"S{len(orders) - 1}")
    lines = (f"S{rank}".ljust(head + 2) + " ".join(cell.ljust(width) for cell in row) for rank, row in enumerate(rows))
    return "\n".join(line.rstrip() for line in lines)
