"""A node's task of the Slurm scripts, without Slurm: its signal reaches ranks that train, and nothing else of what runs there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.end_to_end.program import ROOT, STANDALONE
from tests.spawn import HANGS_SECONDS

RANK = """
import os, signal, sys, time
said = []
time.sleep(1)  # starts up: whoever is signalled without a handler is gone
signal.signal(signal.SIGUSR1, lambda *_: said.append("stop"))
print("training", flush=True)
deadline = time.monotonic() + 30
while not said and time.monotonic() < deadline:
    time.sleep(0.05)
print("saved" if said else "never told", flush=True)
"""


def test_a_signal_to_the_task_alone_reaches_every_rank_that_has_a_handler(tmp_path: Path) -> None:
    """As Slurm sends it where cgroups track processes: to the process that slurmstepd has started, and to none below it."""
    text = (ROOT / "moe_overlap" / "tuner" / "write" / "launch.sh").read_text()
    written = re.search(r"^on_node='.*?^'$", text, re.DOTALL | re.MULTILINE)
    assert written is not None
    (tmp_path / "rank.py").write_text(RANK)
    script = f'CONTAINER= PYTHON={sys.executable}\n{written[0]}\nexec bash -c "$on_node" bash "$@"'
    launcher = [*STANDALONE, "--nproc-per-node", "2", str(tmp_path / "rank.py")]
    said = tmp_path / "log"
    with said.open("w") as log:
        task = subprocess.Popen(
            ["bash", "-c", script, "bash", *launcher],
            env=os.environ | {"SLURM_NODEID": "0"},
            stdout=log,
            stderr=log,
        )
        deadline = time.monotonic() + HANGS_SECONDS
        while task.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
            # Bash loses the status of a child that ends while a signal ends its `wait`: none is sent to a task that is ending.
            if said.read_text().count("saved") < 2:
                task.send_signal(signal.SIGUSR1)
    assert task.poll() == 0, said.read_text()
    assert said.read_text().count("training") == said.read_text().count("saved") == 2
