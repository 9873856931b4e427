"""Orders in which some work of a rank computes while other work communicates.

Partitions of one micro-batch (`stage_major`). A pipeline is a run of consecutive operators that are cut into the same number of
partitions; it crosses layers without a barrier. A stage of it is a maximal run of computation with the communication that
follows. Stages run one after the other; within a stage, partitions run one after the other, each with its computation and then
its communication: while partition i communicates, partition i+1 computes. Source: Lancet, section 5.3 and figure 9.

Two micro-batches (`interleave`): the backward pass of one and the forward pass of another are independent. A turn of a pass is a
run of computation with the all-to-alls that follow it; the weight gradients after an all-to-all or a transfer are its filling.
The order is: a backward turn, a forward turn, the filling of the backward turn, and so on. So the forward turn and the filling
hide a backward all-to-all; the filling and the next backward turn hide a forward all-to-all. If one pass has more turns, they are
spread evenly over those of the other.
- The forward pass posts its receives from the previous stage first.
- It sends before the last backward turn if it can, because the next stage waits for it. With `StageOverlap.sends_late` it sends
  after that turn, which hides all-to-alls that are longer than the filling before it.
- In an interleaved pipeline the two passes may be of one model chunk or of two.
This goes beyond Lancet, which considers one micro-batch at a time.

If the host runs ahead of the device (`counts_read_late`), a dispatch moves after the computation that follows it: the host must
read the counts of the dispatched rows, and while it waits the device executes the computation queued before.
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
    """The partition of a micro-batch that an instruction processes: number `index` of `count`."""

    index: int = 0
    count: int = 1

    @property
    def partition(self) -> tuple[int, ...]:
        """The `partition` field of an instruction; empty if it is not cut."""
        return (self.index,) if self.count > 1 else ()


WHOLE = Part()


def stage_major(
    operators: Sequence[T], partitions_of: Callable[[T], int], communicates: Callable[[T], bool], last_first: bool
) -> Iterator[tuple[T, Part]]:
    """Every operator once per partition, in the order of the module docstring; operators that are not cut keep their place.

    Args:
        operators: in the order of one partition.
        partitions_of: number of partitions of an operator; 1: not cut.
        last_first: partitions in descending order, for backward passes.
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
    """Records how each buffer is cut into partitions, and names the buffers of instructions accordingly.

    An instruction of a partition writes the buffer of that partition (`a.L0.m0.p1`). It reads the same partition if the buffer is
    cut into as many, all partitions if it is cut into another number, the buffer itself if it is not cut, and takes its share of
    them. An instruction that is not cut reads all partitions, in ascending order.
    """

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}

    def name(
        self, reads: Sequence[str], writes: Sequence[str], part: Part = WHOLE, into: int = 1
    ) -> tuple[list[str], list[str]]:
        """The names of the buffers that one instruction reads and writes; records the partitions of the written ones.

        Args:
            into: number of partitions that an instruction which is not cut writes.
        """
        read = [name for buffer in reads for name in self._read(buffer, part)]
        written = []
        for buffer in writes:
            # A buffer that is also read is accumulated and keeps its partitions. Weight gradients are never cut: all
            # partitions add to one sum.
            if buffer not in reads and parse_buffer(buffer).role is not BufferRole.GRADIENT:
                self._parts[buffer] = max(part.count, into)
            written += self._read(buffer, part)
        return read, written

    def parts(self, buffer: str) -> tuple[str, ...]:
        """The names of all partitions of a buffer."""
        return tuple(self._read(buffer, WHOLE))

    def _read(self, buffer: str, part: Part) -> list[str]:
        count = self._parts.get(buffer, 1)
        if count == 1:
            return [buffer]
        indices = [part.index] if part.count == count else range(count)
        return [partition_of(buffer, index) for index in indices]


@dataclass(slots=True)
class Turn:
    """Computation, the all-to-alls after it, and the weight gradients that hide the last of them (`filling`)."""

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
    """Split a pass into turns: a new one begins with each computation after an all-to-all."""
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
    """Two passes of different micro-batches in the order of the module docstring; each pass keeps its internal order."""
    # A receive is posted at its place in the list; after backward turns it would delay the sending stage.
    received = list(takewhile(lambda draft: draft.receives, forward))
    yield from received
    backward_turns = turns_of(backward)
    forward_turns = turns_of(forward[len(received) :])
    # The next stage waits for the send of the forward pass, so it comes before the last backward turn; unless only that turn can
    # hide the forward pass's last all-to-all, because the turn before has no filling.
    sends_early = (
        not sends_late and len(backward_turns) > 1 and bool(backward_turns[-2].filling) and forward_turns[-1].sends
    )
    ending, spread = (forward_turns.pop(), len(backward_turns) - 1) if sends_early else (Turn(), len(backward_turns))
    for number, turn in enumerate(backward_turns):
        if turn is backward_turns[-1]:
            yield from ending.work
        yield from turn.work
        # Rounded prefixes write every forward turn exactly once, whichever pass has more turns.
        first, last = (len(forward_turns) * min(n, spread) // spread for n in (number, number + 1))
        for other in forward_turns[first:last]:
            yield from other.work
        # Last, so that the filling also hides the all-to-all of the forward turn.
        yield from turn.filling


def counts_read_late(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The list with every reader of counts moved after the independent computation that follows it, for a host that runs ahead.

    1. A dispatch is held back while the computation that follows does not need its rows: gate p+1 runs before dispatch p, and the
       experts of the second-to-last partition before the last dispatch.
    2. All-to-alls of counts also overtake it: those of partition p+1 travel while the host reads those of partition p.
    3. Any other communication releases the dispatch, so channels keep their order, and operations meet as before on all ranks.
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
    """Whether a draft may overtake an earlier one that is held back."""
    is_count = draft.kind == "collective" and any(parse_buffer(name).role is BufferRole.SPLITS for name in draft.writes)
    if not is_count and draft.kind not in ("compute", "weight-gradient"):
        return False
    touched = {*draft.reads, *draft.writes}
    return touched.isdisjoint(held.writes) and not set(draft.writes).intersection(held.reads)
