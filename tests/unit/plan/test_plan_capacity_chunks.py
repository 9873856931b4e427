"""The Tutel-style pipeline as lists: its order, that it is sound, and that it computes what the uncut list computes."""

from __future__ import annotations

from collections import Counter

import pytest

from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import CHUNKED_PARTS, LayerOverlap, StageOverlap
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.list_twins import has_race, run_together
from tests.unit.plan.test_plan_partitions import EP2, line, uncut, with_words


@pytest.mark.parametrize("shared", [0, 64])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_lists_are_sound_and_compute_the_same(degree: int, shared: int) -> None:
    words = OverlapWords(capacity_chunks=degree, defer=True, max_deferred_bytes=1 << 40)
    plan, model = with_words(words, "mdmm", shared, stages=2, stage={**EP2, "micro_batch_size": 8})
    validate_plan(plan, model)
    for rank in range(0, plan.world_size, 2):
        made, reference = lower(plan, model, rank), lower(uncut(plan), model, rank)
        check_races(made)
        counts, before = (Counter(i.name for i in each if i.kind != "weight-gradient") for each in (made, reference))
        chunked = {name: degree if any(part in name for part in CHUNKED_PARTS) else 1 for name in before}
        assert counts == {name: count * chunked[name] for name, count in before.items()}
        assert sum(i.bytes for i in made) == sum(i.bytes for i in reference)
        assert Interpreter(made, 8, model).outcome == Interpreter(reference, 8, model).outcome
    assert run_together({rank: list(lower(plan, model, rank)) for rank in range(plan.world_size)})


@pytest.mark.parametrize("shared", [0, 64])
def test_order(shared: int) -> None:
    """All dispatches first, then each chunk's combine right behind its experts; backward is the mirror image."""
    plan, model = with_words(OverlapWords(capacity_chunks=2), "m", shared, micro_batches=1, stage=EP2)
    made = [line(i) for i in lower(plan, model, 0) if i.name.startswith("L0.moe")]
    under_the_first = ["shared"] if shared else []
    forward = ["gate", "count", "dispatch 0", "dispatch 1", *under_the_first]
    forward += ["experts 0", "combine 0", "experts 1", "combine 1", "merge"]
    backward = ["merge", "combine 1", "combine 0", *under_the_first]
    backward += ["experts 1", "dispatch 1", "experts 0", "dispatch 0", "gate"]
    assert made[: len(forward)] == [f"L0.moe.{name}" for name in forward]
    assert [name.replace(".backward", "") for name in made[len(forward) :]] == [f"L0.moe.{name}" for name in backward]
    assert not has_race(lower(plan, model, 0))


def test_gate_and_merge_handle_the_whole() -> None:
    plan, model = with_words(OverlapWords(capacity_chunks=2), "m", micro_batches=1, stage=EP2)
    buffers = {line(i): (i.reads, i.writes) for i in lower(plan, model, 0)}
    assert buffers["L0.moe.dispatch 1"] == (("rows.L0.m0", "splits.L0.m0"), ("received.L0.m0.p1",))
    assert buffers["L0.moe.merge"][0][:2] == ("returned.L0.m0.p0", "returned.L0.m0.p1")
    assert buffers["L0.moe.combine.backward 0"] == (("dreturned.L0.m0",), ("dcomputed.L0.m0.p0",))
    assert buffers["L0.moe.gate.backward"][0][:2] == ("drows.L0.m0.p0", "drows.L0.m0.p1")


def test_degree_one_is_the_uncut_list() -> None:
    overlap = StageOverlap(layers=(LayerOverlap(layer=0, mechanism="tutel", tutel_degree=1),))
    plan, model = plan_samples.plan(2, stage={**EP2, "overlap": overlap}), plan_samples.model("mm")
    validate_plan(plan, model)
    assert lower(plan, model, 0) == lower(uncut(plan), model, 0)
