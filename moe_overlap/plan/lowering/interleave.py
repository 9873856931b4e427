"""Orders in which work of one rank computes while other work communicates.

Partitions of one micro-batch (`stage_major`). A pipeline is a run of neighbouring operators that are cut into the same number of
partitions; it crosses layers without a barrier. A stage of it is a maximal run of computation with the communication that
follows. Stage after stage; inside a stage partition after partition, each with its computation, then its communication: while
partition i communicates, partition i+1 computes. Source: Lancet, section 5.3 and figure 9.

Two micro-batches (`interleave`): the backward pass of one and the forward pass of another, which do not depend on each other. A
turn of a pass is a run of computation with the all-to-alls that follow it; the weight gradients behind an all-to-all or a
transfer are its filling. The backward pass takes a turn, then the forward pass, then the filling of the former, and so on: behind
a backward all-to-all there is the forward turn and the filling, behind a forward one the filling and the next backward turn.
Where one pass has more turns, they are spread evenly over those of the other. The forward pass asks at once for what it receives
from the stage before. It sends before the last backward turn where it can: the next stage waits for that. The plan may ask for
the send behind that turn (`StageOverlap.sends_late`), as the turn hides all-to-alls that are longer than the filling in front of
it. In an interleaved pipeline both passes may be of one chunk or of two. This goes beyond Lancet, which looks at one micro-batch
at a time.

Where the host runs ahead of the device (`counts_read_late`), a dispatch moves behind the computation that follows it: the host
must read the counts of its rows, and while it waits for them the device computes what has been queued before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import TypeVar

from moe_overlap.plan.instructions import BufferRole, parse_buffer, partition_of, reads_counts
from moe_overlap.plan.lowering.dependencies import Draft

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a micro-batch that an instruction handles: partition `index` of `count`."""

    index: int = 0
    count: int = 1

    @property
    def partition(self) -> tuple[int, ...]:
        """The partition that stands in an instruction; empty for the whole."""
        return (self.index,) if self.count > 1 else ()


WHOLE = Part()


def stage_major(
    operators: Sequence[T], partitions_of: Callable[[T], int], communicates: Callable[[T], bool], last_first: bool
) -> Iterator[tuple[T, Part]]:
    """Every operator once per partition, in the order above; operators that are not cut stay where they are.

    Args:
        operators: in the order of one partition.
        partitions_of: 1 where an operator is not cut.
        last_first: partitions in descending order, as a backward pass runs them.
    """
    for count, members in groupby(operators, partitions_of):
        order = range(count)[:: -1 if last_first else 1]
        for stage in _stages(members, communicates):
            yield from ((operator, Part(index, count)) for index in order for operator in stage)


def _stages(operators: Iterable[T], communicates: Callable[[T], bool]) -> list[list[T]]:
    """Cut where computation follows communication."""
    stages: list[list[T]] = []
    for operator in operators:
        if not stages or (communicates(stages[-1][-1]) and not communicates(operator)):
            stages.append([])
        stages[-1].append(operator)
    return stages


class CutBuffers:
    """Records which buffers stand in partitions, and names what an instruction reads and writes accordingly.

    What an instruction of a partition writes is the buffer of that partition (`a.L0.m0.p1`). What it reads is its own
    part where the buffer is cut as it is, all parts where it is cut otherwise, the whole where it is not cut; the
    reader takes its share of them. A whole instruction reads all parts, in ascending order.
    """

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}

    def name(
        self, reads: Sequence[str], writes: Sequence[str], part: Part = WHOLE, into: int = 1
    ) -> tuple[list[str], list[str]]:
        """The names of one instruction's buffers; what it writes is recorded.

        Args:
            into: parts that a whole instruction leaves what it writes in.
        """
        read = [name for buffer in reads for name in self._read(buffer, part)]
        written = []
        for buffer in writes:
            # What is also read is added to and stays cut as it is. Weight gradients are never cut: all partitions add
            # to one sum.
            if buffer not in reads and parse_buffer(buffer).role is not BufferRole.GRADIENT:
                self._parts[buffer] = max(part.count, into)
            written += self._read(buffer, part)
        return read, written

    def parts(self, buffer: str) -> tuple[str, ...]:
        """All names of a buffer."""
        return tuple(self._read(buffer, WHOLE))

    def _read(self, buffer: str, part: Part) -> list[str]:
        count = self._parts.get(buffer, 1)
        if count == 1:
            return [buffer]
        indices = [part.index] if part.count == count else range(count)
        return [partition_of(buffer, index) for index in indices]


