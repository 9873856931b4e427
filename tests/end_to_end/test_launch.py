"""`pretrain_moe.py --nproc-per-node N`: mistakes are answered once, before anything starts; failures and signals in one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.launch import Launch
from moe_overlap.commands.launcher import elastic_config
from tests.end_to_end.program import PROGRAM, ROOT, SMALL, environment, line_count
from tests.spawn import HANGS_SECONDS

TWO = "--nproc-per-node 2"
MISTAKES = {
    "--nproc-per-node": "--nproc-per-node: needs a value; write --nproc-per-node VALUE",
    "--nproc-per-node 0": "--nproc-per-node 0: must be a whole number from 1; correct the value",
    "--nproc-per-node two": "--nproc-per-node two: must be a whole number from 1; correct the value",
    "--nproc-per-node 1.5": "--nproc-per-node 1.5: must be a whole number from 1; correct the value",
    "--nproc-per-node=-2": "--nproc-per-node -2: must be a whole number from 1; correct the value",
    "--nproc_per_node 9999999": "--nproc-per-node 9999999: is above 1048576; correct the value",
    "--nproc-per-node 3": "world size 3: not a multiple of ETP × EP × PP = 1 × 2 × 1; use a multiple of 2 ranks",
    "--nnodes 2": "--nnodes 2: --nproc-per-node says that this process starts the ranks; add --nproc-per-node N",
    "--max-restarts 3": "--max-restarts 3: --nproc-per-node says that this process starts the ranks; add --nproc-per-node N",
    f"{TWO} --nnodes 2": "--nnodes 2: the nodes must know where to meet; add --rdzv-endpoint HOST:PORT, the same on all",
    f"{TWO} --nnodes 1:2": "--nnodes 1:2: must be a whole number from 1; correct the value",
    f"{TWO} --max-restarts -1": "--max-restarts -1: must be a whole number from 0; correct the value",
    f"{TWO} --nnodes 2 --master-addr h": "--rdzv-backend static: every node must know its rank; add --node-rank 0 to 1",
    f"{TWO} --nnodes 2 --master-addr h --node-rank 2": "--node-rank 2: --nnodes says 2: they count from 0; use 0 to 1",
    f"{TWO} --master-port 70000": "--master-port 70000: is no port; use 1 to 65535",
    f"{TWO} --master-port TAKEN": "port of 127.0.0.1:TAKEN: cannot be opened: Address already in use; ",
    f"{TWO} --rdzv-backend zoo": "--rdzv-backend zoo: unknown choice; use c10d or static",
    f"{TWO} --rdzv-endpoint h:port": "--rdzv-endpoint h:port: names no port; write HOST:PORT",
    f"{TWO} --rdzv-endpoint h:1 --master-addr h": "--rdzv-endpoint h:1: is set together with --master-addr; drop one",
    f"{TWO} --standalone --nnodes 2": "--standalone: is for one node, --nnodes says 2; drop it",
    f"{TWO} --standalone=1": "--standalone 1: takes no value; write --standalone",
    f"{TWO} --standalone --master-addr h": "--standalone: is set together with --master-addr; drop one",
    f"{TWO} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 --node-rank 1": (
        "--node-rank 1: c10d numbers the nodes itself; drop it or use --rdzv-backend static"
    ),
    f"{TWO} --dry-run --world-size 4": "--world-size 4: --nproc-per-node says 2 processes in all; drop one of them",
    f"{TWO} --lr fast": "--lr fast: must be a number; correct the value",
    f"{TWO} --num-layer 2": "--num-layer: unknown flag; did you mean --num-layers?",
    f"{TWO} --expert-model-parallel-size 3": "--expert-model-parallel-size 3: 4 experts are not divisible by 3; use ",
    f"{TWO} --fp8-format hybrid": "--fp8-format hybrid: needs Transformer Engine on a GPU: this machine lacks ",
    f"{TWO} --data-path /nowhere/text": "--data-path /nowhere/text: /nowhere/text.idx does not exist; ",
    f"{TWO} --plan /nowhere/plan.json": "--plan /nowhere/plan.json: ",
    f"{TWO} --load /nowhere --exit-on-missing-checkpoint": "--load /nowhere: holds no checkpoint; ",
    f"{TWO} --save /proc/saved": "--save /proc/saved: cannot be written: ",
    f"{TWO} --trace /proc/trace.json": "--trace /proc/trace.json: cannot be written: ",
    f"{TWO} @launch.args": "--nproc-per-node: starts the ranks, which an argument file does not; give it on the command line",
}
"""Words behind those of the small job -> the line, or how it begins."""
ANSWER = """
import contextlib, io, json, sys
import pretrain_moe
for words in json.loads(sys.argv[1]):
    error, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
        status = pretrain_moe.main(words)
    print(json.dumps([status, out.getvalue(), error.getvalue(), "torch" in sys.modules]))
