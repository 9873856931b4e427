"""Event simulation of instruction lists: start and end of every instruction, given its seconds without interference.

Terms. The head of a channel is its first instruction that has not ended. A head is ready when all instructions in its `after`
have ended. Two kinds of instructions *meet* instructions of other ranks: transfers between stages, and the norm of all gradients.
Rules, as instructions.py states them:
1. A ready head starts when its channel is free; heads that meet start together, when all of them are ready, and end together.
2. A running instruction progresses at a rate of 1 or, with an interference model, of 1 / slowdown. The slowdown is the factor of
   its stream among the busy streams of its rank, times the crowding of its links (links.py). Two collectives on one link halve
   each other's rate; a send to a stage and a receive from one do not, since links carry both directions. All-to-alls of counts
   take a latency and do not occupy the link, but may queue behind rows. Instructions that meet have the rate of the slowest rank.
3. The simulation ends when every instruction has ended. If none can start, the error shows the grid of passes and the place.

Lists: of all ranks, or of one rank per stage (at the same place of each), whose collectives inside the stage represent all ranks.
Time: instructions × log(instructions), with interference also × channels.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan import operators
from moe_overlap.plan.instructions import (
    COMPUTE,
    OPTIMIZER,
    TO_DEVICE,
    TO_HOST,
    Instruction,
    ScheduleError,
    Span,
    communication_seconds,
)
from moe_overlap.plan.lowering.layers import COUNT_CHANNEL
from moe_overlap.plan.lowering.pipeline_order import PipelineStep, format_grid
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.links import LinkUse, crowding

Lists = Mapping[int, Sequence[Instruction]]
"""Rank -> its list, free of races (`check_races`)."""
Seconds = Callable[[int, Instruction], float]
"""Seconds of a rank's instruction when nothing else runs."""
Uses = Callable[[int, Instruction], LinkUse]
"""The links that a rank's communication uses."""
End = tuple[int, Instruction]
"""A rank, and its instruction in a task."""
STREAM_OF = {COMPUTE: 0, OPTIMIZER: 0, TO_DEVICE: 2, TO_HOST: 3}
"""Channel -> its index in interference.STREAMS; all other channels are between devices."""
COMPUTING, BETWEEN_DEVICES = 0, 1


@dataclass(frozen=True, slots=True)
class Ran:
    """A simulated instruction of one rank, with start and end in seconds."""

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def span(self) -> Span:
        """The span that the runtime would record."""
        return self.stretch(self.instruction.channel_group, self.start, self.end)

    def stretch(self, channel: str, start: float, end: float) -> Span:
        """A span of a part of its time."""
        # Built field by field, because `dataclasses.replace` is several times slower.
        i = self.instruction
        return Span(i.name, channel, i.chunk or 0, i.micro_batch or 0, start, end, i.partition)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step; `ran` is sorted by end."""

    ran: tuple[Ran, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds until the last rank has finished."""
        return max((event.end for event in self.ran), default=0.0)

    def spans(self, rank: int) -> list[Span]:
        """Spans of one rank, sorted by start."""
        events = sorted((event for event in self.ran if event.rank == rank), key=lambda event: (event.start, event.end))
        return [event.span for event in events]

    def exposed_seconds(self, rank: int) -> float:
        """Seconds of a rank with communication or copies and without computation."""
        return communication_seconds(self.spans(rank))[1]


def simulate(
    lists: Lists,
    seconds: Seconds,
    interference: Interference | Mapping[int, Interference] | None = None,
    queue_seconds: float = 0.0,
    uses: Uses | None = None,
) -> Simulation:
    """Simulate the lists of a step together.

    Args:
        interference: slowdown of instructions that run at the same time, for all ranks or by rank; None: no slowdown.
        queue_seconds: additional seconds of an all-to-all of counts that starts while its rank communicates: it waits for the
            rows in the link's queue.
        uses: the links that communication between devices uses; None: all of it shares one link.
    Raises:
        ScheduleError: the lists wait for each other forever, or the list of a peer is missing.
    """
    if isinstance(interference, Interference):
        interference = dict.fromkeys(lists, interference)
    return _Engine(lists, seconds, interference, queue_seconds, uses).run()


@dataclass(slots=True, eq=False)
class _Task:
    """A running instruction, or several that meet: the two ends of a transfer, or the norm of all ranks."""

    ends: tuple[End, ...]
    remaining: float
    """Seconds of work, at a rate of 1, that remain at `since`."""
    start: float
    since: float
    rate: float = 1.0
    version: int = 0
    """Number of changes of the rate; ends in the queue with an older version are void."""


