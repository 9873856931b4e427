"""Memory that another stream still uses: what the allocator must be told, against a twin that runs lists in random orders."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from moe_overlap.plan.instructions import COMPUTE, Home, Instruction, parse_buffer
from moe_overlap.plan.lowering.dependencies import INPUTS, last_uses
from moe_overlap.plan.lowering.lifetimes import (
    StreamOrder,
    Uses,
    awaited_elsewhere,
    host_waits,
    stream_of,
    uses_to_record,
)
from moe_overlap.plan.lowering.lower import lower
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_list
from tests.unit.plan.test_plan_host_ahead import ahead, case

LISTS = ("pp2_ep2_ahead_rank0.txt", "pp2_ep2_partitioned_rank0.txt", "pp2_ep2_rank2.txt")


def golden(name: str) -> tuple[Instruction, ...]:
    return parse_list((plan_samples.GOLDEN / name).read_text())


def reused_too_early(instructions: Sequence[Instruction], recorded: Uses, draws: random.Random) -> bool:
    """The twin: an allocator whose pools hand memory out at once, and streams that run at random speeds.

    Memory is a number. The host allocates and drops as it issues, from the first instruction to the last; then the streams run.
    A fault is a use of memory after another buffer's owner has begun to write it.
    """
    ends = last_uses(instructions)
    pools: dict[str, list[int]] = {}
    memory: dict[str, tuple[int, str]] = {}
    users: dict[str, set[int]] = {}
    used: dict[int, list[tuple[int, int]]] = {}  # id -> (memory, owner)
    allocated: dict[int, list[tuple[int, int]]] = {}  # id -> (memory, owner) that it begins to write
    blocks, owners, withheld = 0, 0, set[int]()

    def drop(name: str) -> None:
        if name in memory:
            block, stream = memory.pop(name)
            # The allocator waits for the streams that it was told of: such memory does not come back within this list.
            told = any(name in recorded.get(user, ()) for user in users.pop(name, ()))
            (withheld.add if told else pools.setdefault(stream, []).append)(block)

    owner_of: dict[str, int] = {}
    for i in instructions:
        used[i.id], allocated[i.id] = [], []
        for name in dict.fromkeys((*i.reads, *i.writes)):
            if parse_buffer(name).word in INPUTS:
                continue
            if name in memory:
                used[i.id].append((memory[name][0], owner_of[name]))
                users.setdefault(name, set()).add(i.id)
            if name in i.writes:
                pool = pools.setdefault(stream_of(i), [])
                if pool:
                    block = pool.pop()
                else:
                    block, blocks = blocks, blocks + 1
                drop(name)
                memory[name], owner_of[name], owners = (block, stream_of(i)), owners, owners + 1
                allocated[i.id].append((block, owner_of[name]))
        for name in ends[i.id]:
            drop(name)
    queues: dict[str, list[Instruction]] = {}
    for i in instructions:
        queues.setdefault(stream_of(i), []).append(i)
    done: set[int] = set()
    content: dict[int, int] = {}
    while any(queues.values()):
        ready = [queue for queue in queues.values() if queue and done.issuperset(queue[0].after)]
        i = draws.choice(ready).pop(0)
        if any(content.get(block, owner) != owner for block, owner in used[i.id]):
            return True
        content.update(allocated[i.id])
        done.add(i.id)
    return False


@pytest.mark.parametrize("name", LISTS)
def test_what_is_recorded_is_enough(name: str) -> None:
    made = golden(name)
    recorded, draws = uses_to_record(made), random.Random(0)
    assert not any(reused_too_early(made, recorded, draws) for _ in range(20))


def test_the_twin_finds_memory_that_nobody_recorded() -> None:
    """Without a record the rows of a partition are written anew while they are still sent."""
    made = golden("pp2_ep2_ahead_rank0.txt")
    draws = random.Random(1)
    sends = {i.id for i in made if i.kind == "collective" and stream_of(i) != COMPUTE}
    kept = {number: names for number, names in uses_to_record(made).items() if number not in sends}
    assert any(reused_too_early(made, kept, draws) for _ in range(50))


def test_random_waits() -> None:
    """Whatever the speed of the streams, nothing is written too early; with fewer waits, drawn at random, something is."""
    plan, model = case("around", 2, "mm", micro_batch_size=2)
    made = lower(ahead(plan), model, 0)
    draws, recorded = random.Random(2), uses_to_record(made)
    found = 0
    for _ in range(30):
        fewer = {n: frozenset(b for b in names if draws.random() < 0.9) for n, names in recorded.items()}
        found += reused_too_early(made, fewer, draws)
        assert not reused_too_early(made, recorded, draws)
    assert found, "the twin found nothing: the comparison would show nothing"


def test_streams_and_events() -> None:
    made = golden("pp2_ep2_ahead_rank0.txt")
    assert {stream_of(i) for i in made if i.kind in ("compute", "weight-gradient", "optimizer")} == {COMPUTE}
    assert {"ep", "ep.counts", "pp.S0>S1", "pp.S0>S1.backward"} <= {stream_of(i) for i in made}
    assert all(stream_of(i) == COMPUTE for i in made if i.operator.is_update)
    needed = awaited_elsewhere(made)
    assert made[3].id in needed and made[2].id in needed and made[1].id not in needed
    lonely = [dataclasses.replace(i, after=()) for i in made]
    assert awaited_elsewhere(lonely) == frozenset()


@pytest.mark.parametrize(
    ("word", "home"),
    [
        ("weights", Home.DEVICE),
        ("dweights", Home.DEVICE),
        ("weights", Home.MOVED),
        ("state", Home.MOVED),
        ("activations", Home.MOVED),
    ],
)
def test_memory_of_one_group_is_late_at_most(word: str, home: Home) -> None:
    """When the host allocates what is freed in a step, of all groups freed before one may still be in use."""
    made = golden("zero3_offload_rank2.txt")
    waits, ends, order = host_waits(made), last_uses(made), StreamOrder(made)
    place_of = {i.id: place for place, i in enumerate(made)}
    live: set[str] = set()
    freed: list[int] = []
    late: list[int] = []
    awaited: set[int] = set()
    for i in made:
        assert all(place_of[number] < place_of[i.id] for number in waits.get(i.id, ()))
        awaited.update(place_of[number] for number in waits.get(i.id, ()))
        named = {n for n in i.writes if parse_buffer(n).role == word and parse_buffer(n).home is home}
        if named - live:
            late.append(sum(not any(p == a or order.knows(a, p) for a in awaited) for p in freed))
        live |= named
        freed += [place_of[i.id] for name in ends[i.id] if name in live]
        live -= set(ends[i.id])
    assert len(late) > 1 and max(late) == 1
