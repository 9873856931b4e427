"""Orders of passes for tests: that of a plan's stage pass by pass, and the obvious check of the orders of all stages together."""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.plan.lowering.pipeline_order import PipelineStep, pipeline_blocks
from moe_overlap.plan.plan import Plan


def pass_order(plan: Plan, stage: int) -> tuple[PipelineStep, ...]:
    """The passes of one stage of a plan, those that run interleaved one after the other."""
    return tuple(step for block in pipeline_blocks(plan, stage) for step in block)


def fault_of(orders: Sequence[Sequence[PipelineStep]], chunks: int, micro_batches: int) -> str:
    """What is wrong with the orders of all stages together; empty where they are sound.

    Every micro-batch passes every chunk forward and then backward, once each; and the stages, each in its order, do not wait for
    each other for ever.
    """
    expected = {PipelineStep("forward", c, m) for c in range(chunks) for m in range(micro_batches)}
    expected |= {PipelineStep("backward", s.chunk, s.micro_batch) for s in expected}
    for rank, order in enumerate(orders):
        if len(order) != len(set(order)) or set(order) != expected:
            return f"stage {rank} does not run every pass once"
        for place, step in enumerate(order):
            if (
                step.direction == "backward"
                and PipelineStep("forward", step.chunk, step.micro_batch) not in order[:place]
            ):
                return f"stage {rank}: {step} runs before its forward pass"
    left = [list(order) for order in orders]
    done: set[tuple[int, PipelineStep]] = set()
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(left):
            # Running whatever can run is exact: a step that has run takes nothing from another, so no choice is ever wrong.
            while order and input_of(stage, order[0], len(orders), chunks) in (None, *done):
                done.add((stage, order.pop(0)))
                moved = True
    stuck = [f"stage {stage}: {order[0]} waits for ever" for stage, order in enumerate(left) if order]
    return stuck[0] if stuck else ""


def input_of(stage: int, step: PipelineStep, stages: int, chunks: int) -> tuple[int, PipelineStep] | None:
    """The step that a step waits for at another stage; model order is chunk · stages + stage."""
    position = step.chunk * stages + stage + (-1 if step.direction == "forward" else 1)
    if not 0 <= position < stages * chunks:
        return None
    return position % stages, PipelineStep(step.direction, position // stages, step.micro_batch)
