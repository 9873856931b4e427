"""Lists under NCCL's rules: they end, and broken ones are refused; a step-by-step twin agrees."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.lowering.deferral import early_gradients
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.lowering.rendezvous import check_rendezvous, communicator_of
from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_list
from tests.unit.plan.test_plan_partitions import EP2, RECOMPUTES, with_words
from tests.unit.plan.test_plan_send_slots import filled

Lists = dict[int, tuple[Instruction, ...]]


def lists_of(plan: Plan, moe: str) -> Lists:
    """One rank per stage."""
    model = plan_samples.model(moe)
    return {stage.devices.ranks[0]: lower(plan, model, stage.devices.ranks[0]) for stage in plan.stages}


def golden() -> Lists:
    names = {0: "pp2_ep2_rank0.txt", 2: "pp2_ep2_rank2.txt"}
    return {rank: parse_list((plan_samples.GOLDEN / name).read_text()) for rank, name in names.items()}


def ends(lists: Lists) -> bool:
    try:
        check_rendezvous(lists)
    except ScheduleError:
        return False
    return True


def run_by_hand(lists: Lists) -> bool:
    """The obvious twin: again and again, end whatever can end, until nothing is left or nothing moves."""
    left = {rank: list(instructions) for rank, instructions in lists.items()}
    done: dict[int, set[int]] = {rank: set() for rank in lists}

    def front(rank: int, wanted: Instruction) -> bool:
        """Whether it is the first that is left of its queue, and all it waits for has ended."""
        for other in left[rank]:
            if other is wanted:
                return set(wanted.after) <= done[rank]
            same = other.channel == wanted.channel
            if wanted.kind in ("collective", "point-to-point"):
                moves = other.kind in ("collective", "point-to-point")
                same = moves and communicator_of(rank, other) == communicator_of(rank, wanted)
            elif other.kind in ("collective", "point-to-point"):
                same = False
            if same:
                return False
        raise AssertionError

    def end(rank: int, instruction: Instruction) -> None:
        left[rank].remove(instruction)
        done[rank].add(instruction.id)

    moved = True
    while moved:
        moved = False
        for rank, instruction in [(r, i) for r in left for i in left[r]]:
            if instruction not in left[rank] or not front(rank, instruction):
                continue
            if instruction.kind == "point-to-point":
                peer = instruction.peers[0]
                facing = [
                    other
                    for other in left[peer]
                    if other.kind == "point-to-point"
                    and rank in other.peers
                    and bool(other.writes) != bool(instruction.writes)
                    and other.channel == instruction.channel
                ]
                if not facing or not front(peer, facing[0]):
                    continue
                end(peer, facing[0])
            elif instruction.name == "optimizer.norm" and instruction.kind == "collective":
                facing_norms = [(r, next((i for i in left[r] if i.name == "optimizer.norm"), None)) for r in left]
                if any(norm is None or not front(r, norm) for r, norm in facing_norms):
                    continue
                for r, norm in facing_norms:
                    if r != rank and norm is not None:
                        end(r, norm)
            end(rank, instruction)
            moved = True
    return not any(left.values())


def test_golden_pipeline_ends_with_a_communicator_for_each_direction() -> None:
    assert ends(golden()) and run_by_hand(golden())


def on_one_communicator(lists: Lists) -> Lists:
    """All that two ranks send each other in one queue, as a single process group of the pipeline has it."""
    return {
        rank: tuple(dataclasses.replace(i, channel="pp") if i.kind == "point-to-point" else i for i in instructions)
        for rank, instructions in lists.items()
    }


def test_it_stops_where_issue_order_shares_one_communicator_per_pair() -> None:
    """Stage 0 starts its second send while stage 1 starts its first backward send: on one communicator both wait for good."""
    shared = on_one_communicator(golden())
    with pytest.raises(ScheduleError, match="circle"):
        check_rendezvous(shared)
    assert not run_by_hand(shared)


def test_each_direction_has_a_queue_of_its_own() -> None:
    """A send and a receive of each of two ranks, each rank sending first."""

    def side(peer: int) -> tuple[Instruction, ...]:
        up, down = ("a", "b") if peer else ("b", "a")
        common = {"kind": "point-to-point", "stage": 0, "peers": (peer,), "micro_batch": 0}
        send = Instruction(id=0, name=f"send.{up}", channel=up, reads=("x",), **common)  # type: ignore[arg-type]
        receive = Instruction(id=1, name=f"receive.{down}", channel=down, writes=("y",), **common)  # type: ignore[arg-type]
        return send, receive

    lists = {0: side(1), 1: side(0)}
    assert ends(lists) and run_by_hand(lists)
    assert not ends(on_one_communicator(lists)) and not run_by_hand(on_one_communicator(lists))


def swapped(instructions: Sequence[Instruction], first: int, second: int) -> tuple[Instruction, ...]:
    """Two transfers trade places: each keeps the id, the channel's slot and the dependencies of the place it moves to."""
    result = list(instructions)
    for here, there in ((first, second), (second, first)):
        kept = instructions[here]
        result[here] = dataclasses.replace(instructions[there], id=kept.id, after=kept.after)
    return tuple(result)


