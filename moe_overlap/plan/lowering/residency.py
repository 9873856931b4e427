"""Deadlock check under the limits of one device: can a waiting kernel block another one that a peer waits for?

rendezvous.py checks the order of each communicator separately. But the communicators of a rank share its device:

1. *Multiprocessors.* The kernel of a communication occupies multiprocessors from its start until all ranks of its meeting have
   started theirs. `block_limits` limits thread blocks so that the kernels of all communicators of a rank (`communicators_of`) fit
   on the device together: each communicator runs one kernel at a time, so no kernel ever waits for multiprocessors.
   NCCL rounds the limit of sends, receives and all-to-alls up to a power of two (`ncclTopoComputeP2pChannels`).
2. *Queues.* Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), and CUDA does not tell which streams share one. A queue
   starts its entries in the order in which the host issued them, which is list order: an entry that waits for an event, or for
   its predecessor on its stream, blocks all later entries of its queue, also those of other streams.
3. *Waits.* An instruction waits for the end of its `after` and of its predecessor on its stream, as in rendezvous.py. The
   executor issues the wait for a transfer between stages right before the first use: right after the transfer it would block the
   queue until the other stage has arrived (runtime/executor/execute.py).

One queue is the worst case. There an instruction waits until all earlier ones have started; with more queues, and any assignment
of streams (NCCL's internal ones included), only until some of them have. By point 1 an earlier start blocks nothing. So lists
that finish with one queue finish with any number of queues; `check_residency` simulates one queue.

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
"""Most thread blocks of a kernel without a limit (NCCL's MAXCHANNELS of one collective)."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """Number of communicators of one rank whose kernels can run at the same time, at most.

    Attributes:
        point_to_point: communicators of sends and receives (one per pair of ranks and direction) and of all-to-alls.
        collective: communicators of reductions and gathers: gradients of dense layers and of experts, and the norm.
        inside: whether compute operators contain collectives of tensor or context ranks, which run one at a time.
    """

    point_to_point: int
    collective: int
    inside: bool = False

    @property
    def number(self) -> int:
        """All communicators except those inside operators."""
        return self.point_to_point + self.collective

    def blocks(self, limits: BlockLimits) -> int:
        """Thread blocks of all their kernels together, as NCCL rounds them."""
        inside = NCCL_MOST_BLOCKS if self.inside else 0
        rounded = 1 << (limits.point_to_point - 1).bit_length()
        return self.point_to_point * rounded + self.collective * limits.collective + inside


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """Most thread blocks of a kernel, by kind of communicator (`max_ctas`)."""

    point_to_point: int
    collective: int


def communicators_of(lists: Lists, plan: Plan) -> Communicators:
    """The largest number of communicators of each kind on any rank."""
    point_to_point = collective = 0
    for rank, instructions in lists.items():
        met = {(communicator_of(rank, i), i.kind, i.channel_group) for i in instructions if i.kind in COMMUNICATION}
        groups = [group for _, kind, group in met if kind == "collective"]
        pairs, exchanges = len(met) - len(groups), groups.count(EXPERT)
        point_to_point = max(point_to_point, pairs + exchanges)
        # The channel of gradients and weights has three: dense layers, experts, and the norm.
        others = sum(group not in (EXPERT, DATA) for group in groups)
        collective = max(collective, others + (3 if DATA in groups else 0))
    inside = any(stage.tensor > 1 or stage.context > 1 for stage in plan.stages)
    return Communicators(point_to_point, collective, inside)


def block_limits(multiprocessors: int, communicators: Communicators) -> BlockLimits | None:
    """Limits under which the kernels of all communicators of a rank fit on the device at the same time.

    Sends, receives and all-to-alls get the largest power of two with which collectives get at least half as many; collectives
    share the remaining blocks.

    Returns:
        None if the kernels do not fit even with one block each.
    """
    for blocks in (32, 16, 8, 4, 2, 1):
        limits = BlockLimits(blocks, max(1, blocks // 2))
        if communicators.blocks(limits) <= multiprocessors:
            free_blocks = multiprocessors - communicators.blocks(limits)
            more = free_blocks // communicators.collective if communicators.collective else 0
            return BlockLimits(blocks, min(NCCL_MOST_BLOCKS, limits.collective + more))
    return None


def check_residency(lists: Lists) -> None:
    """Check that all ranks finish on GPUs, however their streams share hardware queues.

    Args:
        lists: the lists of the ranks that take part, as `check_rendezvous` has accepted them.
    Raises:
        ScheduleError: the ranks can deadlock.
    """
    stopped = _OneQueue(lists, meetings(lists)).stops()
    if stopped:
        shown = "\n".join(f"  rank {rank} stops at: {instruction}" for rank, instruction in stopped.items())
        raise ScheduleError(f"streams that share a hardware queue would keep each other from starting\n{shown}")


class _OneQueue:
    """Simulates all lists with one hardware queue per rank: instructions start in list order."""

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
        """Rank -> its first instruction that never ends; empty if all ranks finish."""
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
        """Whether everything that the next instruction of a rank waits for has ended."""
        place = self._next[rank]
        return place < len(self._lists[rank]) and all((rank, n) in self._ended for n in self._waits[rank][place])

    def _start(self, node: Node) -> list[int]:
        """Start an instruction. Returns the other ranks of its meeting if that has now ended."""
        self._next[node[0]] += 1
        self._started.add(node)
        members = self._members[self._meeting[node]] if node in self._meeting else [node]
        if not self._started.issuperset(members):
            return []
        self._ended.update(members)
        return [rank for rank, _ in members if rank != node[0]]


def _waits_of(instructions: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction the places that it waits for: its `after`, and its predecessor on its stream."""
    place_of = {i.id: place for place, i in enumerate(instructions)}
    last_on: dict[str, int] = {}
    waits = []
    for place, instruction in enumerate(instructions):
        stream = stream_of(instruction)
        before = [last_on[stream]] if stream in last_on else []
        waits.append([place_of[number] for number in instruction.after] + before)
        last_on[stream] = place
    return waits
