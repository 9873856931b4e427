"""Builds one rank's instruction list and finds the dependencies from the buffers."""

from __future__ import annotations

from collections.abc import Iterable

from moe_overlap.plan.instructions import COMPUTE, Instruction, Kind


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

    def add(
        self,
        kind: Kind,
        name: str,
        *,
        channel: str = COMPUTE,
        chunk: int | None = None,
        micro_batch: int | None = None,
        partition: tuple[int, ...] = (),
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        sent_bytes: int = 0,
        peers: tuple[int, ...] = (),
        after: Iterable[int] = (),
    ) -> int:
        """Append one instruction.

        Args:
            after: what it waits for besides what its buffers say.
        Returns:
            Its id, which is its place.
        """
        read, written = tuple(reads), tuple(writes)
        instruction = Instruction(
            id=len(self._list),
            kind=kind,
            name=name,
            stage=self._stage,
            chunk=chunk,
            micro_batch=micro_batch,
            partition=partition,
            channel=channel,
            reads=read,
            writes=written,
            bytes=sent_bytes,
            peers=peers,
            after=self._dependencies(channel, read, written, after),
        )
        self._list.append(instruction)
        for buffer in written:
            self._writer[buffer], self._readers[buffer] = instruction.id, []
        for buffer in read:
            if buffer not in written:
                self._readers.setdefault(buffer, []).append(instruction.id)
        return instruction.id

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
