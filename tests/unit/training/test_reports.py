"""Reports beside the steps: timers of phases over the ranks, memory, curves that flags ask for, and when they are due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import LoggingConfig
from megatron.training.cli.rules.run import reports_are_due_at_some_step
from megatron.training.report.reports import Reports, TimerWindow, slowest, timer_lines, uses_expert_loads
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.plan.instructions import Span
from moe_overlap.runtime.spans import phase_seconds


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Written:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.loads: list[ExpertLoad] = []

    def say(self, subject: str, text: str) -> None:
        self.said.append((subject, text))

    def log_loads(self, loads: list[ExpertLoad]) -> None:
        self.loads += loads


def reports(config: LoggingConfig, loads: Any = None) -> tuple[Reports, Written]:
    log = Written()
    return Reports(config, log, phase_seconds, loads), log  # type: ignore[arg-type]


def span(name: str, channel: str, start: float, end: float) -> Span:
    return Span(name, channel, 0, 0, start, end)


STEP = (
    span("L0.attention", "compute", 0.0, 1.0),
    span("L0.moe.dispatch", "ep", 1.0, 1.5),
    span("send.S0>S1", "pp", 1.25, 1.75),
    span("L0.moe.experts.backward", "compute", 2.0, 4.0),
    span("L0.moe.experts.dW", "compute", 4.0, 4.5),
    span("L0.mlp.recompute", "compute", 4.5, 5.0),
    span("gradients", "dp", 5.0, 5.25),
    span("optimizer.norm", "dp", 5.25, 5.5),
    span("optimizer.L0", "compute", 5.5, 6.0),
    span("parameters", "dp", 6.0, 6.5),
)


def test_phases_of_a_step() -> None:
    phases = {"forward-backward": 5.0, "all-grads-sync": 0.25, "optimizer": 0.75, "params-all-gather": 0.5}
    parts = {"forward-compute": 1.5, "backward-compute": 2.5, "expert-exchange": 0.5, "pipeline-exchange": 0.5}
    assert phase_seconds(STEP, 0) == {}
    assert phase_seconds(STEP, 1) == phases
    assert phase_seconds(STEP, 2) == phases | parts


def test_a_send_that_the_norm_waits_for_ends_with_the_passes() -> None:
    sent = (*STEP, span("send.S0>S1.backward", "pp", 4.75, 5.25))
    with_send, without = phase_seconds(sent, 2), phase_seconds(STEP, 2)
    assert with_send == without | {"pipeline-exchange": 0.75}


def test_a_window_holds_seconds_per_step() -> None:
    window = TimerWindow()
    for seconds in (1.0, 3.0):
        window.add({"optimizer": seconds})
    assert window.take() == {"optimizer": (2.0,)}
    window.add({"optimizer": 5.0})
    assert window.take() == {"optimizer": (5.0,)}


def test_how_ranks_are_shown() -> None:
    timers = {"optimizer": (0.25, 0.5), "forward-backward": (1.0, 0.0)}
    assert timer_lines(timers, "minmax")[1].split(" . ")[0].split() == ["optimizer", "." * 23, "(250.00,", "500.00)"]
    assert timer_lines(timers, "max")[1:][0].endswith(" 500.00")
    assert timer_lines(timers, "all")[1].endswith(" 0: 250.00 1: 500.00")
    assert slowest(timers) == {"optimizer-time": 0.5, "forward-backward-time": 1.0}


def test_curves_are_drawn_where_a_flag_asks() -> None:
    plain, _ = reports(LoggingConfig(tensorboard_dir="x"))
    assert plain.curves(1, 0.5, 100, STEP) == {}
    nowhere, _ = reports(LoggingConfig(log_timers_to_tensorboard=True, log_world_size_to_tensorboard=True))
    assert nowhere.curves(1, 0.5, 100, STEP) == {}
    everything = LoggingConfig(
        tensorboard_dir="x",
        tensorboard_log_interval=2,
        timing_log_level="1",
        log_timers_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        log_world_size_to_tensorboard=True,
    )
    asked, _ = reports(everything)
    assert "optimizer-time" not in asked.curves(1, 0.5, 100, STEP)
    curves = asked.curves(2, 0.5, 100, STEP)
    assert (curves["iteration-time"], curves["optimizer-time"], curves["world-size"]) == (0.5, 0.75, 1.0)
    assert curves["mem-max-allocated-bytes"] == 100.0


def test_reports_come_at_their_intervals() -> None:
    def loads(first: int, last: int) -> list[ExpertLoad]:
        return [ExpertLoad(first, last, 0, 1, (1,), (0,), 0.0)]

    made, log = reports(LoggingConfig(log_interval=2, log_memory_interval=3, timing_log_level="1"), loads)
    for step in range(4, 10):  # resumed at step 4
        made.curves(step, 0.5, 0, STEP)
        made.after_step(step, 2**20, 3 * 2**20)
    made.flush_loads(9)
    made.flush_loads(9)
    assert [(load.first_step, load.last_step) for load in log.loads] == [(4, 4), (5, 6), (7, 8), (9, 9)]
    assert [subject for subject, _ in log.said] == ["timers", "timers", "memory", "timers", "memory"]
    assert log.said[2][1] == "step 6: peak 1 to 1 MiB, most on rank 0; resident 3 to 3 MiB"
    silent, log = reports(LoggingConfig(log_interval=1))
    silent.after_step(1, 0, 0)
    assert log.said == [] and log.loads == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-experts 4 --log-expert-load f", True),
        ("--num-experts 4 --moe-per-layer-logging --tensorboard-dir d", True),
        ("--num-experts 4 --moe-per-layer-logging --wandb-project p", True),
        ("--num-experts 4 --moe-per-layer-logging", False),
        ("--moe-per-layer-logging --tensorboard-dir d", False),
        ("--num-experts 4 --tensorboard-dir d", False),
    ],
)
def test_routers_count_only_where_somebody_reads(flags: str, expected: bool) -> None:
    assert uses_expert_loads(parse(flags.split()).config) is expected


def test_a_dense_model_has_no_loads() -> None:
    with pytest.raises(ConfigError, match="^--log-expert-load f: a dense model has no experts; add --num-experts"):
        reports_are_due_at_some_step(parse(["--log-expert-load", "f"]).config)
