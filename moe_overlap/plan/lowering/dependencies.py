"""Dependencies of instructions: what buffers demand, what the order of starting demands, and the race check.

Contract. `ListBuilder` gives every draft its id and what its buffers make it wait for; `in_issue_order` adds the waits of the
runner that will follow the list; `last_uses` says how long each buffer must be kept; `check_races` accepts a list only if
instructions that touch one buffer on different channels are ordered.

Issue order. Buffers say what must have been computed; they do not say when a host gets round to starting something. A list names
the waits of its runner, so that whoever simulates or checks the list sees what will be executed.
- The executor (stages that overlap by their own lists) goes through its list from top to bottom. A communication starts behind
  the computation that stands before it: a receive is not posted earlier, and nothing is sent to a stage that has not posted it.
  Where starting a communication waits for another one, as a dispatch waits for its counts, later computation waits, too.
  The norm waits for what was sent: all ranks meet there, behind all that they receive, so that this wait costs nothing.
- Where a device queues what the host gives it (`host_runs_ahead`), starting a communication holds nothing up, and it starts as
  soon as its buffers allow. The host itself waits for counts of rows alone, and issues nothing while it does.
- megatron-core's 1F1B schedule waits for its transfers: a transfer starts behind all computation before it, and computation
  behind all transfers before it.
- megatron-core's interleaved schedule and the resharding of unlike stages run transfers beside computation: nothing is added but
  that megatron-core recomputes inside a backward pass, behind the gradient that it receives.
- megatron-core's MoE layer waits for its all-to-alls in the same way, so that shared experts hide none of them; what a flag hides
  (--moe-shared-expert-overlap) is a matter of prices.

Races. `i` happens before `j` where a path leads from i to j over `after` and over the order of a channel (an earlier instruction
of a channel finishes before a later one starts). Two accesses of a buffer, at least one of them writing, race unless one happens
before the other. Each instruction carries a vector clock: per channel, how many of its instructions have finished when it starts.
1. The clock is the maximum over the predecessor on the channel and everything in `after`, each counted as finished.
2. A read must know the last write of its buffer; a write the last write and, per channel, the last read since.
3. Older accesses need no look: the accesses of step 2 already know them.
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
    """The list of one rank with the waits of the runner that will follow it."""
    if plan.follows_lists:
        return queued_one_by_one(instructions) if plan.host_runs_ahead else issued_one_by_one(instructions)
    groups = (EXPERT, PIPELINE) if plan.pipeline_schedule == "1f1b" else (EXPERT,)
    return waiting_for(recomputed_behind_gradients(instructions), lambda i: i.channel_group in groups)


def issued_one_by_one(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The waits of the executor, which starts one instruction after the other."""
    waits = _Waits()
    communications = {i.id for i in instructions if i.kind in COMMUNICATION}
    last_computation: tuple[int, ...] = ()
    waited_for: set[int] = set()
    last_sends: dict[str, int] = {}
    for instruction in instructions:
        before: set[int] = set()
        if instruction.channel == COMPUTE:
            # While the host waits to start a communication it starts nothing else: the next computation waits as well.
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
    """The waits of the executor where a device queues what the host gives it.

    Nothing holds the host up but numbers that it must read, the counts of rows: what stands behind their reader in the list is
    not issued before they are there, on whichever channel.
    """
    waits = _Waits()
    counted: dict[str, int] = {}
    last_read: tuple[int, ...] = ()
    last_sends: dict[str, int] = {}
    for instruction in instructions:
        if reads_counts(instruction.reads):
            # The latest stands for all before it, since counts have a channel that runs in order.
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
    """The waits of autograd's recomputation, which begins when the gradient of a pass has come."""
    waits = _Waits()
    received: dict[tuple[int | None, int | None], int] = {}
    for instruction in instructions:
        operator, of_pass = instruction.operator, (instruction.chunk, instruction.micro_batch)
        if operator.kind is OperatorKind.RECEIVE and operator.phase == BACKWARD:
            received[of_pass] = instruction.id
        is_again = operator.phase == RECOMPUTE and of_pass in received
        waits.append(instruction, {received[of_pass]} if is_again else ())
    return tuple(waits.ordered)


