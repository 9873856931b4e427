"""Kills at random moments, a save after every step: a few in every slow run, more by `python -m tests.faults --kills 50`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import killed_job


@pytest.mark.slow
def test_three_kills_with_a_save_every_step_resume_bitwise(tmp_path: Path) -> None:
    outcome = killed_job(3, 16, tmp_path)
    assert outcome.problems == () and outcome.kills == 3
