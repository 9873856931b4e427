"""Whether this machine lets tests make hosts of their own, and what a program has left of them."""

from __future__ import annotations

import functools

from moe_overlap.describe.errors import ConfigError
from tools.bench.bed import NETNS_FOLDER, PLACES, Bed, found_in, require_namespaces


@functools.cache
def namespaces_allowed() -> bool:
    """Tried once."""
    try:
        require_namespaces()
        with Bed(1, None):
            return True
    except ConfigError:
        return False


def left_by(pid: int) -> list[str]:
    """Namespaces and CPU groups that carry the number of a process."""
    folders = (NETNS_FOLDER, *(place for place, _, _ in PLACES))
    return [path.name for folder in folders for path, owner in found_in(folder) if owner == pid]
