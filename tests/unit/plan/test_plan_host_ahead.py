"""Lists for devices that queue what the host gives them: every wait for counts has computation queued in front of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction, format_list, reads_counts
from moe_overlap.plan.lowering import lower as lowering
from moe_overlap.plan.lowering.dependencies import Draft
from moe_overlap.plan.lowering.interleave import counts_read_late
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.operators import COUNT
from moe_overlap.plan.overlap import RangeWord
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.list_twins import cuts, has_race, rejects, run_together
from tests.unit.plan.test_plan_partitions import EP2, with_words

Case = tuple[Plan, ModelDescription]


def ahead(plan: Plan) -> Plan:
    return dataclasses.replace(plan, host_runs_ahead=True)


def golden() -> Case:
    plan = load_plan(plan_samples.GOLDEN / "pp2_ep2_partitioned.json")
    values = json.loads((plan_samples.GOLDEN / "pp2_ep2_model.json").read_text())
    return plan, read_record(ModelDescription, values, "pp2_ep2_model.json")


def case(word: RangeWord, partitions: int, letters: str = "mdmm", shared: int = 0, **stage: object) -> Case:
    words = OverlapWords(partitions=partitions, range_word=word, gate="topk", defer=True, max_deferred_bytes=1 << 40)
    stage = {**EP2, "micro_batch_size": partitions, **stage}
    return with_words(words, letters, shared, stages=2, micro_batches=2, stage=stage)


CASES = {
    "around, shared experts": lambda: case("around", 3, shared=64),
    "around, whole layers again": lambda: case("around", 2, recompute=Recompute(layers=1, granularity="full")),
    "after, mixture of experts again": lambda: case(
        "after", 2, recompute=Recompute(layers=1, granularity="selective", modules=("moe",))
    ),
    "experts": lambda: case("experts", 4, shared=64),
}


def hidden(instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction, bool]]:
    """Every instruction that needs counts, and whether computation stands between their all-to-all and it."""
    places: dict[str, int] = {}
    for place, i in enumerate(instructions):
        # A recomputation counts anew, under the same name.
        places.update((name, place) for name in i.writes if i.operator.kind is COUNT)
        if reads_counts(i.reads):
            started = max(places[name] for name in i.reads if name in places)
            yield i, any(other.kind == "compute" for other in instructions[started:place])


def test_golden_list() -> None:
    """The worked example of partitions with `"host_runs_ahead": true` in its plan."""
    plan, model = golden()
    text = format_list(lower(ahead(plan), model, 0))
    assert text == (plan_samples.GOLDEN / "pp2_ep2_ahead_rank0.txt").read_text()
    assert all(covered for _, covered in hidden(lower(ahead(plan), model, 0)))
    assert not any(covered for _, covered in hidden(lower(plan, model, 0))), "a CPU sends as early as it can"


@pytest.mark.parametrize("name", CASES)
def test_waits_for_counts_are_hidden(name: str) -> None:
    plan, model = CASES[name]()
    for rank in (0, 2):
        made = lower_rank(ahead(plan), model, rank)
        bare = [i for i, covered in hidden(made) if not covered]
        # A gate that decides on the whole micro-batch leaves nothing to compute before its first rows have been sent.
        whole_gates = {(i.name, i.micro_batch) for i in made if i.name.endswith("gate") and not i.partition}
        bare_layers = {(i.name.replace("dispatch", "gate"), i.micro_batch) for i in bare}
        assert bare_layers <= whole_gates


@pytest.mark.parametrize("name", CASES)
def test_lists_are_sound_and_compute_the_same(name: str) -> None:
    plan, model = CASES[name]()
    size = plan.stages[0].micro_batch_size
    lists = {rank: list(lower_rank(ahead(plan), model, rank)) for rank in range(plan.world_size)}
    assert run_together(lists)
    for rank in (0, 2):
        made, reference = lists[rank], lower_rank(plan, model, rank)
        assert Interpreter(made, size, model).outcome == Interpreter(reference, size, model).outcome
        # The order of every communicator is the same: what meets what on other ranks does not depend on the device.
        for channel in {i.channel for i in made if i.kind in ("collective", "point-to-point")}:
            orders = [
                [(i.name, i.micro_batch, i.partition) for i in of if i.channel == channel] for of in (made, reference)
            ]
            assert orders[0] == orders[1]


def test_the_race_check_sees_every_wait() -> None:
    plan, model = case("around", 2, "mm")
    made = lower(ahead(plan), model, 0)
    assert not has_race(made)
    for broken in list(cuts(made))[::7]:
        assert rejects(broken) == has_race(broken)


def test_the_host_holds_up_what_stands_behind_a_reader_of_counts() -> None:
    plan, model = golden()
    made = lower(ahead(plan), model, 0)
    before: list[set[int]] = []
    last: dict[str, int] = {}
    counted: dict[str, int] = {}
    waited: set[int] = set()
    for i in made:
        waited |= {counted[name] for name in i.reads if name in counted}
        counted.update((name, i.id) for name in i.writes if reads_counts((name,)))
        earlier = {*i.after, *([last[i.channel]] if i.channel in last else [])}
        before.append(earlier.union(*(before[number] for number in earlier)))
        last[i.channel] = i.id
        assert waited <= before[i.id] | {i.id}, i
    # Computation does not wait for what sends behind it, and a send only for what it reads.
    dispatch = next(i for i in made if i.name.endswith("dispatch"))
    assert dispatch.after == (3,) and made[3].operator.kind is COUNT


def test_a_list_that_sends_first_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: without moving the sends, waits stand bare."""
    monkeypatch.setattr(lowering, "counts_read_late", lambda drafts: drafts)
    plan, model = golden()
    assert not all(covered for _, covered in hidden(lower(ahead(plan), model, 0)))


def test_what_a_send_may_not_pass() -> None:
    send = Draft(
        kind="collective", name="L0.moe.dispatch", channel="ep", reads=("splits.L0.m0",), writes=("received.L0.m0",)
    )
    gate = Draft(kind="compute", name="L0.moe.gate", reads=("a.L0.m0",), writes=("rows.L0.m0",))
    experts = Draft(kind="compute", name="L0.moe.experts", reads=("received.L0.m0",), writes=("computed.L0.m0",))
    other = Draft(kind="collective", name="L1.moe.combine", channel="ep", reads=("computed.L1.m0",))
    assert list(counts_read_late([send, gate, experts])) == [gate, send, experts]
    assert list(counts_read_late([send, other, gate])) == [send, other, gate]
    assert list(counts_read_late([send, gate])) == [gate, send]
    assert list(counts_read_late([])) == []
