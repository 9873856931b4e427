"""Slots of captured instructions: micro-batches that are under way together never share memory, at any speed of the streams."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.captured import CapturedList, captured_list
from moe_overlap.plan.lowering.lifetimes import StreamOrder, stream_of
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.operators import ATTENTION, EXPERTS, GATE, HEAD_LOSS, MERGE
from tests.unit.plan.test_plan_lifetimes_streams import golden
from tests.unit.plan.test_plan_static_capacity import BASE, PAD, WORDS

PIPELINE = "--pipeline-model-parallel-size 2 --global-batch-size 32"
LISTS = {
    **{name: f"{PAD} {words}" for name, words in WORDS.items() if name != "recomputed"},
    "pipeline": f"{PAD} --defer-weight-gradients {PIPELINE}",
    "pipeline of partitions": f"--moe-overlap-partitions 2 {PIPELINE}",
}


def listed(name: str, rank: int = 0) -> tuple[Instruction, ...]:
    config = parse(f"{BASE} {LISTS[name]}".split()).config
    world = 2 * config.parallel.pipeline_model_parallel_size
    validate(config, world)
    model = describe_model(config, 257)
    return lower(plan_from_flags(config, model, world), model, rank)


def shared_too_early(instructions: Sequence[Instruction], found: CapturedList, draws: random.Random) -> bool:
    """The twin: streams at random speeds. Whether a micro-batch starts in a slot while another one that had it is under way."""
    by_stream: dict[str, list[Instruction]] = {}
    for i in instructions:
        by_stream.setdefault(stream_of(i), []).append(i)
    left = {
        (i.chunk, i.micro_batch): {j.id for j in instructions if (j.chunk, j.micro_batch) == (i.chunk, i.micro_batch)}
        for i in instructions
        if i.id in found.slots
    }
    for i in instructions:
        if i.kind == "point-to-point" and (i.chunk, i.micro_batch) in left:
            left[i.chunk, i.micro_batch].discard(i.id)
    slot_of = {(i.chunk, i.micro_batch): found.slots[i.id] for i in instructions if i.id in found.slots}
    first = {holder: min(numbers & found.slots.keys()) for holder, numbers in left.items()}
    ended: set[int] = set()
    while any(by_stream.values()):
        ready = [queue for queue in by_stream.values() if queue and set(queue[0].after) <= ended]
        i = draws.choice(ready).pop(0)
        mine = (i.chunk, i.micro_batch)
        if i.id in found.slots:
            for other, numbers in left.items():
                same = other != mine and other[0] == mine[0] and slot_of[other] == slot_of[mine]
                if same and numbers and first[other] in ended:
                    return True
        ended.add(i.id)
        for numbers in left.values():
            numbers.discard(i.id)
    return False


@pytest.mark.parametrize("name", LISTS)
def test_no_two_micro_batches_under_way_share_a_slot(name: str) -> None:
    made = listed(name)
    found = captured_list(made, has_static_rows=PAD in LISTS[name])
    draws = random.Random(5)
    assert not any(shared_too_early(made, found, draws) for _ in range(20))


def test_as_many_slots_as_micro_batches_are_under_way() -> None:
    count = {name: len(set(captured_list(listed(name), True).slots.values())) for name in LISTS}
    # Weight gradients wait for all-to-alls of their own micro-batch. 1F1B has two of eight under way on the first of two stages.
    assert count == {"deferred": 1, "two micro-batches": 2, "chunks": 1, "pipeline": 2, "pipeline of partitions": 2}


def test_one_slot_for_two_micro_batches_under_way_is_seen() -> None:
    made = listed("two micro-batches")
    found = captured_list(made, True)
    crowded = CapturedList(dict.fromkeys(found.slots, next(iter(found.slots.values()))), found.sent)
    assert any(shared_too_early(made, crowded, random.Random(5)) for _ in range(20))


def test_what_is_captured_is_what_never_changes_its_shape() -> None:
    made = golden("pp2_ep2_ahead_rank0.txt")
    kinds = {made[number].operator.kind for number in captured_list(made, False).slots}
    assert {ATTENTION, GATE} <= kinds and not kinds & {EXPERTS, MERGE, HEAD_LOSS}
    kinds = {made[number].operator.kind for number in captured_list(made, True).slots}
    assert {ATTENTION, GATE, EXPERTS, MERGE} <= kinds
    assert all(made[number].kind == "compute" for number in captured_list(made, True).slots)


def test_what_is_sent_is_copied_out() -> None:
    made = listed("pipeline")
    found = captured_list(made, True)
    order, writers = StreamOrder(made), {name: i for i in made if i.id in found.slots for name in i.writes}
    sends = [i for i in made if i.sends]
    assert sends and all(name in found.sent[writers[name].id] for i in sends for name in i.reads)
    # Nothing on this rank waits for them: without the copy their memory would be written too early.
    last = max(found.slots)
    assert not order.knows(last, max(i.id for i in sends if i.id < last))
