"""Hosts with slow links on one machine: network namespaces joined by a bridge, each with a token bucket at its exit.

`Bed` makes the hosts and `CpuGroup` gives their processes priority. Both are `Temporary`: they must not outlive the program.
Their names carry the id of the process; they are gone when the `with` block is left, when the program ends, and after SIGINT,
SIGTERM or SIGHUP; what a killed program leaves behind goes when the next one starts.

Between hosts communication waits as it does on a cluster, and costs little CPU. Needs root, `ip` and `tc` (iproute2), `nsenter`
and `setpriv` (util-linux); without them use the emulator (emulator.py).

Settings, each of which cost accuracy without it: MTU 9000 and a burst of 128 KiB (a smaller one cuts TCP's 64 KiB segments up
again), Reno and 128 KiB of output per socket (else acknowledgements queue behind megabytes of the other direction).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from moe_overlap.describe.errors import ConfigError

PREFIX = "moebed"
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Temporary:
    """Something on the machine that exists while a `with` block in the main thread runs, however that block ends.

    Attributes:
        name: prefix of all names it gives.
    """

    def __init__(self) -> None:
        self.name = f"{PREFIX}{os.getpid()}"
        self._previous: dict[int, Any] = {}

    def build(self) -> None:
        """Create everything."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove everything that stands under the name; closing again does nothing."""
        raise NotImplementedError

    def sweep(self) -> None:
        """Remove everything of programs that no longer exist."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.sweep()
        atexit.register(self.close)
        for number in ENDING_SIGNALS:
            self._previous[number] = signal.signal(number, _end)
        try:
            self.build()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        atexit.unregister(self.close)


def found_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """Paths in a folder that have such names, and the process each belongs to."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := re.fullmatch(rf"{PREFIX}(\d+)\.\w+", path.name):
                yield path, int(match[1])


def is_alive(pid: int) -> bool:
    """Whether a process exists."""
    return Path("/proc", str(pid)).exists()


def _end(number: int, frame: FrameType | None) -> None:
    """Turn a signal into an exit, so that `with` blocks are left."""
    raise SystemExit(128 + number)


PLACES = ((Path("/sys/fs/cgroup/cpu"), "cpu.shares", 262144), (Path("/sys/fs/cgroup"), "cpu.weight", 10000))
"""Folders of CPU groups (version 1, version 2), the file of their weight, and the highest weight."""
REMOVAL_SECONDS = 5.0