@dataclass(slots=True)
class Turn:
    """Computation, the all-to-alls behind it, and the weight gradients that fill the time of the last of them."""

    work: list[Draft] = field(default_factory=list)
    filling: list[Draft] = field(default_factory=list)

    @property
    def has_exchanged(self) -> bool:
        """Whether the next computation begins another turn."""
        return bool(self.work) and self.work[-1].kind == "collective"

    @property
    def sends(self) -> bool:
        """Whether it ends in a transfer to another stage."""
        return bool(self.work) and self.work[-1].kind == "point-to-point" and not self.work[-1].receives

    @property
    def communicates(self) -> bool:
        """Whether it ends in an all-to-all or a transfer."""
        return self.has_exchanged or (bool(self.work) and self.work[-1].kind == "point-to-point")


def turns_of(drafts: Sequence[Draft]) -> list[Turn]:
    """Cut a pass where computation follows an all-to-all."""
    turns = [Turn()]
    for draft in drafts:
        if draft.kind == "weight-gradient" and turns[-1].communicates:
            turns[-1].filling.append(draft)
            continue
        if draft.kind == "compute" and turns[-1].has_exchanged:
            turns.append(Turn())
        turns[-1].work.append(draft)
    return turns


def interleave(backward: Sequence[Draft], forward: Sequence[Draft], *, sends_late: bool = False) -> Iterator[Draft]:
    """Two passes of different micro-batches in the order above; each keeps its own."""
    # A receive is posted where it stands in the list; behind backward turns it would hold up the stage that sends.
    received = list(takewhile(lambda draft: draft.receives, forward))
    yield from received
    mine = turns_of(backward)
    theirs = turns_of(forward[len(received) :])
    # The next stage waits for what the forward pass sends, so that goes before the last backward turn; unless nothing else would
    # hide the forward pass's last all-to-all, as no weight gradients stand behind the turn before.
    sends_early = not sends_late and len(mine) > 1 and bool(mine[-2].filling) and theirs[-1].sends
    ending, spread = (theirs.pop(), len(mine) - 1) if sends_early else (Turn(), len(mine))
    for number, turn in enumerate(mine):
        if turn is mine[-1]:
            yield from ending.work
        yield from turn.work
        # Rounded prefixes: every forward turn is written once, whichever pass has more turns.
        first, last = (len(theirs) * min(n, spread) // spread for n in (number, number + 1))
        for other in theirs[first:last]:
            yield from other.work
        # Last, so that the forward turn's own all-to-all is hidden even before the next backward turn begins.
        yield from turn.filling


def counts_read_late(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """A list in which what needs counts of rows stands behind the computation that follows it, for a host that runs ahead.

    1. A dispatch is held back while computation follows that does not need what it delivers: gate p+1 before dispatch p, the
       experts of the partition before in front of the last dispatch.
    2. Counts pass it, too: those of partition p+1 are under way while the host reads those of partition p.
    3. Any other communication ends this: the order of a channel stays as it is, and with it what meets what on other ranks.
    """
    held: Draft | None = None
    for draft in drafts:
        if held is not None and not _passes(draft, held):
            yield held
            held = None
        if held is None and draft.kind == "collective" and reads_counts(draft.reads):
            held = draft
        else:
            yield draft
    if held is not None:
        yield held


def _passes(draft: Draft, held: Draft) -> bool:
    """Whether a draft may run before one that stands in front of it."""
    is_count = draft.kind == "collective" and any(parse_buffer(name).role is BufferRole.SPLITS for name in draft.writes)
    if not is_count and draft.kind not in ("compute", "weight-gradient"):
        return False
    touched = {*draft.reads, *draft.writes}
    return touched.isdisjoint(held.writes) and not set(draft.writes).intersection(held.reads)
