"""The closed loop's arithmetic: what a cell's score says, which layouts are run, and how operators are padded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from moe_overlap.job import read_job
from moe_overlap.plan.instructions import COMPUTE, EXPERT
from moe_overlap.plan.serialize import save_plan
from moe_overlap.tuner.search.space import Run, uniform_layouts
from tests.unit.plan import plan_samples
from tools import benchmark_closed_loop
from tools.bench import padded_clock
from tools.bench.closed_loop import (
    LoopCell,
    LoopRow,
    as_json,
    grid,
    job_of,
    layout_flags_of,
    ranks_of,
    rows_table,
    spearman,
    table,
)
from tools.bench.launch import RankFailed
from tools.bench.padded_clock import PaddedClock
from tools.bench.padded_ranks import PaddedRank
from tools.bench.profile import LATE_SECONDS
from tools.bench.variants import Variant


def row(name: str, predicted: float, *steps: float) -> LoopRow:
    return LoopRow(name, ("--flag",), predicted, steps)


CELL = LoopCell(
    "moe",
    100.0,
    (
        row("slow", 3.0, 4.0, 4.2, 3.9),
        row("fast", 1.2, 1.0, 0.9, 8.0),
        row("second", 1.1, 1.5, 1.4, 1.6),
        LoopRow("refused", (), refusal="no rule"),
    ),
    row("fast, cut in two", 0.9, 0.95, 0.94, 0.99),
    12.0,
)


def test_a_choice_is_compared_with_the_best_median() -> None:
    assert CELL.best.name == "fast"  # its median, whatever one disturbed step took
    assert CELL.over_best == pytest.approx(-0.05)
    assert CELL.picked.name == "second"
    assert CELL.picked_over_best == pytest.approx(0.5)


def test_a_profile_that_does_not_end_is_a_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with what it has started."""
    os.mkfifo(tmp_path / "pipe")
    script = f"exec 9> {tmp_path / 'pipe'}; sleep 60 & echo started >&9; wait"
    pipes: list[IO[str]] = []

    def started(_: int) -> None:
        pipes.append((tmp_path / "pipe").open())
        assert pipes[0].readline() == "started\n"

    monkeypatch.setattr(benchmark_closed_loop, "placed", lambda *_: ["sh", "-c", script])
    monkeypatch.setattr(benchmark_closed_loop, "PROFILE_SECONDS", 0.0)
    bed: Any = SimpleNamespace(hosts=1, address=lambda _: "127.0.0.1")
    priority: Any = SimpleNamespace(join=started)
    with pytest.raises(RankFailed, match=r"^tools/profile_cluster\.py has not ended in 0 s$"):
        benchmark_closed_loop.measure_cluster(bed, priority, tmp_path / "cluster.json")
    # The pipe ends with the last process that has it open.
    with pipes[0] as pipe:
        assert pipe.read() == ""


