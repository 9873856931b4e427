"""The order in which a rank starts its instructions, written down as dependencies.

Buffers say what must have been computed; they do not say when a host gets round to starting something. Two runners start
instructions in different orders, and a list names the waits of the one that will run it, so that whoever simulates or checks the
list sees what will be executed.

- The executor (stages that overlap by their own lists) goes through its list from top to bottom. A communication starts behind
  the computation that stands before it: a receive is not posted earlier, and nothing is sent to a stage that has not posted it.
  Where starting a communication waits for another one, as a dispatch waits for its counts, the computation behind it waits, too.
- megatron-core's 1F1B schedule waits for its transfers: a transfer starts behind all computation before it, and computation
  behind all transfers before it.
- megatron-core's interleaved schedule and the resharding of unlike stages run transfers beside computation: no wait is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.plan import Plan

COMMUNICATION = ("collective", "point-to-point")


def in_issue_order(plan: Plan, instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list of one rank with the waits of the runner that will follow it."""
    if any(stage.overlap.is_listed for stage in plan.stages):
        return issued_one_by_one(instructions)
    if plan.pipeline_schedule == "1f1b" and not plan.transfers:
        return waiting_for_transfers(instructions)
    return tuple(instructions)


def issued_one_by_one(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The waits of the executor, which starts one instruction after the other."""
    waits = _Waits()
    communications = {i.id for i in instructions if i.kind in COMMUNICATION}
    last_computation: tuple[int, ...] = ()
    waited_for: set[int] = set()
    for instruction in instructions:
        before: set[int] = set()
        if instruction.channel == COMPUTE:
            before, waited_for, last_computation = waited_for, set(), (instruction.id,)
        elif instruction.kind in COMMUNICATION:
            before = set(last_computation)
            waited_for |= communications.intersection(instruction.after)
        waits.append(instruction, before)
    return tuple(waits.ordered)


def waiting_for_transfers(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The waits of megatron-core's 1F1B schedule, whose transfers and computation never run at the same time."""
    waits = _Waits()
    last_computation: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()
    for instruction in instructions:
        before: tuple[int, ...] = ()
        if instruction.kind == "point-to-point":
            before, transfers = last_computation, (*transfers, instruction.id)
        elif instruction.channel == COMPUTE:
            before, last_computation, transfers = transfers, (instruction.id,), ()
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
        for channel, place in (*self._clocks[number].items(), self._position[number]):
            if clock.get(channel, -1) < place:
                clock[channel] = place
