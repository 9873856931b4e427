"""The corpus of inputs that once failed, and two minutes of new ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import CORPUS, failure
from tests.fuzz.targets import ROOT, targets


def test_inputs_that_once_failed_and_the_seeds(tmp_path: Path) -> None:
    by_name = {target.name: target for target in targets(tmp_path)}
    for target in by_name.values():
        for seed in target.seeds:
            target.read(seed)  # a valid input is read, else its mutations show nothing
    for path in sorted(CORPUS.glob("*-*")) if CORPUS.is_dir() else ():
        assert failure(by_name[path.name.partition("-")[0]], path.read_bytes()) is None, path.name


@pytest.mark.slow
def test_two_minutes_of_mutations() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", "2", "--seed", "16"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
