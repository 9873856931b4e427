"""The channels of a stage whose parameter groups step by themselves, use by use: when each is free, and what waits for it.

Terms as in decoupled.py, which numbers the steps and decides in which order uses are played. Channels are computation, the
optimizer's, copies from and to the host, and collectives among ranks; a job takes one of them for some seconds. A job that no
strategy has costs nothing here, and one that all of them have is not chosen strategy by strategy: most are one or the other.

Legend: N strategies. Arrays are [N] seconds, or bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.slots import BETWEEN_RANKS, ListKind, Part, Slots, Use, loads_weights
from moe_overlap.tuner.cost.stage import UseBytes, UseSeconds

Floats = NDArray[np.float64]
RECENT = 5
"""Uses whose buffers may still be on the device."""


class Job(NamedTuple):
    """Seconds of a job by itself, and which strategies have it; None: all."""

    seconds: Floats
    has: NDArray[np.bool_] | None

    def choose(self, own: Floats, other: Floats) -> Floats:
        """A value for strategies that have the job, another for the rest."""
        return own if self.has is None else np.where(self.has, own, other)


def _job(seconds: Floats) -> Job | None:
    """A job; None where no strategy has it."""
    has = seconds > 0
    if not has.any():
        return None
    return Job(seconds, None if has.all() else has)


class StageChannels:
    """When the channels of a stage are free, and what has left it.

    Attributes:
        computed: when the last use has ended.
        holds: whether buffers are noted for `peak_bytes`.
    """

    def __init__(
        self, parts: Sequence[Part], seconds: UseSeconds, kind: ListKind, slots: Slots, sizes: UseBytes, updates: bool
    ) -> None:
        self._parts, self.kind, self.slots = parts, kind, slots
        rows = {part.row for part in parts}
        # Buffers in the order in which they were noted: the places; their begins, ends and bytes.
        self._held_at: list[int] = []
        self._held: list[tuple[Floats, Floats, Floats]] = []
        sized = {field.name: getattr(sizes, field.name) for field in fields(UseBytes)}
        self._sizes = {(name, row): values[row] for name, values in sized.items() for row in rows if values[row].any()}
        # Updates in front of all uses may last as long as a forward pass.
        self._place = len(parts)
        self.holds = True
        self._loaded: dict[Use, list[tuple[str, Floats]]] = {}
        self._fetching: dict[int, Floats] = {}
        self._begun: dict[int, Floats] = {}
        self._rows = {
            row: {field.name: getattr(seconds, field.name)[row] for field in fields(UseSeconds)} for row in rows
        }
        self._jobs = {
            row: {name: _job(values) for name, values in of_row.items()} for row, of_row in self._rows.items()
        }
        for row, of_row in self._rows.items():
            # Of the last micro-batch; of those before only what ZeRO 2 and 3 scatter.
            self._jobs[row]["reduction"] = _job(of_row["scatter"] + of_row["reduce"])
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

    def _jobs_of(self, index: int) -> dict[str, Job | None]:
        return self._jobs[self._parts[index].row]

    def _run(self, channel: str, after: Floats, job: Job | None, slow: Floats | float) -> Floats:
        """The end of a job on a channel; `after` where there is none.

        Args:
            slow: how many times as long it takes as alone.
        """
        if job is None:
            return after
        free = self._free[channel]
        end = np.maximum(free, after) + job.seconds * slow
        self._free[channel] = job.choose(end, free)
        return job.choose(end, after)

    def _fetch(self, after: Floats, job: Job | None, slow: Floats | float) -> tuple[Floats, Floats]:
        """The begin and the end of a copy from the host."""
        end = self._run("in", after, job, slow)
        return (end if job is None else end - job.seconds * slow), end

    def _join_ranks(self, index: int, after: Floats, name: str, slow: Floats | float) -> Floats:
        """The end of a collective of a part's states; what it shares with tokens counts as long as it is the last."""
        here, job = self._of(index), self._jobs[self._parts[index].row][name]
        if job is not None:
            self._shared_links = job.choose(here["shared"], self._shared_links)
            self._transfer_shared = job.choose(here["transfer_shared"], self._transfer_shared)
        return self._run("ranks", after, job, slow)

    def _update_all(self) -> None:
        """Step 1."""
        first, sweeps, slots = None, self._nothing, self.slots
        for index in range(len(self._parts)):
            jobs, after = self._jobs_of(index), max(index - 1, 0)
            slow = slots.of_update(after, "rest") if index else 1.0
            self._fetching[index], fetched = self._fetch(self._gone["states"][-2], jobs["states_in"], slow)
            first = fetched if first is None else first
            sweeps = sweeps + self._of(index)["sweep"]
            stepped = self._run("optimizer", fetched, jobs["sweep"], 1.0)
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
        jobs = self._jobs_of(index)
        left = self._run("out", stepped, jobs["states_out"], out)
        self._gone["states"].append(left)
        self._hold("states", index, self._fetching[index], left)
        self._hold("gradients", index, self._fetching[index], stepped)
        whole = self._join_ranks(index, stepped, "gather_updated", ranks)
        self._on_host["weights", index, 0] = self._run("out", whole, jobs["weights"], out)
        if self.kind.offloads_weights:
            self._hold("weights", index, stepped - self._of(index)["sweep"], self._on_host["weights", index, 0])
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
            self._ready[use] = self._join_ranks(index, self._stepped[index], "gather", gather)
        self._pending = []
        return end

    def load(self, use: Use, place: int | None) -> None:
        """Step 2: what a use needs, written when the use before it, at this place, begins; None: in front of all uses."""
        index, jobs, limit = use.index, self._jobs_of(use.index), self._last_use
        before = self.slots.uses[place] if place is not None else None
        at = -1 if place is None else place
        gather, rest = self.slots.of(at, "gather"), self.slots.of(at, "rest")
        ready = self._stepped.get(index, self._nothing)
        loaded: list[tuple[str, Floats]] = []
        if loads_weights(self._parts, use, before):
            if index not in self._stepped:
                self._fetching[index], fetched = self._fetch(self._gone["states"][-2], jobs["states_in"], rest)
                self._pending.append((use, np.maximum(fetched, limit), at))
                if place is None:
                    self._step_beside(self._nothing, self._nothing)
                    ready = self._ready[use]
            else:
                if self.kind.offloads_weights and index in self._used:
                    there = np.maximum(limit, self._on_host["weights", index, 0])
                    began, ready = self._fetch(there, jobs["weights"], self.slots.of(at, "weights"))
                    loaded.append(("weights", began))
                ready = self._join_ranks(index, np.maximum(ready, limit), "gather", gather)
                gathers = jobs["gather"]
                loaded.append(("gathered", ready if gathers is None else ready - gathers.seconds * gather))
            self._used.add(index)
        if use.backward:
            saved = self._on_host.get(("activations", index, use.micro_batch), self._nothing)
            began, fetched = self._fetch(np.maximum(limit, saved), jobs["activations"], rest)
            loaded.append(("activations", began))
            ready = np.maximum(ready, fetched)
            if use.micro_batch > 0:
                away, room = self._on_host["gradients", index, 0], self._gone["gradients"][-2]
                free = np.maximum(np.maximum(limit, away), room)
                self._fetching[index], self._fetched[index] = self._fetch(free, jobs["gradients"], rest)
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
            gathers = self._jobs_of(use.index)["gather"] if what == "weights" else None
            until = end if gathers is None else gathers.choose(ready, end)
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
        jobs, index = self._jobs_of(use.index), use.index
        out, scatter = self.slots.of(place, "out"), self.slots.of(place, "scatter")
        if not use.backward:
            if self._parts[index].is_layer:
                left = self._run("out", end, jobs["activations"], out)
                self._on_host["activations", index, use.micro_batch] = left
                self._gone["activations"].append(left)
                self._hold("activations", index, self._begun_forward, left)
            return
        reduced = end
        if use.micro_batch == self.slots.last or self.kind.scatters:
            sum_there = self._fetched.get(index, self._nothing)
            name = "reduction" if use.micro_batch == self.slots.last else "scatter"
            reduced = self._join_ranks(index, np.maximum(end, sum_there), name, scatter)
            self._hold("own_gradients", index, self._begun[index], reduced)
        moves = jobs["gradients"]
        left = self._run("out", reduced, moves, out)
        self._on_host["gradients", index, 0] = left
        self._hold("gradients", index, self._fetching[index] if use.micro_batch else self._begun[index], left)
        # Where nothing leaves nothing is waited for.
        self._gone["gradients"].append(self._nothing if moves is None else moves.choose(left, self._nothing))

    def _hold(self, what: str, index: int, start: Floats, end: Floats) -> None:
        """Note that a buffer of a part is on the device for a time."""
        size = self._sizes.get((what, self._parts[index].row)) if self.holds else None
        if size is not None:
            self._held_at.append(self._place)
            self._held.append((start, end, size))

    def peak_bytes(self, place: int, begin: Floats, end: Floats) -> Floats:
        """Peak bytes of buffers that come and go at the beginning and the end of a use, once two more have been advanced."""
        recent = self._held[bisect_left(self._held_at, place - RECENT) :]
        arrives = begin
        for start, _, _ in recent:
            arrives = np.maximum(arrives, np.where(start < end, start, begin))
        at_begin = at_arrival = self._nothing
        # One buffer at a time: arrays of [N] stay in the cache, those of all buffers do not.
        for start, until, size in recent:
            at_begin = at_begin + size * ((start <= begin) & (begin < until))
            at_arrival = at_arrival + size * ((start <= arrives) & (arrives < until))
        return np.maximum(at_begin, at_arrival)