def waiting_for(instructions: Sequence[Instruction], blocks: Callable[[Instruction], bool]) -> tuple[Instruction, ...]:
    """The waits of a runner some of whose communication never runs at the same time as computation.

    Args:
        blocks: whether an instruction is such communication.
    """
    waits = _Waits()
    last_computation: tuple[int, ...] = ()
    under_way: tuple[int, ...] = ()
    for instruction in instructions:
        before: tuple[int, ...] = ()
        if blocks(instruction):
            # The last computation stands for all before it, since a channel runs in order.
            before, under_way = last_computation, (*under_way, instruction.id)
        elif instruction.channel == COMPUTE:
            before, last_computation, under_way = under_way, (instruction.id,), ()
        waits.append(instruction, before)
    return tuple(waits.ordered)


class _Waits:
    """Adds waits to a list from its top to its bottom, and leaves out those that already hold.

    A clock per instruction says how far each channel must have come when it starts: behind what it waits for, and behind
    what stands before it on its channel.
    """

    def __init__(self) -> None:
        self.ordered: list[Instruction] = []
        self._clocks: dict[int, dict[str, int]] = {}
        self._position: dict[int, tuple[str, int]] = {}
        self._last_on: dict[str, int] = {}

    def append(self, instruction: Instruction, before: Iterable[int]) -> None:
        """Append an instruction that starts behind `before`, too."""
        clock: dict[str, int] = {}
        if instruction.channel in self._last_on:
            self._advance(clock, self._last_on[instruction.channel])
        for number in instruction.after:
            self._advance(clock, number)
        added = []
        # The latest first: it often implies the earlier ones.
        for number in sorted(before, reverse=True):
            # The clock answers by one comparison whether the wait already holds; a search of paths would be quadratic.
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
            return  # Whatever knows that it has finished knows all that it knew.
        clock[channel] = place
        for channel, place in self._clocks[number].items():
            if clock.get(channel, -1) < place:
                clock[channel] = place


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """An instruction before it has a place in a list; fields as there."""

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
        """Its name, taken apart."""
        return parse_operator(self.name, "draft")

    @property
    def receives(self) -> bool:
        """Whether it receives over a stage boundary."""
        return self.kind == "point-to-point" and self.operator.kind is OperatorKind.RECEIVE


def build_list(stage: int, drafts: Iterable[Draft]) -> tuple[Instruction, ...]:
    """The list of one rank of a stage: drafts in issue order, with ids and what each has to wait for."""
    builder = ListBuilder(stage)
    builder.extend(drafts)
    return builder.finish()


class ListBuilder:
    """Appends instructions of one rank.

    `after` is what the buffers say: what is read comes after who wrote it, what is written after who wrote or read it.
    Left out is what another dependency implies, and, inside one channel, all but the writers of what is only read.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._list: list[Instruction] = []
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}

    def append(self, draft: Draft | Instruction, after: Iterable[int] = ()) -> int:
        """Append one instruction.

        Args:
            draft: what it does; an instruction of another list leaves its id and its waits behind.
            after: what it waits for besides what its buffers say.
        Returns:
            Its id, which is its place.
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
        found: set[int] = set(after)
        for buffer in reads:
            # What is also written is an accumulation: the loop over the writes finds its last writer, too.
            if buffer in self._writer and buffer not in writes:
                found.add(self._writer[buffer])
        for buffer in writes:
            touched = [*self._readers.get(buffer, ()), *([self._writer[buffer]] if buffer in self._writer else [])]
            # Accesses on the same channel are ordered by it. Explicit edges
            # would chain a gradient sum's additions of all micro-batches.
            found.update(number for number in touched if self._list[number].channel != channel)
        return self._without_implied(self._last_of_each_channel(found, channel))

    def _last_of_each_channel(self, found: set[int], channel: str) -> set[int]:
        """The last dependency on each other channel is enough: that channel runs in order."""
        last: dict[str, int] = {}
        for number in sorted(found):
            last[self._list[number].channel] = number
        return {n for n in found if self._list[n].channel == channel or last[self._list[n].channel] == n}

    def _without_implied(self, found: set[int]) -> tuple[int, ...]:
        """Leave out what a later dependency reaches over its own `after`."""
        if len(found) < 2:
            return tuple(found)
        # Dependencies point backwards only: below the lowest candidate no path leads to another one, which bounds the walk.
        lowest = min(found)
        reached: set[int] = set()
        waiting = [number for kept in found for number in self._list[kept].after]
        while waiting:
            number = waiting.pop()
            if number >= lowest and number not in reached:
                reached.add(number)
                waiting.extend(self._list[number].after)
        return tuple(sorted(found - reached))


