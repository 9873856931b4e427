"""From a run to a picture: the overlap benchmark leaves a trace of every variant and rank, and the drawing tool reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_overlap.plan.trace import read_traces
from tests.end_to_end.program import ROOT
from tests.spawn import HANGS_SECONDS

SMALL = """
    --emulator --timer-compute --compute-seconds 0.4 --repeats 1 --ratio 0.5 --json --hidden-size 64 --moe-ffn-hidden-size 64
    --num-attention-heads 4 --micro-batch-size 4 --seq-length 64
""".split()


@pytest.mark.slow
@pytest.mark.alone
def test_traces_of_a_benchmark_are_drawn(tmp_path: Path) -> None:
    benchmark = [sys.executable, str(ROOT / "tools/benchmark_overlap.py"), *SMALL]
    chosen = ["--variants", "irregular", "both 2 around", "--traces", str(tmp_path)]
    ended = subprocess.run([*benchmark, *chosen], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 1, "a trace changes nothing of the figures' form"

    without, overlapped = (tmp_path / f"2ranks-topk-0.5-{name}.json" for name in ("irregular", "both-2-around"))
    assert [sorted(file.spans) for file in read_traces(without)] == [[0], [1]], "a file for each rank"
    picture = tmp_path / "overlap.svg"
    draw = [
        sys.executable,
        str(ROOT / "tools/draw_overlap.py"),
        str(without),
        str(overlapped),
        "--output",
        str(picture),
    ]
    subprocess.run(draw, check=True, timeout=HANGS_SECONDS)
    drawn = picture.read_text()
    assert "Without overlap" in drawn and "hidden communication" in drawn and "exposed communication" in drawn
