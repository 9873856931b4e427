"""Dependencies of instructions: through buffers and through the order in which a runner starts them; and the race check.

Contract. `ListBuilder` gives every draft its id and the dependencies of its buffers; `in_issue_order` adds the waits of the
runner that executes the list; `last_uses` returns the last use of each buffer; `check_races` accepts a list only if instructions
that access one buffer on different channels are ordered.

Issue order. Buffers determine data dependencies, but not when the host starts an instruction. The list also contains the waits of
its runner, so a simulator or a checker sees the order that is executed.
- The executor (plans that follow lists) issues its list from top to bottom. A communication starts after the computation listed
  before it: a receive is not posted earlier, and a send starts only after its receive is posted. If the start of a communication
  waits for another one, as a dispatch waits for its counts, later computation waits as well. The norm waits for all sends: all
  ranks meet there, after all their receives, so this wait is free.
- If the device queues the host's launches (`host_runs_ahead`), a communication starts as soon as its buffers allow and delays
  nothing. The host only waits for counts of rows, and issues nothing meanwhile.
- megatron-core's 1F1B schedule waits for its transfers: a transfer starts after all computation listed before it, and computation
  after all transfers listed before it.
- megatron-core's interleaved schedule and the resharding of unlike stages run transfers concurrently with computation. The only
  added wait: megatron-core recomputes inside a backward pass, after it has received the gradient.
- megatron-core's MoE layer waits for its all-to-alls in the same way, so shared experts hide none of them; the cost model
  accounts for --moe-shared-expert-overlap.

Races. `i` happens before `j` if a path leads from i to j over `after` and over the order of a channel (an instruction of a
channel finishes before the next one starts). Two accesses of a buffer, at least one of them a write, race unless one happens
before the other. Each instruction has a vector clock: for each channel, how many of its instructions have finished when it
starts.
1. The clock is the maximum over the predecessor on the channel and everything in `after`, each counted as finished.
2. A read must be ordered after the last write of its buffer; a write after the last write and, per channel, the last read since.
3. Older accesses need no check: those of step 2 are ordered after them.
Time: instructions × (dependencies + buffers) × channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moe_overlap.plan.instructions import (
    COMPUTE,
    EXPERT,
    PIPELINE,
    Instruction,
    Kind,
    ScheduleError,
    parse_buffer,
    reads_counts,
)
from moe_overlap.plan.operators import BACKWARD, RECOMPUTE, OperatorId, OperatorKind, parse_operator
from moe_overlap.plan.plan import Plan

COMMUNICATION = ("collective", "point-to-point")


def in_issue_order(plan: Plan, instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list of one rank with the waits of its runner."""
    if plan.follows_lists:
        return queued_one_by_one(instructions) if plan.host_runs_ahead else issued_one_by_one(instructions)
    groups = (EXPERT, PIPELINE) if plan.pipeline_schedule == "1f1b" else (EXPERT,)
    return waiting_for(recomputed_behind_gradients(instructions), lambda i: i.channel_group in groups)


