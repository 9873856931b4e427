"""Tests of first calls: a module's first call in a step is also differentiated first, where no micro-batch is partitioned.

Transformer Engine's products overwrite the sum of their weight gradients in the backward pass of their first call in a step, and
add to it in every other: a gradient that came earlier would be lost. Partitions run backward last to first, so that models that
are cut are built without (model/build.py). Weight gradients that are put aside are computed in the order of the backward passes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from moe_overlap.plan.capabilities import ListedRun
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.operators import BACKWARD, FORWARD
from moe_overlap.plan.uniform_overlap import OverlapWords, with_uniform_overlap
from tests.unit.plan import plan_samples

WORDS = {
    "deferred": OverlapWords(defer=True, max_deferred_bytes=10**12),
    "around": OverlapWords(partitions=2, range_word="around", gate="topk"),
    "after, deferred": OverlapWords(
        partitions=2, range_word="after", gate="topk", defer=True, max_deferred_bytes=10**12
    ),
    "two micro-batches": OverlapWords(micro_batches=2, defer=True, max_deferred_bytes=10**12),
    "chunks of capacity": OverlapWords(capacity_chunks=2, gate="topk"),
}


def first_places(
    instructions: Iterable[Instruction], phase: object
) -> dict[tuple[object, object], tuple[object, object]]:
    """Micro-batch and partition of the first instruction of each operator of a layer."""
    places: dict[tuple[object, object], tuple[object, object]] = {}
    for i in instructions:
        operator = i.operator
        if i.kind == "compute" and operator.layer is not None and operator.phase is phase:
            places.setdefault((operator.kind, operator.layer), (i.micro_batch, i.partition))
    return places


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", WORDS)
def test_the_first_call_is_the_first_that_is_differentiated(
    name: str, stages: int, chunks: int, runs_ahead: bool
) -> None:
    if chunks > 1 and WORDS[name].micro_batches > 1:
        return  # Micro-batches are not interleaved in an interleaved pipeline.
    sizes = {"data": 2, "expert": 2, "micro_batch_size": 4}
    model = plan_samples.model("mmmm", shared_expert_hidden_size=64)
    plan = plan_samples.plan(4, stages, chunks, micro_batches=4, stage=sizes, host_runs_ahead=runs_ahead)
    plan = with_uniform_overlap(plan, model, WORDS[name], ListedRun(gate="topk"))
    for stage in range(stages):
        instructions = lower(plan, model, 2 * stage)
        forward, backward = (first_places(instructions, phase) for phase in (FORWARD, BACKWARD))
        assert len(forward) >= 4 and forward.keys() == backward.keys()
        assert (forward == backward) is not plan.stages[stage].overlap.cuts_layers
