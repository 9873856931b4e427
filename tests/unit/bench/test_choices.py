"""The benchmark of choices: which plans are in the sweep, what is judged, what a list sleeps."""

from __future__ import annotations

import dataclasses

import pytest

from moe_overlap.api import read_job
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction
from tools.bench.figures import CHOSEN, Judged, baselines, fastest, hand_set
from tools.bench.profile import given_seconds
from tools.bench.variants import JOB, PLAIN, SEQUENTIAL, job_flags
from tools.benchmark_choices import parse_arguments

COMPUTE = Instruction(id=0, kind="compute", name="L0.attention", stage=0, chunk=0, micro_batch=0)


@pytest.mark.parametrize(("gate", "ranges"), [("topk", 3), ("switch", 3), ("batch_prioritized", 2)])
def test_a_sweep_has_every_plan_that_flags_can_say(gate: str, ranges: int) -> None:
    found = hand_set(gate, 8)
    alone, together = 1 + 3 + 3 * ranges, 1 + 3 * ranges  # whole, Tutel-style (one micro-batch at a time), partitions
    assert len(found) == 2 * (alone + together) - 1, "each with and without deferral; not the sequential one"
    assert len({variant.name for variant in found}) == len({variant.flags for variant in found}) == len(found)
    names = [variant.name for variant in found]
    assert {"deferral", "tutel 8", "after 4 + deferral", "experts 2 + deferral + two micro-batches"} <= set(names)
    assert any(name.startswith("around") for name in names) == (ranges == 3)
    job = [*JOB, *job_flags(2, 2, 2)]
    overlaps = {repr(read_job([*job, *variant.flags], 2).plan.stages[0].overlap) for variant in found[::5]}
    assert len(overlaps) == len(found[::5]), "each is another overlap, and one that flags allow"


def test_partitions_divide_the_micro_batch() -> None:
    assert not [variant for variant in hand_set("topk", 6) if " 4" in variant.name.removeprefix("tutel 4")]
    assert [variant.name for variant in baselines("switch")] == [PLAIN, SEQUENTIAL]


JUDGED = Judged(
    finals={
        PLAIN: [4.0, 3.0, 5.0],
        SEQUENTIAL: [3.0, 3.0, 3.0],
        CHOSEN: [2.2, 2.0, 9.0],
        "tutel 2": [2.0, 2.1, 1.9],
        "deferral": [1.0, 2.5, 2.5],
    },
    swept={"tutel 2": [9.0], "deferral": [9.0], "after 2": [4.0, 2.0, 3.0]},
    predicted={CHOSEN: 1.98, "tutel 2": 2.2, "deferral": 2.25, "after 2": 3.0},
)


def test_chosen_is_judged_by_medians_of_the_last_round() -> None:
    assert JUDGED.best == "tutel 2", "neither a baseline nor one lucky step"
    assert JUDGED.over_best == pytest.approx(0.1)
    assert JUDGED.error(CHOSEN) == pytest.approx(-0.1)
    assert JUDGED.mean_error == pytest.approx((0.1 + 0.1 + 0.0) / 3), (
        "signs do not cancel; the sweep where no more was run"
    )


def test_gain_is_taken_turn_by_turn() -> None:
    gain = JUDGED.gain(PLAIN)
    assert (gain.min, gain.median, gain.max) == pytest.approx((5 / 9, 1.5, 4 / 2.2))


def test_finalists_are_the_fastest_undisturbed() -> None:
    assert fastest({"a": [3.0, 1.0], "b": [2.0, 2.0], "c": [1.5, 9.0]}, 2) == ["a", "c"]


def test_a_list_sleeps_what_it_was_given() -> None:
    backward = dataclasses.replace(COMPUTE, id=7, name="L0.attention.backward")
    moved = dataclasses.replace(COMPUTE, id=3, kind="collective", name="L0.moe.dispatch", channel="ep")
    update = dataclasses.replace(COMPUTE, id=9, name="optimizer", micro_batch=None)
    made = [COMPUTE, moved, backward, update]
    seconds = given_seconds([("L0.attention", 1.0), ("L0.attention.backward", 2.0)], made)
    assert (seconds.of(COMPUTE), seconds.of(backward)) == (1.0, 2.0)
    with pytest.raises(ValueError, match="another list"):
        given_seconds([("L0.attention.backward", 2.0), ("L0.attention", 1.0)], made)


def test_bad_command_lines() -> None:
    for words, subject in (
        (["--gates", "topk", "best"], "--gates best"),
        (["--ratio", "0"], "--ratio"),
        (["--ratio", "inf"], "--ratio"),
        (["--sweeps", "0"], "--sweeps"),
        (["--repeats", "0"], "--repeats"),
    ):
        with pytest.raises(ConfigError, match=subject):
            parse_arguments(words)
