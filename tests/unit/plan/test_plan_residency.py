"""Streams that share hardware queues: lists that end with one queue end however streams are shared out, as a twin shows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from moe_overlap import describe
from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.lowering import lower as lowering
from moe_overlap.plan.lowering.lifetimes import stream_of
from moe_overlap.plan.lowering.lower import lower, lower_rank, lower_together
from moe_overlap.plan.lowering.rendezvous import Node, meetings
from moe_overlap.plan.lowering.residency import (
    BlockLimits,
    Communicators,
    _waits_of,
    block_limits,
    check_residency,
    communicators_of,
)
from moe_overlap.plan.operators import EXPERTS
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import load_plan
from tests.multiprocess.unlike_runs import MODEL, UNTIED, Shape, unlike_plan
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_list
from tests.unit.plan.test_plan_host_ahead import ahead
from tests.unit.plan.test_plan_rendezvous import random_overlap

GLOBAL_BATCH = 16
Lists = dict[int, tuple[Instruction, ...]]
Entry = tuple[str, str, Instruction]
"""Stream, what it does there (`follow` what the instruction names, `start`, `wait` for it), instruction."""


def ends(lists: Lists) -> bool:
    try:
        check_residency(lists)
    except ScheduleError:
        return False
    return True


def issued(instructions: Sequence[Instruction], at_once: bool) -> Iterator[Entry]:
    """What the host gives the streams of a rank: NCCL's beside those of the channels.

    Args:
        at_once: whether the wait for a transfer stands right behind it.
    """
    under_way: dict[str, list[Instruction]] = defaultdict(list)
    by_id = {i.id: i for i in instructions}
    for i in instructions:
        stream, is_transfer = stream_of(i), i.kind == "point-to-point"
        for channel, last in [(by_id[n].channel, n) for n in i.after] + [(i.channel, i.id)] * is_transfer:
            while under_way[channel] and under_way[channel][0].id <= last:
                yield channel, "wait", under_way[channel].pop(0)
        yield stream, "follow", i
        if not is_transfer:
            yield stream, "start", i
            continue
        yield f"nccl {stream}", "start", i
        if at_once:
            yield stream, "wait", i
        else:
            under_way[i.channel].append(i)


class Twin:
    """Runs what the hosts have issued move by move, in an order that is drawn; every stream has a queue."""

    def __init__(self, lists: Lists, queue_of: dict[str, int], at_once: bool = False) -> None:
        self.lists = lists
        self.queues: dict[tuple[int, int], list[Entry]] = defaultdict(list)
        for rank, made in lists.items():
            for entry in issued(made, at_once):
                self.queues[rank, queue_of[entry[0]]].append(entry)
        self.followed: dict[int, set[int]] = {rank: set() for rank in lists}
        self.ended: dict[int, set[int]] = {rank: set() for rank in lists}
        self.running: dict[int, list[Instruction]] = {rank: [] for rank in lists}

    def run(self, draws: random.Random) -> bool:
        """Whether all ends."""
        while any(self.queues.values()):
            possible = [place for place, queue in self.queues.items() if queue and self._may(place[0], queue[0])]
            if not possible:
                return False
            place = draws.choice(possible)
            self._do(place[0], *self.queues[place].pop(0)[1:])
        return not any(self.running.values())

    def _may(self, rank: int, entry: Entry) -> bool:
        _, what, i = entry
        if what == "wait":
            return i.id in self.ended[rank]
        if what == "follow":
            idle = all(
                other.kind == "point-to-point" or stream_of(other) != stream_of(i) for other in self.running[rank]
            )
            return idle and self.ended[rank].issuperset(i.after)
        return i.id in self.followed[rank] and all(stream_of(other) != stream_of(i) for other in self.running[rank])

    def _do(self, rank: int, what: str, i: Instruction) -> None:
        if what == "follow":
            self.followed[rank].add(i.id)
        if what != "start":
            return
        self.running[rank].append(i)
        for other, side in self._meeting(rank, i):
            self.running[other].remove(side)
            self.ended[other].add(side.id)

    def _meeting(self, rank: int, i: Instruction) -> list[tuple[int, Instruction]]:
        """All sides of what has started last, once they have; those of an all-to-all have the same list and do as this rank."""
        if i.name == "optimizer.norm":
            sides = [(r, other) for r in self.lists for other in self.running[r] if other.name == i.name]
            return sides if len(sides) == len(self.lists) else []
        if i.kind != "point-to-point":
            return [(rank, i)]
        (peer,) = i.peers
        facing = (
            other
            for other in self.running[peer]
            if other.channel == i.channel and other.peers == (rank,) and other.sends != i.sends
        )
        return next(([(rank, i), (peer, other)] for other in facing), [])


def shared_out(lists: Lists, queues: int, draws: random.Random) -> dict[str, int]:
    """A queue for every stream; with 0 each has one of its own."""
    streams = {stream for made in lists.values() for stream, _, _ in issued(made, False)}
    return {stream: draws.randrange(queues) if queues else place for place, stream in enumerate(sorted(streams))}


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


def test_a_wait_right_behind_a_transfer_would_stop_its_queue() -> None:
    """Each rank sends before it receives: a queue that waits for the end of the one never starts the other."""
    draws = random.Random(0)
    for lists in (two_transfers(False), two_transfers(True)):
        assert ends(lists) and Twin(lists, shared_out(lists, 1, draws)).run(draws)
    crossed = two_transfers(True)
    assert not Twin(crossed, shared_out(crossed, 1, draws), at_once=True).run(draws)
    assert Twin(crossed, shared_out(crossed, 0, draws), at_once=True).run(draws)


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
    assert Twin(lists, shared_out(lists, 0, draws)).run(draws)
    assert not Twin(lists, shared_out(lists, 1, draws)).run(draws)
    with pytest.raises(ScheduleError, match="keep each other from starting\n  rank 0 stops at"):
        check_residency(lists)


def test_a_transfer_waits_for_the_one_before_it_on_its_stream() -> None:
    """Rank 0 sends twice before it receives; rank 1 receives only when what it sends has gone."""
    (send, receive), (receives, sends) = two_transfers(False).values()
    numbered = dataclasses.replace
    lists: Lists = {
        0: (send, numbered(send, id=1, micro_batch=1), numbered(receive, id=2)),
        1: (numbered(sends, id=0), numbered(receives, id=1, after=(0,)), numbered(receives, id=2, micro_batch=1)),
    }
    draws = random.Random(6)
    assert Twin(lists, shared_out(lists, 0, draws)).run(draws)
    assert not Twin(lists, shared_out(lists, 1, draws)).run(draws) and not ends(lists)


def golden() -> Lists:
    names = {0: "pp2_ep2_rank0.txt", 2: "pp2_ep2_rank2.txt"}
    return {rank: parse_list((plan_samples.GOLDEN / name).read_text()) for rank, name in names.items()}


def test_golden_pipeline() -> None:
    lists, draws = golden(), random.Random(3)
    assert ends(lists)
    for queues in (0, 1, 2, 8):
        assert Twin(lists, shared_out(lists, queues, draws)).run(draws)
    # What the executor must not do.
    assert not Twin(lists, shared_out(lists, 1, draws), at_once=True).run(draws)


def test_lists_of_random_plans_end_however_streams_are_shared_out() -> None:
    draws, would_stop, checked = random.Random(5), 0, 0
    for _ in range(12):
        plan, model = random_overlap(draws)
        plan = ahead(plan) if draws.random() < 0.7 else plan
        ranks = [stage.devices.ranks[0] for stage in plan.stages]
        lists = {rank: lower(plan, model, rank) for rank in ranks}
        if sum(map(len, lists.values())) > 160:
            continue
        checked += 1
        assert all(Twin(lists, shared_out(lists, queues, draws)).run(draws) for queues in (1, 2, 2, 4, 4, 8))
        would_stop += not Twin(lists, shared_out(lists, 2, draws), at_once=True).run(draws)
    assert checked > 3 and would_stop


def ends_where_loads_wait(lists: Lists, loads: Callable[[Instruction], bool]) -> bool:
    """Whether all ends where every queue is a stream's own, and some launches wait for all that the device was given before."""
    meeting, waits = meetings(lists), {rank: _waits_of(made) for rank, made in lists.items()}
    members: dict[Node, list[Node]] = defaultdict(list)
    for node, first in meeting.items():
        members[first].append(node)
    issued: dict[int, int] = dict.fromkeys(lists, 0)
    ended: set[Node] = set()

    def may_end(node: Node) -> bool:
        rank, place = node
        return place < issued[rank] and all((rank, other) in ended for other in waits[rank][place])

    before = -1
    while before != sum(issued.values()) + len(ended):
        before = sum(issued.values()) + len(ended)
        for rank, made in lists.items():
            while (place := issued[rank]) < len(made) and (
                not loads(made[place]) or all((rank, n) in ended for n in range(place))
            ):
                issued[rank] += 1
            for node in ((rank, n) for n in range(issued[rank])):
                sides = members[meeting[node]] if node in meeting else [node]
                ended.update(sides if all(map(may_end, sides)) else ())
    return len(ended) == sum(map(len, lists.values()))


