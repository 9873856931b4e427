"""`make train` as a newcomer starts it: from the link to the table, without anything left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.program import ROOT
from tests.link_hosts import left_by, namespaces_allowed
from tests.signals import restore_interruptions

PROGRAM = ROOT / "tools" / "first_run.py"
TINY = """
    --num-layers 1 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 64 --micro-batch-size 4
    --plain-steps 3 --train-iters 5 --eval-iters 1
""".split()


def test_make_hands_its_variables_on() -> None:
    variables = ["PROCESSES=4", "LINK=none", "ARGS=--lr 0.1"]
    # `make test` hands its own flags on (MAKEFLAGS, MAKELEVEL): an inner make would say which folder it enters and leaves.
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "-W", "setup.py", "train", *variables]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=mine)
    assert said.returncode == 0, said.stderr
    *install, last = said.stdout.splitlines()
    assert last == ".venv/bin/python tools/first_run.py --processes 4 --link none --lr 0.1"
    assert any("tools/install.py .venv" in line for line in install)


@pytest.mark.slow
@pytest.mark.alone
def test_from_the_link_to_the_table(tmp_path: Path) -> None:
    folder, saved, mine = tmp_path / "first run", tmp_path / "saved here", tmp_path / "mine.jsonl"
    mine.write_text('{"step": 1, "loss": 77.0}\n')
    words = ["--link", "emulator", "--folder", str(folder), *TINY, "--save", str(saved), "--log-json", str(mine)]
    command = [sys.executable, str(PROGRAM), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr

    lines = ended.stdout.splitlines()
    parts = [re.split(r"\s{2,}", line)[0] for line in lines]
    begins = ["first run", "1 link", "2 measure", "3 tune", "4 train", "5 compare", "look at"]
    assert [part for part in parts if part] == begins and len(lines) < 35
    assert any(line.strip().startswith("same training: over 3 steps") for line in lines)

    record = json.loads((folder / "result.json").read_text())
    assert [len(record[name]["steps"]) for name in ("plain", "tuned")] == [3, 5]
    assert record["tuned"]["steps"][0]["loss"] != 77.0 and len(mine.read_text().splitlines()) == 6
    assert all(record[name]["predicted_step_seconds"] > 0 for name in ("plain", "tuned"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert (folder / "report.html").read_text().count("<svg") == 1
    assert (folder / "megatron_args.txt").exists() and (saved / "step-000005").exists()


@pytest.mark.slow
@pytest.mark.alone
def test_nothing_is_left_after_an_interruption(tmp_path: Path) -> None:
    link = "namespaces" if namespaces_allowed() else "emulator"
    command = [sys.executable, str(PROGRAM), "--link", link, "--folder", str(tmp_path), *TINY]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore_interruptions
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        assert any(line.startswith("1 link") for line in started.stdout), "the ranks are up"
        ranks = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert len(ranks) == 2 and (link == "emulator" or len(left_by(started.pid)) >= 3)
        started.send_signal(signal.SIGINT)
        said = started.stderr.read().strip().splitlines()[-1]
        assert started.wait(60) == 130 and said.startswith("error: interrupted")
    assert left_by(started.pid) == [] and not any(Path("/proc", pid).exists() for pid in ranks)
