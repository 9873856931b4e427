"""Hosts and CPU groups come and go with their program, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from tests.link_hosts import left_by, namespaces_allowed
from tests.signals import restore_interruptions
from tests.spawn import HANGS_SECONDS
from tools.bench import bed as bed_module
from tools.bench.bed import Bed, CpuGroup
from tools.bench.launch import LaunchedRanks, RankFailed

ROOT = Path(__file__).resolve().parents[3]
HOLDS = """
import os, sys, time
from tools.bench.bed import Bed
from tools.bench.bed import CpuGroup
from tools.bench.launch import LaunchedRanks
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
with Bed(2, 100.0) as bed, CpuGroup() as group, LaunchedRanks(sleeps, 2, bed, group):
    print("up", flush=True)
    time.sleep(600)
"""
ECHO = """
import json, os, sys
replies = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "end" and os.environ["RANK"] == "1":
        os._exit(3)
    print(json.dumps([order, os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid()]), file=replies)
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    if not namespaces_allowed():
        pytest.skip("network namespaces are not allowed here")


@pytest.fixture
def program(namespaces: None) -> Iterator[subprocess.Popen[str]]:
    """A program that holds a bed with two ranks."""
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=restore_interruptions
    ) as started:
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        yield started
        started.kill()


def discipline(bed: Bed, host: int) -> str:
    command = [*bed.prefix(host), "tc", "qdisc", "show", "dev", "eth0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_up_rates_and_down(namespaces: None) -> None:
    with Bed(2, 100.0) as bed, CpuGroup():
        assert len(left_by(os.getpid())) >= 3
        assert all("tbf" in discipline(bed, host) and "rate 100Mbit" in discipline(bed, host) for host in range(2))
        bed.set_rate(None)
        assert all("tbf" not in discipline(bed, host) for host in range(2))
        bed.set_rate(12.5)
        assert "rate 12500Kbit" in discipline(bed, 1)
    assert left_by(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(program: subprocess.Popen[str], number: signal.Signals) -> None:
    inside = processes_inside(program.pid)
    program.send_signal(number)
    assert program.wait(30) != 0
    assert left_by(program.pid) == [] and not any(Path("/proc", pid).exists() for pid in inside)


def test_what_a_killed_program_left_goes_with_the_next(program: subprocess.Popen[str]) -> None:
    inside = processes_inside(program.pid)
    program.kill()
    program.wait(30)
    assert left_by(program.pid)
    assert wait_until_gone(inside), "the kernel ends the ranks of a killed program"
    with Bed(1, None), CpuGroup():
        assert left_by(program.pid) == []


def test_a_bed_that_cannot_be_finished_leaves_nothing(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bed_module.SYSCTLS, "tcp_congestion_control", "nonsense")
    with pytest.raises(ConfigError, match="use --emulator"), Bed(2, None):
        pass
    assert left_by(os.getpid()) == []


def test_without_root_or_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError) as refused:
        Bed(2, 100.0)
    assert str(refused.value) == "--namespaces 1000: network namespaces need root (user id 0); use --emulator"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="ip, tc, nsenter, setpriv not installed; install iproute2"):
        Bed(2, 100.0)


def test_ranks_answer_and_end_together() -> None:
    with (
        CpuGroup() as group,
        LaunchedRanks([sys.executable, "-c", ECHO], 2, None, group, timeout_seconds=HANGS_SECONDS) as ranks,
    ):
        answers = ranks.tell(do="say", value=1.5)
        assert [answer[:3] for answer in answers] == [
            [{"do": "say", "value": 1.5}, str(rank), "2"] for rank in range(2)
        ]
        pids = [str(answer[3]) for answer in answers]
        with pytest.raises(RankFailed, match="rank 1: ended with status 3") as failed:
            ranks.tell(do="end")
        assert failed.value.status == 3
    assert not any(Path("/proc", pid).exists() for pid in pids)


def test_a_silent_rank_is_named() -> None:
    sleeps = "import time; time.sleep(600)"
    with (
        CpuGroup() as group,
        LaunchedRanks([sys.executable, "-c", sleeps], 2, None, group, timeout_seconds=0.2) as ranks,
        pytest.raises(RankFailed, match="rank 0, 1: no answer in 0.2 s"),
    ):
        ranks.tell(do="say")


def processes_inside(pid: int) -> list[str]:
    """The two ranks of a program, once both have reached their hosts."""
    names = [name for name in left_by(pid) if name.split(".")[1].isdigit()]
    deadline = time.monotonic() + 30
    found: list[str] = []
    while len(found) < 2 and time.monotonic() < deadline:
        commands = [["ip", "netns", "pids", name] for name in names]
        pids = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.split() for c in commands]
        found = [process for processes in pids for process in processes]
    assert len(found) == 2
    return found


def wait_until_gone(pids: list[str]) -> bool:
    deadline = time.monotonic() + 30
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path("/proc", pid).exists() for pid in pids)
