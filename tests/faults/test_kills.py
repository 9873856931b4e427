"""Kills at random moments, a save after every step: a few in every slow run, more by `python -m tests.faults --kills 50`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_overlap.plan.serialize import save_plan
from tests.end_to_end.program import SMALL_ARGS
from tests.faults.kills import killed_job
from tests.multiprocess.store_runs import with_levels


@pytest.mark.slow
def test_two_kills_with_a_save_every_step_resume_bitwise(tmp_path: Path) -> None:
    outcome = killed_job(2, 16, tmp_path)
    assert outcome.problems == () and outcome.kills == 2


@pytest.mark.slow
def test_kills_between_a_step_and_its_update_resume_bitwise(tmp_path: Path) -> None:
    """With ZeRO 3 a step's update belongs to the next list: a save makes it first."""
    lines = Path(SMALL_ARGS.removeprefix("@")).read_text().splitlines()
    flags = " ".join(line for line in lines if not line.startswith("#"))
    path = tmp_path / "plan.json"
    save_plan(with_levels(flags, 2, (3,)), path)
    more = ["--plan", str(path), "--moe-token-dispatcher-type", "irregular"]
    outcome = killed_job(2, 17, tmp_path, flags=more)
    assert outcome.problems == () and outcome.kills == 2
