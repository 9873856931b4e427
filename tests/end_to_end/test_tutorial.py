"""The blocks of docs/tutorial.md that are marked as executed, in order, in a folder that sees the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.program import ROOT
from tests.spawn import HANGS_SECONDS

pytestmark = pytest.mark.slow

MARKED = re.compile(r"^<!-- executed -->\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_marked_blocks(tmp_path: Path) -> None:
    for name in ("tools", "examples", "pretrain_moe.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = MARKED.findall((ROOT / "docs/tutorial.md").read_text())
    assert len(blocks) == 4
    printed = []
    for block in blocks:
        command = ["bash", "-e", "-c", block]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_SECONDS
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout}{ended.stderr}"
        printed.append(ended.stdout)
    assert "8 experts top-2, 795.4 M parameters" in printed[1]
    assert re.search(r"^step +[\d.]+ s ± ", printed[2], re.MULTILINE)
    assert re.search(r"^step +3/3 +loss ", printed[3], re.MULTILINE), printed[3]