class _Rank:
    """The state of one rank.

    Attributes:
        queues: channel -> its instructions that have not ended, in reverse, so that removing the head takes constant time.
        waits: id -> number of instructions that it waits for.
        wakes: id -> the instructions that wait for it.
        running: channel -> its running task.
        busy: [streams] channel -> its running instruction; without all-to-alls of counts.
        bits: the sum of the bits of the busy streams, as interference.py numbers them.
    """

    __slots__ = ("bits", "busy", "queues", "running", "waits", "wakes")

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.queues: dict[str, list[Instruction]] = defaultdict(list)
        self.waits: dict[int, int] = {}
        self.wakes: dict[int, list[Instruction]] = {}
        self.running: dict[str, _Task] = {}
        self.busy: tuple[dict[str, Instruction], ...] = ({}, {}, {}, {})
        self.bits = 0
        for i in instructions:
            self.queues[i.channel].append(i)
            after = set(i.after)
            self.waits[i.id] = len(after)
            for number in after:
                self.wakes.setdefault(number, []).append(i)
        for queue in self.queues.values():
            queue.reverse()

    def head(self, channel: str) -> Instruction | None:
        """The instruction that a channel could start; None if the channel is busy or empty, or its head must wait."""
        queue = self.queues.get(channel)
        if not queue or channel in self.running or self.waits[queue[-1].id]:
            return None
        return queue[-1]

    def start(self, i: Instruction, task: _Task) -> None:
        """Record that an instruction starts as part of a task."""
        channel = i.channel
        self.running[channel] = task
        if channel != COUNT_CHANNEL:
            stream = STREAM_OF.get(channel, BETWEEN_DEVICES)
            self.busy[stream][channel] = i
            self.bits |= 8 >> stream

    def end(self, channel: str) -> None:
        """Record that the running instruction of a channel has ended."""
        del self.running[channel]
        self.queues[channel].pop()
        if channel != COUNT_CHANNEL:
            stream = STREAM_OF.get(channel, BETWEEN_DEVICES)
            del self.busy[stream][channel]
            if not self.busy[stream]:
                self.bits &= ~(8 >> stream)

    @property
    def first_pending(self) -> Instruction | None:
        """The first instruction of the list that has not ended."""
        return min((queue[-1] for queue in self.queues.values() if queue), key=lambda i: i.id, default=None)


