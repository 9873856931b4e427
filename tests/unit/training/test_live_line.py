"""Progress on one line of a terminal, which whatever is printed next replaces; plain lines where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from megatron.training.cli.config import LoggingConfig
from megatron.training.report.live_line import ERASE, LiveLine
from megatron.training.report.metrics import MetricsLog
from moe_overlap.commands import autotune
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.tuner.search.uniform import RankedLayout
from tests.unit.training.test_metrics import metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def known_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")


def screen(stream: io.StringIO) -> list[str]:
    """The lines that a terminal shows in the end."""
    return [line.rpartition(ERASE)[2] for line in stream.getvalue().split("\n")]


def test_a_line_is_replaced_and_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    line = LiveLine(stream)
    line.clear()
    assert stream.getvalue() == ""
    line.show("first")
    line.show("x" * 100)
    assert screen(stream) == ["x" * 59]
    line.clear()
    line.clear()
    assert screen(stream) == [""] and stream.getvalue().count(ERASE) == 3
    for other in (io.StringIO(), Terminal()):
        monkeypatch.setenv("TERM", "dumb")
        LiveLine(other).show("first")
        assert other.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_steps_between_two_lines_of_training_are_shown_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    log = MetricsLog(LoggingConfig(log_interval=3), rank=0, total_steps=5)
    for step in (1, 2, 3, 4):
        log.log(metrics(step=step))
    assert (screen(stream)[-1].startswith("step 4/5, ")) == is_terminal
    log.say("saved", "here")
    log.close()
    lines = screen(stream)
    assert [line.split()[:2] for line in lines] == [["step", "1/5"], ["step", "3/5"], ["saved", "here"], []]
    assert ("step 2/5" in stream.getvalue()) == is_terminal
    other = Terminal()
    monkeypatch.setattr("sys.stdout", other)
    MetricsLog(LoggingConfig(log_interval=3), rank=1, total_steps=5).log(metrics(step=2))
    assert other.getvalue() == ""


def test_the_answer_of_a_search_follows_an_empty_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)

    def search(words: object, cluster: object, settings: SearchSettings, **named: object) -> RankedLayout:
        assert screen(stream)[0].startswith("reading the captured layers of the model")
        monkeypatch.setattr(autotune.time, "monotonic", lambda: 1e9)
        named["tell"]("capturing layout 1 of 8")  # type: ignore[operator]
        assert screen(stream) == ["capturing layout 1 of 8"]
        monkeypatch.setattr(autotune.time, "monotonic", lambda: 2e9)
        settings.progress(3, 9, None)
        assert screen(stream) == ["3 of at most 9 layouts evaluated; nothing that fits yet"]
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_overlap.plan_search.search.search_plan", search)
    words = ["--megatron-args", "examples/mixtral-8x7b.args", "--gpu", "H100", "--num-gpus", "64"]
    assert autotune.main([*words, "--output", str(tmp_path)]) == 130
    assert screen(stream) == ["error: interrupted before the answer was complete", ""]


def test_time_that_is_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from the start of the command."""
    now = [100.0]
    monkeypatch.setattr(autotune.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = autotune.SearchProgress(stream, begun=90.0, limit=30.0)
    progress.tell("capturing layout 1 of 8")
    now[0] = 115.0
    progress.tell("capturing layout 2 of 8")
    assert stream.getvalue() == "capturing layout 2 of 8; 5 of 30 s left\n"


def test_what_is_recorded_is_said_once_where_lines_stay(capsys: pytest.CaptureFixture[str]) -> None:
    progress = autotune.SearchProgress(io.StringIO())
    progress.tell("recording the operators of a layout")
    progress.tell("recording the operators of a layout")
    assert capsys.readouterr().err == "recording the operators of a layout\n"
