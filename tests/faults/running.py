from collections.abc import Iterator

from tests.faults.fault import Fault


def faults() -> Iterator[Fault]:
    yield from ()
