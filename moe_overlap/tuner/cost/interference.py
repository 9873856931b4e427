"""Interference: how concurrent kernels on a device, and all-to-alls that the processor starts, slow other work down.

Terms. The streams are those of STREAMS. The *alone seconds* of a stream are the time of its work if nothing else runs. While a
set of streams is busy, each of them is slowed down by its factor in the set: it does 1 / factor seconds of its work per second.
Contract. Factors are at least 1, and the inverses of a set's factors add up to at least 1: together the streams do at least as
much work as one stream alone. So all streams take at least as long as the longest of them, and at most as long as all in
sequence. Method (`Interference.seconds`), for every row:
1. Look up the factors of the busy streams.
2. Advance the time to the end of the first of them, and subtract the work that the others did.
3. Repeat until no work remains.

Hosts. interference.json has the measured hosts, with the factors that `calibrate/interference.py` fitted to them. Factors do not
carry over between hosts: copies on two L4 machines already differ by a factor of two. All-to-alls (`AllToAllCosts`). On gloo the
processor that computes also starts all-to-alls, and all-to-alls of counts, in a separate group, wait for the rows that are queued
on a link. Unmeasured costs are zero.

Source: Mist, algorithm 1 and section 5.2.2, which goes through the sets by decreasing size; the result is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import COMPUTE, EXPERT, Instruction
from moe_overlap.plan.serialize import read_record
from moe_overlap.tuner.profile.cluster_file import FittedLinks as LinkFit
from moe_overlap.tuner.profile.cluster_file import fit_line
from moe_overlap.tuner.profile.database import Database, LinkKey

STREAMS = ("compute", "device_to_device", "host_to_device", "device_to_host")
SETS = tuple(
    "".join("1" if stream in members else "0" for stream in range(4))
    for size in (4, 3, 2)
    for members in combinations(range(4), size)
)
"""Sets of busy streams as texts, a digit per stream in the order of STREAMS; a single stream is not slowed down."""
BLOCK = 1 << 12
"""Rows per block, few enough to stay in the cache."""
# Finite, since infinity times False is NaN. An idle stream has factor 1 in every set, so it keeps this value exactly.
IDLE = 1e300
"""Remaining seconds that mark an idle stream."""

Floats = NDArray[np.float64]
Concurrent = Callable[[Floats, Floats, Floats, Floats], Floats]
"""Seconds of computation, device-to-device, host-to-device and device-to-host work that start together."""
Factors = Mapping[str, Sequence[float]]
"""Set -> factors of its busy streams."""


def serial_share(factors: Sequence[float]) -> float:
    """Work that a set does per second, in alone seconds; 1 is the rate of its streams in sequence."""
    return sum(1 / factor for factor in factors)


class Interference:
    """The factors of one host, or of one group of its devices.

    Args:
        factors: for each of SETS the factors of its streams.
        subject: the place of the factors, for error messages.
    Raises:
        ConfigError: a set is missing or unknown, or its factors break the contract above.
    """

    def __init__(self, factors: Factors, subject: str = "interference factors") -> None:
        _check(factors, subject)
        self.factors = {word: tuple(factors[word]) for word in SETS}
        self._table = np.ones((4, 16))
        for word, values in factors.items():
            self._table[_busy(word), int(word, 2)] = values
        self._tables: dict[tuple[int, ...], Floats] = {}
        self._factors: list[list[float]] = self._table.tolist()

    def with_set(self, word: str, values: Sequence[float]) -> Interference:
        """A copy with other factors for one set; the contract is not checked, because a fit tries thousands of factors."""
        other = copy(self)
        other.factors = {**self.factors, word: tuple(values)}
        other._table = self._table.copy()
        other._table[_busy(word), int(word, 2)] = values
        other._tables, other._factors = {}, other._table.tolist()
        return other

    def factor(self, stream: int, busy: Collection[int]) -> float:
        """Slowdown of one stream while the streams `busy`, which include it, are busy."""
        mask = 0
        for other in busy:
            mask |= 8 >> other
        return self._factors[stream][mask]

    def factor_of(self, stream: int, bits: int) -> float:
        """The result of `factor` for the busy streams as a sum of bits, as in `table`."""
        return self._factors[stream][bits]

    @property
    def table(self) -> Floats:
        """[4, 16] factors of the streams in each set; a set is a number with one bit per stream, computation the highest."""
        return self._table.copy()

    def seconds(self, compute: Floats, device: Floats, to_device: Floats, to_host: Floats) -> Floats:
        """Seconds until the end of streams that start at the same time.

        Args:
            compute, device, to_device, to_host: alone seconds of the streams, 0 for an idle one; they broadcast.
        """
        streams = np.broadcast_arrays(compute, device, to_device, to_host)
        used = tuple(stream for stream in range(4) if streams[stream].any())
        if len(used) < 2:
            return sum(streams[1:], start=np.array(streams[0], dtype=np.float64))
        busy_streams = [np.ascontiguousarray(streams[stream], dtype=np.float64).reshape(-1) for stream in used]
        # Two busy streams have a closed form and need no rounds.
        if len(used) == 2:
            return self._pair(used, *busy_streams).reshape(streams[0].shape)
        total = np.empty(busy_streams[0].shape)
        for first in range(0, len(total), BLOCK):
            block = slice(first, first + BLOCK)
            total[block] = self._block(used, np.stack([stream[block] for stream in busy_streams]))
        return total.reshape(streams[0].shape)

    def _pair(self, used: tuple[int, ...], first: Floats, second: Floats) -> Floats:
        """Seconds of two streams that start together."""
        first_factor, second_factor = (self.factor(stream, used) for stream in used)
        first_ends, second_ends = first * first_factor, second * second_factor
        passed = np.minimum(first_ends, second_ends)
        return passed + np.maximum((first_ends - passed) / first_factor, (second_ends - passed) / second_factor)

    def _block(self, used: tuple[int, ...], remaining: Floats) -> Floats:
        """Seconds of three or four streams that start together; `remaining` [streams, rows] (alone seconds) is overwritten."""
        table, total = self._table_of(used), np.zeros(remaining.shape[1])
        remaining += IDLE * (remaining <= 0)
        # Each round ends at least one stream. At most one remains after these rounds, and a single stream is not slowed down.
        for number in range(2, len(used) + 1):
            sets = np.zeros(len(total), dtype=np.uint8)
            for busy in (remaining < IDLE).view(np.uint8):
                sets = sets << 1 | busy
            factors = table.take(sets, axis=1)
            remaining *= factors
            passed = remaining.min(axis=0)
            passed *= passed < IDLE
            total += passed
            remaining -= passed
            remaining /= factors
            if number < len(used):
                remaining += IDLE * (remaining <= 0)
        remaining *= remaining < IDLE
        return total + remaining.sum(axis=0)

    def _table_of(self, used: tuple[int, ...]) -> Floats:
        """[streams, sets] factors of some of the streams; a set is a number with one bit per stream, the first the highest."""
        if used not in self._tables:
            self._tables[used] = np.ascontiguousarray(self._table[_places(used)])
        return self._tables[used]


@cache
def _busy(word: str) -> tuple[int, ...]:
    """The streams of a set."""
    return tuple(stream for stream in range(4) if word[stream] == "1")


@cache
def _places(used: tuple[int, ...]) -> tuple[NDArray[np.intp], ...]:
    """Indices into the table of four streams for `_table_of`."""
    places = [
        sum(8 >> stream for stream, bit in zip(used, f"{number:0{len(used)}b}", strict=True) if bit == "1")
        for number in range(1 << len(used))
    ]
    return np.ix_(used, places)


def _check(factors: Factors, subject: str) -> None:
    """Raise ConfigError for the first set that breaks the contract."""
    for word in factors:
        if word not in SETS:
            raise ConfigError(f"{subject} {word}", "", "no set of busy streams", f"use {', '.join(SETS)}")
    for word in SETS:
        values = factors.get(word, ())
        shown = " ".join(map(str, values))
        if len(values) != word.count("1"):
            rule = f"the set has {word.count('1')} busy streams"
            raise ConfigError(f"{subject} {word}", shown, rule, "give a factor for each")
        if not all(1 <= value < np.inf for value in values):
            raise ConfigError(f"{subject} {word}", shown, "work beside other work is not faster", "use factors from 1")
        if serial_share(values) < 1:
            rule = f"slower than one after the other: the inverses add up to {serial_share(values):.4f}"
            raise ConfigError(f"{subject} {word}", shown, rule, "make them smaller")


NO_INTERFERENCE = Interference({word: (1.0,) * word.count("1") for word in SETS})
"""Factors of 1: streams do not slow each other down, and all end with the longest."""


def partly_concurrent(slowdown: float) -> Concurrent:
    """The simplest interference: the longest channel, plus a share of the seconds of all others."""

    def seconds(compute: Floats, device: Floats, to_device: Floats, to_host: Floats) -> Floats:
        longest = np.maximum(np.maximum(compute, device), np.maximum(to_device, to_host))
        return longest + slowdown * (compute + device + to_device + to_host - longest)

    return seconds


@cache
def slowed_down(slowdown: float) -> Interference:
    """`partly_concurrent` as factors: with n - 1 other streams each takes 1 + (n - 1) · slowdown times as long."""
    return Interference({word: (1.0 + slowdown * (word.count("1") - 1),) * word.count("1") for word in SETS})


FILE = Path(__file__).with_name("interference.json")
SOURCES = {
    "L4": "mist/tools/results/bandwidth-merged-l4.json",
    "A100": "mist/tools/results-final/bandwidth-merged-a100-sxm4-40gb.json",
}
"""GPU type -> the measured host whose factors represent it."""


def group_name(nodes: int, per_node: int) -> str:
    """`2x4`: two nodes, four devices of each."""
    return f"{nodes}x{per_node}"


def place_of(group: str) -> str:
    """`inside_node` or `across_nodes`, by the name of a group of devices."""
    return "inside_node" if group.startswith("1x") else "across_nodes"


@dataclass(frozen=True, slots=True)
class Fitted:
    """Factors, and their error on rows that were held out of the fit."""

    factors: dict[str, tuple[float, ...]]
    """Set of busy streams -> their factors, as `Interference` takes them."""
    calibration_rows: int
    test_rows: int
    test_error_percent: float
    """Mean absolute relative error on the test rows."""


@dataclass(frozen=True, slots=True)
class Host:
    """One measured kind of host.

    Attributes:
        source: file of the measurements.
        gpu: type of its devices.
        noisy, slower_than_serial: numbers of excluded samples; see `calibrate/interference.py`.
        all_groups: fitted to all rows.
        places: fitted to groups inside a node, and to groups across nodes, if both were measured.
        groups: fitted to one group each; by the name of the group.
    """

    source: str
    gpu: str
    noisy: int
    slower_than_serial: int
    all_groups: Fitted
    places: dict[str, Fitted]
    groups: dict[str, Fitted]

    def interference(self, nodes: int, per_node: int) -> tuple[Interference, str]:
        """The model of a group of devices: that of the group if it was measured, else of its place, else of the host.

        Returns:
            The model, and which it is: the group's name, `inside_node`, `across_nodes` or `host`.
        """
        group = group_name(nodes, per_node)
        place = place_of(group)
        for level, name in ((self.groups, group), (self.places, place)):
            if name in level:
                return Interference(level[name].factors), name
        return Interference(self.all_groups.factors), "host"


@cache
def measured_hosts() -> tuple[Host, ...]:
    """The hosts of interference.json."""
    values = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(read_record(Host, value, FILE.name, f"[{number}]") for number, value in enumerate(values))


@cache
def interference_of(gpu: str, nodes: int, per_node: int) -> Interference | None:
    """The factors of a group of devices of a GPU type; None for an unmeasured type."""
    if gpu not in SOURCES:
        return None
    host = next(host for host in measured_hosts() if host.source == SOURCES[gpu])
    return host.interference(nodes, per_node)[0]


STARTS = "start_all_to_all"
"""Kind of link for the processor seconds of starting an all-to-all."""
COUNTS, QUEUED_COUNTS = "counts", "counts_behind_rows"
"""Kinds of links for the seconds of an all-to-all of counts: on an idle link, and queued after rows of that many bytes."""


@dataclass(frozen=True, slots=True)
class AllToAllCosts:
    """Costs of all-to-alls beyond the transfer of their rows.

    Attributes:
        starting: processor seconds to start an all-to-all, by sent bytes.
        count_seconds: seconds of an all-to-all of counts on an idle link.
        queue_seconds: its additional seconds if rows are queued before it.
    """

    starting: LinkFit
    count_seconds: float
    queue_seconds: float


def all_to_all_costs(cluster: Cluster) -> AllToAllCosts | None:
    """Costs of all-to-alls on a measured cluster; None if its database lacks one of them.

    Raises:
        ConfigError: the database cannot be read.
    """
    return None if cluster.measured is None else costs_of(Database.load(Path(cluster.measured.database)).links)


def costs_of(links: Mapping[LinkKey, float]) -> AllToAllCosts | None:
    """Costs of all-to-alls from measured links; None if a kind is missing."""
    of_kind = {
        kind: {key: seconds for key, seconds in links.items() if key.kind == kind}
        for kind in (STARTS, COUNTS, QUEUED_COUNTS)
    }
    if not all(of_kind.values()):
        return None
    # The rank's share of its own rows is not sent.
    sent = [key.held_bytes * (key.ranks - 1) / key.ranks for key in of_kind[STARTS]]
    unqueued, queued = (max(of_kind[kind].values()) for kind in (COUNTS, QUEUED_COUNTS))
    return AllToAllCosts(fit_line(sent, list(of_kind[STARTS].values())), unqueued, max(0.0, queued - unqueued))


def start_seconds(instructions: Sequence[Instruction], starting: LinkFit) -> dict[int, float]:
    """Instruction id -> seconds that starting all-to-alls adds to this computation, the last one before them."""
    added: dict[int, float] = {}
    before = None
    for i in instructions:
        if i.channel == COMPUTE:
            before = i.id
        elif before is not None and i.channel_group == EXPERT:
            seconds = starting.latency_seconds + i.bytes / starting.bytes_per_second
            added[before] = added.get(before, 0.0) + seconds
    return added