class _Engine:
    """State of a run."""

    def __init__(
        self,
        lists: Lists,
        seconds: Seconds,
        interference: Mapping[int, Interference] | None,
        queue_seconds: float,
        uses: Uses | None,
    ) -> None:
        self._lists, self._seconds, self._interference = lists, seconds, interference
        self._queue_seconds = queue_seconds
        self._uses: Uses = uses or (lambda rank, i: LinkUse())
        self._ranks = {rank: _Rank(instructions) for rank, instructions in lists.items()}
        self._events: list[tuple[float, int, int, _Task]] = []
        self._ran: list[Ran] = []
        self._pushed = 0

    def run(self) -> Simulation:
        """Simulate from the first event to the last."""
        for number, rank in self._ranks.items():
            for channel in list(rank.queues):
                self._try(number, channel, 0.0)
        while self._events:
            now, _, version, task = heapq.heappop(self._events)
            # A task whose rate changed has an old end in the heap, too. It is skipped here, because removing it would need a
            # search of the heap.
            if version == task.version:
                self._finish(task, now)
        pending = {number: rank.first_pending for number, rank in self._ranks.items()}
        if any(pending.values()):
            raise ScheduleError(_stuck(pending, self._lists))
        return Simulation(tuple(self._ran))

    def _try(self, rank: int, channel: str, now: float) -> None:
        """Start the head of a channel if rule 1 allows it."""
        head = self._ranks[rank].head(channel)
        if head is None:
            return
        ends = [(rank, head)]
        # The ends may have different prices (stages of unlike shape): the task takes as long as its slowest end.
        work = self._seconds(rank, head)
        for other in self._partners(rank, head):
            other_head = self._ranks[other].head(channel)
            # The end that becomes ready last finds the others ready, so no polling is needed.
            if other_head is None or not _meets(head, other_head, rank):
                return
            ends.append((other, other_head))
            work = max(work, self._seconds(other, other_head))
        # All-to-alls of counts wait for the link's queue only.
        if channel == COUNT_CHANNEL and self._ranks[rank].busy[BETWEEN_DEVICES]:
            work += self._queue_seconds
        task = _Task(tuple(ends), work, now, now)
        for place, i in ends:
            self._ranks[place].start(i, task)
        self._push(task, now)
        self._rates(task, now)

    def _partners(self, rank: int, i: Instruction) -> Sequence[int]:
        """Ranks that an instruction meets."""
        if i.kind == "collective" and i.name == operators.NORM:
            return [other for other in self._lists if other != rank]
        for peer in i.peers:
            if peer not in self._lists:
                raise ScheduleError(f"rank {rank}: the list of its peer {peer} is missing\n> {i}")
        return i.peers

    def _finish(self, task: _Task, now: float) -> None:
        """End a task, and start everything that may start now."""
        # A dict and not a set: instructions that can start at the same time must start in the same order in every run.
        channels: dict[tuple[int, str], bool] = {}
        for number, i in task.ends:
            rank = self._ranks[number]
            rank.end(i.channel)
            self._ran.append(Ran(number, i, task.start, now))
            channels[number, i.channel] = True
            for later in rank.wakes.get(i.id, ()):
                rank.waits[later.id] -= 1
                # An instruction that waits for others cannot start, but its channel keeps its first position in this order.
                place = number, later.channel
                channels[place] = channels.get(place, False) or not rank.waits[later.id]
        self._rates(task, now)
        for (number, channel), may_start in channels.items():
            if may_start:
                self._try(number, channel, now)

    def _rates(self, changed: _Task, now: float) -> None:
        """Apply rule 2 to all running tasks on the ranks of a task that has started or ended."""
        if self._interference is None:
            return
        if len(changed.ends) == 1:
            affected = list(self._ranks[changed.ends[0][0]].running.values())
        else:
            affected = [*dict.fromkeys(task for rank, _ in changed.ends for task in self._ranks[rank].running.values())]
        for task in affected:
            slowdown = max([self._slowdown(rank, i) for rank, i in task.ends])
            rate = 1 / slowdown
            # Work up to now was done at the old rate; the remaining work continues at the new one.
            if rate != task.rate:
                task.remaining -= (now - task.since) * task.rate
                task.since, task.rate, task.version = now, rate, task.version + 1
                self._push(task, now)

    def _slowdown(self, rank: int, i: Instruction) -> float:
        assert self._interference is not None
        state = self._ranks[rank]
        if len(state.running) == 1 or i.channel == COUNT_CHANNEL:
            return 1.0
        stream = STREAM_OF.get(i.channel, BETWEEN_DEVICES)
        factor = self._interference[rank].factor_of(stream, state.bits)
        sharing = state.busy[stream]
        return factor if len(sharing) == 1 else factor * self._crowd(sharing.values(), rank, i, stream)

    def _crowd(self, running: Iterable[Instruction], rank: int, i: Instruction, stream: int) -> float:
        """Slowdown of an instruction by the running instructions of its stream, itself included."""
        same_direction = [other for other in running if not (i.peers and other.peers and i.sends != other.sends)]
        if stream == BETWEEN_DEVICES and len(same_direction) > 1:
            return float(crowding([self._uses(rank, other) for other in same_direction]))
        return float(len(same_direction))

    def _push(self, task: _Task, now: float) -> None:
        self._pushed += 1
        # Rounding may leave slightly negative work. The counter breaks ties in time, because tasks cannot be compared.
        end = now + max(0.0, task.remaining) / task.rate
        heapq.heappush(self._events, (end, self._pushed, task.version, task))


def _meets(first: Instruction, second: Instruction, rank: int) -> bool:
    """Whether two heads are the two ends of one transfer, or both the norm."""
    if first.kind != "point-to-point":
        return second.name == first.name
    # Tiles are identified by their partition: their ends may belong to different micro-batches.
    same = first.partition == second.partition
    same = same and (bool(first.partition) or first.micro_batch == second.micro_batch)
    ends = (first.sends and second.receives) or (first.receives and second.sends)
    return ends and second.peers == (rank,) and same


def _stuck(pending: Mapping[int, Instruction | None], lists: Lists) -> str:
    """The error message: the next instruction of every rank, and the grid of passes with the first rank that is stuck."""
    ranks = list(lists)
    orders = {rank: _passes(instructions) for rank, instructions in lists.items()}
    stuck = next(rank for rank in ranks if pending[rank] is not None)
    lines = [f"rank {rank} waits for ever at {i}" for rank, i in pending.items() if i is not None]
    at = pending[stuck]
    assert at is not None
    marked = next((n for n, step in enumerate(orders[stuck]) if _is_of(step, at)), len(orders[stuck]))
    grid = format_grid([orders[rank] for rank in ranks], (ranks.index(stuck), marked))
    return "\n".join([*lines, f"passes by rank ({', '.join(map(str, ranks))}):", grid])


def _passes(instructions: Sequence[Instruction]) -> list[PipelineStep]:
    """The passes of a list in order of their first computation."""
    return list(dict.fromkeys(pass_of(i) for i in instructions if i.kind == "compute" and i.micro_batch is not None))


def pass_of(i: Instruction) -> PipelineStep:
    """The pass that an instruction with a micro-batch belongs to."""
    return PipelineStep("backward" if i.in_backward_pass else "forward", i.chunk or 0, i.micro_batch or 0)


def _is_of(step: PipelineStep, i: Instruction) -> bool:
    """Whether an instruction belongs to a pass; those without one are shown at the end of the grid."""
    return i.micro_batch is not None and step == pass_of(i)