def test_a_kernel_that_is_loaded_in_a_step_may_stop_a_pipeline() -> None:
    """Hence CUDA_MODULE_LOADING=EAGER (commands/device_settings.py): numbers of rows ask for other products in any step."""
    draws, would_stop = random.Random(3), 0
    for _ in range(12):
        plan, model = random_overlap(draws)
        lists = {stage.devices.ranks[0]: lower(plan, model, stage.devices.ranks[0]) for stage in plan.stages}
        assert ends_where_loads_wait(lists, lambda i: False)
        would_stop += not ends_where_loads_wait(lists, lambda i: i.operator.kind is EXPERTS)
    assert would_stop


def counted(plan: Plan) -> Communicators:
    model = plan_samples.model("m" * sum(len(stage.layers) for stage in plan.stages))
    return communicators_of({s.devices.ranks[0]: lower(plan, model, s.devices.ranks[0]) for s in plan.stages}, plan)


def test_communicators_are_counted_from_the_lists() -> None:
    # Rows, counts and both directions of the boundaries; gradients of dense layers and of experts, and the norm.
    assert counted(load_plan(plan_samples.GOLDEN / "pp2_ep2.json")) == Communicators(4, 3)
    example = load_plan(plan_samples.GOLDEN / "example_plan.json")
    assert counted(example).point_to_point == 6, "an inner stage has two boundaries, or two ranks behind it"