class CpuGroup(Temporary):
    """A CPU group of the highest weight: processes in it hardly notice other work on the machine.

    It needs root. Without it nothing else changes, and measurements vary with the load. Real-time scheduling is no substitute:
    gloo's threads spin under it for whole seconds.

    Attributes:
        folder: the folder of the group; None if this program may not create one.
    """

    folder: Path | None = None

    def build(self) -> None:
        for place, weight_file, weight in PLACES:
            if not (place / "cgroup.procs").exists():
                continue
            with contextlib.suppress(OSError):
                folder = place / f"{self.name}.cpu"
                folder.mkdir(exist_ok=True)
                (folder / weight_file).write_text(str(weight))
                self.folder = folder
                return

    def join(self, pid: int) -> None:
        """Put a process, and those it will start, into the group."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        _remove_group(lambda path, pid: path.name.startswith(f"{self.name}."))

    def sweep(self) -> None:
        _remove_group(lambda path, pid: not is_alive(pid))


def _remove_group(chosen: Callable[[Path, int], bool]) -> None:
    deadline = time.monotonic() + REMOVAL_SECONDS
    for place, _, _ in PLACES:
        for path, pid in found_in(place):
            while chosen(path, pid) and path.exists() and time.monotonic() < deadline:
                try:
                    path.rmdir()
                except OSError:  # its last process is still on its way out
                    time.sleep(0.02)


NETNS_FOLDER = Path("/run/netns")
PROGRAMS = ("ip", "tc", "nsenter", "setpriv")
MTU = 9000
BURST_BYTES = 128 * 1024
FAST_BURST_BYTES = 512 * 1024
FAST_MBIT = 1000.0
"""The larger burst is used from this rate on."""
QUEUE_MILLISECONDS = 400
SYSCTLS = {
    "tcp_congestion_control": "reno",
    "tcp_limit_output_bytes": str(BURST_BYTES),
    "tcp_slow_start_after_idle": "0",
}


class Bed(Temporary):
    """Hosts that exist while the `with` block runs.

    Args:
        hosts: number of hosts.
        rate_mbit: rate of every host's exit in 10^6 bit/s, headers included; None: not limited.
    Raises:
        ConfigError: not root, or a program is missing.
    """

    def __init__(self, hosts: int, rate_mbit: float | None) -> None:
        super().__init__()
        require_namespaces()
        assert 1 <= hosts <= 200, hosts
        self.hosts, self.rate_mbit = hosts, rate_mbit

    def build(self) -> None:
        switch = f"{self.name}.switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            self._add_host(host, switch)

    def close(self) -> None:
        _remove(lambda path, pid: path.name.startswith(f"{self.name}."))

    def sweep(self) -> None:
        _remove(lambda path, pid: not is_alive(pid))

    def address(self, host: int) -> str:
        """Address of a host inside the bed."""
        return f"10.77.0.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """The words before a command that execute it on a host. `ip netns exec` would hide /sys/fs/cgroup."""
        return ["nsenter", f"--net={NETNS_FOLDER / self._host(host)}", "--"]

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every exit at once; None: not limited."""
        self.rate_mbit = rate_mbit
        for host in range(self.hosts):
            self._limit(host)

    def _add_host(self, host: int, switch: str) -> None:
        name, port = self._host(host), f"port{host}"
        _run("ip", "netns", "add", name)
        for key, value in SYSCTLS.items():
            _run(*self.prefix(host), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}")
        ends = ("link", "add", "eth0", "mtu", str(MTU), "type", "veth", "peer", "name", port, "netns", switch)
        _run("ip", "-n", name, *ends)
        _run("ip", "-n", switch, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        self._limit(host)

    def _limit(self, host: int) -> None:
        name = self._host(host)
        if self.rate_mbit is None:
            # Without a limit there is no discipline to delete, and tc says so with status 2.
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", "eth0", "root"], capture_output=True, check=False)
            return
        burst = FAST_BURST_BYTES if self.rate_mbit >= FAST_MBIT else BURST_BYTES
        bits = str(round(self.rate_mbit * 1e6))
        bucket = ("tbf", "rate", bits, "burst", str(burst), "latency", f"{QUEUE_MILLISECONDS}ms")
        _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def _host(self, host: int) -> str:
        return f"{self.name}.{host}"


def require_namespaces() -> None:
    """Raise ConfigError where namespaces cannot be created."""
    fix = "use --emulator"
    if os.geteuid() != 0:
        raise ConfigError("--namespaces", os.geteuid(), "network namespaces need root (user id 0)", fix)
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        rule = f"{', '.join(missing)} not installed"
        raise ConfigError("--namespaces", "", rule, f"install iproute2 and util-linux, or {fix}")


def _remove(chosen: Callable[[Path, int], bool]) -> None:
    for path, pid in found_in(NETNS_FOLDER):
        if chosen(path, pid):
            _kill_inside(path)
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _kill_inside(netns: Path) -> None:
    """End the processes of a host; its links live as long as they do."""
    listed = subprocess.run(["ip", "netns", "pids", netns.name], capture_output=True, text=True, check=False).stdout
    for pid in map(int, listed.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().replace("\n", " ")
        fix = "the machine forbids it: use --emulator"
        raise ConfigError("--namespaces", "", f"{' '.join(_short(command))} failed: {reason}", fix)


def _short(command: Sequence[str]) -> Sequence[str]:
    return command if len(command) < 8 else (*command[:8], "…")
