"""NCCL's rules on one device: may kernels that wait for other ranks fill it, so that those they wait for never start?

rendezvous.py checks the order of every communicator by itself. The communicators of a rank share its device, too:

1. *Residency.* The kernel of a communication holds multiprocessors from its start until all ranks of its meeting have started
   theirs. A device holds `kernels` of them at a time. Computation ends by itself and gives its place back.
2. *Host order.* Streams share `queues` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS; the n-th stream of a list uses queue n
   modulo their number). A queue starts in the order in which the host has issued, that of the list: what waits at its head for
   an event or for a place holds up whatever stands behind it, other streams included.
3. An instruction waits for the end of its `after` and of what stands before it on its stream, as in rendezvous.py.

Answers. With a place for every communicator of a rank nothing competes: each stream has one kernel at a time. With one queue the
order of starts is fixed, so that nothing competes either. In both cases whatever may start may still start later, so one run
stands for all timings, and `check_residency` runs the lists. Otherwise the ranks' timing decides: such a device is refused.
`most_blocks` turns this into a rule: thread blocks that each communicator may use so that all have a place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.instructions import Instruction, ScheduleError
from moe_overlap.plan.lowering.dependencies import COMMUNICATION
from moe_overlap.plan.lowering.lifetimes import stream_of
from moe_overlap.plan.lowering.rendezvous import Lists, Node, communicator_of, meetings

NCCL_MOST_BLOCKS = 32
"""Thread blocks of a kernel where nothing limits them (NCCL's MAXCHANNELS of one collective)."""


HARDWARE_QUEUES = 8
"""CUDA's default of CUDA_DEVICE_MAX_CONNECTIONS."""
COMMUNICATORS_BESIDE = 9
"""Most communicators of a rank under way together: rows, counts, gradients of dense layers and of experts, the norm, and both
directions of two boundaries."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of every rank.

    Attributes:
        kernels: kernels of communication that find a place at a time.
        queues: hardware queues that streams share.
    """

    kernels: int
    queues: int


def communicators_of(lists: Lists) -> dict[int, int]:
    """Rank -> communicators that its list uses."""
    return {
        rank: len({communicator_of(rank, i) for i in instructions if i.kind in COMMUNICATION})
        for rank, instructions in lists.items()
    }


def most_blocks(multiprocessors: int, communicators: int) -> int:
    """Thread blocks per kernel with which the kernels of all communicators of a rank are resident at the same time.

    Raises:
        ScheduleError: there are more communicators than multiprocessors.
    """
    if communicators > multiprocessors:
        raise ScheduleError(f"{communicators} communicators share {multiprocessors} multiprocessors")
    return min(NCCL_MOST_BLOCKS, multiprocessors // max(communicators, 1))


def check_residency(lists: Lists, device: Device) -> None:
    """Check that all ranks finish on devices of limited room.

    Args:
        lists: the lists of the ranks that take part, as `check_rendezvous` has accepted them.
    Raises:
        ScheduleError: ranks wait for each other for good, or their timing decides whether they do.
    """
    most = max(communicators_of(lists).values(), default=0)
    if device.queues > 1 and device.kernels < most:
        raise ScheduleError(
            f"{most} communicators of a rank compete for {device.kernels} kernels: timing decides who starts; "
            f"limit the thread blocks of a kernel until {most} fit, or use one hardware queue"
        )
    stopped = _Run(lists, device, meetings(lists)).stops()
    if stopped:
        shown = "\n".join(f"  rank {rank} stops at: {instruction}" for rank, instruction in stopped.items())
        raise ScheduleError(f"kernels that wait for other ranks keep them from starting\n{shown}")


class _Run:
    """One run of all lists: a work list of what may have become possible, so that each instruction is looked at rarely."""

    def __init__(self, lists: Lists, device: Device, meeting: Mapping[Node, Node]) -> None:
        self._lists, self._kernels, self._meeting = lists, device.kernels, meeting
        self._members: dict[Node, list[Node]] = defaultdict(list)
        for node, first in meeting.items():
            self._members[first].append(node)
        self._queues = {rank: _hardware_queues(instructions, device.queues) for rank, instructions in lists.items()}
        self._place_of = {rank: {i.id: n for n, i in enumerate(made)} for rank, made in lists.items()}
        self._started: set[Node] = set()
        self._ended: set[Node] = set()
        self._resident = dict.fromkeys(lists, 0)
        self._last_on: dict[Node, Node] = {}
        for rank, instructions in lists.items():
            last: dict[str, int] = {}
            for place, instruction in enumerate(instructions):
                stream = stream_of(instruction)
                if stream in last:
                    self._last_on[rank, place] = (rank, last[stream])
                last[stream] = place

    def stops(self) -> dict[int, Instruction]:
        """Rank -> the first instruction that never ends; empty where all finish."""
        waiting = list(self._lists)
        while waiting:
            rank = waiting.pop()
            for queue in self._queues[rank]:
                while queue and self._may_start((rank, queue[-1])):
                    waiting += self._start((rank, queue.pop()))
        return {
            rank: instructions[place]
            for rank, instructions in self._lists.items()
            if (place := next((n for n in range(len(instructions)) if (rank, n) not in self._ended), -1)) >= 0
        }

    def _may_start(self, node: Node) -> bool:
        rank, place = node
        instruction = self._lists[rank][place]
        before = self._last_on.get(node)
        if before is not None and before not in self._ended:
            return False
        if any((rank, self._place_of[rank][number]) not in self._ended for number in instruction.after):
            return False
        return node not in self._meeting or self._resident[rank] < self._kernels

    def _start(self, node: Node) -> list[int]:
        """Start an instruction; the ranks on which something may have become possible."""
        self._started.add(node)
        if node not in self._meeting:
            self._ended.add(node)
            return [node[0]]
        self._resident[node[0]] += 1
        members = self._members[self._meeting[node]]
        if not self._started.issuperset(members):
            return [node[0]]
        self._ended.update(members)
        for rank, _ in members:
            self._resident[rank] -= 1
        return [rank for rank, _ in members]


def _hardware_queues(instructions: Sequence[Instruction], number: int) -> list[list[int]]:
    """Places of a list by hardware queue, the first last."""
    queues: list[list[int]] = [[] for _ in range(number)]
    streams: dict[str, int] = {}
    for place, instruction in enumerate(instructions):
        queues[streams.setdefault(stream_of(instruction), len(streams)) % number].append(place)
    return [queue[::-1] for queue in queues]
