"""Slowdowns of work that starts together: a use of a part, the loads of the next use, and what the use before leaves.

Terms. A slot is the time of one use. Its tasks are

    compute    the use itself; tokens travel in a share of it
    weights    from the host for the next use, then `gather` among ranks
    rest       what else the next use needs from the host, behind the weights on their channel
    scatter    of what the use before left, then `out` to the host; the gather waits for it on their channel

Method. All tasks that may start do so at once. Whatever runs is slowed down by the factors of the streams that are busy
(interference.py); while tokens travel, they and collectives of states slow each other down on the links that both use, to half
their rates where that is one link. When a task ends the rates are new, until none is left: at most as many rounds as tasks. A
slot's tasks are slower than alone by the ratio that is returned.

`SlowdownTable` keeps the slots of a group of strategies, `UseSlowdowns` finds those of the uses of a stage, or of several stages
that differ in the kinds of their parts alone. These are played in one go: a lane is a strategy of one of them.

Legend: P slots, N strategies, L lanes (stage by stage its strategies).
Source: Mist, algorithm 1, with the order of tasks on a channel beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.stage import UseBytes, UseSeconds

Floats = NDArray[np.float64]
TASKS = ("compute", "weights", "rest", "scatter", "gather", "out")
COMPUTE, WEIGHTS, REST, SCATTER, GATHER, OUT = range(len(TASKS))
BETWEEN_RANKS = 4
"""Bit of the collectives among the streams of interference.py; computation is 8, copies to the device 2 and to the host 1."""


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
    """The properties of a plan that change the order of a list.

    Attributes:
        offloads_weights: whether each part is updated in front of its first use, and not all of them first.
        transfers_wait: whether passes of several chunks wait for transfers between stages, as those of one chunk always do.
    """

    offloads_weights: bool
    transfers_wait: bool = True


@dataclass(frozen=True, slots=True)
class Use:
    """One pass of one micro-batch through the part of this index."""

    index: int
    backward: bool
    micro_batch: int


def slowdowns(
    seconds: Mapping[str, Floats],
    sent: Floats,
    out_waits: NDArray[np.bool_],
    gather_waits: NDArray[np.bool_],
    shared: Mapping[str, Floats],
    factors: Interference,
) -> dict[str, Floats]:
    """How many times as long each task of a slot takes as alone; 1 where there is none.

    Args:
        seconds: TASKS -> [P, N] seconds alone.
        sent: [P, N] share of `compute` in which tokens travel.
        out_waits: [P, N] whether `out` waits for `scatter`.
        gather_waits: [P, N] whether `gather` waits for `rest`, too.
        shared: [P, N] by how much `scatter` and `gather` and the tokens slow each other down, 0 to 1 (`UseSeconds.shared`).
    """
    alone = np.stack([seconds[name] for name in TASKS])
    left, passed, table = alone.copy(), np.zeros_like(alone), factors.table
    active = np.empty(alone.shape, dtype=np.bool_)
    while True:
        waiting = left > 0
        if not waiting.any():
            break
        active[:] = waiting
        active[REST] &= ~waiting[WEIGHTS]
        active[GATHER] &= ~waiting[WEIGHTS] & ~waiting[SCATTER] & ~(waiting[REST] & gather_waits)
        active[OUT] &= ~(waiting[SCATTER] & out_waits)
        crowd = 1.0 + np.where(active[SCATTER], shared["scatter"], shared["gather"])
        rates = _rates(active, sent, crowd, table)
        # A task that is not active has no rate; dividing by 1 keeps numpy quiet and infinity keeps it out of the minimum.
        ends = np.where(active, left / np.where(active, rates, 1.0), np.inf).min(axis=0)
        ends = np.where(np.isfinite(ends), ends, 0.0)
        passed += np.where(active, ends, 0.0)
        left -= np.where(active, rates * ends, 0.0)
        # Rounding leaves a little of what has ended.
        left[left <= 1e-12 * alone] = 0.0
    ratio = np.where(alone > 0, passed / np.where(alone > 0, alone, 1.0), 1.0)
    return dict(zip(TASKS, ratio, strict=True))


def _rates(active: NDArray[np.bool_], sent: Floats, crowd: Floats, table: Floats) -> Floats:
    """Seconds of its own work that each task does in a second.

    Args:
        crowd: how many times as long tokens and the collective of states take together as alone.
    """
    computes = active[COMPUTE]
    collective = active[SCATTER] | active[GATHER]
    others = 4 * collective + 2 * (active[WEIGHTS] | active[REST]) + active[OUT]
    alone, with_compute = others.astype(np.intp), (others + 8).astype(np.intp)
    # A use alternates between computation and sending: its rate is the mean over its own work, the others' over time.
    computing = (1.0 - sent) * table[0].take(with_compute)
    sending = sent * table[1].take(alone | BETWEEN_RANKS) * np.where(collective, crowd, 1.0)
    slow = computing + sending
    share = np.where(computes, computing / np.where(slow > 0, slow, 1.0), 1.0)
    state, sends = np.where(computes, with_compute, alone), alone | BETWEEN_RANKS
    rates = np.empty(active.shape)
    rates[COMPUTE] = 1.0 / np.where(slow > 0, slow, 1.0)
    between = share / table[1].take(state) + (1.0 - share) / (crowd * table[1].take(sends))
    rates[SCATTER] = rates[GATHER] = between
    rates[WEIGHTS] = rates[REST] = share / table[2].take(state) + (1.0 - share) / table[2].take(sends)
    rates[OUT] = share / table[3].take(state) + (1.0 - share) / table[3].take(sends)
    return rates


OF_UPDATES = {
    UseSeconds: ("states_in", "states_out", "sweep", "gather_updated"),
    UseBytes: ("states",),
}
"""Seconds and bytes that only updates take."""


class Job(NamedTuple):
    """A job by itself.

    Attributes:
        seconds: [N]; 0 of strategies without it.
        has: which strategies have it; None: all.
        bar: 0 of those, and of the others minus infinity: added to a time it puts that before all; None: all have it.
    """

    seconds: Floats
    has: NDArray[np.bool_] | None
    bar: Floats | None

    def choose(self, own: Floats, other: Floats | float) -> Floats:
        """A value for strategies that have the job, another for the rest."""
        return own if self.has is None else np.where(self.has, own, other)


def _job(seconds: Floats) -> Job | None:
    """A job; None where no strategy has it."""
    has = seconds > 0
    if not has.any():
        return None
    if has.all():
        return Job(seconds, None, None)
    return Job(seconds, has, np.where(has, 0.0, -np.inf))


def jobs_of(seconds: Mapping[str, Floats]) -> dict[str, Job | None]:
    """The jobs that the seconds of a part are."""
    # Of the last micro-batch; of those before only what ZeRO 2 and 3 scatter.
    return {name: _job(values) for name, values in seconds.items()} | {
        "reduction": _job(seconds["scatter"] + seconds["reduce"])
    }


class SlowdownTable:
    """How much slower the tasks of slots are than alone, for one group of strategies; a slot is priced once.

    Attributes:
        updates: whether parts are updated.
    """

    def __init__(
        self, seconds: UseSeconds, sizes: UseBytes, kind: ListKind, factors: Interference, updates: bool = True
    ) -> None:
        self.seconds, self.sizes, self.kind, self.factors, self.updates = seconds, sizes, kind, factors, updates
        self.table = factors.table
        self._known: dict[SlotKey, dict[str, Floats]] = {}
        self._rows: dict[int, dict[str, Floats]] = {}
        self._jobs: dict[int, dict[str, Job | None]] = {}

    def row(self, row: int) -> dict[str, Floats]:
        """All seconds of a kind of part."""
        if row not in self._rows:
            self._rows[row] = {field.name: getattr(self.seconds, field.name)[row] for field in fields(UseSeconds)}
        return self._rows[row]

    def jobs(self, row: int) -> dict[str, Job | None]:
        """The jobs that they are."""
        if row not in self._jobs:
            self._jobs[row] = jobs_of(self.row(row))
        return self._jobs[row]

    @cached_property
    def moved(self) -> dict[tuple[str, int], Floats]:
        """Name and kind of part -> bytes that are on the device for a while; without those that are 0."""
        sized = {field.name: getattr(self.sizes, field.name) for field in fields(UseBytes)}
        rows = range(len(self.sizes.weights))
        return {(name, row): values[row] for name, values in sized.items() for row in rows if values[row].any()}

    @cached_property
    def still(self) -> tuple[SlowdownTable, NDArray[np.intp]]:
        """The same where nothing is updated, and the place there of each strategy [N]: many differ in their updates alone."""
        rows = [
            getattr(values, field.name)
            for values in (self.seconds, self.sizes)
            for field in fields(values)
            if field.name not in OF_UPDATES[type(values)]
        ]
        # Sorting whole rows of numbers takes longer than sorting their bytes.
        lanes = np.ascontiguousarray(np.concatenate(rows).T)
        words = lanes.view(np.dtype((np.void, lanes.dtype.itemsize * lanes.shape[1])))[:, 0]
        _, first, place = np.unique(words, return_index=True, return_inverse=True)
        seconds, sizes = UseSeconds(**_still(self.seconds, first)), UseBytes(**_still(self.sizes, first))
        return SlowdownTable(seconds, sizes, self.kind, self.factors, updates=False), place

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._known

    def add(self, new: Mapping[SlotKey, Mapping[str, Floats]]) -> None:
        """Price slots that are not known yet; those without updates are known where nothing is updated."""
        if self.updates:
            still, lanes = self.still
            for key in new:
                if key in still:
                    self._known[key] = {name: slow[lanes] for name, slow in still[key].items()}
            new = {key: tasks for key, tasks in new.items() if key not in still}
        if not new:
            return
        nothing = np.zeros(self.seconds.forward.shape[1])
        arrays = {
            name: np.stack([tasks.get(name, nothing) for tasks in new.values()])
            for name in (*TASKS, "sent", "waits", "gather waits", "scatter shared", "gather shared")
        }
        sent, waits, gather_waits = arrays.pop("sent"), arrays.pop("waits") > 0, arrays.pop("gather waits") > 0
        shared = {name: arrays.pop(f"{name} shared") for name in ("scatter", "gather")}
        slow = slowdowns(arrays, sent, waits, gather_waits, shared, self.factors)
        for number, key in enumerate(new):
            self._known[key] = {name: slow[name][number] for name in TASKS}

    def __getitem__(self, key: SlotKey) -> dict[str, Floats]:
        return self._known[key]


def _still(values: UseSeconds | UseBytes, lanes: NDArray[np.intp]) -> dict[str, Floats]:
    """Seconds or bytes of some strategies without their updates."""
    fewer = {field.name: getattr(values, field.name)[:, lanes] for field in fields(values)}
    return fewer | {name: np.zeros_like(fewer[name]) for name in OF_UPDATES[type(values)]}


SlotKey = tuple[object, ...]
"""The key of a slot: kinds and passes of its uses, and what they load and leave."""


class _Slot:
    """A slot of several stages; [L] of a task is made when it is asked for: played again jobs mostly take their own slowdowns."""

    def __init__(self, of_stages: Sequence[Mapping[str, Floats]]) -> None:
        self._of_stages = of_stages
        self._known: dict[str, Floats] = {}

    def __getitem__(self, task: str) -> Floats:
        if len(self._of_stages) == 1:
            return self._of_stages[0][task]
        if task not in self._known:
            self._known[task] = np.concatenate([slow[task] for slow in self._of_stages])
        return self._known[task]


class UseSlowdowns:
    """The slots of the uses of stages, and of their updates; and what their parts take alone. Arrays are [L]."""

    def __init__(self, stages: Sequence[Sequence[Part]], uses: Sequence[Use], table: SlowdownTable) -> None:
        """Find the slots, and price those that the table does not know.

        Args:
            stages: of as many parts, which differ in their rows alone.
            uses: of each of them.
        """
        self.parts, self.uses, self.group, self._kind = stages[0], uses, table, table.kind
        self.last = max(use.micro_batch for use in uses)
        self.table, strategies = table.table, table.seconds.forward.shape[1]
        self.lanes = strategies * len(stages)
        self._nothing = np.zeros(strategies)
        new: dict[SlotKey, dict[str, Floats]] = {}
        found = [self._slots_of(parts, new) for parts in stages]
        table.add(new)
        # Of every slot its keys on the stages; uses whose slots are equal on all of them share one.
        places, updates = ([*zip(*keys, strict=True)] for keys in zip(*found, strict=True))
        slots = {keys: _Slot([table[key] for key in keys]) for keys in dict.fromkeys([*places, *updates])}
        self._places, self._updates = ([slots[keys] for keys in each] for each in (places, updates))
        self._rows = [tuple(parts[index].row for parts in stages) for index in range(len(stages[0]))]
        kinds = {rows: self._seconds_of(rows) for rows in dict.fromkeys(self._rows)}
        self.seconds = [kinds[rows] for rows in self._rows]
        """Seconds of each part."""
        jobs = {rows: self._jobs_in(rows) for rows in kinds}
        self.jobs = [jobs[rows] for rows in self._rows]
        """The jobs that they are."""
        self.sent, self.shared = np.empty((len(uses), self.lanes)), np.empty((len(uses), self.lanes))
        for place, use in enumerate(uses):
            of_part = self.seconds[use.index]
            self.sent[place] = of_part["sent_backward" if use.backward else "sent_forward"]
            self.shared[place] = of_part["shared"]

    def _seconds_of(self, rows: tuple[int, ...]) -> dict[str, Floats]:
        """All seconds of a part that is of these kinds on the stages."""
        kinds = [self.group.row(row) for row in rows]
        if len(kinds) == 1:
            return kinds[0]
        return {name: np.concatenate([seconds[name] for seconds in kinds]) for name in kinds[0]}

    def _jobs_in(self, rows: tuple[int, ...]) -> dict[str, Job | None]:
        kinds = [self.group.jobs(row) for row in rows]
        if len(kinds) == 1:
            return kinds[0]
        # Most jobs are none of any strategy, or of all of them, on every stage.
        known: dict[str, Job | None] = {}
        for name in kinds[0]:
            jobs = [of_kind[name] for of_kind in kinds]
            if any(jobs):
                taken = np.concatenate([self._nothing if job is None else job.seconds for job in jobs])
                known[name] = Job(taken, None, None) if all(job and job.has is None for job in jobs) else _job(taken)
            else:
                known[name] = None
        return known

    @cached_property
    def moved(self) -> dict[tuple[str, int], Floats]:
        """Name and index of a part -> bytes that are on the device for a while; without those that are 0."""
        known, moved = self.group.moved, {}
        for name, (index, rows) in itertools.product((field.name for field in fields(UseBytes)), enumerate(self._rows)):
            sizes = [known.get((name, row)) for row in rows]
            if any(size is not None for size in sizes):
                moved[name, index] = np.concatenate([self._nothing if size is None else size for size in sizes])
        return moved

    def saved(self, index: int) -> Floats:
        """Bytes that a part saves on the device for one micro-batch."""
        sizes = self.group.sizes.saved
        return np.concatenate([sizes[row] for row in self._rows[index]])

    def _slots_of(
        self, parts: Sequence[Part], new: dict[SlotKey, dict[str, Floats]]
    ) -> tuple[list[SlotKey], list[SlotKey]]:
        """Keys of a stage's slots, and of those of its updates.

        Args:
            new: slots that are not priced yet; what of them this stage has is added.
        """
        table, uses, seconds, nothing = self.group, self.uses, self.group.seconds, self._nothing
        places: list[SlotKey] = []
        for place, use in enumerate(uses):
            before = uses[place - 1] if place else None
            behind = uses[place + 1] if place + 1 < len(uses) else None
            key = self._key(parts, before, use, behind)
            if key not in table and key not in new:
                new[key] = self._tasks(parts, before, use, behind)
            places.append(key)
        updates: list[SlotKey] = []
        for index in range(len(parts) if table.updates else 0):
            row = parts[index].row
            after = parts[index + 1].row if index + 1 < len(parts) else None
            updates.append(("update", row, after))
            if updates[-1] in table or updates[-1] in new:
                continue
            new[updates[-1]] = {
                "compute": seconds.sweep[row],
                "rest": nothing if after is None else seconds.states_in[after],
                "gather": seconds.gather_updated[row],
                "out": seconds.states_out[row],
            }
        return places, updates

    def _key(self, parts: Sequence[Part], before: Use | None, use: Use, behind: Use | None) -> SlotKey:
        """The key that tells a slot from others."""
        key: list[object] = [
            parts[use.index].row,
            use.backward,
            self._is_first(use) and self._kind.offloads_weights,
        ]
        if behind is not None:
            loads = loads_weights(parts, behind, use)
            other = parts[behind.index].row
            is_first = self._is_first(behind) and self._kind.offloads_weights
            key += [other, is_first, loads, behind.backward, behind.micro_batch > 0]
        if before is not None:
            other, is_last = parts[before.index].row, before.micro_batch == self.last
            key += ["leaves", other, before.backward, is_last]
        return tuple(key)

    def _is_first(self, use: Use) -> bool:
        """Whether a part is updated in front of a use."""
        return self.group.updates and use.micro_batch == 0 and not use.backward

    def _tasks(self, parts: Sequence[Part], before: Use | None, use: Use, behind: Use | None) -> dict[str, Floats]:
        """The tasks of a slot."""
        seconds, nothing = self.group.seconds, self._nothing
        row = parts[use.index].row
        slot = {
            "compute": (seconds.backward if use.backward else seconds.forward)[row],
            "sent": (seconds.sent_backward if use.backward else seconds.sent_forward)[row],
            **dict.fromkeys(("weights", "rest", "scatter", "gather", "out", "waits"), nothing),
        }
        updates = self._kind.offloads_weights
        if self._is_first(use) and updates:
            slot["out"] = seconds.states_out[row] + seconds.weights[row]
        if behind is not None:
            other = parts[behind.index].row
            loads = loads_weights(parts, behind, use)
            if self._is_first(behind) and updates:
                slot["rest"], slot["gather"] = seconds.states_in[other], seconds.gather_updated[other]
                # In the first slot alone: the states of later parts come a slot ahead of their gather.
                slot["gather waits"] = nothing + (before is None)
            elif loads and updates:
                slot["weights"] = seconds.weights[other]
            slot["gather shared"] = seconds.shared[other]
            if loads:
                slot["gather"] = slot["gather"] + seconds.gather[other]
            if behind.backward:
                slot["rest"] = seconds.activations[other]
                if behind.micro_batch > 0:
                    slot["rest"] = slot["rest"] + seconds.gradients[other]
        if before is not None:
            other = parts[before.index].row
            if before.backward:
                slot["scatter shared"] = seconds.shared[other]
                slot["scatter"] = seconds.scatter[other]
                if before.micro_batch == self.last:
                    slot["scatter"] = slot["scatter"] + seconds.reduce[other]
                slot["out"], slot["waits"] = slot["out"] + seconds.gradients[other], nothing + 1.0
            else:
                slot["out"] = slot["out"] + seconds.activations[other]
        return slot

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
