"""A gradient of 100 MB over a slow link: what its places in the list cost the all-to-alls, and the step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moe_overlap.describe.errors import ConfigError
from tests.end_to_end.program import ROOT
from tests.spawn import HANGS_SECONDS
from tools.bench.bed import require_namespaces

PROGRAM = ROOT / "tools" / "benchmark_gradient_gaps.py"


def links() -> str:
    try:
        require_namespaces()
    except ConfigError:
        return "--emulator"
    return "--namespaces"


@pytest.mark.slow
@pytest.mark.alone
def test_a_gradient_of_100_megabytes_fills_the_gaps() -> None:
    command = [sys.executable, str(PROGRAM), links(), "--repeats", "5", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert 2 * record["sent_bytes"] > 100e6 and record["pieces"] > 4
    rows = record["variants"]
    # Of the quietest turn: other work on the machine only lengthens a step and an exchange.
    step = {name: row["step"][0] for name, row in rows.items()}
    exchanges = {name: row["exchanges"][0] for name, row in rows.items()}
    assert exchanges["at once"] > 1.1 * exchanges["none"], "a link without contention would show nothing"
    assert exchanges["in gaps"] <= 1.05 * exchanges["none"]
    assert step["in gaps"] < step["at once"] and step["in gaps"] < step["at the end"]


def test_a_mistake_is_one_line() -> None:
    command = [sys.executable, str(PROGRAM), "--emulator", "--num-layer", "4"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_SECONDS, check=False)
    assert ended.returncode == 2 and ended.stderr == "error: --num-layer: unknown flag; did you mean --num-layers?\n"
