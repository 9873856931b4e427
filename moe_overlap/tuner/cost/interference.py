"""Seconds that work costs other work: kernels at the same time on a device, and all-to-alls that computation has to start.

Terms. A stream is one of these four. The *alone seconds* of a stream are what its work takes when nothing else runs. While
a set of streams is busy, each of them is slowed down by a factor that belongs to the set: it does 1 / factor seconds of its
work per second.
Contract. Factors are at least 1 and, per set, their inverses add up to at least 1: together the streams do at least as much
as one of them alone. So the whole takes at least as long as its longest stream, and at most as long as all in a row.
Method (`Interference.seconds`), for every row:
1. Look up the factors of the streams that are still busy.
2. Let time pass until the first of them ends; take what the others did off their work.
3. Repeat until nothing is left.

Hosts. interference.json holds the hosts whose interference was measured, with the factors that `calibrate/interference.py` fitted
to them. Factors do not carry over from one kind of host to another: two L4 machines already differ twofold in their copies.
All-to-alls (`AllToAllCosts`). On gloo the processor that computes also starts all-to-alls, and counts, in a group of their own,
wait behind the rows that a link has queued. Where neither was measured nothing is charged.

Source: Mist, algorithm 1 and section 5.2.2; it goes through the sets one after the other, largest first, which is the same.
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
"""Sets of busy streams as words, a digit per stream in the order of STREAMS; one stream alone is not slowed down."""
BLOCK = 1 << 12
"""Rows worked on at a time, few enough to stay in the cache."""
# Finite, since infinity times False is NaN. An idle stream has factor 1 in every set, so it keeps this value exactly.
IDLE = 1e300
"""Seconds left to do that stand for a stream that has nothing to do."""

Floats = NDArray[np.float64]
Concurrent = Callable[[Floats, Floats, Floats, Floats], Floats]
"""Seconds of computation, device-to-device, host-to-device and device-to-host work that start together."""
Factors = Mapping[str, Sequence[float]]
"""Set -> factors of its busy streams."""


def serial_share(factors: Sequence[float]) -> float:
    """Work that a set does per second, in alone seconds: 1 is as much as its streams in a row."""
    return sum(1 / factor for factor in factors)


class Interference:
    """The factors of one host, or of one group of its devices.

    Args:
        factors: for each of SETS.
        subject: where they stand, for errors.
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
        """The same but for the factors of one set. That they keep the contract is not looked at: a fit tries thousands."""
        other = copy(self)
        other.factors = {**self.factors, word: tuple(values)}
        other._table = self._table.copy()
        other._table[_busy(word), int(word, 2)] = values
        other._tables, other._factors = {}, other._table.tolist()
        return other

    def factor(self, stream: int, busy: Collection[int]) -> float:
        """Slowdown of one stream while the streams `busy`, itself among them, are."""
        mask = 0
        for other in busy:
            mask |= 8 >> other
        return self._factors[stream][mask]

    def factor_of(self, stream: int, bits: int) -> float:
        """The same, for the sum of the busy streams' bits, as in `table`."""
        return self._factors[stream][bits]

    @property
    def table(self) -> Floats:
        """[4, 16] factors of the streams; a set is the number whose bits they are, computation the highest."""
        return self._table.copy()

    def seconds(self, compute: Floats, device: Floats, to_device: Floats, to_host: Floats) -> Floats:
        """Seconds until everything has ended that began at the same time.

        Args:
            compute, device, to_device, to_host: alone seconds of the streams, 0 where one has nothing to do; they broadcast.
        """
        given = np.broadcast_arrays(compute, device, to_device, to_host)
        used = tuple(stream for stream in range(4) if given[stream].any())
        if len(used) < 2:
            return sum(given[1:], start=np.array(given[0], dtype=np.float64))
        alone = [np.ascontiguousarray(given[stream], dtype=np.float64).reshape(-1) for stream in used]
        # Two busy streams have a closed form and need no rounds.
        if len(used) == 2:
            return self._pair(used, *alone).reshape(given[0].shape)
        total = np.empty(alone[0].shape)
        for first in range(0, len(total), BLOCK):
            block = slice(first, first + BLOCK)
            total[block] = self._block(used, np.stack([stream[block] for stream in alone]))
        return total.reshape(given[0].shape)

    def _pair(self, used: tuple[int, ...], one: Floats, other: Floats) -> Floats:
        """Seconds of two streams that start together."""
        one_factor, other_factor = (self.factor(stream, used) for stream in used)
        one_ends, other_ends = one * one_factor, other * other_factor
        passed = np.minimum(one_ends, other_ends)
        return passed + np.maximum((one_ends - passed) / one_factor, (other_ends - passed) / other_factor)

    def _block(self, used: tuple[int, ...], left: Floats) -> Floats:
        """Seconds of three or four streams that start together, [streams, rows] alone seconds; `left` is used up."""
        table, total = self._table_of(used), np.zeros(left.shape[1])
        left += IDLE * (left <= 0)
        # Each round ends at least one stream, so after these one at most is left, which nothing slows down.
        for number in range(2, len(used) + 1):
            sets = np.zeros(len(total), dtype=np.uint8)
            for busy in (left < IDLE).view(np.uint8):
                sets = sets << 1 | busy
            factors = table.take(sets, axis=1)
            left *= factors
            passed = left.min(axis=0)
            passed *= passed < IDLE
            total += passed
            left -= passed
            left /= factors
            if number < len(used):
                left += IDLE * (left <= 0)
        left *= left < IDLE
        return total + left.sum(axis=0)

    def _table_of(self, used: tuple[int, ...]) -> Floats:
        """[streams, sets] factors of some of the streams; a set is the number whose bits they are, the first the highest."""
        if used not in self._tables:
            self._tables[used] = np.ascontiguousarray(self._table[_places(used)])
        return self._tables[used]


