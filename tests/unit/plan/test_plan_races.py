"""The race check against its slow twin (transitive closure), on random lists and on lowered ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.lowering.dependencies import INPUTS, Draft, build_list, check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import StageOverlap
from tests.unit.plan import plan_samples
from tests.unit.plan.list_twins import List, cuts, has_race, rejects

RANDOM_LISTS = 500


def instruction(
    number: int, channel: str, reads: str = "", writes: str = "", after: tuple[int, ...] = ()
) -> Instruction:
    return Instruction(
        id=number, kind="compute", name=f"L{number}.mlp", stage=0, channel=channel, reads=tuple(reads.split()),
        writes=tuple(writes.split()), after=after,
    )  # fmt: skip


def random_list(seed: int) -> List:
    """Random accesses of a few buffers, each after all it conflicts with; half of the lists forget some of that."""
    draw = random.Random(seed)
    channels = [f"c{n}" for n in range(draw.randint(2, 5))]
    buffers = [f"b{n}" for n in range(draw.randint(2, 8))]
    forgetful = draw.random() < 0.5
    made: list[Instruction] = []
    for place in range(draw.randint(5, 25)):
        written = sorted({buffer for earlier in made for buffer in earlier.writes})
        reads = tuple(draw.sample(written, min(len(written), draw.randint(0, 2))))
        writes = tuple(draw.sample(buffers, draw.randint(0 if reads else 1, 2)))
        after = {
            earlier.id
            for earlier in made
            if {*earlier.writes} & {*reads, *writes} or {*earlier.reads} & {*writes} or draw.random() < 0.02
        }
        kept = tuple(sorted(after))[-1 if forgetful else 0 :]
        made.append(instruction(place, draw.choice(channels), " ".join(reads), " ".join(writes), kept))
    return tuple(made)


def lists_with_a_needed_dependency() -> Iterator[tuple[List, List]]:
    """A list that the twin accepts, and the same without a dependency that it needs."""
    for seed in itertools.count():
        made = random_list(seed)
        if has_race(made):
            continue
        broken = list(cuts(made))
        random.Random(seed).shuffle(broken)
        if needed := next(filter(has_race, broken), None):
            yield made, needed


def test_random_lists_are_accepted_and_rejected_without_a_needed_dependency() -> None:
    for made, broken in itertools.islice(lists_with_a_needed_dependency(), RANDOM_LISTS):
        check_races(made)
        assert rejects(broken)


def test_verdicts_are_those_of_the_twin() -> None:
    racing = 0
    for seed in range(1000, 1300):
        made = random_list(seed)
        assert rejects(made) == has_race(made)
        racing += has_race(made)
        for cut in cuts(made):
            assert rejects(cut) == has_race(cut)
    assert 50 < racing < 250


PLANS = [
    plan_samples.plan(layers=2, stages=2, stage={"data": 2, "expert": 2}),
    plan_samples.plan(layers=4, stages=2, chunks=2, stage={"data": 2, "expert": 2}),
    plan_samples.plan(layers=2, stage={"data": 2, "overlap": StageOverlap(gradient_chunk_bytes=1 << 18)}),
]


@pytest.mark.parametrize("plan", PLANS)
def test_lowered_lists_are_rejected_without_a_needed_dependency(plan: plan_samples.Plan) -> None:
    model = plan_samples.model("m" * sum(len(stage.layers) for stage in plan.stages), shared_expert_hidden_size=64)
    for rank in range(0, plan.world_size, 2):
        made = lower(plan, model, rank)
        assert not has_race(made)
        needed = 0
        for cut in cuts(made):
            assert rejects(cut) == has_race(cut)
            needed += has_race(cut)
        assert needed >= 5


def test_message_marks_both_lines() -> None:
    made = [
        instruction(0, "a", writes="x"),
        instruction(1, "a", writes="y"),
        instruction(2, "b", writes="z"),
        instruction(3, "b", reads="x"),
    ]
    with pytest.raises(ScheduleError) as caught:
        check_races(made)
    assert str(caught.value) == "\n".join(
        [
            "L0.mlp and L3.mlp race for x: no dependency path from the first to the second",
            f"> {made[0]}",
            f"  {made[1]}",
            f"  {made[2]}",
            f"> {made[3]}",
        ]
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([instruction(0, "a", writes="x"), instruction(1, "b", writes="x")], "race for x"),
        ([instruction(0, "a", "tokens"), instruction(1, "b", writes="tokens")], "race for tokens"),
        ([instruction(0, "a", "rows")], "rows is read before anything wrote it\n> 0"),
        ([instruction(0, "a", after=(7,))], "dependency 7 does not exist\n> 0"),
        ([instruction(0, "a", after=(1,)), instruction(1, "a", after=(0,))], "dependency 1 does not stand before it"),
        ([instruction(0, "a", after=(0,))], "dependency 0 does not stand before it"),
        ([instruction(0, "a"), instruction(0, "a")], "id 0 stands twice"),
    ],
)
def test_faults(made: list[Instruction], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_races(made)
    assert message in str(caught.value)


def test_paths_over_channels_and_dependencies_count() -> None:
    check_races(
        [
            instruction(0, "a", writes="x"),
            instruction(1, "a"),
            instruction(2, "b", after=(1,)),
            instruction(3, "b"),
            instruction(4, "c", "x", "x", after=(3,)),
        ]
    )


def test_reads_do_not_race_and_ids_may_have_gaps() -> None:
    check_races(
        [instruction(5, "a", writes="x"), instruction(9, "b", "x", after=(5,)), instruction(12, "c", "x", after=(5,))]
    )
    with pytest.raises(ScheduleError, match="race for x"):
        check_races(
            [
                instruction(5, "a", writes="x"),
                instruction(9, "b", "x", after=(5,)),
                instruction(12, "c", "x", after=(5,)),
                instruction(13, "a", writes="x", after=(12,)),
            ]
        )


def test_inputs_are_declared() -> None:
    assert "tokens" in INPUTS
    check_races([instruction(0, "a", "tokens.m0")])
    check_races([instruction(0, "a", "capacity.m0")], inputs=frozenset({"capacity"}))


def test_builder_orders_what_it_is_given() -> None:
    """Random accesses with no dependencies named: the builder finds enough of them."""
    for seed in range(300):
        made = build_list(
            0,
            (
                Draft(kind="compute", name=i.name, channel=i.channel, reads=i.reads, writes=i.writes)
                for i in random_list(seed)
            ),
        )
        assert not has_race(made)
        check_races(made)
