"""How long buffers are kept, against the obvious twin, and what is left to wait for a recomputation."""

from __future__ import annotations

import pytest

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.dependencies import last_uses
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.plan import Recompute
from tests.unit.plan import plan_samples

List = tuple[Instruction, ...]
FULL = Recompute(layers=1, granularity="full")


def lists() -> list[List]:
    recomputes = (Recompute(), FULL, Recompute(layers=2, granularity="selective", modules=("moe",)))
    made = []
    for again in recomputes:
        plan = plan_samples.plan(layers=4, stages=2, stage={"data": 2, "expert": 2, "recompute": again})
        made.append(lower(plan, plan_samples.model("mdmm"), 2))
    return made


def is_needed(made: List, name: str, place: int) -> bool:
    """Whether what a buffer holds behind this place is read."""
    for later in made[place + 1 :]:
        if name in later.reads:
            return True
        if name in later.writes:
            return False
    return False


@pytest.mark.parametrize("made", lists(), ids=["nothing", "layers", "MoE layers"])
def test_buffers_end_where_nobody_reads_them_any_more(made: List) -> None:
    ends = last_uses(made)
    for place, i in enumerate(made):
        expected = {name for name in (*i.reads, *i.writes) if not is_needed(made, name, place)}
        assert set(ends[i.id]) == expected, i


def test_between_the_passes_only_the_inputs_of_recomputed_layers_wait() -> None:
    plan = plan_samples.plan(layers=2, micro_batches=1, stage={"data": 2, "expert": 2, "recompute": FULL})
    made = lower(plan, plan_samples.model("mm"), 0)
    held: set[str] = set()
    ends = last_uses(made)
    for i in made:
        held |= set(i.writes)
        held -= set(ends[i.id])
        if i.name == "head.loss":
            break
    # Only the first layer of the chunk is recomputed; the second keeps what its own backward pass is given.
    assert {name for name in held if name.split(".")[1] == "L0"} == {"h.L0.m0"}
