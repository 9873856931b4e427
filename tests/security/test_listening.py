"""Who can reach the sockets of a job: of one machine nobody from outside, of several those who know the address they meet at."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.commands import meeting
from tests.end_to_end.program import PROGRAM, ROOT, SMALL_ARGS, environment

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def processes_of(job: int) -> Iterator[Path]:
    """A process and those that it has started: torch's agent gives every rank a session of its own."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    for process in parents:
        above = process
        while above not in (job, 0):
            above = parents.get(above, 0)
        if above == job:
            yield Path(f"/proc/{process}")


def interfaces(job: int) -> list[dict[str, str]]:
    """The interfaces that variables name to each rank of a job, by variable."""
    ranks = []
    for process in processes_of(job):
        environment = dict(line.partition("=")[::2] for line in (process / "environ").read_text().split("\0"))
        if "LOCAL_RANK" in environment:
            ranks.append({name: environment.get(name, "") for name in meeting.LOOPBACK})
    return ranks


def listening_addresses(job: int) -> set[str]:
    """Addresses, in hexadecimal as the kernel writes them, on which processes of a job listen."""
    sockets, found = set(), set()
    for process in processes_of(job):
        for file in (process / "fd").iterdir():
            target = re.fullmatch(r"socket:\[(\d+)\]", str(file.readlink()) if file.is_symlink() else "")
            sockets |= {target[1]} if target else set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            place, state, inode = (row.split()[column] for column in (1, 3, 9))
            found |= {place.partition(":")[0]} if state == LISTENS and inode in sockets else set()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_of_one_machine_listens_on_the_loopback_interface_alone() -> None:
    command = [sys.executable, str(PROGRAM), "--nproc-per-node", "2", SMALL_ARGS, "--train-iters", "1000"]
    job = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert job.stdout is not None
        next(line for line in job.stdout if line.startswith("step"))
        # 127.0.0.1, least significant byte first.
        assert listening_addresses(job.pid) == {"0100007F"}
        # Where the machine's name means another interface, gloo would take that.
        assert interfaces(job.pid) == [{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}] * 2
    finally:
        job.kill()
        job.communicate()


def bound(monkeypatch: pytest.MonkeyPatch, host: str, address: str) -> str:
    """Where the socket listens that a host is given, whose name means an address."""
    asked = socket.getaddrinfo

    def known(name: Any, port: Any, *more: Any, **named: Any) -> Any:
        return asked(address if name == host else name, port, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    with meeting.listening_socket(host, 0) as listening:
        return str(listening.getsockname()[0])


def test_a_store_listens_where_others_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "127.0.0.1", "127.0.0.1") == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        try:
            way_out.connect(("192.0.2.1", 9))  # sends nothing: it tells this machine's own address
        except OSError:
            pytest.skip("this machine has the loopback interface alone")
        own = way_out.getsockname()[0]
    assert bound(monkeypatch, "node0", own) == own


@pytest.mark.parametrize("address", ["127.0.1.1", "203.0.113.7"])
def test_a_name_that_others_read_otherwise_is_no_place_to_bind_to(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Debian's name of the machine itself; an address that a router stands for."""
    assert bound(monkeypatch, "node0", address) == "0.0.0.0"


def test_a_port_that_is_taken_is_told() -> None:
    with meeting.listening_socket("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        meeting.listening_socket("127.0.0.1", taken.getsockname()[1])
