"""Builds one rank's instruction list and finds the dependencies from the buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from moe_overlap.plan.instructions import COMPUTE, Instruction, Kind


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

    @classmethod
    def of(cls, instruction: Instruction) -> Draft:
        """What an instruction of a list was made from."""
        return cls(**{field.name: getattr(instruction, field.name) for field in fields(cls)})


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

    def append(self, draft: Draft, after: Iterable[int] = ()) -> int:
        """Append one instruction.

        Args:
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
            if buffer in self._writer and buffer not in writes:
                found.add(self._writer[buffer])
        for buffer in writes:
            touched = [*self._readers.get(buffer, ()), *([self._writer[buffer]] if buffer in self._writer else [])]
            found.update(number for number in touched if self._list[number].channel != channel)
        return self._without_implied(self._last_of_each_channel(found, channel))

    def _last_of_each_channel(self, found: set[int], channel: str) -> set[int]:
        """Of the dependencies on another channel the last is enough: that channel runs in order."""
        last: dict[str, int] = {}
        for number in sorted(found):
            last[self._list[number].channel] = number
        return {n for n in found if self._list[n].channel == channel or last[self._list[n].channel] == n}

    def _without_implied(self, found: set[int]) -> tuple[int, ...]:
        """Leave out what a later dependency reaches over its own `after`."""
        if len(found) < 2:
            return tuple(found)
        lowest = min(found)
        reached: set[int] = set()
        waiting = [number for kept in found for number in self._list[kept].after]
        while waiting:
            number = waiting.pop()
            if number >= lowest and number not in reached:
                reached.add(number)
                waiting.extend(self._list[number].after)
        return tuple(sorted(found - reached))
