"""The channels of a stage whose parameter groups step by themselves, use by use: when each is free, and what waits for it.

Terms as in decoupled.py, which numbers the steps and decides in which order uses are played. Channels are computation, the
optimizer's, copies from and to the host, and collectives among ranks; a job takes one of them for some seconds. A job that no
strategy has costs nothing here, and one that all of them have is not chosen strategy by strategy: most are one or the other.

Legend: N strategies, or lanes of several stages (use_slowdowns.py). Arrays are [N] seconds, or bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from copy import copy

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.overlaps import JobKey, Ran, Slowed
from moe_overlap.tuner.cost.use_slowdowns import BETWEEN_RANKS, Job, Use, UseSlowdowns, loads_weights

Floats = NDArray[np.float64]
SLOT_TASKS = {
    "compute": "compute",
    "weights": "weights",
    "gather": "gather",
    "scatter": "scatter",
    "left": "out",
} | dict.fromkeys(("activations", "gradients"), "rest")
"""Jobs of uses -> tasks of slots (use_slowdowns.py)."""
ROUNDING = 1e-12
"""Of the seconds so far: what rounding leaves between times that are equal."""
RECENT = 5
"""Uses whose buffers may still be on the device."""


class StageChannels:
    """When the channels of a stage are free, and what has left it.

    Attributes:
        computed: when the last use has ended.
        holds: whether buffers are noted for `peak_bytes`.
        notes: whether it is noted when jobs run.
        ran: when the jobs of uses ran; of strategies without one the begin is the end.
        slowed: how many times as long they take as alone; None where slots say it.
    """

    def __init__(self, slots: UseSlowdowns, slowed: Slowed | None = None, notes: bool = False) -> None:
        """Channels on which nothing has run.

        Args:
            slowed: how many times as long jobs take as alone, where that was read off a play (overlaps.py); None: as `slots` say.
        """
        parts, self.kind = slots.parts, slots.group.kind
        self._parts, self.slots, self.slowed = parts, slots, slowed
        self.notes = notes
        self.ran: Ran = {}
        # Buffers in the order in which they were noted: the places; their begins, ends, bytes, earliest begins and latest ends.
        self._held_at: list[int] = []
        self._held: list[tuple[Floats, Floats, Floats, float, float]] = []
        self._sizes, self._of, self._jobs_of = slots.moved, slots.seconds, slots.jobs
        # What updates in front of all uses leave behind may last up to the first backward pass.
        self._place = next((place for place, use in enumerate(slots.uses) if use.backward), len(slots.uses))
        self.holds = True
        self._loaded: dict[Use, list[tuple[str, Floats]]] = {}
        self._fetching: dict[int, Floats] = {}
        self._begun: dict[int, Floats] = {}
        nothing = np.zeros(slots.lanes)
        self._free = dict.fromkeys(("compute", "optimizer", "in", "out", "ranks"), nothing)
        self._nothing, self.computed, self._last_use = nothing, nothing, nothing
        self._gone: dict[str, list[Floats]] = {
            name: [nothing, nothing] for name in ("states", "activations", "gradients")
        }
        self._shared_links = self._transfer_shared = nothing
        self._transfers = bool(slots.group.seconds.transfer.any())
        # Ends of what earlier uses have left, where the last use has left its own before the next one is computed.
        self._left: dict[str, Floats] | None = None
        self._ready: dict[Use, Floats] = {}
        self._stepped: dict[int, Floats] = {}
        self._used: set[int] = set()
        self._on_host: dict[tuple[str, int, int], Floats] = {}
        self._fetched: dict[int, Floats] = {}
        self._sharing, self._shared_uses = False, nothing
        self._first_begin: Floats | None = None
        self._updates = slots.group.updates
        # Whether updates that were begun in front of all uses go on beside them: states that come, and weights that are gathered.
        self._updating = self._gathering = False
        if not self._updates:
            self._stepped = dict.fromkeys(range(len(parts)), nothing)
            self._on_host = {("weights", index, 0): nothing for index in range(len(parts))}
            self._used = set(range(len(parts)))
        # Of the gradient that has left behind the last use: its part, when it was reduced, and when it began to leave.
        self._leaving: tuple[int, Floats, Floats] | None = None
        self._joined: list[JobKey] = []
        self._crossing: tuple[Floats, Floats] | None = None
        self._pending: list[tuple[Use, Floats, int]] = []
        self._leaves: tuple[Use, Floats, int] | None = None

    def fork(self) -> StageChannels:
        """The same channels from here on, for which another future is played."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, list, set)):
                setattr(other, name, copy(value))
        other._gone = {name: list(left) for name, left in self._gone.items()}
        return other

    @property
    def ended(self) -> Floats:
        """When all channels have ended."""
        return np.max([*self._free.values()], axis=0)

    @property
    def reduced(self) -> Floats:
        """When all computation and all collectives have ended."""
        return np.maximum(self.computed, self._free["ranks"])

    def lags(self) -> Floats:
        """[channels, L] By how much longer than the last use each channel and what the next use has loaded go on.

        All waits are for one of these: stages of which they are equal go on alike.
        """
        times = np.array([*self._free.values(), *self._ready.values()])
        later: Floats = np.maximum(0.0, times - self.computed)
        return later

    def transfer(self, crossing: int, blocks: bool, place: int) -> Floats:
        """Send and receive hidden states between two passes; from when on the second one counts.

        A transfer and a collective of states slow each other down on the links that both use, and copies slow down the transfer.
        What it takes by itself is no part of the passes: pipeline.py adds it. What the last use has left goes on meanwhile.

        Args:
            crossing: transfers, one each way at most.
            blocks: whether the next pass waits for them.
            place: of the first use of the second pass.
        """
        row, end = self._of[self.slots.uses[0].index], self.computed
        if not crossing or not self._transfers:
            return end
        self._left, self._leaving = dict(self._free), None
        self.leave()
        alone = row["transfer"] if blocks else crossing * row["transfer"]
        grown, crowd = 1.0 + self._transfer_shared, 1.0 + self._transfer_shared * (crossing if blocks else 1)
        busy = np.maximum(0.0, self._free["ranks"] - end)
        common = np.minimum(alone * grown, busy * crowd)
        self._join_later(common * (1.0 - 1.0 / crowd))
        # What is left of them goes on beside the next collectives.
        self._crossing = alone - common / grown, np.maximum(self._free["ranks"], end)
        if not blocks:
            return end
        common = np.minimum(alone * grown, (busy + self._gathered_beside(place)) * crowd)
        copies = 2 * (self._free["in"] > end) + (self._free["out"] > end)
        taken = (alone + common * (1.0 - 1.0 / grown)) * self.slots.table[1].take(BETWEEN_RANKS + copies)
        self._free["compute"] = end + taken
        return end + alone

    def _gathered_beside(self, place: int) -> Floats:
        """Seconds of weights that are gathered from the end of a pass on: those of the next pass's second use.

        Those of its first use, at this place, are gathered while the last use of the pass before computes.
        """
        if place + 1 >= len(self.slots.uses) or self.kind.offloads_weights:
            return self._nothing
        use, behind = self.slots.uses[place], self.slots.uses[place + 1]
        job = self._jobs_of[behind.index]["gather"]
        if job is None or behind.index not in self._stepped or not loads_weights(self._parts, behind, use):
            return self._nothing
        return job.seconds

    def _join_later(self, later: Floats) -> None:
        """Let the collective that goes on among ranks end later."""
        before = self._free["ranks"]
        self._free["ranks"] = before + later
        # A use that waits for it begins later, too, and so does a gradient that leaves behind it.
        self._ready = {use: np.where(ready == before, ready + later, ready) for use, ready in self._ready.items()}
        if self._leaving is not None:
            index, reduced, begun = self._leaving
            self._leave_later(index, np.where(reduced == before, np.maximum(0.0, reduced + later - begun), 0.0))
        longer = later > 0
        # Which one it is depends on the strategy.
        for key in reversed(self._joined):
            if not longer.any():
                break
            begun, ended = self.ran[key]
            last = longer & (ended >= before) & (ended > begun)
            self.ran[key] = begun, np.where(last, ended + later, ended)
            longer &= ~last

    def _leave_later(self, index: int, later: Floats) -> None:
        """Let the gradient that left last be gone later."""
        moves = self._jobs_of[index]["gradients"]
        if moves is None:
            return
        later = moves.choose(later, 0.0)
        self._free["out"] = self._free["out"] + later
        self._on_host["gradients", index, 0] = self._on_host["gradients", index, 0] + later
        self._gone["gradients"][-1] = self._gone["gradients"][-1] + later

    def wait(self, until: Floats) -> None:
        """Let no use begin before a time; what has been loaded for it, or is on its way out, goes on meanwhile."""
        self._free["compute"] = np.maximum(self._free["compute"], until)

    def begin(self, use: Use) -> None:
        """Write what stands in front of the first use."""
        if self._updates and not self.kind.offloads_weights:
            self._update_all()
        self.load(use, None)

    def _slow(self, task: str, place: int, slot: int) -> Floats | float:
        """How many times as long a job of the use at a place takes as alone.

        Args:
            slot: the place of the use in whose slot it runs.
        """
        if self.slowed is None:
            return self.slots.of(slot, SLOT_TASKS[task])
        return self.slowed.get((task, place), 1.0)

    def _run(
        self, channel: str, after: Floats, job: Job | None, slow: Floats | float, key: JobKey | None = None
    ) -> tuple[Floats, Floats]:
        """The begin and the end of a job on a channel; `after` where there is none.

        Args:
            slow: how many times as long it takes as alone.
            key: what it is, where it is noted when it runs; None: a job of an update.
        """
        if job is None:
            return after, after
        free, taken = self._free[channel], job.seconds * slow
        if job.bar is None:
            begin = np.maximum(free, after)
            self._free[channel] = end = begin + taken
        else:
            # Of strategies without the job the channel stays as free as it was, and `after` is when it begins and ends.
            begin = np.maximum(free + job.bar, after)
            end = begin + taken
            self._free[channel] = np.maximum(free, end + job.bar)
        if self.notes and key is not None:
            self.ran[key] = begin, end
        return begin, end

    def _join_ranks(
        self, index: int, after: Floats, name: str, slow: Floats | float, key: JobKey | None = None
    ) -> tuple[Floats, Floats]:
        """Begin and end of a collective of a part's states; what it shares with tokens counts as long as it is the last."""
        here, job = self._of[index], self._jobs_of[index][name]
        if job is not None:
            # The one is asked for where slots say what is slowed down, the other where transfers are.
            if self.slowed is None:
                self._shared_links = job.choose(here["shared"], self._shared_links)
            if self._transfers:
                self._transfer_shared = job.choose(here["transfer_shared"], self._transfer_shared)
            self._joined += [key] if key is not None and self.notes else []
        begin, end = self._run("ranks", after, job, slow, key)
        if job is not None and name == "gather" and self._updating:
            # States of later parts are on their way to the device meanwhile.
            common = np.minimum(self._sweeps[0][-1], end) - (end - job.seconds * slow)
            self._update_later(end, np.maximum(0.0, common) * (1.0 - 1.0 / self.slots.table[2, BETWEEN_RANKS | 2]))
        if job is None or self._crossing is None:
            return begin, end
        return begin, self._beside_transfers(job, begin, end, key)

    def _beside_transfers(self, job: Job, begin: Floats, end: Floats, key: JobKey | None) -> Floats:
        """The end of a collective beside transfers of the pass before that have not ended; it ends later on common links."""
        assert self._crossing is not None
        crossing, since = self._crossing
        left = job.choose(np.maximum(0.0, crossing - np.maximum(0.0, begin - since)), crossing)
        if not left.any():
            self._crossing = None
            return end
        grown = 1.0 + self._transfer_shared
        common = np.minimum(left * grown, (end - begin) * grown)
        later = common * (1.0 - 1.0 / grown)
        if job.has is not None:
            common, later = np.where(job.has, common, 0.0), np.where(job.has, later, 0.0)
        self._free["ranks"] = self._free["ranks"] + later
        self._crossing = left - common / grown, job.choose(end + later, since)
        if self.notes and key is not None:
            self.ran[key] = self.ran[key][0], self.ran[key][1] + later
        return end + later

    def _update_all(self) -> None:
        """Step 1."""
        slots, begins, ends = self.slots, [], []
        for index in range(len(self._parts)):
            jobs, after = self._jobs_of[index], max(index - 1, 0)
            slow = slots.of_update(after, "rest") if index else 1.0
            self._fetching[index], fetched = self._run("in", self._gone["states"][-2], jobs["states_in"], slow)
            begins.append(np.maximum(fetched, self._free["optimizer"]))
            _, stepped = self._run("optimizer", fetched, jobs["sweep"], 1.0)
            ends.append(stepped)
            self._stepped[index] = self._store(
                index, stepped, slots.of_update(index, "out"), slots.of_update(index, "gather")
            )
        # Begin and end of every optimizer step, as if nothing computed, and what they take up to there from the first on.
        taken = np.cumsum([of_part["sweep"] for of_part in self._of], axis=0)
        self._sweeps = np.array(begins), np.array(ends), begins[0] + taken
        self._sharing = self._updating = self._gathering = True

    def _store(self, index: int, stepped: Floats, out: Floats | float, ranks: Floats | float) -> Floats:
        """Store what an optimizer step has updated; the end of what a use of the part waits for.

        Args:
            out, ranks: slowdowns.
        """
        jobs = self._jobs_of[index]
        _, left = self._run("out", stepped, jobs["states_out"], out)
        self._gone["states"].append(left)
        self._hold("states", index, self._fetching[index], left)
        self._hold("gradients", index, self._fetching[index], stepped)
        _, whole = self._join_ranks(index, stepped, "gather_updated", ranks)
        _, self._on_host["weights", index, 0] = self._run("out", whole, jobs["weights"], out)
        if self.kind.offloads_weights:
            self._hold("weights", index, stepped - self._of[index]["sweep"], self._on_host["weights", index, 0])
        return whole

    def _beside_sweeps(self, use: Use, behind: Use | None, begin: Floats, end: Floats) -> Floats:
        """The end of a use of the first forward passes, which share the device with optimizer steps.

        A pass ends no earlier than all steps up to those of its own parts and all uses so far take together, and no earlier than
        the uses so far beside as many steps as have begun: two kernels at a time halve each other.
        """
        if self._first_begin is None:
            self._first_begin = begin
        self._shared_uses = done = self._shared_uses + (end - begin)
        if behind is not None and self._pass_of(behind) == self._pass_of(use):
            return end
        begun, stepped, taken = self._sweeps
        further = (stepped - np.minimum(stepped, np.maximum(begun, self._first_begin))) * (begun < end)
        ended = np.maximum(end, self._first_begin + done + np.minimum(done, further.sum(axis=0)))
        if use.micro_batch == 0:
            ended = np.maximum(ended, taken[use.index] + done)
        self._sharing = use.index < len(self._parts) - 1
        return ended

    def _pass_of(self, use: Use) -> tuple[bool, int, int]:
        return use.backward, use.micro_batch, self._parts[use.index].chunk

    def _step_beside(self, begin: Floats, end: Floats) -> Floats:
        """Optimizer steps of parts that are loaded while a use runs from `begin` to `end`; when both have ended."""
        for use, start, place in self._pending:
            index, gather = use.index, self.slots.of(place, "gather")
            # Two kernels at a time halve each other until the first of them ends.
            sweep = self._of[index]["sweep"]
            both = np.maximum(begin, start)
            common = np.maximum(0.0, np.minimum(end - both, sweep - (both - start)))
            end = end + common
            self._free["optimizer"] = start + sweep + common
            # Updated states leave while the next use runs.
            out = self.slots.of(place + 1, "out")
            self._stepped[index] = self._store(index, self._free["optimizer"], out, gather)
            _, self._ready[use] = self._join_ranks(index, self._stepped[index], "gather", gather)
        self._pending = []
        return end

    def load(self, use: Use, place: int | None) -> None:
        """Step 2: what a use needs, written when the use before it, at this place, begins; None: in front of all uses."""
        index, jobs, limit = use.index, self._jobs_of[use.index], self._last_use
        before = self.slots.uses[place] if place is not None else None
        at = -1 if place is None else place
        ready = self._stepped.get(index, self._nothing)
        loaded: list[tuple[str, Floats]] = []
        if loads_weights(self._parts, use, before):
            if index not in self._stepped:
                rest = self.slots.of(at, "rest")
                self._fetching[index], fetched = self._run("in", self._gone["states"][-2], jobs["states_in"], rest)
                self._pending.append((use, np.maximum(fetched, limit), at))
                if place is None:
                    self._step_beside(self._nothing, self._nothing)
                    ready = self._ready[use]
            else:
                if self.kind.offloads_weights and index in self._used:
                    there = np.maximum(limit, self._on_host["weights", index, 0])
                    began, ready = self._come("weights", there, index, at)
                    loaded.append(("weights", began))
                slow, key = self._slow("gather", at + 1, at), ("gather", at + 1)
                began, ready = self._join_ranks(index, np.maximum(ready, limit), "gather", slow, key)
                loaded.append(("gathered", began))
            self._used.add(index)
        if use.backward:
            saved = self._on_host.get(("activations", index, use.micro_batch), self._nothing)
            began, fetched = self._come("activations", np.maximum(limit, saved), index, at)
            loaded.append(("activations", began))
            ready = np.maximum(ready, fetched)
            if use.micro_batch > 0:
                away, room = self._on_host["gradients", index, 0], self._gone["gradients"][-2]
                free = np.maximum(np.maximum(limit, away), room)
                self._fetching[index], self._fetched[index] = self._come("gradients", free, index, at)
        self._ready[use], self._loaded[use] = ready, loaded

    def _fetched_ahead(self, place: int) -> Floats:
        """When the states of two more parts are there that are updated behind the use at a place and the one after it.

        They wait for room and not for uses, so that a stage that waits fetches them, too; `load` begins them at that time.
        """
        fetched, uses = self._free["in"], self.slots.uses
        for ahead in (2, 3):
            use = uses[place + ahead] if place + ahead < len(uses) else None
            if use is None or use.backward or use.micro_batch or use.index in self._stepped:
                break
            begin = np.maximum(fetched, self._gone["states"][ahead - 4])
            fetched = begin + self._of[use.index]["states_in"]
        return fetched

    def _come(self, what: str, after: Floats, index: int, at: int) -> tuple[Floats, Floats]:
        """The begin and the end of a copy from the host for the use behind the one at a place."""
        job = self._jobs_of[index][what]
        return (
            (after, after) if job is None else self._run("in", after, job, self._slow(what, at + 1, at), (what, at + 1))
        )

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
            self._free["compute"] = np.maximum(self.ended, self._fetched_ahead(place))
        # Step 4.
        leaving = self._gone["gradients" if use.backward else "activations"]
        gone = leaving[-1 if self._is_leaving(use.backward) else -2]
        ready, here = self._ready.pop(use), self._of[use.index]
        begin = np.maximum(np.maximum(self._free["compute"], ready), gone)
        slow, computing = self._slow("compute", place, place), begin
        if use.backward and use.micro_batch > 0 and self._jobs_of[use.index]["gradients"]:
            # It waits for the sum of gradients in its middle: what comes before is put off, as if it waited at once.
            computing = np.maximum(begin, self._fetched[use.index] - here["lead"] * slow)
        end = computing + here["backward" if use.backward else "forward"] * slow
        if self.slowed is None:
            end = self._beside_older(begin, end, here["sent_backward" if use.backward else "sent_forward"])
        if self.notes:
            self.ran["compute", place] = computing, end
        self.leave()
        if behind is not None and not waits:
            self.load(behind, place)
        if self._sharing:
            end = self._beside_sweeps(use, behind, begin, end)
        end = self._step_beside(begin, end)
        self._free["compute"] = self.computed = self._last_use = end
        self._leaves = (use, end, place + 1)
        for what, start in self._loaded.pop(use) if self.holds else []:
            # Shards that came from the host are there until they have been gathered.
            gathers = self._jobs_of[use.index]["gather"] if what == "weights" else None
            until = end if gathers is None else gathers.choose(ready, end)
            self._hold(what, use.index, start, until)
        if self.kind.offloads_weights and self._updates and use.micro_batch == 0 and not use.backward:
            # What its update has left stays for the use, though it may have been copied to the host before.
            self._hold("weights", use.index, np.minimum(self._on_host["weights", use.index, 0], end), end)
        if use.backward:
            self._begun[use.index] = begin
        else:
            self._begun_forward = begin
        return begin

    def _is_leaving(self, backward: bool) -> bool:
        """Whether the use before has something of that pass that will leave; an embedding saves no activations."""
        if self._leaves is None or self._leaves[0].backward != backward:
            return False
        return backward or self._parts[self._leaves[0].index].is_layer

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
            own, other = (1.0 - 1.0 / table[which, both] for which in (0, stream))
            if stream == 1:
                # While tokens travel, both slow each other down on links that both use.
                crowded, computes = sent * self._shared_links / (1.0 + self._shared_links), 1.0 - sent
                own, other = computes * own + crowded, computes * other + crowded
            end = end + common * own
            self._free[channel] = self._free[channel] + common * other
            if channel == "in" and self._updating:
                self._update_later(stop, common * other)
            elif channel == "ranks" and self._gathering:
                self._gather_later(stop, common * other)
        return end

    def _update_later(self, time: Floats, later: Floats) -> None:
        """Let the optimizer steps that end behind a time end later: what runs up to then slows down their states on the way."""
        if not later.any():
            return
        self._stepped = {
            index: np.where(stepped > time, stepped + later, stepped) for index, stepped in self._stepped.items()
        }
        begins, ends, taken = self._sweeps
        waits = ends > time
        self._sweeps = np.where(waits, begins + later, begins), np.where(waits, ends + later, ends), taken
        self._updating = bool(waits[-1].any())

    def _gather_later(self, time: Floats, later: Floats) -> None:
        """Let the gathers of updated weights that end behind a time end later: what runs up to then slows them down."""
        self._gathering = False
        for index, stepped in self._stepped.items():
            job, waits = self._jobs_of[index]["gather_updated"], stepped > time
            if job is not None and waits.any():
                self._stepped[index] = np.where(waits, stepped + job.choose(later, 0.0), stepped)
                self._gathering = True

    def leave(self) -> None:
        """Step 3: what the last use has left; it goes while the next use runs."""
        if self._leaves is None:
            return
        use, end, place = self._leaves
        self._leaves = None
        jobs, index, own = self._jobs_of[use.index], use.index, place - 1
        out, left_key = self._slow("left", own, place), ("left", own)
        if not use.backward:
            if self._parts[index].is_layer:
                _, left = self._run("out", end, jobs["activations"], out, left_key)
                self._on_host["activations", index, use.micro_batch] = left
                self._gone["activations"].append(left)
                self._hold("activations", index, self._begun_forward, left)
            return
        reduced = end
        name = "reduction" if use.micro_batch == self.slots.last else "scatter"
        if jobs[name] is not None:
            sum_there = self._fetched.get(index, self._nothing)
            scatter, key = self._slow("scatter", own, place), ("scatter", own)
            _, reduced = self._join_ranks(index, np.maximum(end, sum_there), name, scatter, key)
            self._hold("own_gradients", index, self._begun[index], reduced)
        moves = jobs["gradients"]
        self._leaving = index, reduced, np.maximum(reduced, self._free["out"])
        _, left = self._run("out", reduced, moves, out, left_key)
        self._on_host["gradients", index, 0] = left
        self._hold("gradients", index, self._fetching[index] if use.micro_batch else self._begun[index], left)
        # Where nothing leaves nothing is waited for.
        self._gone["gradients"].append(self._nothing if moves is None else moves.choose(left, self._nothing))

    def _hold(self, what: str, index: int, start: Floats, end: Floats) -> None:
        """Note that a buffer of a part is on the device for a time."""
        size = self._sizes.get((what, index)) if self.holds else None
        if size is not None:
            self._held_at.append(self._place)
            self._held.append((start, end, size, float(start.min()), float(end.max())))

    def peak_bytes(self, place: int, begin: Floats, end: Floats) -> Floats:
        """Peak bytes of buffers that come and go at the beginning and the end of a use, once two more have been advanced."""
        recent, earliest, latest = self._held[bisect_left(self._held_at, place - RECENT) :], begin.min(), end.max()
        # What was gone in all of them before, or comes later, counts for none.
        recent = [held for held in recent if held[-1] > earliest and held[-2] <= latest]
        if not recent:
            return self._nothing
        starts, ends, sizes = (np.array(values) for values in list(zip(*recent, strict=True))[:3])
        arrives = np.where((starts < end) & (sizes > 0.0), starts, begin).max(axis=0)
        arrives = np.maximum(arrives, begin)
        # What waits for room begins when another ends: just behind that time rounding cannot tell them apart.
        at_begin, at_arrival = (
            (sizes * ((starts <= time) & (time < ends))).sum(axis=0)
            for time in (begin * (1.0 + ROUNDING), arrives * (1.0 + ROUNDING))
        )
        return np.maximum(at_begin, at_arrival)
