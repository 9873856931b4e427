"""Event simulation of instruction lists: start and end of every instruction, given the seconds that each takes alone.

Terms. The head of a channel is its first instruction that has not run. A head is ready when all of `after` have ended. Transfers
between stages and the norm of all gradients meet: they begin when the heads of all their ranks are ready and end together.
Rules, as instructions.py states them:
1. A ready head starts when its channel is free and, if it meets others, when they are ready, too.
2. While it runs it does its work at a rate of 1, or, with an interference model, at 1 / slowdown: the factor of its stream among
   the busy streams of its rank, times the crowding of its links (links.py: two collectives at a time on one link halve each
   other; what is sent to another stage and what is received from one do not: links carry both ways; all-to-alls of counts take
   a latency and leave the link to the others, but may queue behind rows on their way). What meets goes at the rate of its
   slowest rank.
3. The simulation ends when every instruction has run. Where none can, the error shows the grid of passes with the place.

Lists: of all ranks, or of one rank per stage (at the same place of each), whose collectives inside a stage then stand for all.
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
from moe_overlap.plan.lowering.pipeline_order import Step, format_grid
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.links import LinkUse, crowding

Lists = Mapping[int, Sequence[Instruction]]
"""Rank -> its list, which `check_races` accepts."""
Seconds = Callable[[int, Instruction], float]
"""Seconds of a rank's instruction when nothing else runs."""
Uses = Callable[[int, Instruction], LinkUse]
"""The links that a rank's communication keeps busy."""
End = tuple[int, Instruction]
"""A rank, and the instruction by which it takes part."""
STREAM_OF = {COMPUTE: 0, OPTIMIZER: 0, TO_DEVICE: 2, TO_HOST: 3}
"""Channel -> its place in interference.STREAMS; the others join devices."""
COMPUTING, BETWEEN_DEVICES = 0, 1


@dataclass(frozen=True, slots=True)
class Ran:
    """One instruction of one rank, in time."""

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def span(self) -> Span:
        """Its span as the runtime records it."""
        return self.stretch(self.instruction.channel_group, self.start, self.end)

    def stretch(self, channel: str, start: float, end: float) -> Span:
        """A part of its time, as the runtime records it; `dataclasses.replace` takes several times as long."""
        i = self.instruction
        return Span(i.name, channel, i.chunk or 0, i.micro_batch or 0, start, end, i.partition)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step; `ran` in order of the ends."""

    ran: tuple[Ran, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds until the last rank has finished."""
        return max((event.end for event in self.ran), default=0.0)

    def spans(self, rank: int) -> list[Span]:
        """Spans of one rank in order of the starts."""
        events = sorted((event for event in self.ran if event.rank == rank), key=lambda event: (event.start, event.end))
        return [event.span for event in events]

    def exposed_seconds(self, rank: int) -> float:
        """Seconds of a rank in which it communicates or copies and computes nothing."""
        return communication_seconds(self.spans(rank))[1]


def simulate(
    lists: Lists,
    seconds: Seconds,
    interference: Interference | Mapping[int, Interference] | None = None,
    queue_seconds: float = 0.0,
    uses: Uses | None = None,
) -> Simulation:
    """Run the lists of a step together.

    Args:
        interference: how what runs at the same time on a rank slows down, on all ranks or by rank; None: not at all.
        queue_seconds: how much longer counts take that start while their rank sends something else: what a link has queued.
        uses: the links that communication between devices uses; None: all of it shares one.
    Raises:
        ScheduleError: the lists wait for each other for ever, or a peer's list is not there.
    """
    if isinstance(interference, Interference):
        interference = dict.fromkeys(lists, interference)
    return _Engine(lists, seconds, interference, queue_seconds, uses).run()


@dataclass(slots=True, eq=False)
class _Task:
    """Running work: one instruction, or the two ends of a transfer, or the norm of all ranks."""

    ends: tuple[End, ...]
    left: float
    """Alone seconds still to do at `since`."""
    start: float
    since: float
    rate: float = 1.0
    version: int = 0
    """Counts changes of the rate; older ends of it in the queue are void."""


