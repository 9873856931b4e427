"""The simulator against a slow twin, analytic costs of pipelines and Mist's objective; what it says of lists that block."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.lowering.dependencies import issued_one_by_one
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.plan.trace import write_trace
from moe_overlap.plan.uniform_overlap import OverlapWords
from moe_overlap.tuner.cost.interference import NO_INTERFERENCE, SETS, Interference
from moe_overlap.tuner.cost.links import LinkUse
from moe_overlap.tuner.cost.simulate.engine import simulate
from moe_overlap.tuner.cost.simulate.memory import intervals, live_bytes
from tests.unit.plan import plan_samples
from tests.unit.plan.list_twins import run_together
from tests.unit.plan.test_plan_decoupled import ALL
from tests.unit.plan.test_plan_partitions import with_words

Lists = dict[int, Sequence[Instruction]]
STREAMS = {"compute": 0, "optimizer": 0, "h2d": 2, "d2h": 3}


def one_rank_each(plan: Plan, model: Any) -> Lists:
    """The lists of the first rank of every stage."""
    return {stage.devices.ranks[0]: lower_rank(plan, model, stage.devices.ranks[0]) for stage in plan.stages}


def twin(lists: Lists, seconds: Callable[[int, Instruction], float], model: Interference | None) -> dict[Any, Any]:
    """Nothing but the rules: look at everything, let time pass until the first end, look at everything again."""
    queues = {
        (r, c): [i for i in made if i.channel == c] for r, made in lists.items() for c in {i.channel for i in made}
    }
    done: set[tuple[int, int]] = set()
    running: list[dict[str, Any]] = []
    ran: dict[Any, Any] = {}
    now = 0.0

    def ready(rank: int, channel: str) -> Instruction | None:
        queue = queues.get((rank, channel), [])
        busy = any((rank, channel) in task["at"] for task in running)
        return queue[0] if queue and not busy and all((rank, n) in done for n in queue[0].after) else None

    def start_one() -> bool:
        for rank, channel in queues:
            first = ready(rank, channel)
            others = [] if first is None else list(lists) if first.name == "optimizer.norm" else [rank, *first.peers]
            heads = {other: ready(other, channel) for other in others}
            if first is None or not all(heads.values()):
                continue
            if first.kind == "point-to-point" and first.name[:4] == heads[first.peers[0]].name[:4]:  # type: ignore[union-attr]
                continue
            if len({i.name.replace("receive", "send") for i in heads.values() if i}) > 1:
                continue
            left = max(seconds(other, i) for other, i in heads.items() if i)
            running.append({"at": {(r, channel): i for r, i in heads.items()}, "left": left, "start": now})
            return True
        return False

    def rate(task: dict[str, Any]) -> float:
        if model is None:
            return 1.0
        rates = []
        for (rank, channel), mine in task["at"].items():
            if channel == "ep.counts":
                rates.append(1.0)
                continue
            at = [place for other in running for place in other["at"].items()]
            there = [(c, i) for (r, c), i in at if r == rank and c != "ep.counts"]
            stream = STREAMS.get(channel, 1)
            both_ways = [i for _, i in there if mine.peers and i.peers and i.name[:4] != mine.name[:4]]
            share = sum(STREAMS.get(c, 1) == stream for c, _ in there) - len(both_ways)
            rates.append(1 / (model.factor(stream, [STREAMS.get(c, 1) for c, _ in there]) * share))
        return min(rates)

    while True:
        while start_one():
            pass
        if not running:
            assert not any(queues.values())
            return ran
        rates = [rate(task) for task in running]
        passed = min(task["left"] / speed for task, speed in zip(running, rates, strict=True))
        now += passed
        for task, speed in zip(running, rates, strict=True):
            task["left"] -= passed * speed
        for task in [task for task in running if task["left"] < 1e-9]:
            running.remove(task)
            for (rank, channel), i in task["at"].items():
                queues[rank, channel].pop(0)
                done.add((rank, i.id))
                ran[rank, i.id] = (task["start"], now)


def samples() -> list[Lists]:
    experts = {"data": 2, "expert": 2}
    words = OverlapWords(
        gate="topk", partitions=2, range_word="around", defer=True, max_deferred_bytes=1 << 20, micro_batches=2
    )
    made = [
        one_rank_each(plan_samples.plan(4, 2, 2, 4, experts), plan_samples.model("mdmm")),
        one_rank_each(
            plan_samples.plan(3, 3, 1, 4, {"data": 2, "zero_level": 3, "offload": ALL}), plan_samples.model("ddd")
        ),
        one_rank_each(
            *with_words(words, "mmdm", 64, stages=2, micro_batches=3, stage={**experts, "micro_batch_size": 2})
        ),
    ]
    plan = plan_samples.plan(2, 2, 1, 2, {"data": 2})
    return [*made, {rank: lower(plan, plan_samples.model("dd"), rank) for rank in range(4)}]


FACTORS = Interference({word: tuple(1.0 + 0.2 * n for n in range(word.count("1"))) for word in SETS})


@pytest.mark.parametrize("model", [None, FACTORS], ids=["alone", "interference"])
@pytest.mark.parametrize("number", range(4))
def test_it_equals_the_twin(number: int, model: Interference | None) -> None:
    lists = samples()[number]
    draw = random.Random(number)
    drawn = {(rank, i.id): draw.choice((0.0, draw.random())) for rank, made in lists.items() for i in made}
    result = simulate(lists, lambda rank, i: drawn[rank, i.id], model)
    expected = twin(lists, lambda rank, i: drawn[rank, i.id], model)
    assert len(result.ran) == len(expected)
    for one in result.ran:
        assert (one.start, one.end) == pytest.approx(expected[one.rank, one.instruction.id], abs=1e-7)


def pass_seconds(forward: float, backward: float) -> Callable[[int, Instruction], float]:
    """Layers with all their time in attention."""

    def seconds(_: int, i: Instruction) -> float:
        return forward if i.name.endswith(".attention") else backward if i.name.endswith("attention.backward") else 0.0

    return seconds


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 9)])
def test_1f1b_takes_its_closed_form(stages: int, micro_batches: int) -> None:
    plan = plan_samples.plan(stages, stages, 1, micro_batches)
    lists = one_rank_each(plan, plan_samples.model("d" * stages))
    step = simulate(lists, pass_seconds(1.0, 2.5)).step_seconds
    assert step == pytest.approx((stages - 1 + micro_batches) * 3.5)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (2, 3, 6), (4, 4, 4)])
def test_interleaving_divides_the_bubble(stages: int, chunks: int, micro_batches: int) -> None:
    plan = plan_samples.plan(stages * chunks, stages, chunks, micro_batches)
    lists = one_rank_each(plan, plan_samples.model("d" * stages * chunks))
    step = simulate(lists, pass_seconds(1.0, 2.0)).step_seconds
    assert step == pytest.approx(micro_batches * chunks * 3.0 + (stages - 1) * 3.0)


F, B, G = 1.0, 2.0, 4
EXTRAS = {
    0: ([2.0, 0.5, 1.5], [1.0, 1.5, 3.5]),
    1: ([0.0, 1.75, 2.0], [0.0, 3.0, 4.0]),
    2: ([0.0, 0.75, 2.5], [0.0, 1.0, 4.25]),
}
"""Stage that decides -> seconds of the first and of the last micro-batch beyond a stable one, at each of three stages."""


def third_term(first: list[float], last: list[float]) -> float:
    """max (d_i - sum of t_j of the stages before)."""
    return max(d + e - stage * (F + B) for stage, (d, e) in enumerate(zip(first, last, strict=True)))


def after_arrival(made: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list in which everything waits until the first micro-batch has arrived; the first stage waits for none."""
    arrival = next(i for i in made if i.receives)
    if arrival.operator.in_backward_pass:
        return tuple(made)
    assert not arrival.after
    ordered = [arrival, *(i for i in made if i is not arrival)]
    place = {i.id: number for number, i in enumerate(ordered)}
    after = [tuple(sorted({0, *(place[number] for number in i.after)})) if n else () for n, i in enumerate(ordered)]
    return tuple(dataclasses.replace(i, id=n, after=after[n]) for n, i in enumerate(ordered))


