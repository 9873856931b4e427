"""All faults, in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults import damage, running, starts
from tests.faults.fault import Fault


def _all() -> Iterator[Fault]:
    for group in (damage.files, damage.forged, damage.folders, damage.parts, starts.faults, running.faults):
        yield from group()


FAULTS = tuple(_all())