def nccl_takes(limits: BlockLimits, communicators: Communicators) -> int:
    """Thread blocks as ncclTopoComputeP2pChannels and the collectives take them: powers of two for sends and receives."""
    rounded = next(power for power in (1, 2, 4, 8, 16, 32, 64) if power >= limits.point_to_point)
    inside = 32 if communicators.inside else 0
    return communicators.point_to_point * rounded + communicators.collective * limits.collective + inside


GPUS = json.loads((Path(describe.__file__).parent / "gpus.json").read_text())


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if gpu["multiprocessors"]])
def test_what_nccl_takes_fits_every_gpu(name: str) -> None:
    multiprocessors = GPUS[name]["multiprocessors"]
    for pairs, others, inside in itertools.product((0, 2, 4, 6, 10, 22), (1, 3), (False, True)):
        communicators = Communicators(pairs, others, inside)
        if communicators.number + 32 * inside > multiprocessors:
            continue
        limits = block_limits(multiprocessors, communicators)
        assert limits is not None and nccl_takes(limits, communicators) <= multiprocessors
        more = BlockLimits(limits.point_to_point * 2, limits.point_to_point)
        assert limits.point_to_point == 32 or nccl_takes(more, communicators) > multiprocessors, (
            "no room is left unused"
        )
    assert block_limits(multiprocessors, Communicators(multiprocessors, 1)) is None


def test_the_limits_of_an_inner_stage() -> None:
    assert block_limits(132, Communicators(6, 3)) == BlockLimits(16, 12)
    assert block_limits(108, Communicators(6, 3)) == BlockLimits(8, 20)
    assert block_limits(132, Communicators(6, 3, inside=True)) == BlockLimits(8, 17), (
        "tensor ranks take up to 32 of them"
    )


def random_unlike(draws: random.Random) -> Plan:
    """Two to four stages of any number of data ranks and any micro-batch."""
    stages = draws.randint(2, 4)
    shapes = [
        Shape(layers, samples=draws.choice((1, 2, 4)), data=draws.choice((1, 2, 4)), tensor=draws.choice((1, 2)))
        for layers in {2: (2, 2), 3: (1, 2, 1), 4: (1, 1, 1, 1)}[stages]
    ]
    shapes = [replace(s, samples=min(s.samples, GLOBAL_BATCH // s.data)) for s in shapes]
    return unlike_plan(tuple(shapes), f"{UNTIED} --global-batch-size {GLOBAL_BATCH}")


def test_stages_of_unlike_shape_end_with_one_queue() -> None:
    """The stage before follows the order of the stage behind; in the order of its own passes some of them would stop."""
    draws, unlike = random.Random(11), 0
    model = describe_model(parse([*f"{MODEL} {UNTIED}".split(), "--micro-batch-size", "1"]).config, 256)
    for case in range(24):
        plan = random_unlike(draws)
        lists = lower_together(plan, model, 0)
        assert ends(lists)
        unlike += bool(plan.transfers)
        for rank in lists if case % 4 == 0 else ():
            assert lists[rank] == lower_rank(plan, model, rank), "written once for a stage, readdressed"
    assert unlike > 15


def test_every_plan_is_checked_whatever_it_says_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ahead(load_plan(plan_samples.GOLDEN / "pp2_ep2.json"))
    asked: list[object] = []
    monkeypatch.setattr(lowering, "check_residency", asked.append)
    model = plan_samples.model("m" * sum(len(stage.layers) for stage in plan.stages))
    lower(plan, model, 0)
    lower(dataclasses.replace(plan, host_runs_ahead=False), model, 0)
    assert len(asked) == 2