@cache
def _busy(word: str) -> tuple[int, ...]:
    """The streams of a set."""
    return tuple(stream for stream in range(4) if word[stream] == "1")


@cache
def _places(used: tuple[int, ...]) -> tuple[NDArray[np.intp], ...]:
    """Indices in the table of four streams of the factors that `_table_of` gives for some of them."""
    places = [
        sum(8 >> stream for stream, bit in zip(used, f"{number:0{len(used)}b}", strict=True) if bit == "1")
        for number in range(1 << len(used))
    ]
    return np.ix_(used, places)


def _check(factors: Factors, subject: str) -> None:
    """ConfigError for the first set that breaks the contract."""
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
"""The factors of streams that do not disturb each other: the whole ends when the longest stream does."""


def partly_concurrent(slowdown: float) -> Concurrent:
    """The plainest interference: the longest channel, and a part of what runs beside it."""

    def seconds(compute: Floats, device: Floats, to_device: Floats, to_host: Floats) -> Floats:
        longest = np.maximum(np.maximum(compute, device), np.maximum(to_device, to_host))
        return longest + slowdown * (compute + device + to_device + to_host - longest)

    return seconds


@cache
def slowed_down(slowdown: float) -> Interference:
    """`partly_concurrent` as factors: beside n - 1 others a stream takes 1 + (n - 1) · slowdown times as long."""
    return Interference({word: (1.0 + slowdown * (word.count("1") - 1),) * word.count("1") for word in SETS})


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
    """`inside_node` or `across_nodes`: where the devices of a group of this name stand."""
    return "inside_node" if group.startswith("1x") else "across_nodes"


@dataclass(frozen=True, slots=True)
class Fitted:
    """Factors, and how well they do on rows they were not fitted to."""

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
        source: where the measurements come from.
        gpu: its devices.
        noisy, slower_than_serial: samples that were left out, as `calibrate/interference.py` says.
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


STARTS = "start_all_to_all"
"""Kind of link whose seconds are those for which starting an all-to-all keeps the processor."""
COUNTS, QUEUED_COUNTS = "counts", "counts_behind_rows"
"""Kinds of links whose seconds are those of an all-to-all of counts: alone on a link, and behind rows of that many bytes."""


@dataclass(frozen=True, slots=True)
class AllToAllCosts:
    """Costs of all-to-alls that the bytes of their rows do not tell.

    Attributes:
        starting: seconds of the processor to start an all-to-all, by the bytes that leave.
        count_seconds, queue_seconds: of an all-to-all of counts, and how much longer it takes behind rows.
    """

    starting: LinkFit
    count_seconds: float
    queue_seconds: float


def all_to_all_costs(cluster: Cluster) -> AllToAllCosts | None:
    """Costs of all-to-alls on a measured cluster; None where its database does not have all of them.

    Raises:
        ConfigError: the database cannot be read.
    """
    return None if cluster.measured is None else costs_of(Database.load(Path(cluster.measured.database)).links)


def costs_of(links: Mapping[LinkKey, float]) -> AllToAllCosts | None:
    """Costs of all-to-alls from measured links; None where a kind is missing."""
    of_kind = {
        kind: {key: seconds for key, seconds in links.items() if key.kind == kind}
        for kind in (STARTS, COUNTS, QUEUED_COUNTS)
    }
    if not all(of_kind.values()):
        return None
    # What stays on the rank is not sent.
    sent = [key.held_bytes * (key.ranks - 1) / key.ranks for key in of_kind[STARTS]]
    alone, queued = (max(of_kind[kind].values()) for kind in (COUNTS, QUEUED_COUNTS))
    return AllToAllCosts(fit_line(sent, list(of_kind[STARTS].values())), alone, max(0.0, queued - alone))


def start_seconds(instructions: Sequence[Instruction], starting: LinkFit) -> dict[int, float]:
    """Seconds that starting all-to-alls adds to the computation before them, by the id of its instruction."""
    added: dict[int, float] = {}
    before = None
    for i in instructions:
        if i.channel == COMPUTE:
            before = i.id
        elif before is not None and i.channel_group == EXPERT:
            seconds = starting.latency_seconds + i.bytes / starting.bytes_per_second
            added[before] = added.get(before, 0.0) + seconds
    return added
