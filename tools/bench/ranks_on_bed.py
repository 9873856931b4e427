"""Ranks on hosts of their own, joined by links of a rate that may change: the base of benchmarks of predictions and choices."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from tools.bench.bed import Bed, CpuGroup, require_namespaces
from tools.bench.launch import FIRST_PORT, Ranks
from tools.bench.variants import Variant
from tools.bench.worker import command_of

ROOT = Path(__file__).resolve().parents[2]


class RanksOnBed:
    """Processes of one or more jobs on the same hosts.

    Args:
        bed: None: emulated links.
        jobs: told by name of their variants; where there is one, it is told everything.
        mbit: rate of every rank's exit in 10^6 bit/s.
    """

    def __init__(self, bed: Bed | None, jobs: Sequence[tuple[Sequence[str], Ranks]], mbit: float) -> None:
        self._bed, self._jobs = bed, jobs
        self.set_rate(mbit)

    def set_rate(self, mbit: float) -> None:
        """Change the rate of every exit."""
        self._mbit = mbit
        if self._bed is not None:
            self._bed.set_rate(mbit)

    def tell(self, **order: Any) -> list[Any]:
        """Send one order to the ranks of its variant, or of the first job; their answers."""
        named = (ranks for names, ranks in self._jobs if order.get("variant") in names)
        return next(named, self._jobs[0][1]).tell(bytes_per_second=self._mbit * 1e6 / 8, **order)


@contextlib.contextmanager
def ranks_on_bed(
    ranks: int,
    job: Sequence[str],
    groups: Sequence[Sequence[Variant]],
    profiled: Variant,
    *,
    timer: bool,
    namespaces: bool,
    mbit: float,
) -> Iterator[RanksOnBed]:
    """Hosts, links and processes; gone when the block is left.

    Args:
        groups: variants by job; megatron-core's own stand apart where computation is real.
        profiled: as `TimerRank` takes it.
    """
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Bed(ranks, mbit)) if namespaces else None
        priority = stack.enter_context(CpuGroup())
        jobs = []
        for number, group in enumerate(groups):
            command = command_of(job, group, timer=timer, emulator=bed is None, profiled=profiled)
            processes = Ranks(command, ranks, bed, priority, folder=ROOT, port=FIRST_PORT + number)
            stack.enter_context(processes).answers()
            jobs.append(([variant.name for variant in group], processes))
        yield RanksOnBed(bed, jobs, mbit)


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """`--namespaces` and `--emulator`, between which `settle_links` decides where neither is given."""
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--namespaces", action="store_true", default=None, help="default where they can be made")
    links.add_argument("--emulator", dest="namespaces", action="store_false", help="links inside the processes")


def settle_links(arguments: argparse.Namespace) -> None:
    """Choose namespaces where they can be created; ConfigError where they are asked for and cannot."""
    if arguments.namespaces is None:
        with contextlib.suppress(ConfigError):
            require_namespaces()
            arguments.namespaces = True
    elif arguments.namespaces:
        require_namespaces()


def links_name(arguments: argparse.Namespace) -> str:
    """Name of the chosen links, for files and records."""
    return "namespaces" if arguments.namespaces else "emulator"
