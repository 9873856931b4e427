"""Seconds of a stage whose parameter groups step by themselves (ZeRO 2 and 3, offloading), for many strategies at once.

Terms. A part is a parameter group: embedding, a layer, a prediction layer, head. A use is one pass of one micro-batch through it.
Contract. The times are those of the list that plan/lowering/optimizer_state.py writes, with uses in place of operators: its waits
are here, with the number of the step there. What runs at the same time slows each other down (slots.py); what goes on
from earlier slots does so as long as both run.
1. The updates in front of the first forward pass; where weights are offloaded in front of the first use of each part.
2. What a use needs is loaded while the use before it computes, and waits for the end of the last use that has ended.
3. Saved activations leave behind a forward use, gradients behind a backward use.
4. A use waits for what left two uses before.
5. Between passes hidden states go to other stages and come from them. With one chunk the next pass waits for them; with more
   they go on beside it. Either way they and collectives of states that share a link with them take longer.
6. A few micro-batches are played: the first, one that every further one repeats (`stable`), and the last. Once without updates,
   whose copies would slow down the one that stands for many; once with them, which tells what they add to the first pass and
   leave behind for later ones; and once by a stage that waits in front of forward passes and its last backward pass.

Legend: K kinds of parts, N strategies. `simulate/engine.py` is the slow twin.
Source: Mist, section 5.1 and figure 10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved, one_f_one_b
from moe_overlap.tuner.cost.slots import Part, Slots, SlotTable, Use
from moe_overlap.tuner.cost.stage import UseBytes
from moe_overlap.tuner.cost.stage_channels import StageChannels

Floats = NDArray[np.float64]
STABLE = 2
"""The first micro-batch that stands for all further ones."""
GROUP = 2
"""Micro-batches that pass a chunk before the next chunk is entered; in pipelines of more stages there are more of them."""


@dataclass(frozen=True, slots=True)
class PlayedStage:
    """Seconds of the passes of a stage; [N] each. What is not said to wait has its input in time.

    Attributes:
        forward, backward: of a micro-batch that all further ones repeat.
        first: of the first forward pass of a chunk beyond a part of `forward`, with the updates in front of it.
        enter: of all passes from there to the first one of the last chunk beyond such parts.
        behind: of the passes after those beyond what they take without updates, which leave copies and collectives behind.
        waited: of the first forward pass beyond `forward`, where the stage has waited for its input long enough for every update.
        again: of a forward pass right behind another one, beyond `forward`.
        turn: of the first backward pass beyond `backward`: no sum of gradients is there yet. On the first stage with what slows
            down the passes from there on: copies that updates have left behind.
        drain: of the last backward pass beyond `backward`; all stages but the last have waited for it.
        rush: the same where it is right behind another one, and has not waited.
        tail: from its end until everything has been reduced and copied.
        buffer_bytes: peak of what is on the device for a while, less what of the activations in flight is not held at that time.
        update_bytes: peak beside the updates, which run before activations are held.
    """

    forward: Floats
    backward: Floats
    first: Floats
    enter: Floats
    behind: Floats
    waited: Floats
    again: Floats
    turn: Floats
    drain: Floats
    rush: Floats
    tail: Floats
    buffer_bytes: Floats
    update_bytes: Floats


def play_stage(parts: Sequence[Part], table: SlotTable, sizes: UseBytes, ahead: int, waits: bool) -> PlayedStage:
    """Seconds of a stage.

    Args:
        parts: the stage's, in order of their forward pass.
        ahead: 0 on the last stage of a pipeline; 1 stands for forward passes before the first backward pass.
        waits: whether another stage stands before it.
    """
    chunks = [*dict.fromkeys(part.chunk for part in parts)]
    order = _order(chunks, ahead)
    uses = [
        Use(index, step.direction == "backward", step.micro_batch)
        for step in order
        for index in _indices(parts, step.chunk, step.direction == "backward")
    ]
    slots = Slots(parts, uses, table)
    directions = [step.direction for step in order]
    filling = order[: directions.index("backward")]
    emptying = order[len(order) - directions[::-1].index("forward") + 1 :]

    def run(*noted: str, updates: bool = True) -> _Run:
        played = StageChannels(parts, table.seconds, table.kind, slots, sizes, updates)
        return _Run(played, parts, sizes, ahead, waits, emptying, noted)

    # Memory: beside updates there is most where nothing waits, and gradients on their way are most where the stage has waited.
    updating = run(UPDATING)
    updating.play(forward_waits=False, drains=False)
    busy = run(updates=False) if ahead else run(PASSING, updates=False)
    busy.play(forward_waits=False, drains=False)
    idle = busy
    # The only stage of a pipeline never waits for another.
    if waits or ahead:
        idle = run(PASSING) if ahead else run()
        idle.play(forward_waits=waits, drains=bool(ahead))
    group = 1 if len(chunks) == 1 else GROUP
    stable = range(STABLE, STABLE + group)
    # Forward passes ahead stand before the first backward pass: a cycle has the forward pass of a later micro-batch.
    cycle = range(STABLE + ahead * group, STABLE + (ahead + 1) * group)
    forward, backward = busy.mean("forward", cycle), busy.mean("backward", stable)
    usual = {
        step: busy.mean(step.direction, stable if step.direction == "backward" else cycle, step.chunk) for step in order
    }
    nothing = np.zeros_like(forward)

    def beyond(steps: Sequence[Step], played: _Run = busy) -> Floats:
        """Seconds of some passes of a chunk beyond the usual ones."""
        return sum((played.taken[step] - usual[step] for step in steps), start=nothing)

    entered = max(number for number, step in enumerate(filling) if step.micro_batch == 0) + 1
    # Where no pass follows, those between the chunks' first ones stand for more of them in longer pipelines.
    followed = filling[entered:] or [step for step in filling if step.micro_batch > 0]
    again, rush = (beyond(steps) * len(chunks) / max(1, len(steps)) for steps in (followed, emptying))
    ends = idle if ahead else busy

    def slowed(steps: Sequence[Step]) -> Floats:
        """Seconds by which what updates leave behind slows down some passes."""
        return sum((updating.taken[step] - busy.taken[step] for step in steps), start=nothing)

    # The first stage always does all its updates. The passes that it makes before it has waited for a gradient are told apart.
    turned = len(filling) if ahead and not waits else len(order)
    return PlayedStage(
        forward=forward,
        backward=backward,
        first=beyond(order[:1], updating),
        enter=beyond(filling[1:entered], updating),
        behind=slowed(order[entered:turned]),
        waited=idle.mean("forward", range(1)) - forward if waits else nothing,
        again=again,
        turn=(busy if ahead else idle).mean("backward", range(1)) - backward + slowed(order[turned:]),
        drain=ends.mean("backward", range(slots.last, slots.last + 1)) - backward,
        rush=rush,
        tail=ends.played.ended - ends.ends[order[-1]],
        buffer_bytes=np.max([*updating.later, *busy.later, *idle.later], axis=0),
        update_bytes=np.max(updating.early, axis=0),
    )


UPDATING, PASSING = "updating", "passing"
"""Peaks that a run notes: in the first micro-batch's forward passes, beside updates, and later."""