def last_uses(instructions: Sequence[Instruction]) -> dict[int, tuple[str, ...]]:
    """Instruction id -> buffers whose content nobody reads after it.

    A buffer that is written anew before it is read again, as a recomputation does it, is not kept in between.
    """
    ends: dict[int, tuple[str, ...]] = {}
    needed: set[str] = set()
    for i in reversed(instructions):
        ends[i.id] = tuple(name for name in dict.fromkeys((*i.reads, *i.writes)) if name not in needed)
        # Writes before reads: an accumulation writes its buffer anew, yet needs what stood there. A piece leaves the others'.
        needed.difference_update(() if i.region else i.writes)
        needed.update(i.reads)
    return ends


INPUTS = frozenset({"tokens", "labels", "gradient", "state", "parameters", "host"})
"""First words of buffers that are there when a step starts."""


@dataclass(slots=True)
class _Buffer:
    """Accesses so far that a later one can still race with."""

    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict)
    """Channel -> its last reading instruction since the last write."""


def check_races(instructions: Sequence[Instruction], inputs: frozenset[str] = INPUTS) -> None:
    """Check one rank's list.

    Args:
        inputs: first words of buffers that may be read before anything wrote them.
    Raises:
        ScheduleError: an id that stands twice, a dependency on what is not earlier in the list, a buffer read before it
            was written, or a race; the message shows the lines.
    """
    places = _places(instructions)
    channels = {name: n for n, name in enumerate(dict.fromkeys(i.channel for i in instructions))}
    channel_of = [channels[i.channel] for i in instructions]
    position: list[int] = []
    clocks: list[list[int]] = []
    last_on: list[int | None] = [None] * len(channels)
    buffers: dict[str, _Buffer] = {}

    def knows(here: int, earlier: int) -> bool:
        return clocks[here][channel_of[earlier]] >= position[earlier]

    for here, instruction in enumerate(instructions):
        mine = channel_of[here]
        previous = last_on[mine]
        # Step 1.
        clock = [0] * len(channels) if previous is None else [*clocks[previous]]
        if previous is not None:
            clock[mine] = position[previous]
        for number in reversed(instruction.after):
            place = places[number]
            # Whatever knows that it has finished knows all that it knew.
            if clock[channel_of[place]] < position[place]:
                clock = list(map(max, clock, clocks[place]))
                clock[channel_of[place]] = position[place]
        clocks.append(clock)
        position.append(1 if previous is None else position[previous] + 1)
        last_on[mine] = here
        for name in instruction.reads:
            buffer = buffers.setdefault(name, _Buffer())
            # Step 2, the last write.
            if buffer.writer is None:
                if parse_buffer(name).word not in inputs:
                    raise ScheduleError(f"{name} is read before anything wrote it\n{_marked(instructions, here)}")
            elif not knows(here, buffer.writer):
                raise _race(instructions, name, buffer.writer, here)
        for name in instruction.writes:
            buffer = buffers.setdefault(name, _Buffer())
            # Step 2, one reader per channel: a channel runs in order, so its last read implies the earlier ones.
            for earlier in (*buffer.readers.values(), *(() if buffer.writer is None else (buffer.writer,))):
                if not knows(here, earlier):
                    raise _race(instructions, name, earlier, here)
            buffer.writer, buffer.readers = here, {}
        for name in instruction.reads:
            # An accumulation counts as the writer alone: who is ordered behind its write is ordered behind its read.
            if name not in instruction.writes:
                buffers[name].readers[mine] = here


def _places(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Id -> place in the list, once ids and dependencies have been found sound."""
    places: dict[int, int] = {}
    known = {instruction.id for instruction in instructions}
    for place, instruction in enumerate(instructions):
        if instruction.id in places:
            raise ScheduleError(f"id {instruction.id} stands twice\n{_marked(instructions, place)}")
        for number in instruction.after:
            if number not in places:
                why = "does not stand before it" if number in known else "does not exist"
                raise ScheduleError(f"dependency {number} {why}\n{_marked(instructions, place)}")
        places[instruction.id] = place
    return places


def _race(instructions: Sequence[Instruction], buffer: str, first: int, second: int) -> ScheduleError:
    names = f"{instructions[first].name} and {instructions[second].name}"
    lines = _marked(instructions, first, second)
    return ScheduleError(f"{names} race for {buffer}: no dependency path from the first to the second\n{lines}")


def _marked(instructions: Sequence[Instruction], *places: int) -> str:
    """The lines at these places, with their neighbours, marked."""
    shown = sorted({n for place in places for n in (place - 1, place, place + 1) if 0 <= n < len(instructions)})
    return "\n".join(f"{'>' if n in places else ' '} {instructions[n]}" for n in shown)
