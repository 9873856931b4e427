"""The closed loop: ranks on slow links measure themselves, plans are predicted, and then run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.serialize import load_plan
from tests.end_to_end.program import ROOT
from tests.spawn import HANGS_SECONDS
from tools.bench.bed import require_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.alone]

COMMAND = [sys.executable, str(ROOT / "tools/benchmark_closed_loop.py")]


def cell_of(folder: Path, words: str) -> dict[str, Any]:
    """The measured cell of one model on links of one rate."""
    try:
        require_namespaces()
    except ConfigError as error:
        pytest.skip(str(error))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*COMMAND, *words.split(), "--folder", str(folder), "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    (cell,) = json.loads(ended.stdout)["cells"]
    return cell


def test_smallest_case(tmp_path: Path) -> None:
    """Every layout of two ranks is predicted and run; the plan search is left out."""
    cell = cell_of(tmp_path, "--models smallest --mbit 200 --ranks 2 --steps 1 --grid-only")
    rows = cell["rows"]
    assert {row["name"] for row in rows} >= {"DP only, micro-batch 2", "PP2, micro-batch 2", "EP2, micro-batch 2"}
    for row in [*rows, cell["chosen"]]:
        assert row["unknown"] == [], row  # every operator that computes has seconds of its own
        # However busy the machine is: no step is much shorter than what its operators sleep and its links take.
        assert row["refusal"] is not None or row["steps"][0] > 0.5 * row["predicted_seconds"], row
    assert -1.0 <= cell["spearman"] <= 1.0
    kept = tmp_path / "smallest-200mbit-2ranks.json"
    assert json.loads(kept.read_text()) == cell


def test_stages_of_unlike_shape_are_found_and_gain_what_was_predicted(tmp_path: Path) -> None:
    """Four ranks measure themselves; the answer has stages of unlike shape, and its written flags run as they are."""
    cell = cell_of(tmp_path, "--models heavy-head --mbit 100 --steps 3 --fastest 2")
    plan = load_plan(tmp_path / "heavy-head-100mbit" / "plan.json")
    assert plan.transfers and len({len(stage.devices.ranks) for stage in plan.stages}) > 1
    chosen, uniform = cell["chosen"], cell["rows"]
    seconds = statistics.median(chosen["steps"])
    assert chosen["predicted_seconds"] == pytest.approx(seconds, rel=0.05)
    fastest = min(uniform, key=lambda row: statistics.median(row["steps"]))
    gained = statistics.median(fastest["steps"]) - seconds
    assert gained >= 0.5 * (min(row["predicted_seconds"] for row in uniform) - chosen["predicted_seconds"]) > 0


@pytest.mark.parametrize("words", ["--models gpt", "--steps 0", "--ranks 1", "--mbit -1"])
def test_mistakes_are_one_line(words: str) -> None:
    ended = subprocess.run([*COMMAND, *words.split()], capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"error: {words.split()[0]} ")
