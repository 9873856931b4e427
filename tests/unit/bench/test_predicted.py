"""Predictions for a bed: spans as the recorder has them, the cost of starting all-to-alls, the host's time, errors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction
from moe_overlap.report.trace import Trace
from moe_overlap.tuner.cost.interference import start_seconds
from moe_overlap.tuner.cost.simulate.engine import simulate
from moe_overlap.tuner.profile.cluster_file import FittedLinks
from tools.bench.machine import BedLinks, Calibration, computing, host_time, predicted_spans, recorded
from tools.benchmark_predictions import (
    CHUNKS,
    FLAT,
    PIPELINED,
    PLANS,
    STAGES,
    choose,
    judge,
    parse_arguments,
    report,
    table,
)

COMPUTE = Instruction(id=0, kind="compute", name="L0.attention", stage=0, chunk=0, micro_batch=0)


def computes(number: int, *after: int) -> Instruction:
    return dataclasses.replace(COMPUTE, id=number, after=after)


def exchanges(number: int, *after: int, sent: int = 0) -> Instruction:
    made = dataclasses.replace(COMPUTE, id=number, kind="collective", name="L0.moe.dispatch", channel="ep")
    return dataclasses.replace(made, after=after, bytes=sent)


def spans_of(made: list[Instruction], seconds: list[float]) -> list[tuple[str, float, float]]:
    simulation = simulate({0: made}, lambda _, i: seconds[i.id])
    return [(span.channel, span.start, span.end) for span in recorded(made, simulation, 0)]


def test_an_exchange_lasts_until_its_rank_has_waited_for_it() -> None:
    early = [computes(0), exchanges(1, 0), computes(2), computes(3, 1)]
    assert spans_of(early, [1, 1, 3, 1]) == [("compute", 0, 1), ("compute", 1, 4), ("ep", 1, 4), ("compute", 4, 5)]
    assert spans_of(early, [1, 3, 1, 1]) == [("compute", 0, 1), ("compute", 1, 2), ("ep", 1, 4), ("compute", 4, 5)]


def test_an_exchange_begins_where_it_is_started_behind_another_one() -> None:
    made = [computes(0), exchanges(1, 0), computes(2), exchanges(3, 2), computes(4, 1), computes(5, 3)]
    spans = spans_of(made, [1, 4, 1, 4, 1, 1])
    assert [span for span in spans if span[0] == "ep"] == [("ep", 1, 5), ("ep", 2, 9)], "it moves from 5 on"


def test_an_exchange_nobody_waits_for_ends_with_the_list() -> None:
    assert spans_of([computes(0), exchanges(1, 0), computes(2)], [1, 5, 1])[-1] == ("ep", 1, 6)


def test_starting_an_exchange_lengthens_the_computation_before_it() -> None:
    made = [computes(0), exchanges(1, 0, sent=100), exchanges(2, 0, sent=300), computes(3, 1), exchanges(4, 3)]
    assert start_seconds(made, FittedLinks(1.0, 100.0, 0.0)) == {0: 1 + 1 + 1 + 3, 3: 1}


def test_host_time_solves_both_jobs() -> None:
    jobs = [Calibration(1.2 * alone + 3e-5 * calls, alone, calls) for alone, calls in ((0.002, 500.0), (0.9, 520.0))]
    assert host_time(*jobs) == pytest.approx((1.2, 3e-5))
    in_step, call_seconds = host_time(Calibration(0.001, 0.002, 500.0), jobs[1])
    assert 0 < call_seconds < 1e-8 and in_step == pytest.approx(jobs[1].step_seconds / 0.9, rel=1e-3)


def test_computation_of_the_passes() -> None:
    seconds = {("moe.experts", "compute"): 2.0, ("optimizer", "compute"): 4.0, ("moe.dispatch", "ep"): 8.0}
    assert computing(Trace(seconds, 20.0)) == 2.0


def test_errors_are_those_of_medians() -> None:
    predicted = Trace({("moe.experts", "compute"): 1.1, ("moe.count", "ep"): 0.5}, 2.0)
    measured = [Trace({("moe.experts", "compute"): 1.0}, step) for step in (4.0, 1.0, 2.5)]
    one = judge("deferral", predicted, measured)
    assert (one.measured_seconds, one.error) == (2.5, pytest.approx(-0.2))
    assert {row["kind"]: row["error"] for row in one.kinds} == {"moe.experts": pytest.approx(0.1), "moe.count": None}
    better = dataclasses.replace(one, plan="tutel 2", predicted_seconds=2.75)
    assert report([one, better])["mean_error"] == pytest.approx(0.15), "signs do not cancel"
    assert "-20.0%   1000 … 4000" in table([one, better])


def test_a_pipeline_has_as_many_samples_and_experts_for_each_rank_of_a_stage() -> None:
    assert (STAGES.ranks, STAGES.stages) == (4, 2)
    flags = dict(zip(STAGES.flags[::2], STAGES.flags[1::2], strict=True))
    assert flags["--pipeline-model-parallel-size"] == flags["--expert-model-parallel-size"] == "2"
    assert flags["--num-experts"] == "4" and flags["--global-batch-size"] == "64"
    # Its stages may have two chunks, of a layer each; several micro-batches may run two at a time.
    flags = dict(zip(CHUNKS.flags[::2], CHUNKS.flags[1::2], strict=True))
    assert flags["--num-layers"] == "4" and flags["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert "interleaved micro-batches" in CHUNKS.plans and "micro-batches" not in FLAT.plans


def test_counts_and_transfers_take_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages: the second starts when what the first sends has arrived; counts behind rows wait in their queue."""
    counts = dataclasses.replace(exchanges(1, 0), name="L0.moe.count", channel="ep.counts")
    send = Instruction(
        id=3,
        kind="point-to-point",
        name="send.S0>S1",
        stage=0,
        micro_batch=0,
        channel="pp",
        bytes=50,
        peers=(1,),
        after=(2,),
    )
    receive = dataclasses.replace(send, id=0, name="receive.S0>S1", stage=1, peers=(0,), after=())
    lists = {0: [computes(0), counts, computes(2, 1), send], 1: [receive, computes(1, 0)]}
    prices = {rank: SimpleNamespace(instructions=made, slowed=None) for rank, made in lists.items()}
    monkeypatch.setattr("tools.bench.machine.simulated", lambda *_: SimpleNamespace(prices=prices))
    links = BedLinks(FittedLinks(0.0, 1e30, 0.0), FittedLinks(1.0, 100.0, 0.0), 0.25, 0.5)
    spans = predicted_spans([], cast(Any, None), links, {"L0.attention": 2.0})
    assert [(s.channel, s.start, s.end) for s in spans[0]] == [
        ("compute", 0.0, 2.0),
        ("ep", 2.0, 2.25),
        ("compute", 2.25, 4.25),
        ("pp", 4.25, 5.75),
    ]
    assert [(s.channel, s.start, s.end) for s in spans[1]] == [("pp", 0.0, 5.75), ("compute", 5.75, 7.75)]


def test_bad_command_lines() -> None:
    chosen = choose(("interleaved micro-batches", *PIPELINED, *PLANS))
    assert {shape: [plan.name for plan in plans] for shape, plans in chosen.items()} == {
        FLAT: [*PLANS],
        STAGES: [*PIPELINED],
        CHUNKS: ["interleaved micro-batches"],
    }
    for words, subject in (
        (["--plans", "both 3"], "--plans"),
        (["--plans", "micro-batches"], "with `pipeline ` or `interleaved ` before it also all 2 around"),
        (["--mbit", "0"], "--mbit"),
        (["--repeats", "0"], "--repeats"),
        (["--plans", *PIPELINED], "--timer-compute"),
        (["--plans", *PIPELINED, "--timer-compute", "--emulator"], "without --emulator"),
    ):
        with pytest.raises(ConfigError, match=subject):
            parse_arguments(words)
