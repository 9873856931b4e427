"""One plan predicted and run for real on emulated links; mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.program import ROOT

TIMED = """
    --timer-compute --emulator --mbit 400 --repeats 1 --plans deferral --json --hidden-size 256 --moe-ffn-hidden-size 256
    --num-attention-heads 4 --micro-batch-size 4
""".split()


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "benchmark_predictions.py"), *words]
    return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.alone
def test_a_predicted_step_is_the_measured_one(tmp_path: Path) -> None:
    ended = benchmark(*TIMED, "--folder", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert (record["links"], record["compute"], record["link_mbit"]) == ("emulator", "timer", 400.0)
    (plan,) = record["plans"]
    assert plan["plan"] == "deferral" and plan["error"] == pytest.approx(0.0, abs=0.2)
    kinds = {row["kind"]: row for row in plan["kinds"] if row["channel"] == "ep"}
    assert set(kinds) >= {"moe.dispatch", "moe.combine", "moe.dispatch.backward", "moe.combine.backward"}
    assert all(kinds[name]["error"] == pytest.approx(0.0, abs=0.3) for name in ("moe.dispatch", "moe.combine"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"emulator-400mbit.json", "deferral.predicted.json", "deferral.measured.json.rank1"}


def test_a_mistake_is_one_line() -> None:
    ended = benchmark("--plans", "both 3 around")
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: --plans both 3 around: unknown here; choose among irregular, tutel 2")
