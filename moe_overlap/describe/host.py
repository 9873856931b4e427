"""The host of this process."""

import os
import sys


def usable_cores() -> int:
    """Number of cores that this process may use: the cores of its affinity mask on Linux, otherwise all cores of the host."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