@pytest.mark.parametrize("critical", EXTRAS)
def test_a_step_is_mists_objective_and_waiting_hides_the_first_micro_batch(critical: int) -> None:
    """(G - 1) max t + sum t + max (d_i - sum of t_j before i): Mist, equation 1, on three stages of one layer.

    The gather in front of the first forward pass and the reduction behind the last backward pass are d.
    """
    first, last = EXTRAS[critical]
    stage = {"data": 2, "zero_level": 1, "offload": Offload(optimizer=0.5)}
    plan, model = plan_samples.plan(3, 3, 1, G, stage), plan_samples.model("ddd")

    def seconds(rank: int, i: Instruction) -> float:
        extra = {f"parameters.L{rank // 2}": first[rank // 2], f"gradients.L{rank // 2}": last[rank // 2]}
        return extra.get(i.name, pass_seconds(F, B)(rank, i))

    step = simulate(one_rank_each(plan, model), seconds).step_seconds
    assert third_term(first, last) == first[critical] + last[critical] - critical * (F + B) > 0
    assert step == pytest.approx((G - 1) * (F + B) + 3 * (F + B) + third_term(first, last))
    waiting = {rank: after_arrival(made) for rank, made in one_rank_each(plan, model).items()}
    late = simulate(waiting, seconds).step_seconds
    hidden = sum(first) - max(extra - place * F for place, extra in enumerate(first))
    assert late == pytest.approx(step + hidden) and hidden >= 1.0


def compute(number: int, channel: str, after: tuple[int, ...] = (), kind: Any = "compute") -> Instruction:
    names = {"compute": "attention", "ep": "moe.dispatch", "dp": "moe.combine", "ep.counts": "moe.count"}
    return Instruction(
        id=number, kind=kind, name=f"L{number}.{names[channel]}", stage=0, micro_batch=0, channel=channel, after=after
    )


def test_interference_by_hand() -> None:
    """Half speed together: an all-to-all of 2 s ends after 4 s, 3 of 5 s of computation are left. Collectives share the link."""
    half = Interference({**NO_INTERFERENCE.factors, "1100": (2.0, 2.0)})
    lists = {0: [compute(0, "compute"), compute(1, "ep", kind="collective")]}
    alone = {0: 5.0, 1: 2.0, 2: 1.0}
    ends = [(one.instruction.id, one.end) for one in simulate(lists, lambda _, i: alone[i.id], half).ran]
    assert ends == [(1, 4.0), (0, 7.0)]
    lists = {0: [compute(1, "ep", kind="collective"), compute(2, "dp", kind="collective")]}
    ends = [(one.instruction.id, one.end) for one in simulate(lists, lambda _, i: alone[i.id], half).ran]
    assert ends == [(2, 2.0), (1, 3.0)]
    ends = [(one.instruction.id, one.end) for one in simulate(lists, lambda _, i: alone[i.id]).ran]
    assert ends == [(2, 1.0), (1, 2.0)]


def test_exchanges_on_different_links_do_not_slow_each_other_down() -> None:
    """Together they take as long as their most wanted link is wanted: 0.25 + 1 of the network here."""
    lists = {0: [compute(1, "ep", kind="collective"), compute(2, "dp", kind="collective")]}
    alone = {1: 2.0, 2: 1.0}

    def ends(tokens: LinkUse, gradients: LinkUse) -> list[float]:
        uses = {"ep": tokens, "dp": gradients}
        ran = simulate(lists, lambda _, i: alone[i.id], NO_INTERFERENCE, uses=lambda _, i: uses[i.channel]).ran
        return [one.end for one in ran]

    assert ends(LinkUse(1.0, 0.0), LinkUse(0.0, 1.0)) == [1.0, 2.0]
    assert ends(LinkUse(1.0, 0.0), LinkUse(1.0, 0.5)) == [2.0, 3.0]
    assert ends(LinkUse(1.0, 0.25), LinkUse(0.0, 1.0)) == [1.25, 2.25]


def test_counts_pass_rows_and_slow_nothing_down() -> None:
    """Those of part 1 go while the rows of part 0 travel; computation behind a dispatch waits for the counts it waits for."""
    half = Interference({**NO_INTERFERENCE.factors, "1100": (2.0, 2.0)})
    listed = [
        compute(0, "compute"),
        compute(1, "ep.counts", (0,), "collective"),
        compute(2, "ep", (1,), "collective"),
        compute(3, "ep.counts", (0,), "collective"),
        compute(4, "ep", (3,), "collective"),
        compute(5, "compute"),
    ]
    alone = [1.0, 0.25, 2.0, 0.5, 2.0, 1.0]

    def ends(made: Sequence[Instruction]) -> list[float]:
        ran = simulate({0: made}, lambda _, i: alone[i.id], half).ran
        return [one.end for one in sorted(ran, key=lambda one: one.instruction.id)]

    assert ends(listed) == [1.0, 1.25, 4.0, 1.75, 6.0, 2.75]
    assert ends(issued_one_by_one(listed)) == [1.0, 1.25, 4.25, 1.75, 6.25, 3.75]
    late = [*listed[:3], compute(3, "compute"), compute(4, "ep.counts", (3,), "collective")]
    queued = simulate({0: late}, lambda _, i: alone[i.id], queue_seconds=0.125).ran
    taken = [one.end - one.start for one in queued if one.instruction.channel == "ep.counts"]
    assert taken == [0.25, 2.125], "the first meets no rows"


def test_a_receive_is_posted_behind_the_computation_before_it() -> None:
    """Nothing of it has arrived by then; what reads it waits for all of it."""
    computing = compute(0, "compute")
    receive = dataclasses.replace(
        computing, id=1, kind="point-to-point", name="receive.S0>S1", channel="pp.S0>S1", peers=(1,)
    )
    send = dataclasses.replace(receive, id=0, name="send.S0>S1", peers=(0,))
    lists = {0: [computing, receive, compute(2, "compute", (1,))], 1: [send]}
    alone = {"L0.attention": 3.0, "L2.attention": 1.0}
    steps = [
        simulate({0: made, 1: lists[1]}, lambda _, i: alone.get(i.name, 2.0)).step_seconds
        for made in (lists[0], issued_one_by_one(lists[0]))
    ]
    assert steps == [4.0, 6.0]


def test_the_directions_of_a_boundary_pass_each_other() -> None:
    """Each has a communicator, and links carry both ways: neither send waits for the other."""
    send = Instruction(
        id=0, kind="point-to-point", name="send.S0>S1", stage=0, micro_batch=0, channel="pp.S0>S1", peers=(1,)
    )
    back = dataclasses.replace(send, id=1, name="receive.S0>S1.backward", channel="pp.S0>S1.backward")
    lists = {
        0: [send, back],
        1: [
            dataclasses.replace(back, id=0, name="send.S0>S1.backward", peers=(0,)),
            dataclasses.replace(send, id=1, name="receive.S0>S1", peers=(0,)),
        ],
    }
    assert simulate(lists, lambda *_: 2.0).step_seconds == 2.0


def test_spans_and_exposed_seconds(tmp_path: Path) -> None:
    lists = {
        0: [
            compute(0, "compute"),
            compute(1, "ep", (0,), "collective"),
            compute(2, "compute"),
            compute(3, "compute", (1,)),
        ]
    }
    result = simulate(lists, lambda _, i: [1.0, 3.0, 2.0, 1.0][i.id])
    assert [(s.name, s.channel, s.start, s.end) for s in result.spans(0)] == [
        ("L0.attention", "compute", 0.0, 1.0),
        ("L2.attention", "compute", 1.0, 3.0),
        ("L1.moe.dispatch", "ep", 1.0, 4.0),
        ("L3.attention", "compute", 4.0, 5.0),
    ]
    assert (result.exposed_seconds(0), result.step_seconds) == (1.0, 5.0)
    write_trace(tmp_path / "trace.json", result.spans(0), 0)
    assert "L1.moe.dispatch" in (tmp_path / "trace.json").read_text()


def test_lists_that_block_each_other_are_shown_in_the_grid() -> None:
    plan, model = plan_samples.plan(layers=2, stages=2, micro_batches=4), plan_samples.model("dd")
    lists = {
        rank: [dataclasses.replace(i, channel=i.channel.partition(".")[0]) for i in made]
        for rank, made in one_rank_each(plan, model).items()
    }
    assert not run_together({rank: list(made) for rank, made in lists.items()})
    with pytest.raises(ScheduleError) as caught:
        simulate(lists, lambda *_: 1.0)
    lines = str(caught.value).splitlines()
    assert [line.split()[:6] for line in lines[:2]] == [
        ["rank", str(rank), "waits", "for", "ever", "at"] for rank in (0, 1)
    ]
    assert lines[2] == "passes by rank (0, 1):"
    assert lines[3].split() == ["S0", "0F0", "[0F1]", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert lines[4].split() == ["S1", "0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0F3", "0B3"]


def test_ends_of_different_micro_batches_do_not_meet() -> None:
    plan, model = plan_samples.plan(layers=2, stages=2, micro_batches=2), plan_samples.model("dd")
    lists = one_rank_each(plan, model)
    other = [dataclasses.replace(i, micro_batch=1 - i.micro_batch) if i.peers else i for i in lists[1]]  # type: ignore[operator]
    with pytest.raises(ScheduleError, match=r"rank 1 waits for ever at 0 +point-to-point receive.S0>S1"):
        simulate({**lists, 1: other}, lambda *_: 1.0)


def test_a_peer_without_a_list() -> None:
    plan, model = plan_samples.plan(layers=2, stages=2), plan_samples.model("dd")
    with pytest.raises(ScheduleError, match="rank 0: the list of its peer 1 is missing"):
        simulate({0: lower(plan, model, 0)}, lambda *_: 1.0)


def peak(lists: Lists, rank: int, seconds: Callable[[int, Instruction], float], word: str) -> float:
    """Most buffers there at once whose name begins with a word."""
    ran = [one for one in simulate(lists, seconds).ran if one.rank == rank]
    return max(count for _, count in live_bytes(ran, lambda name: float(name.startswith(word))))


def test_1f1b_holds_a_micro_batch_for_every_stage_behind() -> None:
    plan = plan_samples.plan(4, 4, 1, 6)
    lists = one_rank_each(plan, plan_samples.model("dddd"))
    assert [peak(lists, rank, pass_seconds(1.0, 2.0), f"activations.L{rank}.") for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("offload", [ALL, Offload(gradients=1.0), Offload(activations=1.0)])
def test_what_moves_is_bounded_whatever_takes_long(offload: Offload) -> None:
    """Weights, states and activations of two parts, gradient sums of three: one comes, one is added to, one leaves."""
    plan = plan_samples.plan(12, 1, 1, 2, {"data": 2, "zero_level": 3, "offload": offload})
    lists = one_rank_each(plan, plan_samples.model("d" * 12))
    most = dict.fromkeys(("weights.", "moved.state.", "moved.gradient.", "moved.activations."), 0.0)
    for seed in range(8):
        draw = random.Random(seed)
        slow = draw.choice(("h2d", "d2h", "dp", "compute", "optimizer"))
        drawn = [draw.random() ** 3 * (20 if i.channel == slow else 1) for i in lists[0]]
        for word in most:
            most[word] = max(most[word], peak(lists, 0, lambda _, i, drawn=drawn: drawn[i.id], word))  # type: ignore[misc]
    assert most == {
        "weights.": 2.0,
        "moved.state.": 2.0 if offload.optimizer else 0.0,
        "moved.gradient.": 3.0 if offload.gradients else 0.0,
        "moved.activations.": 2.0 if offload.activations else 0.0,
    }


def test_intervals_by_hand() -> None:
    """`a` is there twice, `parameters` always, `h` until its last reader has ended, tokens from the start, the host's never."""
    buffers = [("", "a"), ("a tokens.m0", "h"), ("host.weights parameters.L0", "a"), ("h a", "")]
    made = [
        dataclasses.replace(compute(n, "compute"), reads=tuple(reads.split()), writes=tuple(writes.split()))
        for n, (reads, writes) in enumerate(buffers)
    ]
    ran = simulate({0: made}, lambda *_: 1.0).ran
    found = sorted(one for one in intervals(ran) if not one[0].startswith("activations"))
    assert found == [
        ("a", 0.0, 2.0),
        ("a", 2.0, 4.0),
        ("h", 1.0, 4.0),
        ("parameters.L0", 0.0, 4.0),
        ("tokens.m0", 0.0, 2.0),
    ]
    sizes = {"a": 2.0, "h": 1.0}
    assert live_bytes(ran, lambda name: sizes.get(name, 0.0)) == [(0.0, 2.0), (1.0, 3.0), (4.0, 0.0)]