class _Run:
    """A stage that plays its passes once.

    Attributes:
        taken: seconds of the passes, with what they wait for of their own stage.
        ends: when they have ended.
        early, later: peaks beside the updates, and beside the first, a stable and the last micro-batches.
    """

    def __init__(
        self,
        played: StageChannels,
        parts: Sequence[Part],
        sizes: UseBytes,
        ahead: int,
        waits: bool,
        emptying: Sequence[Step],
        noted: Sequence[str],
    ) -> None:
        self.played, self._parts, self._sizes, self._ahead = played, parts, sizes, ahead
        self._emptying, self._noted = emptying, noted
        self._chunks, self._waits = [*dict.fromkeys(part.chunk for part in parts)], waits
        self._virtual = len(self._chunks)
        nothing = np.zeros_like(played.computed)
        self.taken: dict[Step, Floats] = defaultdict(lambda: nothing)
        self.ends: dict[Step, Floats] = {}
        self.early, self.later = [nothing], [nothing]
        self._window: list[tuple[int, Use, Floats, Floats]] = []

    def mean(self, direction: str, micro_batches: range, chunk: int | None = None) -> Floats:
        """Seconds of some micro-batches in one direction, through one chunk or all of them, on average."""
        taken = (
            seconds
            for step, seconds in self.taken.items()
            if step.direction == direction and step.micro_batch in micro_batches and chunk in (None, step.chunk)
        )
        return sum(taken, start=np.zeros_like(self.played.computed)) / len(micro_batches)

    def play(self, forward_waits: bool, drains: bool) -> None:
        """Play all uses.

        Args:
            forward_waits: whether the stage has waited for the input of every forward pass.
            drains: the same of the last micro-batch's backward passes.
        """
        played, slots = self.played, self.played.slots
        # Buffers count beside uses whose peaks are noted alone, and those are looked at two uses late.
        held_until = 2 + max((place for place, use in enumerate(slots.uses) if self._notes(use)), default=-3)
        played.holds = held_until >= 0
        played.begin(slots.uses[0])
        for place, use in enumerate(slots.uses):
            step, before = self._step(use), played.computed
            last = self._step(slots.uses[place - 1]) if place else None
            opens = step != last
            waits = opens and (forward_waits if not use.backward else drains and use.micro_batch == slots.last)
            if opens and last is not None and not waits:
                crossing = self._crosses(last, is_input=False) + self._crosses(step, is_input=True)
                before = played.transfer(crossing, blocks=self._virtual == 1 or played.kind.transfers_wait)
            played.holds = place <= held_until
            begin = played.advance(place, waits=waits)
            self.ends[step] = played.computed
            self.taken[step] = self.taken[step] + played.computed - (begin if waits else before)
            self._note_peaks(place, use, begin)
        played.leave()
        while self._window:
            self._note_peak(*self._window.pop(0))

    def _step(self, use: Use) -> Step:
        return Step("backward" if use.backward else "forward", self._parts[use.index].chunk, use.micro_batch)

    def _crosses(self, step: Step, is_input: bool) -> bool:
        """Whether the input or the output of a pass comes from or goes to another stage."""
        at_start, at_end = step.chunk == self._chunks[0], step.chunk == self._chunks[-1]
        if is_input == (step.direction == "forward"):
            return self._waits or self._ahead > 0 and not at_start
        return self._ahead > 0 or self._waits and not at_end

    @staticmethod
    def _updates(use: Use) -> bool:
        """Whether updates are made in front of a use or beside it."""
        return use.micro_batch == 0 and not use.backward

    def _notes(self, use: Use) -> bool:
        """Whether the peak beside a use may be noted."""
        return (UPDATING if self._updates(use) else PASSING) in self._noted

    def _note_peaks(self, place: int, use: Use, begin: Floats) -> None:
        uses, ahead = self.played.slots.uses, self._ahead
        # Two uses late: the next one has loaded its gradients by then, and it is known when they leave.
        if len(self._window) > 1:
            self._note_peak(*self._window.pop(0))
        # Of a forward pass the last use counts: no more is held before it.
        turns_back = use.backward or place + 1 < len(uses) and uses[place + 1].backward
        group = 1 if self._virtual == 1 else GROUP
        first = 0 if use.backward else ahead * group
        looked_at = use.micro_batch == first or use.micro_batch - first in range(STABLE, STABLE + group)
        looked_at |= use.backward and (use.micro_batch == self.played.slots.last or self._step(use) in self._emptying)
        if self._notes(use) and (self._updates(use) or (turns_back and looked_at)):
            self._window.append((place, use, begin, self.played.computed))

    def _note_peak(self, place: int, use: Use, begin: Floats, end: Floats) -> None:
        peak, chunk = self.played.peak_bytes(place, begin, end), self._parts[use.index].chunk
        if self._ahead and not use.backward and use.micro_batch == 0:
            self.early.append(peak + _saved(self._parts, self._sizes, range(use.index + 1)))
            return
        ended = _saved(self._parts, self._sizes, range(use.index + 1, len(self._parts)), chunk)
        if self._step(use) in self._emptying:
            # Backward passes in a row: more gradients wait to leave, and one pass fewer is in flight.
            ended = ended + _saved(self._parts, self._sizes, range(len(self._parts)), chunk)
        self.later.append(peak - ended)


def _saved(parts: Sequence[Part], sizes: UseBytes, indices: Iterable[int], chunk: int | None = None) -> Floats:
    """Bytes of one micro-batch that some of the parts (of a chunk) save on the device."""
    rows = (parts[index].row for index in indices if chunk is None or parts[index].chunk == chunk)
    return sum((sizes.saved[row] for row in rows), start=np.zeros_like(sizes.saved[0]))


def _order(chunks: Sequence[int], ahead: int) -> list[Step]:
    """The passes that are played: those of a pipeline of two stages, as a chunk's micro-batches come in groups."""
    if len(chunks) == 1:
        order = one_f_one_b(2, 1 - ahead, STABLE + 2)
    else:
        order = interleaved(GROUP, 1 - ahead, len(chunks), STABLE + 2 * GROUP)
    return [Step(step.direction, chunks[step.chunk], step.micro_batch) for step in order]


def _indices(parts: Sequence[Part], chunk: int, is_backward: bool) -> list[int]:
    indices = [index for index, part in enumerate(parts) if part.chunk == chunk]
    return indices[::-1] if is_backward else indices