class _Rank:
    """The state of one rank.

    Attributes:
        queues: channel -> its instructions that have not ended, the head last: taking it is then constant time.
        waits: id -> instructions that it still waits for.
        wakes: id -> the instructions that wait for it.
        running: channel -> what runs there.
        busy: by stream, the instructions that run in it by their channels, but for counts.
        bits: the sum of the busy streams' bits, as interference.py numbers them.
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
        """The instruction that a channel could start; None where it is busy, empty or must wait."""
        queue = self.queues.get(channel)
        if not queue or channel in self.running or self.waits[queue[-1].id]:
            return None
        return queue[-1]

    def start(self, i: Instruction, task: _Task) -> None:
        """Note that an instruction runs, as an end of a task."""
        channel = i.channel
        self.running[channel] = task
        if channel != COUNT_CHANNEL:
            stream = STREAM_OF.get(channel, BETWEEN_DEVICES)
            self.busy[stream][channel] = i
            self.bits |= 8 >> stream

    def end(self, channel: str) -> None:
        """Note that what a channel ran has ended."""
        del self.running[channel]
        self.queues[channel].pop()
        if channel != COUNT_CHANNEL:
            stream = STREAM_OF.get(channel, BETWEEN_DEVICES)
            del self.busy[stream][channel]
            if not self.busy[stream]:
                self.bits &= ~(8 >> stream)

    @property
    def first_left(self) -> Instruction | None:
        """The first instruction of the list that has not run."""
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
            # A task whose rate has changed left its old end in the heap; it is skipped here, because removing it there
            # would cost a search of the heap.
            if version == task.version:
                self._finish(task, now)
        left = {number: rank.first_left for number, rank in self._ranks.items()}
        if any(left.values()):
            raise ScheduleError(_stuck(left, self._lists))
        return Simulation(tuple(self._ran))

    def _try(self, rank: int, channel: str, now: float) -> None:
        """Start the head of a channel if rule 1 allows it."""
        head = self._ranks[rank].head(channel)
        if head is None:
            return
        ends = [(rank, head)]
        # The ends may have different prices (stages of unlike shape): a meeting lasts as long as its slowest end.
        alone = self._seconds(rank, head)
        for other in self._partners(rank, head):
            theirs = self._ranks[other].head(channel)
            # Whichever end becomes ready last finds the others ready, so nobody needs to poll.
            if theirs is None or not _meets(head, theirs, rank):
                return
            ends.append((other, theirs))
            alone = max(alone, self._seconds(other, theirs))
        # Counts wait only for what the link has queued when they start.
        if channel == COUNT_CHANNEL and self._ranks[rank].busy[BETWEEN_DEVICES]:
            alone += self._queue_seconds
        task = _Task(tuple(ends), alone, now, now)
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
                raise ScheduleError(f"rank {rank}: the list of its peer {peer} is not there\n> {i}")
        return i.peers

    def _finish(self, task: _Task, now: float) -> None:
        """End a task, and start everything that may start now."""
        # A dict and not a set: what can start at the same time must start in the same order in every run.
        channels: dict[tuple[int, str], bool] = {}
        for number, i in task.ends:
            rank = self._ranks[number]
            rank.end(i.channel)
            self._ran.append(Ran(number, i, task.start, now))
            channels[number, i.channel] = True
            for later in rank.wakes.get(i.id, ()):
                rank.waits[later.id] -= 1
                # What still waits for others starts nothing, but a channel keeps the place at which it was met first.
                place = number, later.channel
                channels[place] = channels.get(place, False) or not rank.waits[later.id]
        self._rates(task, now)
        for (number, channel), may_start in channels.items():
            if may_start:
                self._try(number, channel, now)

    def _rates(self, changed: _Task, now: float) -> None:
        """Set the rates of everything that runs on the ranks of a task, which has started or ended, by rule 2."""
        if self._interference is None:
            return
        if len(changed.ends) == 1:
            beside = list(self._ranks[changed.ends[0][0]].running.values())
        else:
            beside = [*dict.fromkeys(task for rank, _ in changed.ends for task in self._ranks[rank].running.values())]
        for task in beside:
            slowdown = max([self._slowdown(rank, i) for rank, i in task.ends])
            rate = 1 / slowdown
            # Work so far was done at the old rate; only the rest goes on at the new one.
            if rate != task.rate:
                task.left -= (now - task.since) * task.rate
                task.since, task.rate, task.version = now, rate, task.version + 1
                self._push(task, now)

    def _slowdown(self, rank: int, i: Instruction) -> float:
        assert self._interference is not None
        here = self._ranks[rank]
        if len(here.running) == 1 or i.channel == COUNT_CHANNEL:
            return 1.0
        stream = STREAM_OF.get(i.channel, BETWEEN_DEVICES)
        factor = self._interference[rank].factor_of(stream, here.bits)
        beside = here.busy[stream]
        return factor if len(beside) == 1 else factor * self._crowd(beside.values(), rank, i, stream)

    def _crowd(self, running: Iterable[Instruction], rank: int, i: Instruction, stream: int) -> float:
        """How many times as long an instruction takes beside others of its stream, itself among them."""
        beside = [other for other in running if not (i.peers and other.peers and i.sends != other.sends)]
        if stream == BETWEEN_DEVICES and len(beside) > 1:
            return float(crowding([self._uses(rank, other) for other in beside]))
        return float(len(beside))

    def _push(self, task: _Task, now: float) -> None:
        self._pushed += 1
        # Rounding may leave slightly less than nothing to do. The number breaks ties in time: tasks have no order.
        end = now + max(0.0, task.left) / task.rate
        heapq.heappush(self._events, (end, self._pushed, task.version, task))


def _meets(own: Instruction, theirs: Instruction, rank: int) -> bool:
    """Whether two heads are the two ends of one transfer, or both the norm."""
    if own.kind != "point-to-point":
        return theirs.name == own.name
    same = own.partition == theirs.partition  # of tiles, whose ends may belong to unlike micro-batches
    same = same and (bool(own.partition) or own.micro_batch == theirs.micro_batch)
    ends = (own.sends and theirs.receives) or (own.receives and theirs.sends)
    return ends and theirs.peers == (rank,) and same


def _stuck(left: Mapping[int, Instruction | None], lists: Lists) -> str:
    """The grid of passes with the first rank that is stuck, and what every rank stands at."""
    ranks = list(lists)
    orders = {rank: _passes(instructions) for rank, instructions in lists.items()}
    stuck = next(rank for rank in ranks if left[rank] is not None)
    lines = [f"rank {rank} waits for ever at {i}" for rank, i in left.items() if i is not None]
    at = left[stuck]
    assert at is not None
    marked = next((n for n, step in enumerate(orders[stuck]) if _is_of(step, at)), len(orders[stuck]))
    grid = format_grid([orders[rank] for rank in ranks], (ranks.index(stuck), marked))
    return "\n".join([*lines, f"passes by rank ({', '.join(map(str, ranks))}):", grid])


def _passes(instructions: Sequence[Instruction]) -> list[Step]:
    """The passes of a list in order of their first computation."""
    return list(dict.fromkeys(pass_of(i) for i in instructions if i.kind == "compute" and i.micro_batch is not None))


def pass_of(i: Instruction) -> Step:
    """The pass that an instruction with a micro-batch belongs to."""
    return Step("backward" if i.in_backward_pass else "forward", i.chunk or 0, i.micro_batch or 0)


def _is_of(step: Step, i: Instruction) -> bool:
    """Whether an instruction belongs to a pass; what belongs to none stands at the end of the grid."""
    return i.micro_batch is not None and step == pass_of(i)
