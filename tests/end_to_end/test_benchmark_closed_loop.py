"""The closed loop on its smallest case: two ranks measure themselves, and every layout is predicted and run.

The plan search is left out: it captures and measures what only it looks at, for minutes on a busy machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from tests.end_to_end.program import ROOT
from tests.spawn import HANGS_SECONDS
from tools.bench.bed import require_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.alone]

COMMAND = [sys.executable, str(ROOT / "tools/benchmark_closed_loop.py")]


def test_smallest_case(tmp_path: Path) -> None:
    try:
        require_namespaces()
    except ConfigError as error:
        pytest.skip(str(error))
    words = [
        "--models",
        "smallest",
        "--mbit",
        "200",
        "--ranks",
        "2",
        "--steps",
        "1",
        "--folder",
        str(tmp_path),
        "--grid-only",
        "--json",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*COMMAND, *words], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    (cell,) = json.loads(ended.stdout)["cells"]
    rows = cell["rows"]
    assert {row["name"] for row in rows} >= {"DP only, micro-batch 2", "PP2, micro-batch 2", "EP2, micro-batch 2"}
    for row in [*rows, cell["chosen"]]:
        assert row["unknown"] == [], row  # every operator that computes has seconds of its own
        # However busy the machine is: no step is much shorter than what its operators sleep and its links take.
        assert row["refusal"] is not None or row["steps"][0] > 0.5 * row["predicted_seconds"], row
    assert -1.0 <= cell["spearman"] <= 1.0
    kept = tmp_path / "smallest-200mbit-2ranks.json"
    assert json.loads(kept.read_text()) == cell


@pytest.mark.parametrize("words", ["--models gpt", "--steps 0", "--ranks 1", "--mbit -1"])
def test_mistakes_are_one_line(words: str) -> None:
    ended = subprocess.run([*COMMAND, *words.split()], capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"error: {words.split()[0]} ")
