"""Seconds of a stage whose parameter groups step by themselves (ZeRO 2 and 3, offloading), for many strategies at once.

Terms. A part is a parameter group: embedding, a layer, a prediction layer, head. A use is one pass of one micro-batch through it.
Contract. The times are those of the list that plan/lowering/optimizer_state.py writes, with uses in place of operators: its waits
are here, with the number of the step there. What runs at the same time slows each other down (slots.py); what goes on
from earlier slots does so as long as both run.
1. The updates in front of the first forward pass; where weights are offloaded in front of the first use of each part.
2. What a use needs is loaded while the use before it computes, and waits for the end of the last use that has ended.
3. Saved activations leave behind a forward use, gradients behind a backward use.
4. A use waits for what left two uses before.
5. A few micro-batches are played: the first, one that every further one repeats (`stable`), and the last.

Legend: K kinds of parts, N strategies. `simulate/engine.py` is the slow twin.
Source: Mist, section 5.1 and figure 10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.slots import LAST, STABLE, ListKind, Part, Slots, SlotTable, Use, loads_weights
from moe_overlap.tuner.cost.stage import UseBytes, UseSeconds

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlayedStage:
    """Seconds of the passes of a stage whose input is always there; [N] each.

    Attributes:
        first_forward: until the first forward pass has ended, the updates in front of it included.
        waited_forward: of the first forward pass of a stage that has waited for its input long enough for every update.
        first_backward: of the first backward pass of the last stage of a pipeline, which follows at once.
        forward, backward: of a micro-batch that all further ones repeat.
        last_backward: of the last backward pass; all stages but the last have waited for it.
        tail: from its end until everything has been reduced and copied.
        buffer_bytes: peak of what is on the device for a while, less what of the activations in flight is not held at that time.
        update_bytes: peak beside the updates, which run before activations are held.
    """

    first_forward: Floats
    waited_forward: Floats
    first_backward: Floats
    forward: Floats
    backward: Floats
    last_backward: Floats
    tail: Floats
    buffer_bytes: Floats
    update_bytes: Floats

    @property
    def stable(self) -> Floats:
        """Seconds of a stable micro-batch."""
        return self.forward + self.backward


def play_stage(parts: Sequence[Part], table: SlotTable, sizes: UseBytes, ahead: int, waits: bool) -> PlayedStage:
    """Seconds of a stage.

    Args:
        parts: the stage's, in order of their forward pass.
        ahead: forward passes before the first backward pass; 0 on the last stage of a pipeline, 1 stands for more.
        waits: whether another stage stands before it.
    """
    chunks = [*dict.fromkeys(part.chunk for part in parts)]
    order = _passes(chunks, ahead)
    uses = [Use(index, backward, m) for backward, m, chunk in order for index in _indices(parts, chunk, backward)]
    seconds, kind, slots = table.seconds, table.kind, Slots(parts, uses, table)
    waiting = _Played(parts, seconds, kind, slots, sizes)
    waiting.begin(uses[0])
    arrived, turns = waiting.advance(0, waits=True), {False: waiting.computed}
    for place, use in enumerate(uses[1:], start=1):
        if use.micro_batch > 0:
            break
        waiting.advance(place)
        turns[use.backward] = waiting.computed
    waited = turns[False] - arrived
    played = _Played(parts, seconds, kind, slots, sizes)
    played.begin(uses[0])
    ends: dict[tuple[bool, int], Floats] = {}
    taken: dict[tuple[bool, int], Floats] = defaultdict(lambda: np.zeros_like(waited))
    drained = False
    window: list[tuple[Use, Floats, Floats]] = []
    early, later = [np.zeros_like(waited)], []
    for place, use in enumerate(uses):
        of_pass, before = (use.backward, use.micro_batch), played.computed
        drains = bool(ahead) and of_pass == (True, LAST) and not drained
        drained |= drains
        begin = played.advance(place, waits=drains)
        ends[of_pass] = played.computed
        taken[of_pass] = taken[of_pass] + played.computed - (begin if drains else before)
        # One use late: what the next one has loaded by then is known.
        if window:
            last, start, end = window.pop()
            peak = played.peak_bytes(start, end)
            if ahead and not last.backward and last.micro_batch == 0:
                early.append(peak + _saved(parts, sizes, range(last.index + 1)))
            else:
                later.append(peak - _saved(parts, sizes, range(last.index + 1, len(parts)), parts[last.index].chunk))
        # Of a forward pass the last use counts: no more is held before it.
        turns_back = use.backward or place + 1 < len(uses) and uses[place + 1].backward
        at = (0, STABLE) if use.backward else (ahead, STABLE + ahead)
        if (turns_back and use.micro_batch in at) or (use.micro_batch == 0 and not use.backward):
            window.append((use, begin, played.computed))
    played.leave()
    backward = taken[True, STABLE]
    first_backward = backward
    if ahead == 0 and len(chunks) == 1:
        first_backward = turns[True] - turns[False] if waits else taken[True, 0]
    return PlayedStage(
        first_forward=ends[False, 0],
        waited_forward=waited,
        first_backward=first_backward,
        # Forward passes ahead stand before the first backward pass: a cycle has the forward pass of a later micro-batch.
        forward=taken[False, STABLE + ahead],
        backward=backward,
        last_backward=taken[True, LAST],
        tail=played.ended - ends[True, LAST],
        buffer_bytes=np.max(later, axis=0),
        update_bytes=np.max(early, axis=0),
    )


def _saved(parts: Sequence[Part], sizes: UseBytes, indices: Iterable[int], chunk: int | None = None) -> Floats:
    """Bytes of one micro-batch that some of the parts (of a chunk) save on the device."""
    rows = (parts[index].row for index in indices if chunk is None or parts[index].chunk == chunk)
    return sum((sizes.saved[row] for row in rows), start=np.zeros_like(sizes.saved[0]))


def _passes(chunks: Sequence[int], ahead: int) -> list[tuple[bool, int, int]]:
    """Passes (backward, micro-batch, chunk) of LAST + 1 micro-batches."""
    forward = [(False, m, chunk) for m in range(LAST + 1) for chunk in chunks]
    backward = [(True, m, chunk) for m in range(LAST + 1) for chunk in reversed(chunks)]
    warm = ahead * len(chunks)
    order = forward[:warm]
    if ahead == 0 and len(chunks) > 1:
        warm = len(chunks) - 1
        order = forward[:warm]
    for number in range(warm, len(forward)):
        order += [forward[number], backward[number - warm]]
    return order + backward[len(forward) - warm :]


def _indices(parts: Sequence[Part], chunk: int, is_backward: bool) -> list[int]:
    indices = [index for index, part in enumerate(parts) if part.chunk == chunk]
    return indices[::-1] if is_backward else indices


class _Played:
    """When the channels of a stage are free, and what has left it; arrays of [N]."""

    def __init__(
        self, parts: Sequence[Part], seconds: UseSeconds, kind: ListKind, slots: Slots, sizes: UseBytes
    ) -> None:
        self._parts, self._kind, self._slots, self._sizes = parts, kind, slots, sizes
        self._held: list[tuple[int, Floats, Floats, Floats]] = []
        # Updates in front of all uses may last as long as a forward pass.
        self._place = len(parts)
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
        self._shared_links = nothing
        self._ready: dict[Use, Floats] = {}
        self._stepped: dict[int, Floats] = {}
        self._used: set[int] = set()
        self._on_host: dict[tuple[str, int, int], Floats] = {}
        self._fetched: dict[int, Floats] = {}
        self._pending: list[tuple[Use, Floats, int]] = []
        self._leaves: tuple[Use, Floats, int] | None = None

    @property
    def ended(self) -> Floats:
        """When all channels have ended."""
        return np.max([*self._free.values()], axis=0)

    def begin(self, use: Use) -> None:
        """Write what stands in front of the first use."""
        if not self._kind.offloads_weights:
            self._update_all()
        self.load(use, None)

    def _of(self, index: int) -> dict[str, Floats]:
        return self._rows[self._parts[index].row]

    def _run(self, channel: str, after: Floats, seconds: Floats) -> Floats:
        """The end of work on a channel; `after` where there is none."""
        works = seconds > 0
        end = np.maximum(self._free[channel], after) + seconds
        self._free[channel] = np.where(works, end, self._free[channel])
        return np.where(works, end, after)

    def _join_ranks(self, index: int, after: Floats, seconds: Floats) -> Floats:
        """The end of a collective of a part's states; what it shares with tokens counts as long as it is the last."""
        self._shared_links = np.where(seconds > 0, self._of(index)["shared"], self._shared_links)
        return self._run("ranks", after, seconds)

    def _update_all(self) -> None:
        """Step 1."""
        first, sweeps, slots = None, self._nothing, self._slots
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
        if self._kind.offloads_weights:
            self._hold("weights", index, stepped - here["sweep"], self._on_host["weights", index, 0])
        return whole

    def _step_beside(self, begin: Floats, end: Floats) -> Floats:
        """Optimizer steps of parts that are loaded while a use runs from `begin` to `end`; when both have ended."""
        for use, start, place in self._pending:
            index, gather = use.index, self._slots.of(place, "gather")
            # Two kernels at a time halve each other until the first of them ends.
            sweep = self._of(index)["sweep"]
            both = np.maximum(begin, start)
            common = np.maximum(0.0, np.minimum(end - both, sweep - (both - start)))
            end = end + common
            self._free["optimizer"] = start + sweep + common
            # Updated states leave while the next use runs.
            out = self._slots.of(place + 1, "out")
            self._stepped[index] = self._store(index, self._free["optimizer"], out, gather)
            self._ready[use] = self._join_ranks(index, self._stepped[index], self._of(index)["gather"] * gather)
        self._pending = []
        return end

    def load(self, use: Use, place: int | None) -> None:
        """Step 2: what a use needs, written when the use before it, at this place, begins; None: in front of all uses."""
        index, here, limit = use.index, self._of(use.index), self._last_use
        before = self._slots.uses[place] if place is not None else None
        at = -1 if place is None else place
        gather, rest = self._slots.of(at, "gather"), self._slots.of(at, "rest")
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
                if self._kind.offloads_weights and index in self._used:
                    moved = here["weights"] * self._slots.of(at, "weights")
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
                self._fetched[index] = self._run("in", np.maximum(limit, away), taken)
                self._fetching[index] = self._fetched[index] - taken
                if not self._kind.scatters:
                    ready = np.maximum(ready, self._fetched[index])
        self._ready[use], self._loaded[use] = ready, loaded

    def advance(self, place: int, waits: bool = False) -> Floats:
        """The use at a place, the loads of the next one, and what the one before leaves; when it begins.

        Args:
            waits: whether the stage has waited for the use until all that it could do was done.
        """
        uses = self._slots.uses
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
        begin = np.max([self._free["compute"], ready, gone], axis=0)
        end = begin + here["backward" if use.backward else "forward"] * self._slots.of(place, "compute")
        end = self._beside_older(begin, end, here["sent_backward" if use.backward else "sent_forward"])
        self.leave()
        if behind is not None and not waits:
            self.load(behind, place)
        if not self._kind.offloads_weights and not use.backward and use.micro_batch == 0:
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
        table, stop = self._slots.table, end
        for channel, stream in (("ranks", 1), ("in", 2), ("out", 3)):
            common = np.minimum(self._free[channel], stop) - begin
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
        out, scatter = self._slots.of(place, "out"), self._slots.of(place, "scatter")
        if not use.backward:
            if self._parts[index].is_layer:
                left = self._run("out", end, here["activations"] * out)
                self._on_host["activations", index, use.micro_batch] = left
                self._gone["activations"].append(left)
                self._hold("activations", index, self._begun_forward, left)
            return
        reduced = end
        if use.micro_batch == LAST or self._kind.scatters:
            sum_there = self._fetched.get(index, self._nothing)
            both = here["scatter"] + (here["reduce"] if use.micro_batch == LAST else 0.0)
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
        if size.any():
            self._held.append((self._place, start, end, size))

    def peak_bytes(self, begin: Floats, end: Floats) -> Floats:
        """Peak bytes of buffers that come and go at the beginning and the end of a use, once the next one has been advanced."""
        if not self._held:
            return self._nothing
        at_begin = at_end = self._nothing
        oldest = self._place - RECENT
        for place, start, until, size in reversed(self._held):
            if place < oldest:
                break
            at_begin = at_begin + size * ((start <= begin) & (begin < until))
            at_end = at_end + size * ((start < end) & (end <= until))
        return np.maximum(at_begin, at_end)


RECENT = 5
"""Uses whose buffers may still be on the device."""