"""


def test_mistakes_are_one_line_and_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "launch.args").write_text("--nproc-per-node 2\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        commands = [
            [*SMALL, *words.replace("TAKEN", port).replace("@launch", f"@{tmp_path}/launch").split()]
            for words in MISTAKES
        ]
        ended = subprocess.run(
            [sys.executable, "-c", ANSWER, json.dumps(commands)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=HANGS_SECONDS,
        )
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == len(MISTAKES)
    wrong = []
    for (words, expected), (status, out, error, torch) in zip(MISTAKES.items(), answers, strict=True):
        lines = error.replace(port, "TAKEN").splitlines()
        right = len(lines) == 1 and lines[0].startswith(f"error: {expected}") and "; " in lines[0]
        if not right or (status, out, torch) != (2, "", False):
            wrong.append((words, status, out, error, torch))
    assert wrong == []


def test_ranks_of_one_machine_meet_where_no_name_must_be_resolved() -> None:
    """Where a machine's own name does not resolve, torchrun's agent retries until its limit."""
    config = parse(SMALL).config
    apart = elastic_config(Launch(processes_per_node=2), config)
    assert (apart.rdzv_endpoint, apart.local_addr) == ("127.0.0.1:0", "127.0.0.1")
    port = elastic_config(Launch(processes_per_node=2, endpoint="host:29500", job="a"), config)
    assert (port.rdzv_endpoint, port.local_addr, port.run_id) == ("127.0.0.1:29500", "127.0.0.1", "a")
    named = elastic_config(Launch(processes_per_node=2, nodes=2, endpoint="host:29500"), config)
    assert (named.rdzv_endpoint, named.local_addr) == ("host:29500", None)


def test_a_rank_that_torchrun_started_starts_no_further_ones() -> None:
    rank = environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    command = [sys.executable, str(PROGRAM), *SMALL, "--nproc-per-node", "2"]
    ended = subprocess.run(command, cwd=ROOT, env=rank, capture_output=True, text=True, timeout=HANGS_SECONDS)
    line = "error: --nproc-per-node 2: torchrun or Slurm has started this rank already; drop it\n"
    assert (ended.returncode, ended.stderr) == (2, line)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not been waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Started:
    """A job of the program's own launcher, running, and its ranks once it trains."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.log = folder, folder / "log.jsonl"
        command = [sys.executable, str(PROGRAM), *SMALL, "--nproc-per-node", "2", "--log-json", str(self.log)]
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [*command, "--train-iters", "100000", *words],
                cwd=ROOT,
                env=environment({"TMPDIR": str(folder)}),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """The processes of the ranks, from the second step on."""
        while line_count(self.log) < 2 and self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        assert self.process.poll() is None, (self.folder / "err").read_text()
        ranks = [
            pid for pid in children(self.process.pid) if b"pretrain_moe" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(ranks) == 2
        return sorted(ranks)

    def end(self, ranks: list[int]) -> tuple[int, str]:
        """Exit status and stderr; nothing is left behind."""
        try:
            status = self.process.wait(HANGS_SECONDS)
        finally:
            self.process.kill()
        assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
        assert list(self.folder.glob("moe-launch-*")) == []
        return status, (self.folder / "err").read_text()


def test_a_killed_rank_is_named_with_its_step(tmp_path: Path) -> None:
    started = Started(tmp_path)
    ranks = started.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    status, error = started.end(ranks)
    assert status == 128 + signal.SIGKILL
    assert re.fullmatch(
        r"error: rank \d was ended by SIGKILL \(step \d+\); the kernel does so where memory is out\n", error
    )


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_signals_reach_the_ranks(tmp_path: Path, number: signal.Signals, name: str) -> None:
    started = Started(tmp_path)
    ranks = started.ranks()
    started.process.send_signal(number)
    assert started.end(ranks) == (128 + number, f"stopped by {name}: every rank has ended\n")


@pytest.mark.slow
def test_ranks_save_before_they_go_where_the_flags_say_so(tmp_path: Path) -> None:
    started = Started(tmp_path, "--exit-signal-handler", "--save", str(tmp_path / "saved"))
    ranks = started.ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.end(ranks) == (0, "")
    assert (
        "stopped      signal 15\nnext         python pretrain_moe.py --nproc-per-node 2 @"
        in (tmp_path / "out").read_text()
    )
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert saved.name == f"step-{line_count(started.log):06d}"


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_line_and_status_and_is_started_again_as_often_as_asked(tmp_path: Path) -> None:
    words = [
        *SMALL,
        "--lr",
        "1e30",
        "--log-json",
        str(tmp_path / "log"),
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    command = [sys.executable, str(PROGRAM), *words]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert ended.returncode == 1
    first, second = ended.stderr.splitlines()
    assert first == second and re.fullmatch(r"error: step \d+: not finite: .*", first)


@pytest.mark.slow
def test_mistakes_that_only_a_rank_sees_keep_their_status(tmp_path: Path) -> None:
    words = [*SMALL, "--nproc-per-node", "2", "--save", str(tmp_path / "saved")]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / ".lock").mkdir()
    command = [sys.executable, str(PROGRAM), *words]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: --save ")
