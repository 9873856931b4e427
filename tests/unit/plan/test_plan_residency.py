"""Communicators that share a device: lists end with a place for each or with one queue, and a step-by-step twin agrees."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from moe_overlap.plan.instructions import Instruction, ScheduleError, parse_list
from moe_overlap.plan.lowering import lower as lowering
from moe_overlap.plan.lowering.lifetimes import stream_of
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.lowering.residency import Device, check_residency, communicators_of, most_blocks
from moe_overlap.plan.serialize import load_plan
from tests.unit.plan import plan_samples
from tests.unit.plan.test_plan_host_ahead import ahead
from tests.unit.plan.test_plan_rendezvous import random_overlap

Lists = dict[int, tuple[Instruction, ...]]


def ends(lists: Lists, device: Device) -> bool:
    try:
        check_residency(lists, device)
    except ScheduleError:
        return False
    return True


def run_by_hand(lists: Lists, device: Device, draws: random.Random) -> bool:
    """The obvious twin: at random, start something that may start, or end a meeting that all have reached."""
    left = {rank: list(made) for rank, made in lists.items()}
    resident: dict[int, list[Instruction]] = {rank: [] for rank in lists}
    done: dict[int, set[int]] = {rank: set() for rank in lists}
    order = {rank: list(dict.fromkeys(map(stream_of, made))) for rank, made in lists.items()}

    def queue_of(rank: int, i: Instruction) -> int:
        return order[rank].index(stream_of(i)) % device.queues

    def startable(rank: int) -> list[Instruction]:
        heads: dict[int, Instruction] = {}
        for i in left[rank]:
            heads.setdefault(queue_of(rank, i), i)
        return [i for i in heads.values() if may_start(rank, i)]

    def may_start(rank: int, i: Instruction) -> bool:
        communicates = i.kind in ("collective", "point-to-point")
        free = not communicates or len(resident[rank]) < device.kernels
        idle = all(stream_of(other) != stream_of(i) for other in resident[rank])
        return free and idle and done[rank].issuperset(i.after)

    def facing(rank: int, i: Instruction) -> list[tuple[int, Instruction]] | None:
        """All sides of a meeting, once they are resident."""
        if i.kind == "point-to-point":
            (peer,) = i.peers
            others = [
                (peer, other)
                for other in resident[peer]
                if other.channel == i.channel and other.peers == (rank,) and bool(other.writes) != bool(i.writes)
            ]
            return [(rank, i), *others] if others else None
        if i.name == "optimizer.norm":
            norms = [(r, other) for r in lists for other in resident[r] if other.name == i.name]
            return norms if len(norms) == len(lists) else None
        return [(rank, i)]

    while any(left.values()) or any(resident.values()):
        moves: list[Callable[[], None]] = []
        for rank in lists:
            for i in startable(rank):

                def start(rank: int = rank, i: Instruction = i) -> None:
                    left[rank].remove(i)
                    if i.kind in ("collective", "point-to-point"):
                        resident[rank].append(i)
                    else:
                        done[rank].add(i.id)

                moves.append(start)
            for i in resident[rank]:
                sides = facing(rank, i)
                if sides is not None:

                    def end(sides: list[tuple[int, Instruction]] = sides) -> None:
                        for other, side in sides:
                            resident[other].remove(side)
                            done[other].add(side.id)

                    moves.append(end)
        if not moves:
            return False
        draws.choice(moves)()
    return True


def two_transfers(swapped: bool) -> Lists:
    """Rank 0 sends a and receives b, rank 1 the mirror; the ranks' hosts issue them in the same order or not."""

    def transfer(number: int, peer: int, sends: bool, channel: str) -> Instruction:
        ends = {"reads": ("h.L1.m0",)} if sends else {"writes": ("dh.L1.m0",)}
        side = "send" if sends else "receive"
        name = f"{side}.S0>S1" + (".backward" if channel.endswith("backward") else "")
        return Instruction(
            id=number,
            kind="point-to-point",
            name=name,
            stage=1 - peer,
            micro_batch=0,
            channel=channel,
            peers=(peer,),
            **ends,
        )  # type: ignore[arg-type]

    forth, back = "pp.S0>S1", "pp.S0>S1.backward"
    first = (transfer(0, 1, True, forth), transfer(1, 1, False, back))
    second = [transfer(0, 0, False, forth), transfer(1, 0, True, back)]
    if swapped:
        second = [transfer(0, 0, True, back), transfer(1, 0, False, forth)]
    return {0: first, 1: tuple(second)}


