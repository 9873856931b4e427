"""NCCL's rules on one device: may what waits for other ranks keep back what those wait for, so that all stop for good?

rendezvous.py checks the order of every communicator by itself. The communicators of a rank share its device, too:

1. *Places.* The kernel of a communication holds multiprocessors from its start until all ranks of its meeting have started
   theirs. `block_limits` limits thread blocks so that the kernels of all communicators of a rank, as its list counts them
   (`communicators_of`), find a place together: each runs its kernels one by one, so that none ever waits for a place.
   NCCL gives sends, receives and all-to-alls the next power of two of the limit (`ncclTopoComputeP2pChannels`).
2. *Queues.* Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), and CUDA does not tell which streams share one. A queue
   starts its entries in the order in which the host has issued them, that of the list: an entry that waits for an event, or for
   what stands before it on its stream, holds up all that stands behind it in its queue, other streams included.
3. *Waits.* An instruction waits for the end of its `after` and of what stands before it on its stream, as in rendezvous.py. The
   executor issues the wait for a transfer between stages where it is first needed: right behind the transfer it would hold up
   the queue until the other stage has come so far (runtime/executor/execute.py).

One queue decides for all. There an instruction waits for all earlier ones to have started; under any other sharing, among any
number of queues, with streams of NCCL's own, for some of them. Whatever starts earlier keeps nothing back, as no place is
missing. So lists that end with one queue end with every number and every sharing, and `check_residency` runs the lists so.

All-to-alls and reductions among the ranks of one stage count as computation: these ranks have the same list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.instructions import DATA, EXPERT, Instruction, ScheduleError
from moe_overlap.plan.lowering.dependencies import COMMUNICATION
from moe_overlap.plan.lowering.lifetimes import stream_of
from moe_overlap.plan.lowering.rendezvous import Lists, Node, communicator_of, meetings
from moe_overlap.plan.plan import Plan

NCCL_MOST_BLOCKS = 32
"""Thread blocks of a kernel where nothing limits them (NCCL's MAXCHANNELS of one collective)."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """Most communicators of one rank whose kernels may be under way together.

    Attributes:
        point_to_point: of sends and receives, a pair of ranks and direction each, and of all-to-alls.
        collective: of reductions and gathers: gradients of dense layers and of experts, and the norm.
        inside: whether operators that compute have collectives of their own, of tensor or context ranks, one at a time.
    """

    point_to_point: int
    collective: int
    inside: bool = False

    @property
    def number(self) -> int:
        """All of them, those inside operators left out."""
        return self.point_to_point + self.collective

    def blocks(self, limits: BlockLimits) -> int:
        """Thread blocks that their kernels hold together, as NCCL counts them."""
        inside = NCCL_MOST_BLOCKS if self.inside else 0
        rounded = 1 << (limits.point_to_point - 1).bit_length()
        return self.point_to_point * rounded + self.collective * limits.collective + inside


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """Most thread blocks of a kernel: what `max_ctas` of a communicator says."""

    point_to_point: int
    collective: int


def communicators_of(lists: Lists, plan: Plan) -> Communicators:
    """The communicators of the rank that has most of each kind."""
    point_to_point = collective = 0
    for rank, instructions in lists.items():
        met = {(communicator_of(rank, i), i.kind, i.channel_group) for i in instructions if i.kind in COMMUNICATION}
        groups = [group for _, kind, group in met if kind == "collective"]
        pairs, exchanges = len(met) - len(groups), groups.count(EXPERT)
        point_to_point = max(point_to_point, pairs + exchanges)
        # The channel of gradients and weights carries those of dense layers, those of experts, and the norm.
        others = sum(group not in (EXPERT, DATA) for group in groups)
        collective = max(collective, others + (3 if DATA in groups else 0))
    inside = any(stage.tensor > 1 or stage.context > 1 for stage in plan.stages)
    return Communicators(point_to_point, collective, inside)


def block_limits(multiprocessors: int, communicators: Communicators) -> BlockLimits | None:
    """The limits with which the kernels of all communicators of a rank are resident at the same time.

    Sends, receives and all-to-alls have the largest power of two that leaves collectives half as many each; these have the rest.

    Returns:
        None where they do not fit with one block each.
    """
    for blocks in (32, 16, 8, 4, 2, 1):
        limits = BlockLimits(blocks, max(1, blocks // 2))
        if communicators.blocks(limits) <= multiprocessors:
            left = multiprocessors - communicators.blocks(limits)
            more = left // communicators.collective if communicators.collective else 0
            return BlockLimits(blocks, min(NCCL_MOST_BLOCKS, limits.collective + more))
    return None


def check_residency(lists: Lists) -> None:
    """Check that all ranks finish on devices that queue, however their streams share queues.

    Args:
        lists: the lists of the ranks that take part, as `check_rendezvous` has accepted them.
    Raises:
        ScheduleError: ranks may wait for each other for good.
    """
    stopped = _OneQueue(lists, meetings(lists)).stops()
    if stopped:
        shown = "\n".join(f"  rank {rank} stops at: {instruction}" for rank, instruction in stopped.items())
        raise ScheduleError(f"streams that share a hardware queue would keep each other from starting\n{shown}")


class _OneQueue:
    """One run of all lists in which every rank starts its instructions in their order."""

    def __init__(self, lists: Lists, meeting: Mapping[Node, Node]) -> None:
        self._lists, self._meeting = lists, meeting
        self._members: dict[Node, list[Node]] = defaultdict(list)
        for node, first in meeting.items():
            self._members[first].append(node)
        self._waits = {rank: _waits_of(instructions) for rank, instructions in lists.items()}
        self._next = dict.fromkeys(lists, 0)
        self._started: set[Node] = set()
        self._ended: set[Node] = set()

    def stops(self) -> dict[int, Instruction]:
        """Rank -> the first instruction that never ends; empty where all finish."""
        waiting = list(self._lists)
        while waiting:
            rank = waiting.pop()
            while self._may_start(rank):
                waiting += self._start((rank, self._next[rank]))
        return {
            rank: instructions[place]
            for rank, instructions in self._lists.items()
            if (place := next((n for n in range(len(instructions)) if (rank, n) not in self._ended), -1)) >= 0
        }

    def _may_start(self, rank: int) -> bool:
        """Whether the next instruction of a rank waits for nothing."""
        place = self._next[rank]
        return place < len(self._lists[rank]) and all((rank, n) in self._ended for n in self._waits[rank][place])

    def _start(self, node: Node) -> list[int]:
        """Start an instruction; the other ranks for which something has ended."""
        self._next[node[0]] += 1
        self._started.add(node)
        members = self._members[self._meeting[node]] if node in self._meeting else [node]
        if not self._started.issuperset(members):
            return []
        self._ended.update(members)
        return [rank for rank, _ in members if rank != node[0]]


def _waits_of(instructions: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction the places of those that it waits for: of its `after`, and the one before it on its stream."""
    place_of = {i.id: place for place, i in enumerate(instructions)}
    last_on: dict[str, int] = {}
    waits = []
    for place, instruction in enumerate(instructions):
        stream = stream_of(instruction)
        before = [last_on[stream]] if stream in last_on else []
        waits.append([place_of[number] for number in instruction.after] + before)
        last_on[stream] = place
    return waits
