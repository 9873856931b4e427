"""tools/profile_cluster.py as users start it: alone and under torchrun, stopped in the middle, and with mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_overlap.api import predict
from moe_overlap.describe.cluster import load_cluster
from moe_overlap.tuner.profile.database import Database
from tests.end_to_end.program import STANDALONE

ROOT = Path(__file__).resolve().parents[2]
TOOL = str(ROOT / "tools" / "profile_cluster.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCHRUN = ["-m", "torch.distributed.run", *STANDALONE, "--nproc-per-node", "2"]


def run(*words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, *(TORCHRUN if ranks == 2 else []), TOOL, *words]
    return subprocess.run(launch, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "here.txt"), "--output here.txt: is no cluster description"),
        (("--output", "here.json", "--device", "cuda"), "--device cuda: this machine has no GPU"),
        (("--output", "here.json", "--megatron-args", "none.args"), "none.args"),
        (("--output", "/proc/here.json"), "cannot be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    environment = {**ENVIRONMENT, "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, TOOL, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_run_goes_on_and_a_third_measures_nothing(tmp_path: Path) -> None:
    output, database = tmp_path / "here.json", tmp_path / "here.measured.jsonl"
    started = subprocess.Popen([sys.executable, TOOL, "--output", str(output), "--quick"], env=ENVIRONMENT, cwd=ROOT)
    deadline = time.monotonic() + 120
    while (not database.exists() or len(database.read_bytes().splitlines()) < 20) and time.monotonic() < deadline:
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = Database.load(database).operators
    assert len(kept) >= 10 and not output.exists()

    done = run("--output", str(output), "--quick")
    assert done.returncode == 0, done.stderr
    whole = Database.load(database)
    assert {key: whole.operators[key] for key in kept} == kept and len(whole.operators) > len(kept)
    text = database.read_text()
    assert run("--output", str(output), "--quick").returncode == 0
    assert database.read_text() == text


@pytest.mark.slow
@pytest.mark.alone
def test_two_ranks_measure_links_and_a_prediction_reads_them(tmp_path: Path) -> None:
    output = tmp_path / "here.json"
    done = run("--output", str(output), "--quick", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("2 ranks")
    database = Database.load(tmp_path / "here.measured.jsonl")
    assert {key.kind for key in database.links} == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
    }
    prediction = predict([f"@{ROOT / 'examples/tiny-mixtral-8x7b.args'}"], load_cluster(output))
    assert prediction.predicted.provenance.measured > 0.99 and not prediction.extrapolating
    assert 0.05 < prediction.predicted.step_seconds < 20
    grown = (tmp_path / "here.measured.jsonl").read_text()
    again = predict([f"@{ROOT / 'examples/tiny-mixtral-8x7b.args'}"], load_cluster(output))
    assert again.predicted.step_seconds == prediction.predicted.step_seconds
    assert (tmp_path / "here.measured.jsonl").read_text() == grown
    content = json.loads(output.read_text())
    assert content["groups"][0]["gpus_per_node"] == 2