def test_two_communicators_on_two_devices() -> None:
    draws = random.Random(0)
    same, crossed = two_transfers(False), two_transfers(True)
    for lists in (same, crossed):
        assert ends(lists, Device(kernels=2, queues=1)) and ends(lists, Device(kernels=2, queues=8))
        assert run_by_hand(lists, Device(2, 1), draws) and run_by_hand(lists, Device(2, 8), draws)
    # One place: hosts that agree on the order get through with one queue; crossed, each fills its device and waits for the other.
    assert ends(same, Device(1, 1)) and run_by_hand(same, Device(1, 1), draws)
    with pytest.raises(ScheduleError, match="keep them from starting"):
        check_residency(crossed, Device(1, 1))
    assert not run_by_hand(crossed, Device(1, 1), draws)
    # With more queues timing decides, even where the hosts agree.
    with pytest.raises(ScheduleError, match="timing decides"):
        check_residency(same, Device(1, 2))
    assert {run_by_hand(same, Device(1, 2), draws) for _ in range(50)} == {True, False}


def test_a_shared_queue_holds_up_what_another_stream_could_start() -> None:
    """Each rank computes on what it receives, then sends what the other computes on: one queue puts the send behind the wait."""
    lists: Lists = {}
    for rank, transfers in two_transfers(False).items():
        receive = next(i for i in transfers if i.receives)
        send = next(i for i in transfers if i.sends)
        computes = Instruction(id=1, kind="compute", name="L1.mlp", stage=0, micro_batch=0, after=(0,))
        first, last = dataclasses.replace(receive, id=0), dataclasses.replace(send, id=2)
        lists[rank] = (first, computes, last)
    draws = random.Random(4)
    for device, expected in ((Device(2, 8), True), (Device(2, 1), False)):
        assert ends(lists, device) == run_by_hand(lists, device, draws) == expected


def golden() -> Lists:
    names = {0: "pp2_ep2_rank0.txt", 2: "pp2_ep2_rank2.txt"}
    return {rank: parse_list((plan_samples.GOLDEN / name).read_text()) for rank, name in names.items()}


def test_golden_pipeline() -> None:
    lists = golden()
    most = max(communicators_of(lists).values())
    for queues in (1, 2, 8):
        assert ends(lists, Device(most, queues)) == run_by_hand(lists, Device(most, queues), random.Random(3))


def test_random_plans_and_the_twin_agree() -> None:
    draws, verdicts = random.Random(5), set()
    for _ in range(12):
        plan, model = random_overlap(draws)
        plan = ahead(plan) if draws.random() < 0.7 else plan
        ranks = [stage.devices.ranks[0] for stage in plan.stages]
        lists = {rank: lower(plan, model, rank) for rank in ranks}
        if sum(map(len, lists.values())) > 160:
            continue
        most = max(communicators_of(lists).values())
        for device in (Device(most, 8), Device(most, 1), Device(1, 1), Device(2, 1), Device(most, 2)):
            verdict = ends(lists, device)
            # Nothing competes: any timing gives the answer of any other.
            assert run_by_hand(lists, device, draws) == verdict
            verdicts.add((device.queues == 1, device.kernels == most, verdict))
    assert (False, True, True) in verdicts and (True, False, False) in verdicts


def test_most_blocks() -> None:
    assert most_blocks(132, 8) == 16 and most_blocks(132, 3) == 32 and most_blocks(132, 0) == 32
    assert most_blocks(8, 8) == 1
    with pytest.raises(ScheduleError):
        most_blocks(4, 5)


def test_a_plan_for_devices_that_queue_is_checked_for_its_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ahead(load_plan(plan_samples.GOLDEN / "pp2_ep2.json"))
    asked: list[Device] = []
    monkeypatch.setattr(lowering, "check_residency", lambda lists, device: asked.append(device))
    model = plan_samples.model("m" * sum(len(stage.layers) for stage in plan.stages))
    lower(plan, model, 0)
    lower(plan, model, 0, 1)
    assert [device.queues for device in asked] == [8, 1] and asked[0].kernels > 2
    lower(dataclasses.replace(plan, host_runs_ahead=False), model, 0)
    assert len(asked) == 2
