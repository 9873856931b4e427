"""The gather of weights under the first passes of a step (`StageOverlap.overlap_param_gather`).

With ZeRO 1 each replica has updated only its own shard in the previous step. The gathers of all parameter groups come before the
passes, in order of first use, and start immediately: the link is free until the first rows travel, and later stages are idle
until their first micro-batch arrives. The first computation of the step that uses a group's weights waits for its gather; the
channel runs in order, so all later uses are ordered after it.

An evaluation step begins with the same gathers; a repeated gather does not change the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.lowering.gradient_buckets import optimizer_parts
from moe_overlap.plan.lowering.optimizer_state import PartDrafts, part_of
from moe_overlap.plan.plan import Plan


def with_gathers(drafts: Sequence[Draft], plan: Plan, stage_index: int, model: ModelDescription) -> Iterator[Draft]:
    """The passes of a step after the gathers of their weights; just the passes without `overlap_param_gather` or replicas.

    Args:
        drafts: forward and backward of all micro-batches of one rank.
    """
    stage = plan.stages[stage_index]
    if not stage.overlap.overlap_param_gather or not stage.is_replicated:
        yield from drafts
        return
    parts = PartDrafts(plan, stage_index, model, {})
    missing = set(optimizer_parts(plan, stage_index, model))
    passes, gathered = [], []
    for draft in drafts:
        needed = [part for part in _weights_of(draft, parts) if part in missing]
        missing.difference_update(needed)
        gathered += needed
        passes.append(replace(draft, reads=(*draft.reads, *map(_weights, needed))) if needed else draft)
    assert not missing, f"weights that no pass uses: {sorted(missing)}"
    for part in gathered:
        yield parts.gather(part, (_weights(part),))
    yield from passes


def _weights_of(draft: Draft, parts: PartDrafts) -> tuple[str, ...]:
    """The parameter groups whose weights an instruction reads."""
    part = part_of(draft)
    return parts.weights(part, draft.operator.in_backward_pass) if part else ()


def _weights(part: str) -> str:
    return f"parameters.{part}"
