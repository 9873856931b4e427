"""The host that this process runs on."""

import os
import sys


def usable_cores() -> int:
    """Cores that this process may run on: those of its affinity where the system has one, else all of the host."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
