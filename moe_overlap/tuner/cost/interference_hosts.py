"""The hosts whose interference was measured, and the factors fitted to them (fit_interference.py writes them down).

Factors do not carry over from one kind of host to another: two L4 machines already differ twofold in their copies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_overlap.plan.serialize import read_record
from moe_overlap.tuner.cost.interference import Interference

FILE = Path(__file__).with_name("interference.json")
SOURCES = {
    "L4": "mist/tools/results/bandwidth-merged-l4.json",
    "A100": "mist/tools/results-final/bandwidth-merged-a100-sxm4-40gb.json",
}
"""GPU type -> the host whose factors stand for it, where several were measured."""


def group_name(nodes: int, per_node: int) -> str:
    """`2x4`: two nodes, four devices of each."""
    return f"{nodes}x{per_node}"


def place_of(group: str) -> str:
    """Whether the devices of a group share a node."""
    return "inside_node" if group.startswith("1x") else "across_nodes"


@dataclass(frozen=True, slots=True)
class Fitted:
    """Factors, and how well they do on rows they were not fitted to."""

    factors: dict[str, tuple[float, ...]]
    """Set of busy streams -> their factors, as interference.py takes them."""
    calibration_rows: int
    test_rows: int
    test_error_percent: float
    """Mean absolute relative error on the test rows."""


@dataclass(frozen=True, slots=True)
class Host:
    """One measured kind of host.

    Attributes:
        source: where the measurements come from.
        gpu: its devices.
        noisy, slower_than_serial: samples that were left out, as concurrency_samples.py says.
        whole: fitted to all rows.
        places: fitted to groups inside a node, and across nodes, where both were measured.
        groups: fitted to one group each, by its name.
    """

    source: str
    gpu: str
    noisy: int
    slower_than_serial: int
    whole: Fitted
    places: dict[str, Fitted]
    groups: dict[str, Fitted]

    def interference(self, nodes: int, per_node: int) -> tuple[Interference, str]:
        """The model of a group of devices: its own where it was measured, else that of its place, else the host's.

        Returns:
            The model, and which it is: the group's name, `inside_node`, `across_nodes` or `host`.
        """
        group = group_name(nodes, per_node)
        place = place_of(group)
        for level, name in ((self.groups, group), (self.places, place)):
            if name in level:
                return Interference(level[name].factors), name
        return Interference(self.whole.factors), "host"


@cache
def measured_hosts() -> tuple[Host, ...]:
    """All hosts of interference.json."""
    values = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(read_record(Host, value, FILE.name, f"[{number}]") for number, value in enumerate(values))


@cache
def interference_of(gpu: str, nodes: int, per_node: int) -> Interference | None:
    """The factors that stand for a GPU type, for a group of its devices; None for a type that was not measured."""
    if gpu not in SOURCES:
        return None
    host = next(host for host in measured_hosts() if host.source == SOURCES[gpu])
    return host.interference(nodes, per_node)[0]
