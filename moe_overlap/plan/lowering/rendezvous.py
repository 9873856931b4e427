"""Deadlock check of instruction lists under NCCL's rules: do all ranks finish their step?

NCCL has no tags. The order of operations alone decides which ones match; an order that gloo tolerates can deadlock a GPU cluster.

Terms. A *communicator* joins the ranks of one group; a stage boundary has one per pair of ranks and direction. A *meeting* is one
operation of a communicator on all of its ranks. The model:

1. On every rank a communicator is a queue: its operations run one after the other, in list order.
2. A meeting ends only after every rank has reached it. The k-th operation of a rank meets the k-th of the other ranks: a send
   meets a receive of the same tensor, a collective the same collective.
3. Different communicators do not wait for each other. They share a device's multiprocessors: residency.py.
4. An instruction starts after all of its `after` and its predecessor on its channel have ended.

If every meeting is one node, rule 2 becomes edges of a graph, and the step ends if and only if the graph has no cycle: the
outcome does not depend on timing.

One rank per stage is enough if the ranks of a stage have the same list and send to the rank at the same place (equal stages): a
cycle among all ranks implies one among the representatives. Stages of unlike shape need all ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.operators import NORM

SHOWN_RANKS = 4
"""Ranks whose first stuck instruction an error shows."""

Node = tuple[int, int]
"""Rank and place in its list."""
Lists = Mapping[int, Sequence[Instruction]]


def communicator_of(rank: int, communication: Instruction) -> Hashable:
    """The key of a communication's communicator; equal on all of its ranks.

    A pair of ranks has one communicator per direction of a boundary, a group one per channel. The norm of the gradients joins
    all ranks; any other collective the ranks of its stage.
    """
    if communication.kind == "point-to-point":
        (peer,) = communication.peers
        return (min(rank, peer), max(rank, peer), communication.channel)
    return ("world", NORM) if communication.name == NORM else (communication.stage, communication.channel)


def check_rendezvous(lists: Lists) -> None:
    """Check that all ranks finish their lists under NCCL's rules.

    Args:
        lists: the lists of the ranks that take part; every peer of a transfer is among them.
    Raises:
        ScheduleError: an operation meets a different one or none, or ranks wait for each other in a cycle; the message shows the
            first lines that cannot start.
    """
    graph = _Graph(lists)
    for key, of_rank in _queues(lists).items():
        _meet(graph, lists, key, of_rank)
        for rank, places in of_rank.items():
            graph.queue(rank, places)
    stuck = graph.stuck()
    if stuck:
        raise ScheduleError(f"ranks wait for each other in a circle\n{_first_lines(lists, stuck)}")


def meetings(lists: Lists) -> dict[Node, Node]:
    """Every communication, as rank and place in its list -> the representative of its meeting.

    Raises:
        ScheduleError: an operation meets a different one or none.
    """
    graph = _Graph(lists)
    queues = _queues(lists)
    for key, of_rank in queues.items():
        _meet(graph, lists, key, of_rank)
    # A collective of which `lists` has a single rank is its own meeting.
    nodes = {(rank, place) for of_rank in queues.values() for rank, places in of_rank.items() for place in places}
    return {node: graph.node(node) for node in nodes}


def _queues(lists: Lists) -> dict[Hashable, dict[int, list[int]]]:
    """Communicator -> rank -> places in its list, in order."""
    queues: dict[Hashable, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, instructions in lists.items():
        for place, instruction in enumerate(instructions):
            if instruction.kind in ("collective", "point-to-point"):
                queues[communicator_of(rank, instruction)][rank].append(place)
    return queues


def _meet(graph: _Graph, lists: Lists, key: Hashable, of_rank: Mapping[int, Sequence[int]]) -> None:
    """Rule 2: merge the k-th operations of all ranks of a communicator, which must be the same operation.

    Transfers of a pair are matched per direction: the k-th send of one rank meets the k-th receive of the other.
    """
    transfers = any(lists[rank][places[0]].kind == "point-to-point" for rank, places in of_rank.items())
    if not transfers:
        _meet_in_order(graph, lists, key, of_rank)
        return
    sends, receives = _directions(lists, of_rank)
    for source, (peer, places) in sends.items():
        _meet_in_order(graph, lists, key, {source: places, peer: receives.pop(peer, (source, []))[1]})
    for target, (peer, places) in receives.items():
        _meet_in_order(graph, lists, key, {target: places, peer: []})


def _directions(
    lists: Lists, of_rank: Mapping[int, Sequence[int]]
) -> tuple[dict[int, tuple[int, list[int]]], dict[int, tuple[int, list[int]]]]:
    """(Rank -> its peer and the places of its sends, rank -> its peer and the places of its receives)."""
    sends: dict[int, tuple[int, list[int]]] = {}
    receives: dict[int, tuple[int, list[int]]] = {}
    for rank, places in of_rank.items():
        for place in places:
            transfer = lists[rank][place]
            side = receives if transfer.writes else sends
            side.setdefault(rank, (transfer.peers[0], []))[1].append(place)
    return sends, receives


def _meet_in_order(graph: _Graph, lists: Lists, key: Hashable, of_rank: Mapping[int, Sequence[int]]) -> None:
    most = max(of_rank, key=lambda rank: len(of_rank[rank]))
    for k in range(len(of_rank[most])):
        first = lists[most][of_rank[most][k]]
        for rank, places in of_rank.items():
            if k >= len(places):
                raise ScheduleError(f"rank {rank} never meets rank {most} on {key}\n  rank {most}: {first}")
            other = lists[rank][places[k]]
            if _identity(other) != _identity(first):
                raise ScheduleError(
                    f"two different operations meet on {key}\n  rank {most}: {first}\n  rank {rank}: {other}"
                )
            graph.merge((most, of_rank[most][k]), (rank, places[k]))


def _identity(communication: Instruction) -> tuple[object, ...]:
    """The fields that are equal on all sides of a meeting.

    Between unlike stages it is the number of the piece: its micro-batch may have different numbers on the two sides.
    """
    if communication.kind == "point-to-point":
        number = communication.partition or communication.micro_batch
        return (communication.channel, number)
    return (communication.name, communication.micro_batch, communication.partition)


@dataclass(slots=True)
class _Graph:
    """The graph of all instructions of all ranks, with one node per meeting."""

    lists: Lists
    _meeting: dict[Node, Node] = field(default_factory=dict)
    _before: list[tuple[Node, Node]] = field(default_factory=list)

    def merge(self, node: Node, other: Node) -> None:
        """Make both the same meeting."""
        self._meeting[other] = self._meeting.setdefault(node, node)

    def queue(self, rank: int, places: Sequence[int]) -> None:
        """Rule 1: each operation waits for the previous one."""
        self._before += [((rank, first), (rank, second)) for first, second in pairwise(places)]

    def stuck(self) -> dict[int, int]:
        """Rank -> place of its first instruction that never ends; empty where all ranks finish (Kahn's algorithm)."""
        edges = [*self._before, *self._own_order()]
        successors: dict[Node, list[Node]] = defaultdict(list)
        waits_for: dict[Node, int] = defaultdict(int)
        for first, second in edges:
            earlier, later = self.node(first), self.node(second)
            successors[earlier].append(later)
            waits_for[later] += 1
        nodes = {
            self.node((rank, place)) for rank, instructions in self.lists.items() for place in range(len(instructions))
        }
        ready = deque(node for node in nodes if not waits_for[node])
        ended: set[Node] = set()
        while ready:
            node = ready.popleft()
            ended.add(node)
            for later in successors[node]:
                waits_for[later] -= 1
                if not waits_for[later]:
                    ready.append(later)
        return {
            rank: place
            for rank, instructions in self.lists.items()
            if (place := next((p for p in range(len(instructions)) if self.node((rank, p)) not in ended), None))
            is not None
        }

    def node(self, node: Node) -> Node:
        """The representative of its meeting; itself if it meets no other."""
        return self._meeting.get(node, node)

    def _own_order(self) -> list[tuple[Node, Node]]:
        """Rule 4."""
        edges: list[tuple[Node, Node]] = []
        for rank, instructions in self.lists.items():
            place_of = {instruction.id: place for place, instruction in enumerate(instructions)}
            last: dict[str, int] = {}
            for place, instruction in enumerate(instructions):
                edges += [((rank, place_of[number]), (rank, place)) for number in instruction.after]
                if instruction.kind not in ("collective", "point-to-point"):
                    if instruction.channel in last:
                        edges.append(((rank, last[instruction.channel]), (rank, place)))
                    last[instruction.channel] = place
        return edges


def _first_lines(lists: Lists, stuck: Mapping[int, int]) -> str:
    shown = list(stuck.items())[:SHOWN_RANKS]
    return "\n".join(f"  rank {rank} stops at: {lists[rank][place]}" for rank, place in shown)