@pytest.mark.parametrize("moe", ["mm", "mdmd"])
def test_one_swapped_transfer_is_refused(moe: str) -> None:
    lists = lists_of(plan_samples.plan(len(moe), 2, micro_batches=4), moe)
    assert ends(lists)
    for rank, instructions in lists.items():
        places = [n for n, i in enumerate(instructions) if i.kind == "point-to-point"]
        for first, second in itertools.pairwise(places):
            if instructions[first].channel == instructions[second].channel:
                assert not ends({**lists, rank: swapped(instructions, first, second)}), (rank, first, second)


def test_a_transfer_that_nobody_meets_is_refused() -> None:
    lists = golden()
    last = max(n for n, i in enumerate(lists[2]) if i.kind == "point-to-point")
    cut = tuple(
        dataclasses.replace(i, after=tuple(n for n in i.after if n != lists[2][last].id))
        for n, i in enumerate(lists[2])
        if n != last
    )
    with pytest.raises(ScheduleError, match="never meets"):
        check_rendezvous({**lists, 2: cut})


def random_plan(draw: random.Random) -> tuple[Plan, str]:
    stages, chunks = draw.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
    layers = stages * chunks * draw.choice([1, 2])
    micro_batches = stages * draw.choice([1, 2, 3]) if chunks > 1 else draw.randint(1, 7)
    sizes = {"expert": 2, "data": 2, "zero_level": draw.choice([0, 1])}
    moe = "".join(draw.choice("md") for _ in range(layers))
    return plan_samples.plan(layers, stages, chunks, micro_batches, stage=sizes), moe


def test_random_pipelines_end_and_the_twin_agrees() -> None:
    draw = random.Random(7)
    verdicts = set()
    for _ in range(40):
        plan, moe = random_plan(draw)
        lists = lists_of(plan, moe)
        assert ends(lists)
        rank = draw.choice(list(lists))
        places = [n for n, i in enumerate(lists[rank]) if i.kind == "point-to-point"]
        broken = {**lists, rank: swapped(lists[rank], *draw.sample(places, 2))} if len(places) > 1 else lists
        for some in (lists, broken):
            for is_shared in (False, True):
                queued = on_one_communicator(some) if is_shared else some
                verdict = ends(queued)
                if verdict:
                    assert run_by_hand(queued)
                verdicts.add((some is lists, is_shared, verdict))
    assert {(True, False, True), (False, False, False), (True, True, False)} <= verdicts


def random_overlap(draw: random.Random) -> tuple[Plan, ModelDescription]:
    """A pipeline of any form whose stages overlap, hold shards or offload, as drawn."""
    stages, chunks = draw.choice([(2, 1), (2, 1), (3, 1), (2, 2)])
    letters = "".join(draw.choice("mmd") for _ in range(stages * chunks))
    letters = letters if "m" in letters else "m" + letters[1:]
    form = draw.choice(["partitions", "micro-batches", "chunks", "decoupled", "behind sends"])
    sizes: dict[str, Any] = {**EP2, "recompute": draw.choice(RECOMPUTES)}
    micro_batches = stages * draw.choice([1, 2])
    shape: dict[str, Any] = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches}
    if form == "decoupled":
        offload = Offload(optimizer=draw.choice([0.0, 0.5]), weights=draw.choice([0.0, 1.0]))
        sizes = {"data": 2, "zero_level": draw.choice([2, 3]), "offload": offload}
        return plan_samples.plan(len(letters), stage=sizes, **shape), plan_samples.model(letters)
    defer = draw.random() < 0.6 or form == "behind sends"
    words = OverlapWords(
        partitions=2 if form == "partitions" or (form == "micro-batches" and draw.random() < 0.3) else 1,
        range_word=draw.choice(["experts", "after", "around"]),
        capacity_chunks=2 if form == "chunks" else 1,
        gate="topk",
        defer=defer,
        max_deferred_bytes=draw.choice([1 << 12, 1 << 18, 1 << 40]) if defer else 0,
        micro_batches=2 if form == "micro-batches" and chunks == 1 else 1,
    )
    plan, model = with_words(words, letters, stage=sizes, **shape)
    return (filled(plan, model) if form == "behind sends" and chunks == 1 else plan), model


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_random_plans_end(count: int) -> None:
    """Partitions, two micro-batches at a time, capacity chunks, bubble slots, ZeRO 2 and 3: `lower` itself checks."""
    draw, forms, bounded = random.Random(11), set(), 0
    for _ in range(count):
        plan, model = random_overlap(draw)
        first = lower(plan, model, plan.stages[0].devices.ranks[0])
        assert any(i.kind == "point-to-point" for i in first)
        bounded += bool(early_gradients(first))
        overlap = plan.stages[0].overlap
        mechanisms = {layer.mechanism for layer in overlap.layers}
        forms.add((len(plan.stages), len(plan.stages[0].chunks), *sorted(mechanisms), plan.stages[0].is_decoupled))
    assert len(forms) > 12 and bounded > count // 10