def issued_one_by_one(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list with the waits of the executor, whose host starts one instruction after the other."""
    waits = _Waits()
    communications = {i.id for i in instructions if i.kind in COMMUNICATION}
    last_computation: tuple[int, ...] = ()
    waited_for: set[int] = set()
    last_sends: dict[str, int] = {}
    for instruction in instructions:
        before: set[int] = set()
        if instruction.channel == COMPUTE:
            # A host that waits to start a communication starts nothing else: the next computation waits as well.
            before, waited_for, last_computation = waited_for, set(), (instruction.id,)
        elif instruction.kind in COMMUNICATION:
            before = set(last_computation)
            if instruction.operator.kind is OperatorKind.NORM:
                before |= set(last_sends.values())
            elif instruction.sends:
                last_sends[instruction.channel] = instruction.id
            waited_for |= communications.intersection(instruction.after)
        waits.append(instruction, before)
    return tuple(waits.ordered)


def queued_one_by_one(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list with the waits of the executor on a device that queues the host's launches.

    The host only waits for counts of rows. Instructions after a reader of counts are not issued before these counts have
    arrived, on any channel.
    """
    waits = _Waits()
    counted: dict[str, int] = {}
    last_read: tuple[int, ...] = ()
    last_sends: dict[str, int] = {}
    for instruction in instructions:
        if reads_counts(instruction.reads):
            # The latest implies all earlier ones, since counts have their own channel, which runs in order.
            read = (counted[name] for name in instruction.reads if name in counted)
            last_read = (max((*last_read, *read)),)
        before = {*last_read}
        if instruction.kind in COMMUNICATION:
            if instruction.operator.kind is OperatorKind.NORM:
                before |= set(last_sends.values())
            elif instruction.sends:
                last_sends[instruction.channel] = instruction.id
        waits.append(instruction, before)
        counted.update((name, instruction.id) for name in instruction.writes if reads_counts((name,)))
    return tuple(waits.ordered)


def recomputed_behind_gradients(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list with the waits of autograd's recomputation, which begins after the gradient of a pass has arrived."""
    waits = _Waits()
    received: dict[tuple[int | None, int | None], int] = {}
    for instruction in instructions:
        operator, pass_key = instruction.operator, (instruction.chunk, instruction.micro_batch)
        if operator.kind is OperatorKind.RECEIVE and operator.phase == BACKWARD:
            received[pass_key] = instruction.id
        waits_for_gradient = operator.phase == RECOMPUTE and pass_key in received
        waits.append(instruction, {received[pass_key]} if waits_for_gradient else ())
    return tuple(waits.ordered)


def waiting_for(instructions: Sequence[Instruction], blocks: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
    """The list with the waits of a runner that never overlaps some communication with computation.

    Args:
        blocks: whether an instruction is such a communication.
    """
    waits = _Waits()
    last_computation: tuple[int, ...] = ()
    under_way: tuple[int, ...] = ()
    for instruction in instructions:
        before: tuple[int, ...] = ()
        if blocks(instruction):
            # The last computation implies all earlier ones, since a channel runs in order.
            before, under_way = last_computation, (*under_way, instruction.id)
        elif instruction.channel == COMPUTE:
            before, last_computation, under_way = under_way, (instruction.id,), ()
        waits.append(instruction, before)
    return tuple(waits.ordered)


class _Waits:
    """Adds waits to a list from top to bottom, without those that other waits already imply.

    Each instruction has a vector clock: how far each channel has progressed when the instruction starts, through its waits and
    its predecessor on its channel.
    """

    def __init__(self) -> None:
        self.ordered: list[Instruction] = []
        self._clocks: dict[int, dict[str, int]] = {}
        self._position: dict[int, tuple[str, int]] = {}
        self._last_on: dict[str, int] = {}

    def append(self, instruction: Instruction, before: Iterable[int]) -> None:
        """Append an instruction that additionally waits for the ids in `before`."""
        clock: dict[str, int] = {}
        if instruction.channel in self._last_on:
            self._advance(clock, self._last_on[instruction.channel])
        for number in instruction.after:
            self._advance(clock, number)
        added = []
        # The latest first: it often implies the earlier ones.
        for number in sorted(before, reverse=True):
            # One comparison of clocks decides whether the wait is implied; a search for paths would be quadratic.
            channel, place = self._position[number]
            if clock.get(channel, -1) < place:
                added.append(number)
                self._advance(clock, number)
        if added:
            instruction = dataclasses.replace(instruction, after=tuple(sorted({*instruction.after, *added})))
        self.ordered.append(instruction)
        self._clocks[instruction.id] = clock
        place = self._position[self._last_on[instruction.channel]][1] + 1 if instruction.channel in self._last_on else 0
        self._position[instruction.id] = (instruction.channel, place)
        self._last_on[instruction.channel] = instruction.id

    def _advance(self, clock: dict[str, int], number: int) -> None:
        channel, place = self._position[number]
        if clock.get(channel, -1) >= place:
            return  # This wait is implied, and with it all waits of that instruction.
        clock[channel] = place
        for channel, place in self._clocks[number].items():
            if clock.get(channel, -1) < place:
                clock[channel] = place


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """An instruction without id and dependencies; the fields are those of `Instruction`."""

    kind: Kind
    name: str
    channel: str = COMPUTE
    chunk: int | None = None
    micro_batch: int | None = None
    partition: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bytes: int = 0
    peers: tuple[int, ...] = ()
    region: tuple[int, ...] = ()

    @property
    def operator(self) -> OperatorId:
        """The typed form of its name."""
        return parse_operator(self.name, "draft")

    @property
    def receives(self) -> bool:
        """Whether it receives over a stage boundary."""
        return self.kind == "point-to-point" and self.operator.kind is OperatorKind.RECEIVE


def build_list(stage: int, drafts: Iterable[Draft]) -> tuple[Instruction, ...]:
    """The list of one rank of a stage: drafts in issue order, with ids and the dependencies of their buffers."""
    builder = ListBuilder(stage)
    builder.extend(drafts)
    return builder.finish()


class ListBuilder:
    """Appends instructions of one rank.

    `after` follows from the buffers: a read waits for the last writer, a write for the last writer and the readers since. Implied
    dependencies are left out. So are those on the same channel, except from a reader on the writer of a buffer that it only
    reads.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._list: list[Instruction] = []
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}

    def append(self, draft: Draft | Instruction, after: Iterable[int] = ()) -> int:
        """Append one instruction.

        Args:
            draft: the instruction; id and waits of an instruction from another list are dropped.
            after: ids of additional dependencies.
        Returns:
            Its id, which is its index in the list.
        """
        instruction = Instruction(
            id=len(self._list),
            kind=draft.kind,
            name=draft.name,
            stage=self._stage,
            chunk=draft.chunk,
            micro_batch=draft.micro_batch,
            partition=draft.partition,
            channel=draft.channel,
            reads=draft.reads,
            writes=draft.writes,
            bytes=draft.bytes,
            peers=draft.peers,
            region=draft.region,
            after=self._dependencies(draft.channel, draft.reads, draft.writes, after),
        )
        self._list.append(instruction)
        for buffer in draft.writes:
            self._writer[buffer], self._readers[buffer] = instruction.id, []
        for buffer in draft.reads:
            if buffer not in draft.writes:
                self._readers.setdefault(buffer, []).append(instruction.id)
        return instruction.id

    def extend(self, drafts: Iterable[Draft]) -> None:
        """Append several."""
        for draft in drafts:
            self.append(draft)

    def finish(self) -> tuple[Instruction, ...]:
        """The list."""
        return tuple(self._list)

    def _dependencies(
        self, channel: str, reads: tuple[str, ...], writes: tuple[str, ...], after: Iterable[int]
    ) -> tuple[int, ...]:
        numbers: set[int] = set(after)
        for buffer in reads:
            # A buffer that is also written is accumulated: the loop over the writes adds its last writer.
            if buffer in self._writer and buffer not in writes:
                numbers.add(self._writer[buffer])
        for buffer in writes:
            touched = [*self._readers.get(buffer, ()), *([self._writer[buffer]] if buffer in self._writer else [])]
            # Accesses on the same channel are ordered anyway. Explicit edges
            # would chain the additions of all micro-batches to a gradient sum.
            numbers.update(number for number in touched if self._list[number].channel != channel)
        return self._without_implied(self._last_of_each_channel(numbers, channel))

    def _last_of_each_channel(self, numbers: set[int], channel: str) -> set[int]:
        """Keep only the last dependency on every other channel: channels run in order."""
        last: dict[str, int] = {}
        for number in sorted(numbers):
            last[self._list[number].channel] = number
        return {n for n in numbers if self._list[n].channel == channel or last[self._list[n].channel] == n}

    def _without_implied(self, numbers: set[int]) -> tuple[int, ...]:
        """Drop dependencies that another one reaches over `after`."""
        if len(numbers) < 2:
            return tuple(numbers)
        # Dependencies only point to lower ids, so the search can stop at the lowest candidate.
        lowest = min(numbers)
        reached: set[int] = set()
        waiting = [number for later in numbers for number in self._list[later].after]
        while waiting:
            number = waiting.pop()
            if number >= lowest and number not in reached:
                reached.add(number)
                waiting.extend(self._list[number].after)
        return tuple(sorted(numbers - reached))


def last_uses(instructions: Sequence[Instruction]) -> dict[int, tuple[str, ...]]:
    """Instruction id -> buffers whose content no later instruction reads.

    A buffer that is overwritten before it is read again, as by a recomputation, is not needed in between.
    """
    ends: dict[int, tuple[str, ...]] = {}
    needed: set[str] = set()
    for i in reversed(instructions):
        ends[i.id] = tuple(name for name in dict.fromkeys((*i.reads, *i.writes)) if name not in needed)
        # Writes before reads: an accumulation overwrites its buffer but needs the old content. A piece overwrites only its
        # region.
        needed.difference_update(() if i.region else i.writes)
        needed.update(i.reads)
    return ends


INPUTS = frozenset({"tokens", "labels", "gradient", "state", "parameters", "host"})
"""First words of buffers that exist when a step starts."""


@dataclass(slots=True)
class _Buffer:
    """Earlier accesses that a later one can still race with."""

    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict)
    """Channel -> its last reading instruction since the last write."""


def check_races(instructions: Sequence[Instruction], inputs: frozenset[str] = INPUTS) -> None:
    """Check one rank's list.

    Args:
        inputs: first words of buffers that exist when the step starts.
    Raises:
        ScheduleError: a duplicate id, a dependency that is not earlier in the list, a buffer that is read before it is written,
            or a race; the message shows the lines.
    """
    places = _places(instructions)
    channels = {name: n for n, name in enumerate(dict.fromkeys(i.channel for i in instructions))}
    channel_of = [channels[i.channel] for i in instructions]
    position: list[int] = []
    clocks: list[list[int]] = []
    last_on: list[int | None] = [None] * len(channels)
    buffers: dict[str, _Buffer] = {}

    def knows(place: int, earlier: int) -> bool:
        return clocks[place][channel_of[earlier]] >= position[earlier]

    for place, instruction in enumerate(instructions):
        channel = channel_of[place]
        previous = last_on[channel]
        # Step 1.
        clock = [0] * len(channels) if previous is None else [*clocks[previous]]
        if previous is not None:
            clock[channel] = position[previous]
        for number in reversed(instruction.after):
            earlier = places[number]
            # An instruction that starts after `earlier` inherits all that `earlier` itself waited for.
            if clock[channel_of[earlier]] < position[earlier]:
                clock = list(map(max, clock, clocks[earlier]))
                clock[channel_of[earlier]] = position[earlier]
        clocks.append(clock)
        position.append(1 if previous is None else position[previous] + 1)
        last_on[channel] = place
        for name in instruction.reads:
            buffer = buffers.setdefault(name, _Buffer())
            # Step 2, the last write.
            if buffer.writer is None:
                if parse_buffer(name).word not in inputs:
                    raise ScheduleError(f"{name} is read before anything wrote it\n{_marked(instructions, place)}")
            elif not knows(place, buffer.writer):
                raise _race(instructions, name, buffer.writer, place)
        for name in instruction.writes:
            buffer = buffers.setdefault(name, _Buffer())
            # Step 2, one reader per channel: a channel runs in order, so its last read implies the earlier ones.
            for earlier in (*buffer.readers.values(), *(() if buffer.writer is None else (buffer.writer,))):
                if not knows(place, earlier):
                    raise _race(instructions, name, earlier, place)
            buffer.writer, buffer.readers = place, {}
        for name in instruction.reads:
            # An accumulation counts as the writer only: an access ordered after its write is also ordered after its read.
            if name not in instruction.writes:
                buffers[name].readers[channel] = place


def _places(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Id -> index in the list; ScheduleError for a duplicate id or a dependency that is not earlier in the list."""
    places: dict[int, int] = {}
    ids = {instruction.id for instruction in instructions}
    for place, instruction in enumerate(instructions):
        if instruction.id in places:
            raise ScheduleError(f"id {instruction.id} stands twice\n{_marked(instructions, place)}")
        for number in instruction.after:
            if number not in places:
                why = "does not stand before it" if number in ids else "does not exist"
                raise ScheduleError(f"dependency {number} {why}\n{_marked(instructions, place)}")
        places[instruction.id] = place
    return places


def _race(instructions: Sequence[Instruction], buffer: str, first: int, second: int) -> ScheduleError:
    names = f"{instructions[first].name} and {instructions[second].name}"
    lines = _marked(instructions, first, second)
    return ScheduleError(f"{names} race for {buffer}: no dependency path from the first to the second\n{lines}")


def _marked(instructions: Sequence[Instruction], *places: int) -> str:
    """The lines at these places, marked, with their neighbours."""
    shown = sorted({n for place in places for n in (place - 1, place, place + 1) if 0 <= n < len(instructions)})
    return "\n".join(f"{'>' if n in places else ' '} {instructions[n]}" for n in shown)
