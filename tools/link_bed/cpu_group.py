"""A CPU group of the highest weight: processes in it hardly notice other work on the machine.

Needs root. Without it nothing else changes, and measurements vary with the load. (Real-time scheduling is no substitute: gloo's
threads spin under it for whole seconds.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from tools.link_bed.temporary import Temporary, found_in, is_alive

PLACES = ((Path("/sys/fs/cgroup/cpu"), "cpu.shares", 262144), (Path("/sys/fs/cgroup"), "cpu.weight", 10000))
"""Where CPU groups stand (version 1, version 2), the file of their weight, and the highest one."""
REMOVAL_SECONDS = 5.0


class CpuGroup(Temporary):
    """A group that exists while the `with` block runs.

    Attributes:
        folder: of the group; None where this program may not make one.
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
        _remove(lambda path, pid: path.name.startswith(f"{self.name}."))

    def sweep(self) -> None:
        _remove(lambda path, pid: not is_alive(pid))


def _remove(chosen: Callable[[Path, int], bool]) -> None:
    deadline = time.monotonic() + REMOVAL_SECONDS
    for place, _, _ in PLACES:
        for path, pid in found_in(place):
            while chosen(path, pid) and path.exists() and time.monotonic() < deadline:
                try:
                    path.rmdir()
                except OSError:  # its last process is still on its way out
                    time.sleep(0.02)