def test_rank_correlation() -> None:
    assert ranks_of([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 Σd² / (n (n² - 1)) with one pair of neighbours exchanged
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / 60)
    assert CELL.rank_correlation == pytest.approx(0.5)


def test_reports_name_every_layout() -> None:
    text = rows_table(CELL)
    assert [line.split("  ")[0] for line in text.splitlines()[1:]] == [
        "fast, cut in two",
        "fast",
        "second",
        "slow",
        "refused",
    ]
    assert "no rule" in text
    assert table([CELL]).splitlines()[-1].count("|") == table([CELL]).splitlines()[0].count("|")
    assert len(as_json(CELL)["rows"]) == 4


def test_the_grid_leaves_out_what_it_says() -> None:
    run = Run(gpus=4, domain_gpus=4, sequence_length=128, global_batch_size=16)
    every = list(uniform_layouts(plan_samples.model("mmmm"), run))
    chosen = list(grid(every, (2,)))
    assert {(layout.context, layout.virtual, layout.micro_batch) for layout in chosen} == {(1, 1, 2)}
    assert {layout.tensor for layout in chosen} == {1, 2, 4} and {layout.expert for layout in chosen} == {1, 2, 4}
    assert len(chosen) < len(every)
    cut = next(layout for layout in chosen if layout.tensor == 2)
    assert "--sequence-parallel" in layout_flags_of(cut)


@dataclass
class Open:
    name: str
    channel: str


@dataclass
class Recorder:
    _current: Open | None = None


SLOWER = 3.0


class Time:
    """A clock that moves where it is told to, and where one sleeps."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(padded_clock, "time", clock)
    return clock


def test_an_operator_sleeps_for_the_rest_of_its_seconds(time: Time) -> None:
    recorder = Recorder()
    clock = PaddedClock(recorder, {"L0.attention": 0.5}, SLOWER)
    clock.start_step()
    clock.mark()
    recorder._current = Open("L0.attention", COMPUTE)
    time.now += 0.2
    assert clock.mark() == pytest.approx(0.5 - LATE_SECONDS)
    time.now += 0.1  # a communication begins inside the span: nothing is padded twice
    assert clock.mark() == pytest.approx(0.6 - LATE_SECONDS)
    recorder._current = Open("L0.moe.dispatch", EXPERT)
    time.now += 1.0
    assert clock.mark() == pytest.approx(1.6 - LATE_SECONDS)
    assert not clock.late and not clock.unknown


def test_collectives_inside_operators_come_on_top(time: Time) -> None:
    """One that its caller waits for at once, and one that runs beside products of the operator."""
    recorder = Recorder()
    clock = PaddedClock(recorder, {"L0.attention": 0.5}, SLOWER)
    clock.mark()
    recorder._current = Open("L0.attention", COMPUTE)
    time.now += 0.2
    opened = recorder.start_inside("tp", blocks=True)
    time.now += 0.3  # until its call returns
    assert recorder.wait_inside(opened, lambda: time.sleep(0.5) or "done") == "done"
    opened = recorder.start_inside("tp", blocks=False)
    time.now += 0.05  # a product; the device takes SLOWER times as long, before it waits for the collective
    begun: list[float] = []
    recorder.wait_inside(opened, lambda: begun.append(time.now) or time.sleep(0.4))
    assert begun == [pytest.approx(1.05 + 0.05 * (SLOWER - 1) - LATE_SECONDS)]
    assert clock.mark() == pytest.approx(0.5 + 0.8 + 0.4 - LATE_SECONDS), "0.5 s of its own, and the waits"
    recorder._current = Open("L1.attention", COMPUTE)
    clock._seconds = {"L1.attention": 0.1}
    assert clock.mark() == pytest.approx(1.8 - 2 * LATE_SECONDS), "waits of the operator before are over"


def test_what_runs_beside_a_collective_takes_no_more_than_its_operator(time: Time) -> None:
    recorder = Recorder()
    clock = PaddedClock(recorder, {"L0.attention": 0.5}, SLOWER)
    clock.mark()
    recorder._current = Open("L0.attention", COMPUTE)
    opened = recorder.start_inside("tp", blocks=False)
    time.now += 0.4
    recorder.wait_inside(opened, lambda: time.sleep(0.3))
    assert clock.mark() == pytest.approx(0.8, abs=2 * LATE_SECONDS)


def test_late_and_unknown_operators_are_told(time: Time) -> None:
    recorder = Recorder()
    clock = PaddedClock(recorder, {"L0.attention": 0.5}, SLOWER)
    clock.mark()
    recorder._current = Open("L0.attention", COMPUTE)
    time.now += 0.7
    clock.mark()
    recorder._current = Open("L0.mlp", COMPUTE)
    clock.mark()
    recorder._current = Open("optimizer.L0", COMPUTE)  # updates are never padded
    clock.mark()
    assert clock.late == {"L0.attention": pytest.approx(0.2)}
    assert clock.unknown == {"L0.mlp"}


def test_a_rank_reads_the_plan_that_a_layout_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search's answer for an overlap has its layout and its micro-batch in a plan, not in flags."""
    job = job_of("moe")
    layout = ["--expert-model-parallel-size", "2", "--micro-batch-size", "2", "--vocab-size", "1000"]
    save_plan(read_job([*job, *layout], 4).plan, tmp_path / "plan.json")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    config = PaddedRank(job, SLOWER).parse(Variant("layout", ("--plan", str(tmp_path / "plan.json")))).config
    assert (config.training.micro_batch_size, config.parallel.expert_model_parallel_size) == (2, 2)
