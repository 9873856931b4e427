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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved, one_f_one_b
from moe_overlap.tuner.cost.slots import BETWEEN_RANKS, ListKind, Part, Slots, SlotTable, Use, loads_weights
from moe_overlap.tuner.cost.stage import UseBytes, UseSeconds

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
        played = _Played(parts, table.seconds, table.kind, slots, sizes, updates)
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
        played: _Played,
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


class _Played:
    """When the channels of a stage are free, and what has left it; arrays of [N]."""

    def __init__(
        self, parts: Sequence[Part], seconds: UseSeconds, kind: ListKind, slots: Slots, sizes: UseBytes, updates: bool
    ) -> None:
        self._parts, self.kind, self.slots, self._sizes = parts, kind, slots, sizes
        # Buffers in the order in which they were noted: the places, and [3, H, N] their begins, ends and bytes.
        self._held_at: list[int] = []
        self._held = np.empty((3, HELD, seconds.forward.shape[1]))
        # Updates in front of all uses may last as long as a forward pass.
        self._place = len(parts)
        self.holds = True
        """Whether buffers are noted."""
        self._loaded: dict[Use, list[tuple[str, Floats]]] = {}
        self._fetching: dict[int, Floats] = {}
        self._begun: dict[int, Floats] = {}
        self._rows = {
            row: {field.name: getattr(seconds, field.name)[row] for field in fields(UseSeconds)}
            for row in {part.row for part in parts}
        }
        nothing = np.zeros(seconds.forward.shape[1])
        self._free = dict.fromkeys(("compute", "optimizer", "in", "out", "ranks"), nothing)
        self._nothing, self.computed, self._last_use = nothing, nothing, nothing
        self._gone: dict[str, list[Floats]] = {
            name: [nothing, nothing] for name in ("states", "activations", "gradients")
        }
        self._shared_links = self._transfer_shared = nothing
        self._transfers = bool(seconds.transfer.any())
        # Ends of what earlier uses have left, where the last use has left its own before the next one is computed.
        self._left: dict[str, Floats] | None = None
        self._ready: dict[Use, Floats] = {}
        self._stepped: dict[int, Floats] = {}
        self._used: set[int] = set()
        self._on_host: dict[tuple[str, int, int], Floats] = {}
        self._fetched: dict[int, Floats] = {}
        self._updates = updates
        if not updates:
            self._stepped = dict.fromkeys(range(len(parts)), nothing)
            self._on_host = {("weights", index, 0): nothing for index in range(len(parts))}
            self._used = set(range(len(parts)))
        self._pending: list[tuple[Use, Floats, int]] = []
        self._leaves: tuple[Use, Floats, int] | None = None

    @property
    def ended(self) -> Floats:
        """When all channels have ended."""
        return np.max([*self._free.values()], axis=0)

    def transfer(self, crossing: int, blocks: bool) -> Floats:
        """Send and receive hidden states between two passes; from when on the second one counts.

        A transfer and a collective of states slow each other down on the links that both use, and copies slow down the transfer.
        What it takes by itself is no part of the passes: pipeline.py adds it. What the last use has left goes on meanwhile.

        Args:
            crossing: transfers, one each way at most.
            blocks: whether the next pass waits for them.
        """
        row, end = self._of(self.slots.uses[0].index), self.computed
        if not crossing or not self._transfers:
            return end
        self._left = dict(self._free)
        self.leave()
        alone = row["transfer"] if blocks else crossing * row["transfer"]
        grown, crowd = 1.0 + self._transfer_shared, 1.0 + self._transfer_shared * (crossing if blocks else 1)
        common = np.minimum(alone * grown, np.maximum(0.0, self._free["ranks"] - end) * crowd)
        self._free["ranks"] = self._free["ranks"] + common * (1.0 - 1.0 / crowd)
        if not blocks:
            return end
        copies = 2 * (self._free["in"] > end) + (self._free["out"] > end)
        taken = (alone + common * (1.0 - 1.0 / grown)) * self.slots.table[1].take(BETWEEN_RANKS + copies)
        self._free["compute"] = end + taken
        return end + alone

    def begin(self, use: Use) -> None:
        """Write what stands in front of the first use."""
        if self._updates and not self.kind.offloads_weights:
            self._update_all()
        self.load(use, None)

    def _of(self, index: int) -> dict[str, Floats]:
        return self._rows[self._parts[index].row]

    def _run(self, channel: str, after: Floats, seconds: Floats) -> Floats:
        """The end of work on a channel; `after` where there is none."""
        works = seconds > 0
        # Most channels have work under all strategies of a group, or under none: nothing is chosen for the latter.
        if not works.any():
            return after
        end = np.maximum(self._free[channel], after) + seconds
        self._free[channel] = np.where(works, end, self._free[channel])
        return np.where(works, end, after)

    def _join_ranks(self, index: int, after: Floats, seconds: Floats) -> Floats:
        """The end of a collective of a part's states; what it shares with tokens counts as long as it is the last."""
        self._shared_links = np.where(seconds > 0, self._of(index)["shared"], self._shared_links)
        self._transfer_shared = np.where(seconds > 0, self._of(index)["transfer_shared"], self._transfer_shared)
        return self._run("ranks", after, seconds)

    def _update_all(self) -> None:
        """Step 1."""
        first, sweeps, slots = None, self._nothing, self.slots
        for index in range(len(self._parts)):
            here, after = self._of(index), max(index - 1, 0)
            slow = slots.of_update(after, "rest") if index else 1.0
            taken = here["states_in"] * slow
            begin = self._run("in", self._gone["states"][-2], taken)
            self._fetching[index] = begin - taken
            first = begin if first is None else first
            sweeps = sweeps + here["sweep"]
            stepped = self._run("optimizer", begin, here["sweep"])
            self._stepped[index] = self._store(
                index, stepped, slots.of_update(index, "out"), slots.of_update(index, "gather")
            )
        # Optimizer steps share the device with the first forward pass, which ends no earlier than both take together.
        assert first is not None
        self._shared = first + sweeps

    def _store(self, index: int, stepped: Floats, out: Floats | float, ranks: Floats | float) -> Floats:
        """Store what an optimizer step has updated; the end of what a use of the part waits for.

        Args:
            out, ranks: slowdowns.
        """
        here = self._of(index)
        left = self._run("out", stepped, here["states_out"] * out)
        self._gone["states"].append(left)
        self._hold("states", index, self._fetching[index], left)
        self._hold("gradients", index, self._fetching[index], stepped)
        whole = self._join_ranks(index, stepped, here["gather_updated"] * ranks)
        self._on_host["weights", index, 0] = self._run("out", whole, here["weights"] * out)
        if self.kind.offloads_weights:
            self._hold("weights", index, stepped - here["sweep"], self._on_host["weights", index, 0])
        return whole

    def _step_beside(self, begin: Floats, end: Floats) -> Floats:
        """Optimizer steps of parts that are loaded while a use runs from `begin` to `end`; when both have ended."""
        for use, start, place in self._pending:
            index, gather = use.index, self.slots.of(place, "gather")
            # Two kernels at a time halve each other until the first of them ends.
            sweep = self._of(index)["sweep"]
            both = np.maximum(begin, start)
            common = np.maximum(0.0, np.minimum(end - both, sweep - (both - start)))
            end = end + common
            self._free["optimizer"] = start + sweep + common
            # Updated states leave while the next use runs.
            out = self.slots.of(place + 1, "out")
            self._stepped[index] = self._store(index, self._free["optimizer"], out, gather)
            self._ready[use] = self._join_ranks(index, self._stepped[index], self._of(index)["gather"] * gather)
        self._pending = []
        return end

    def load(self, use: Use, place: int | None) -> None:
        """Step 2: what a use needs, written when the use before it, at this place, begins; None: in front of all uses."""
        index, here, limit = use.index, self._of(use.index), self._last_use
        before = self.slots.uses[place] if place is not None else None
        at = -1 if place is None else place
        gather, rest = self.slots.of(at, "gather"), self.slots.of(at, "rest")
        ready = self._stepped.get(index, self._nothing)
        loaded: list[tuple[str, Floats]] = []
        if loads_weights(self._parts, use, before):
            if index not in self._stepped:
                taken = here["states_in"] * rest
                fetched = self._run("in", self._gone["states"][-2], taken)
                self._fetching[index] = fetched - taken
                begin = np.maximum(fetched, limit)
                self._pending.append((use, begin, at))
                if place is None:
                    self._step_beside(self._nothing, self._nothing)
                    ready = self._ready[use]
            else:
                if self.kind.offloads_weights and index in self._used:
                    moved = here["weights"] * self.slots.of(at, "weights")
                    ready = self._run("in", np.maximum(limit, self._on_host["weights", index, 0]), moved)
                    loaded.append(("weights", ready - moved))
                taken = here["gather"] * gather
                ready = self._join_ranks(index, np.maximum(ready, limit), taken)
                loaded.append(("gathered", ready - taken))
            self._used.add(index)
        if use.backward:
            saved = self._on_host.get(("activations", index, use.micro_batch), self._nothing)
            taken = here["activations"] * rest
            fetched = self._run("in", np.maximum(limit, saved), taken)
            loaded.append(("activations", fetched - taken))
            ready = np.maximum(ready, fetched)
            if use.micro_batch > 0:
                away = self._on_host["gradients", index, 0]
                taken = here["gradients"] * rest
                room = self._gone["gradients"][-2]
                self._fetched[index] = self._run("in", np.maximum(np.maximum(limit, away), room), taken)
                self._fetching[index] = self._fetched[index] - taken
                if not self.kind.scatters:
                    ready = np.maximum(ready, self._fetched[index])
        self._ready[use], self._loaded[use] = ready, loaded

    def advance(self, place: int, waits: bool = False) -> Floats:
        """The use at a place, the loads of the next one, and what the one before leaves; when it begins.

        Args:
            waits: whether the stage has waited for the use until all that it could do was done.
        """
        uses = self.slots.uses
        self._place = max(self._place, place)
        use, behind = uses[place], uses[place + 1] if place + 1 < len(uses) else None
        if waits:
            self.leave()
            if behind is not None:
                # The loads of two uses do not wait for the first of them to begin.
                self.load(behind, place)
            self._step_beside(self._free["compute"], self._free["compute"])
            self._free["compute"] = self.ended
        # Step 4.
        leaving = self._gone["gradients" if use.backward else "activations"]
        gone = leaving[-1 if self._leaves is not None and self._leaves[0].backward == use.backward else -2]
        ready, here = self._ready.pop(use), self._of(use.index)
        begin = np.maximum(np.maximum(self._free["compute"], ready), gone)
        end = begin + here["backward" if use.backward else "forward"] * self.slots.of(place, "compute")
        end = self._beside_older(begin, end, here["sent_backward" if use.backward else "sent_forward"])
        self.leave()
        if behind is not None and not waits:
            self.load(behind, place)
        if self._updates and not self.kind.offloads_weights and not use.backward and use.micro_batch == 0:
            self._shared = self._shared + end - begin
            end = np.maximum(end, self._shared) if use.index == len(self._parts) - 1 else end
        end = self._step_beside(begin, end)
        self._free["compute"] = self.computed = self._last_use = end
        self._leaves = (use, end, place + 1)
        for what, start in self._loaded.pop(use):
            # Shards that came from the host are there until they have been gathered.
            until = np.where(here["gather"] > 0, ready, end) if what == "weights" else end
            self._hold(what, use.index, start, until)
        if use.backward:
            self._begun[use.index] = begin
        else:
            self._begun_forward = begin
        return begin

    def _beside_older(self, begin: Floats, end: Floats, sent: Floats) -> Floats:
        """The end of a use beside copies and collectives of earlier slots that go on; they end later, too."""
        table, stop, left = self.slots.table, end, self._left or self._free
        self._left = None
        for channel, stream in (("ranks", 1), ("in", 2), ("out", 3)):
            common = np.minimum(left[channel], stop) - begin
            if common.max() <= 0:
                continue
            common = np.maximum(0.0, common)
            both = 8 | 8 >> stream
            share = sent if stream == 1 else 0.0
            own, other = (table[which, both] - 1.0 for which in (0, stream))
            # While tokens travel, both slow each other down on links that both use.
            crowded = share * self._shared_links / (1.0 + self._shared_links)
            end = end + common * ((1.0 - share) * own / (1.0 + own) + crowded)
            later = self._free[channel] + common * ((1.0 - share) * other / (1.0 + other) + crowded)
            self._free[channel] = np.where(common > 0, later, self._free[channel])
        return end

    def leave(self) -> None:
        """Step 3: what the last use has left; it goes while the next use runs."""
        if self._leaves is None:
            return
        use, end, place = self._leaves
        self._leaves = None
        here, index = self._of(use.index), use.index
        out, scatter = self.slots.of(place, "out"), self.slots.of(place, "scatter")
        if not use.backward:
            if self._parts[index].is_layer:
                left = self._run("out", end, here["activations"] * out)
                self._on_host["activations", index, use.micro_batch] = left
                self._gone["activations"].append(left)
                self._hold("activations", index, self._begun_forward, left)
            return
        reduced = end
        if use.micro_batch == self.slots.last or self.kind.scatters:
            sum_there = self._fetched.get(index, self._nothing)
            both = here["scatter"] + (here["reduce"] if use.micro_batch == self.slots.last else 0.0)
            reduced = self._join_ranks(index, np.maximum(end, sum_there), both * scatter)
            self._hold("own_gradients", index, self._begun[index], reduced)
        left = self._run("out", reduced, here["gradients"] * out)
        self._on_host["gradients", index, 0] = left
        self._hold("gradients", index, self._fetching[index] if use.micro_batch else self._begun[index], left)
        # Where nothing leaves nothing is waited for.
        self._gone["gradients"].append(np.where(here["gradients"] > 0, left, 0.0))

    def _hold(self, what: str, index: int, start: Floats, end: Floats) -> None:
        """Note that a buffer of a part is on the device for a time."""
        size = getattr(self._sizes, what)[self._parts[index].row]
        if not self.holds or not size.any():
            return
        if len(self._held_at) == self._held.shape[1]:
            self._held = np.concatenate([self._held, np.empty_like(self._held)], axis=1)
        row = len(self._held_at)
        self._held_at.append(self._place)
        self._held[0, row], self._held[1, row], self._held[2, row] = start, end, size

    def peak_bytes(self, place: int, begin: Floats, end: Floats) -> Floats:
        """Peak bytes of buffers that come and go at the beginning and the end of a use, once two more have been advanced."""
        recent = slice(bisect_left(self._held_at, place - RECENT), len(self._held_at))
        start, until, size = self._held[:, recent][:, ::-1]
        arrives = np.where(start < end, start, begin).max(axis=0, initial=-np.inf)
        arrives = np.maximum(arrives, begin)
        at_begin = (size * ((start <= begin) & (begin < until))).sum(axis=0)
        at_arrival = (size * ((start <= arrives) & (arrives < until))).sum(axis=0)
        return np.maximum(at_begin, at_arrival)


RECENT = 5
"""Uses whose buffers may still be on the device."""
HELD = 64
"""Buffers that there is room for at first."""
