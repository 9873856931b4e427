"""The folder in which ranks tell their launcher how far they are: every start of the ranks has its own part of it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from megatron.training.cli.launch import Launch
from moe_overlap.commands.exits import LaunchFolder
from moe_overlap.commands.launcher import _failed


def test_a_restart_is_not_told_of_the_attempt_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, launch = LaunchFolder(tmp_path), Launch(processes_per_node=2, max_restarts=1)
    first.begin()
    first.note(1, "step 7")
    first.finish(0)
    assert first.claim() and not first.claim()
    # The second attempt's rank is killed while it imports: it has said nothing yet.
    last = first.of_attempt(launch.max_restarts)
    assert (last.activity(1), last.has_spoken(), last.finished()) == ("start", False, 0)
    assert _failed({1: -signal.SIGKILL}, launch, last) == 128 + signal.SIGKILL
    assert re.match(r"error: rank 1 was ended by SIGKILL \(start\);", capsys.readouterr().err)
    assert _failed({1: 3}, launch, last) == 3
    assert capsys.readouterr().err == "error: rank 1 ended with status 3 (start)\n"


def test_the_last_attempt_counts_its_own_ranks(tmp_path: Path) -> None:
    for attempt in (0, 9, 10):
        folder = LaunchFolder(tmp_path, str(attempt))
        folder.begin()
        folder.finish(0)
        folder.note(0, f"step {attempt}")
    last = folder.last_attempt()
    assert (last.attempt, last.finished(), last.activity(0)) == ("10", 1, "step 10")
    assert LaunchFolder(tmp_path).finished() == 1 and LaunchFolder(tmp_path / "none").last_attempt().finished() == 0


def test_a_rank_that_is_killed_while_it_notes_is_known_by_its_last_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LaunchFolder(tmp_path)
    folder.note(1, "step 7")

    def killed(path: Path, text: str) -> None:
        path.touch()
        path.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.note(1, "step 8")
    assert folder.activity(1) == "step 7"
