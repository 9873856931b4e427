"""Reports on a full disk: every sink costs one line, and the final save is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.program import SMALL_ARGS, alone


@pytest.mark.slow
def test_full_disks_behind_every_report(tmp_path: Path) -> None:
    full = [f"{flag} /dev/full" for flag in ("--log-json", "--log-expert-load", "--trace")]
    words = f"{SMALL_ARGS} --expert-model-parallel-size 1 --train-iters 3 --lr-warmup-iters 1 {' '.join(full)}"
    ended = alone([*words.split(), "--save", str(tmp_path)])
    assert ended.status == 0, ended
    rule = "cannot be written: No space left on device; training goes on without it"
    assert ended.err.splitlines() == [f"warning: {flag}: {rule}" for flag in full]
    assert (tmp_path / "step-000003/complete.json").is_file()
