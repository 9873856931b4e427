"""The corpus of inputs that once failed, the harness itself, and two minutes of new inputs."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from tests.fuzz import guard
from tests.fuzz.__main__ import CORPUS
from tests.fuzz.guard import canary, failure
from tests.fuzz.mutate import VALUES, json_changed
from tests.fuzz.targets import ROOT, Target, targets

NO_LIMIT = 1e6
"""Seconds an input may take where no one asks how fast the machine is; the alarm of the guard ends what hangs."""


def test_inputs_that_once_failed_and_the_seeds(tmp_path: Path) -> None:
    by_name = {target.name: target for target in targets(tmp_path)}
    for target in by_name.values():
        for seed in target.seeds:
            assert failure(target, seed, NO_LIMIT) is None, target.name
    inputs = sorted(CORPUS.glob("*-*"))
    assert inputs
    for path in inputs:
        assert failure(by_name[path.name.partition("-")[0]], path.read_bytes(), NO_LIMIT) is None, path.name


def test_every_target_stands_in_the_table_of_formats(tmp_path: Path) -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for target in targets(tmp_path):
        assert f"`{target.name}`" in text, target.name


def _refused(content: bytes) -> object:
    raise ConfigError("file", "", "is wrong", "mend it")


def _nested(content: bytes) -> object:
    return _nested(content)


def _several_lines(content: bytes) -> object:
    raise guard.EXPECTED[1]("one\ntwo")


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (_refused, None),
        (_nested, "traceback"),
        (_several_lines, "line"),
        (lambda content: sys.exit(1), "traceback"),
        (lambda content: print("a\x1b[2J"), "line"),
        (lambda content: 2, "line"),
        (lambda content: print("step nan s"), "nan"),
        (lambda content: print(json.dumps({"a": float("inf")})), "nan"),
        (lambda content: pickle.loads(pickle.dumps(_Calls())), "code"),
        (lambda content: subprocess.run(["true"], check=True), "code"),
    ],
)
def test_the_guard_sees_what_a_reader_does_wrong(read: Callable[[bytes], object], kind: str | None) -> None:
    wrong = failure(Target("target", (b"",), read, is_command=True, prints_numbers=True), b"", NO_LIMIT)
    assert (wrong and wrong.kind) == kind


def test_the_guard_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HANG_SECONDS", 1)
    wrong = failure(Target("target", (b"",), lambda content: time.sleep(1000)), b"", NO_LIMIT)
    assert wrong is not None and wrong.kind == "hang"


def test_inputs_follow_from_the_seed_and_leave_the_values_alone() -> None:
    seed, before = json.dumps({"a": [1, {"b": 2.5}], "c": "text"}).encode(), json.dumps(VALUES)
    first, second = (random.Random(7), random.Random(7))
    inputs = [json_changed(seed, first) for _ in range(500)]
    assert inputs == [json_changed(seed, second) for _ in range(500)]
    assert len(set(inputs)) > 250 and json.dumps(VALUES) == before


class _Calls:
    def __reduce__(self) -> tuple[object, ...]:
        return canary, ()


@pytest.mark.slow
def test_at_most_two_minutes_of_mutations() -> None:
    # As many whatever the machine: the same inputs in every run, so that a failure is a change's and no chance's.
    limits = ["--minutes", "2", "--inputs", "25000", "--seconds", "15"]
    command = [sys.executable, "-m", "tests.fuzz", *limits, "--seed", "20261123"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
