"""Seconds of a stage whose parameter groups step by themselves (ZeRO 2 and 3, offloading), for many strategies at once.

Terms. A part is a parameter group: embedding, a layer, a prediction layer, head. A use is one pass of one micro-batch through a part.
Contract. The times are those of the list that plan/lowering/optimizer_state.py writes, with uses in place of operators: every wait
of that list is here, with the number of its step there. What runs at the same time slows each other down as if all of a use's
copies and collectives started with it (`UseSeconds`).
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.slots import TASKS, slowdowns
from moe_overlap.tuner.cost.stage import KindTerms, StateRates, Strategy, state_seconds, state_sizes

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class UseSeconds:
    """Seconds of the uses and the updates of each kind of part, each alone; [K, N] each."""

    forward: Floats
    backward: Floats
    sent_forward: Floats
    """Share of a forward use in which tokens travel, over links that collectives of states use as well."""
    sent_backward: Floats
    weights: Floats
    """The offloaded share of weights, one way."""
    gather: Floats
    """Shards of weights, gathered for a use (ZeRO 3)."""
    activations: Floats
    """The offloaded share of what one micro-batch saves, one way."""
    gradients: Floats
    """The offloaded share of a gradient sum, one way."""
    scatter: Floats
    """Gradients of one micro-batch (ZeRO 2, 3)."""
    reduce: Floats
    """Gradient sums, once a step (ZeRO 0, 1)."""
    states_in: Floats
    """States and gradients that an update takes from the host."""
    states_out: Floats
    sweep: Floats
    """The optimizer step."""
    gather_updated: Floats
    """Updated shards of weights, gathered (ZeRO 1, 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UseBytes:
    """Bytes on the device while parts of each kind are used or updated, beyond what always stays there; [K, N] each."""

    weights: Floats
    """The offloaded share of weights."""
    gathered: Floats
    """Weights that are gathered for a use (ZeRO 3)."""
    activations: Floats
    """The offloaded share of what one micro-batch saves."""
    gradients: Floats
    """The offloaded share of a gradient sum."""
    own_gradients: Floats
    """The gradient of one micro-batch until it is scattered (ZeRO 2, 3)."""
    states: Floats
    """The offloaded share of optimizer states."""
    saved: Floats
    """What of one micro-batch's activations stays on the device."""


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter group of a stage, in order of its forward pass.

    Attributes:
        row: its kind.
        chunk: its model chunk.
        is_layer: whether it saves activations that are worth moving.
        is_embedding: whether its backward pass needs no weights.
        held_once: whether one micro-batch alone is ever held of it, as of the head.
    """

    row: int
    chunk: int = 0
    is_layer: bool = True
    is_embedding: bool = False
    held_once: bool = False


@dataclass(frozen=True, slots=True)
class ListKind:
    """What changes the order of a list.

    Attributes:
        offloads_weights: whether each part is updated in front of its first use, and not all of them first.
        scatters: whether the gradient of every micro-batch is reduced into shards (ZeRO 2, 3).
    """

    offloads_weights: bool
    scatters: bool


@dataclass(frozen=True, slots=True)
class Use:
    """One pass of one micro-batch through the part of this index."""

    index: int
    backward: bool
    micro_batch: int


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


STABLE, LAST = 2, 3
"""Micro-batches that are played: the one that stands for all further ones, and the last."""


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


class SlotTable:
    """How much slower the tasks of slots are than alone (slots.py), for one group of strategies; a slot is priced once."""

    def __init__(self, seconds: UseSeconds, kind: ListKind, factors: Interference) -> None:
        self.seconds, self.kind, self.factors = seconds, kind, factors
        self.table = factors.table
        self._known: dict[SlotKey, dict[str, Floats]] = {}

    def add(self, slots: Mapping[SlotKey, Mapping[str, Floats]]) -> None:
        """Price slots that are not known yet."""
        new = {key: tasks for key, tasks in slots.items() if key not in self._known}
        if not new:
            return
        nothing = np.zeros(self.seconds.forward.shape[1])
        arrays = {
            name: np.stack([tasks.get(name, nothing) for tasks in new.values()]) for name in (*TASKS, "sent", "waits")
        }
        sent, waits = arrays.pop("sent"), arrays.pop("waits") > 0
        slow = slowdowns(arrays, sent, waits, self.factors)
        for number, key in enumerate(new):
            self._known[key] = {name: slow[name][number] for name in TASKS}

    def __getitem__(self, key: SlotKey) -> dict[str, Floats]:
        return self._known[key]


SlotKey = tuple[object, ...]
"""What tells a slot from others: kinds and passes of its uses, and what they load and leave."""


class Slots:
    """The slots of the uses of one stage, and of its updates."""

    def __init__(self, parts: Sequence[Part], uses: Sequence[Use], table: SlotTable) -> None:
        self._parts, self.uses, self._kind = parts, uses, table.kind
        self.table = table.table
        seconds, new = table.seconds, {}
        nothing = np.zeros(seconds.forward.shape[1])
        places: list[SlotKey] = []
        for place, use in enumerate(uses):
            before = uses[place - 1] if place else None
            behind = uses[place + 1] if place + 1 < len(uses) else None
            key, tasks = self._slot(seconds, before, use, behind, nothing)
            new[key] = tasks
            places.append(key)
        updates: list[SlotKey] = []
        for index in range(len(parts)):
            row, after = parts[index].row, parts[min(index + 1, len(parts) - 1)].row
            updates.append(("update", row, after))
            new["update", row, after] = {
                "compute": seconds.sweep[row],
                "rest": seconds.states_in[after],
                "gather": seconds.gather_updated[row],
                "out": seconds.states_out[row],
            }
        table.add(new)
        self._places, self._updates = [table[key] for key in places], [table[key] for key in updates]

    def _slot(
        self, seconds: UseSeconds, before: Use | None, use: Use, behind: Use | None, nothing: Floats
    ) -> tuple[tuple[object, ...], dict[str, Floats]]:
        """What tells a slot from others, and its tasks."""
        row = self._parts[use.index].row
        slot = {
            "compute": (seconds.backward if use.backward else seconds.forward)[row],
            "sent": (seconds.sent_backward if use.backward else seconds.sent_forward)[row],
            **dict.fromkeys(("weights", "rest", "scatter", "gather", "out", "waits"), nothing),
        }
        key: list[object] = [row, use.backward]
        updates = self._kind.offloads_weights
        if not use.backward and use.micro_batch == 0 and updates:
            slot["out"] = seconds.states_out[row] + seconds.weights[row]
            key.append("stores")
        if behind is not None:
            other = self._parts[behind.index].row
            first = behind.micro_batch == 0 and not behind.backward
            loads = loads_weights(self._parts, behind, use)
            key += [other, first, loads, behind.backward, behind.micro_batch > 0]
            if first and updates:
                slot["rest"], slot["gather"] = seconds.states_in[other], seconds.gather_updated[other]
            elif loads and updates:
                slot["weights"] = seconds.weights[other]
            if loads:
                slot["gather"] = slot["gather"] + seconds.gather[other]
            if behind.backward:
                slot["rest"] = seconds.activations[other]
                if behind.micro_batch > 0:
                    slot["rest"] = slot["rest"] + seconds.gradients[other]
        if before is not None:
            other, is_last = self._parts[before.index].row, before.micro_batch == LAST
            key += ["leaves", other, before.backward, is_last]
            if before.backward:
                slot["scatter"] = seconds.scatter[other] + (seconds.reduce[other] if is_last else 0.0)
                slot["out"], slot["waits"] = slot["out"] + seconds.gradients[other], nothing + 1.0
            else:
                slot["out"] = slot["out"] + seconds.activations[other]
        return tuple(key), slot

    def of(self, place: int, task: str) -> Floats | float:
        """Slowdown of a task in the slot of the use at this place; 1 outside the step."""
        return self._places[place][task] if 0 <= place < len(self._places) else 1.0

    def of_update(self, index: int, task: str) -> Floats:
        """Slowdown of a task of a part's update."""
        return self._updates[index][task]


def loads_weights(parts: Sequence[Part], use: Use, before: Use | None) -> bool:
    """Whether a use loads weights: what the use before has loaded stays; the gradient of an embedding needs none."""
    there = before is not None and before.index == use.index and not _skips_weights(parts, before)
    return not there and not _skips_weights(parts, use)


def _skips_weights(parts: Sequence[Part], use: Use) -> bool:
    return use.backward and parts[use.index].is_embedding


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
        whole = self._run("ranks", stepped, here["gather_updated"] * ranks)
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
            self._ready[use] = self._run("ranks", self._stepped[index], self._of(index)["gather"] * gather)
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
                ready = self._run("ranks", np.maximum(ready, limit), taken)
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
            # While tokens travel, both halve each other.
            end = end + common * ((1.0 - share) * own / (1.0 + own) + share / 2)
            later = self._free[channel] + common * ((1.0 - share) * other / (1.0 + other) + share / 2)
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
            reduced = self._run("ranks", np.maximum(end, sum_there), both * scatter)
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


def use_bytes(kinds: KindTerms, strategy: Strategy, rates: StateRates) -> UseBytes:
    """The bytes that move with the uses of every kind of part under every strategy."""
    sizes, level = state_sizes(kinds, strategy, rates), strategy.zero_level
    numbers = (kinds.dense_parameters + kinds.expert_parameters)[:, None]
    replicated = (strategy.data > 1) | (strategy.expert_data > 1)
    activations = kinds.saved_bytes[:, None] * kinds.is_layer[:, None] * strategy.offload_activations
    return UseBytes(
        weights=sizes.weights * strategy.offload_weights,
        gathered=np.where(replicated & (level >= 3), rates.weight_bytes * numbers, 0.0),
        activations=activations,
        gradients=sizes.gradients * strategy.offload_gradients,
        own_gradients=np.where(replicated & (level >= 2), rates.gradient_bytes * numbers, 0.0),
        states=sizes.optimizer * strategy.offload_optimizer,
        saved=kinds.saved_bytes[:, None] - activations,
    )


def use_seconds(kinds: KindTerms, strategy: Strategy, rates: StateRates) -> UseSeconds:
    """Price the uses and updates of every kind of part under every strategy."""
    forward, backward = kinds.forward_seconds[:, None], kinds.backward_seconds[:, None]
    sizes = state_sizes(kinds, strategy, rates)
    dense, experts = kinds.dense_parameters[:, None], kinds.expert_parameters[:, None]
    level, host = strategy.zero_level, rates.host_copy
    gathered = state_seconds(dense, experts, rates.gathered_bytes, rates)
    reduced = state_seconds(dense, experts, rates.gradient_bytes, rates)
    nothing = np.zeros_like(gathered)
    gather = np.where(level >= 3, gathered, nothing)
    scatter = np.where(level >= 2, reduced, nothing)
    reduce = np.where(level < 2, reduced, nothing) * np.where(level == 0, 2.0, 1.0)
    gather_updated = np.where((level >= 1) & (level < 3), gathered, nothing)
    weights = host * sizes.weights * strategy.offload_weights
    gradients = host * sizes.gradients * strategy.offload_gradients
    states = host * sizes.optimizer * strategy.offload_optimizer
    activations = host * kinds.is_layer[:, None] * kinds.saved_bytes[:, None] * strategy.offload_activations
    return UseSeconds(
        forward=forward + nothing,
        backward=backward + nothing,
        sent_forward=kinds.sent_forward_seconds[:, None] / np.where(forward > 0, forward, 1.0) + nothing,
        sent_backward=kinds.sent_backward_seconds[:, None] / np.where(backward > 0, backward, 1.0) + nothing,
        weights=weights,
        gather=gather,
        activations=activations + nothing,
        gradients=gradients,
        scatter=scatter,
        reduce=reduce,
        states_in=states + gradients,
        states_out=states,
        sweep=rates.optimizer_sweep * sizes.swept,
        gather_updated=gather_updated,
    )
