"""Seconds of a stage whose parameter groups step by themselves (ZeRO 2 and 3, offloading), for many strategies at once.

Terms. A part is a parameter group: embedding, a layer, a prediction layer, head. A use is one pass of one micro-batch through it.
Contract. The times are those of the list that plan/lowering/optimizer_state.py writes, with uses in place of operators: its waits
are here, with the number of the step there. What runs at the same time slows each other down: at first as slots say
(use_slowdowns.py), with what goes on from earlier slots as long as both run, then as is read off such a play (overlaps.py).
1. The updates in front of the first forward pass; where weights are offloaded in front of the first use of each part.
2. What a use needs is loaded while the use before it computes, and waits for the end of the last use that has ended.
3. Saved activations leave behind a forward use, gradients behind a backward use.
4. A use waits for what left two uses before.
5. Between passes hidden states go to other stages and come from them. With one chunk the next pass waits for them; with more
   they go on beside it. Either way they and collectives of states that share a link with them take longer.
6. A few micro-batches are played: the first, one that every further one repeats (`stable`), and the last. Without updates, whose
   copies would slow down the one that stands for many, at the rates of slots, at those that are read off that play, and at those
   that are read off this second one, relaxed; at these also by a stage that waits in front of forward passes and its last
   backward pass. Once with updates, at the rates of slots, which tells what they add to the first pass and leave behind for later
   ones, until later passes differ no more. Most strategies differ in their updates alone: without updates one of those is played.

Legend: K kinds of parts, N strategies. `simulate/engine.py` is the slow twin.
Source: Mist, section 5.1 and figure 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.lowering.pipeline_order import Step, interleaved, one_f_one_b
from moe_overlap.tuner.cost.overlaps import Slowed, slowdowns_of
from moe_overlap.tuner.cost.stage_channels import ROUNDING, StageChannels
from moe_overlap.tuner.cost.use_slowdowns import Part, SlowdownTable, Use, UseSlowdowns

Floats = NDArray[np.float64]
KEPT = 0.3
"""Weight of the slowdowns before, where others are read off a play at these."""
STABLE = 2
"""The first micro-batch that stands for all further ones."""
GROUP = 2
"""Micro-batches that pass a chunk before the next chunk is entered; in pipelines of more stages there are more of them."""


@dataclass(frozen=True, slots=True)
class PlayedStage:
    """Seconds of a stage by the names of `pipeline.StageTimes`, as they are read off its plays; [N] each.

    Attributes:
        forward, backward: of a micro-batch that all further ones repeat.
        first: for the first pass of a chunk; `forward` counts there in equal parts for the chunks.
        behind: what the passes after the updates take with them beyond what they take without; on the last stage without what
            `turn` has of that.
        enter_waited: at the slowdowns that were read off, as the stage is busy.
        round: behind a wait in which all is done that the stage could do; on the last stage as `drain`.
        drain: for one chunk's pass, times the chunks. All stages but the last have waited as long as the stage behind takes for
            the pass; on the last stage it is that of the first of several in a row, as `rush` counts for the others. On the
            first stage with what that makes its tail longer.
        rush: times the chunks, too.
        tail: on the first stage where it has not waited.
        copies: of the first stage; 0 elsewhere.
        buffer_bytes: peak of what is on the device for a while, less what of the activations in flight is not held at that time.
        update_bytes: peak beside the updates, which run before activations are held.
    """

    forward: Floats
    backward: Floats
    first: Floats
    enter: Floats
    behind: Floats
    waited: Floats
    enter_waited: Floats
    again: Floats
    turn: Floats
    round: Floats
    drain: Floats
    rush: Floats
    tail: Floats
    copies: Floats
    buffer_bytes: Floats
    update_bytes: Floats


def play_stages(stages: Sequence[Sequence[Part]], table: SlowdownTable, ahead: int, waits: bool) -> PlayedStage:
    """Seconds of a stage, or of several in one go: [L], stage by stage its strategies.

    A play is a long row of operations on few numbers each: most of its time is that of starting them.

    Args:
        stages: the parts of each, in order of their forward pass; they differ in their rows alone.
        table: strategies, and what their uses take.
        ahead: 0 on the last stage of a pipeline; 1 stands for forward passes before the first backward pass.
        waits: whether another stage stands before it.
    """
    passes = _Passes(stages[0], ahead, waits, table.kind.transfers_wait)
    chunks, order, filling, entered = passes.chunks, passes.order, passes.filling, passes.entered
    # Many strategies differ in their updates alone: all other runs play one of those.
    still, places = table.still
    still_slots, slots = (UseSlowdowns(stages, passes.uses, given) for given in (still, table))
    lanes = np.concatenate([places + each * (still_slots.lanes // len(stages)) for each in range(len(stages))])

    def run(given: UseSlowdowns, *noted: str, slowed: Slowed | None = None, notes: bool = False) -> _Run:
        return _Run(StageChannels(given, slowed, notes), passes, noted)

    # Memory: beside updates there is most where nothing waits, and gradients on their way are most where the stage has waited.
    in_front = [FIRST_PASSING] if ahead and not waits else []
    updating = run(slots, UPDATING, *in_front)
    bare = run(still_slots, *(in_front if ahead else [PASSING]), notes=True)
    with_updates = _play_both(updating, bare, passes, lanes)
    busy, idle = _read_off(bare, run, passes)
    group = 1 if len(chunks) == 1 else GROUP
    stable = range(STABLE, STABLE + group)
    # Forward passes ahead stand before the first backward pass: a cycle has the forward pass of a later micro-batch.
    cycle = range(STABLE + ahead * group, STABLE + (ahead + 1) * group)
    forward, backward = busy.mean("forward", cycle), busy.mean("backward", stable)
    usual = {
        step: busy.mean(step.direction, stable if step.direction == "backward" else cycle, step.chunk) for step in order
    }
    nothing, nothing_updated = np.zeros_like(forward), np.zeros(len(lanes))

    def updated(steps: Sequence[Step]) -> Floats:
        """Seconds of passes with updates in front of them beyond the usual ones."""
        return sum((updating.taken[step] - usual[step][lanes] for step in steps), start=nothing_updated)

    # Where no pass follows, those between the chunks' first ones stand for more of them in longer pipelines.
    followed = filling[entered:] or [step for step in filling if step.micro_batch > 0]
    again = _each_beyond(busy, usual, followed, len(chunks))
    rush, around, drain, tail, copies = _emptied(passes, usual, busy, idle)
    apart = _apart(order, usual, (forward, backward), still_slots)

    def slowed(steps: Sequence[Step]) -> Floats:
        """Seconds by which what updates leave behind slows down some passes."""
        apart = (updating.taken[step] - bare.taken[step][lanes] for step in steps if step in with_updates)
        return sum(apart, start=nothing_updated)

    waited, turn = (
        each.mean(direction, range(1))[lanes]
        for each, direction in ((idle, "forward"), (busy if ahead else idle, "backward"))
    )
    counted = nothing_updated
    if waits and table.kind.offloads_weights:
        # Parts are updated in front of their first use, so that waiting does not hide all of it.
        begins = run(slots, UPDATING, *([PASSING] if ahead else []))
        begins.play(forward_waits=True, passes=entered if ahead else passes.turned_back, waited=entered)
        waited = begins.mean("forward", range(1))
        if not ahead:
            counted = begins.mean("backward", range(1)) - turn
            turn = turn + counted
        # While it waits it fetches the states of more parts, which are then on the device together.
        updating.early += begins.early
        updating.later += begins.later
    # Not only the first backward passes are unlike the usual ones: gradients that have begun to leave hold up those behind them.
    settling = passes.settling(len(filling) if ahead else entered)
    # The passes up to the last chunk's first one are those of their chunks; what that leaves for the others counts behind them.
    chunks_apart = sum((apart[step] for step in order[:entered]), start=nothing)
    turn = turn + (_beyond(busy, usual, settling) - chunks_apart)[lanes]
    return PlayedStage(
        forward=forward[lanes],
        backward=backward[lanes],
        first=updated(order[:1]),
        enter=updated(filling[1:entered]) + chunks_apart[lanes],
        behind=slowed(order[entered:]) - counted,
        waited=waited - forward[lanes] if waits else nothing_updated,
        enter_waited=(_beyond(busy, usual, filling[1:entered]) + chunks_apart)[lanes],
        again=again[lanes],
        turn=turn - backward[lanes],
        round=around[lanes],
        drain=drain[lanes],
        rush=rush[lanes],
        tail=tail[lanes],
        copies=copies[lanes],
        buffer_bytes=np.maximum(np.max(updating.later, axis=0), np.max([*bare.later, *idle.later], axis=0)[lanes]),
        update_bytes=np.max(updating.early, axis=0),
    )


def _beyond(run: _Run, usual: Mapping[Step, Floats], steps: Sequence[Step]) -> Floats:
    """Seconds of some passes of a chunk beyond the usual ones."""
    return sum((run.taken[step] - usual[step] for step in steps), start=np.zeros_like(run.played.computed))


def _each_beyond(run: _Run, usual: Mapping[Step, Floats], steps: Sequence[Step], chunks: int) -> Floats:
    """The same of each of some passes on average, times the chunks."""
    return _beyond(run, usual, steps) * chunks / max(1, len(steps))


def _emptied(
    passes: _Passes, usual: Mapping[Step, Floats], busy: _Run, idle: _Run
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """`rush`, `round`, `drain`, `tail` and `copies` of PlayedStage, for the strategies that were played."""
    chunks, ahead = len(passes.chunks), passes.ahead
    ends = idle if ahead else busy
    rush = _each_beyond(busy, usual, passes.emptying, chunks)
    drain = _beyond(ends, usual, passes.closing) * chunks
    drain = drain if ahead else drain - len(passes.emptying) * rush
    around = _each_beyond(ends, usual, passes.awaited, chunks) if ahead else drain
    tail, tail_busy = (each.played.ended - each.ends[passes.order[-1]] for each in (ends, busy))
    copies = ends.played.ended - ends.played.reduced if not passes.waits else np.zeros_like(tail)
    if ahead and not passes.waits:
        # Nothing stands in front of the first stage: what its last pass leaves where it has waited counts with that pass.
        drain, tail = drain + (tail - tail_busy) * chunks, tail_busy
    return rush, around, drain, tail, copies


def _apart(
    order: Sequence[Step],
    usual: Mapping[Step, Floats],
    both: tuple[Floats, Floats],
    slots: UseSlowdowns,
) -> dict[Step, Floats]:
    """Seconds of each usual pass beyond the mean over the chunks, without what its parts take by themselves beyond theirs.

    Chunks of as many layers are unlike where one of them stands behind passes that leave more to copy. What parts take by
    themselves is told by uneven_chunks.py.

    Args:
        both: seconds of a micro-batch, forward and backward.
    """
    whole, chunks = dict(zip(("forward", "backward"), both, strict=True)), len({part.chunk for part in slots.parts})
    apart = {}
    for direction, chunk in {(step.direction, step.chunk) for step in order}:
        alone = [
            seconds[direction] * ((part.chunk == chunk) - 1.0 / chunks)
            for part, seconds in zip(slots.parts, slots.seconds, strict=True)
        ]
        step = next(step for step in order if (step.direction, step.chunk) == (direction, chunk))
        apart[direction, chunk] = usual[step] - whole[direction] / chunks - np.sum(alone, axis=0)
    return {step: apart[step.direction, step.chunk] for step in order}


def _read_off(bare: _Run, run: Callable[..., _Run], passes: _Passes) -> tuple[_Run, _Run]:
    """A stage without updates at the slowdowns that are read off its own runs: busy all the time, and idle before some passes.

    Args:
        bare: the same at those of slots.
        run: of what is to be played.
    """
    slots, ahead, waits = bare.played.slots, passes.ahead, passes.waits
    noted = [PASSING] if ahead else []
    first = bare.read()
    again = run(slots, slowed=first, notes=True)
    again.play(forward_waits=False)
    slowed = _relaxed(first, again.read())
    if ahead and not waits:
        # The first stage is idle before its last backward pass alone: up to there it is played once.
        idle = run(slots, *noted, slowed=slowed)
        idle.play(forward_waits=False, until=passes.drained)
        busy = idle.fork()
        busy.play(forward_waits=False)
        idle.play(forward_waits=False, drains=busy.taken)
        return busy, idle
    busy = run(slots, slowed=slowed)
    busy.play(forward_waits=False)
    # The only stage of a pipeline never waits for another.
    if not waits and not ahead:
        return busy, busy
    idle = run(slots, *noted, slowed=slowed)
    if ahead:
        idle.play(forward_waits=waits, drains=busy.taken)
    else:
        # Of the last stage only the first micro-batch is asked for; behind its first backward pass it waits no more.
        idle.play(forward_waits=waits, passes=passes.turned_back, waited=passes.entered)
    return busy, idle


def _relaxed(before: Slowed, after: Slowed) -> Slowed:
    """Slowdowns between those of a play and those that were read off it.

    What is slowed down less is done earlier, beside other work, and slows that down more: what is read off overshoots. Where
    copies disturb the rest a lot, as on L4, steps were up to 12 % too short without it.
    """
    return {job: KEPT * slow + (1.0 - KEPT) * after[job] for job, slow in before.items()}


def _play_both(updating: _Run, bare: _Run, passes: _Passes, lanes: NDArray[np.intp]) -> list[Step]:
    """Play a stage with updates and without, with updates only until every strategy has settled.

    A strategy has settled when its updates have left nothing behind that a later pass could wait for: from there on its passes
    take as long as without updates.

    Args:
        lanes: of every strategy the place of the one that stands for it without updates.
    Returns:
        The passes that were played with updates.
    """
    settled = np.zeros(len(lanes), dtype=np.bool_)
    with_updates: list[Step] = []
    for step, end in zip(passes.order, passes.ends, strict=True):
        bare.play(forward_waits=False, until=end)
        if settled.all():
            continue
        updating.play(forward_waits=False, until=end)
        if settled.any():
            # So that no strategy's answer depends on when the others settle.
            updating.taken[step] = np.where(settled, bare.taken[step][lanes], updating.taken[step])
        with_updates.append(step)
        if len(with_updates) >= passes.entered:
            settled |= updating.goes_on_like(bare, lanes)
        if settled.all():
            # Two more uses tell when the buffers leave beside which peaks have been noted.
            updating.play(forward_waits=False, until=min(end + 2, passes.ends[-1]))
    for run in (updating, bare):
        run.close()
    return with_updates


UPDATING, PASSING, FIRST_PASSING = "updating", "passing", "first passing"
"""Peaks that a run notes: in the first micro-batch's forward passes, beside updates, later, or before the last micro-batch."""


class _Passes:
    """The passes that are played, and what is known of them before.

    Attributes:
        filling, emptying: the passes in front of the first backward pass, and those behind the one that follows the last
            forward pass.
        closing: the passes that `PlayedStage.drain` tells.
        entered: passes up to the last one that updates are made in front of.
        uses, steps: of every place the use, and the pass that it belongs to.
        turned_back: passes up to the last one of the first micro-batch.
        awaited, spaced: of `emptying` those that the stage has waited for until all that it could do was done, and those behind
            them, whose gradients come as far apart as the stage behind makes them in a row.
        drained: the place of the first use in `emptying`.
    """

    def __init__(self, parts: Sequence[Part], ahead: int, waits: bool, transfers_wait: bool) -> None:
        self.parts, self.ahead, self.waits = parts, ahead, waits
        self.chunks = [*dict.fromkeys(part.chunk for part in parts)]
        self.blocks = len(self.chunks) == 1 or transfers_wait
        self.order = _order(self.chunks, ahead)
        directions = [step.direction for step in self.order]
        self.filling = self.order[: directions.index("backward")]
        self.entered = max(number for number, step in enumerate(self.filling) if step.micro_batch == 0) + 1
        self.emptying = self.order[len(self.order) - directions[::-1].index("forward") + 1 :]
        self.uses: list[Use] = []
        self.steps: list[Step] = []
        for step in self.order:
            of_step = _indices(parts, step.chunk, step.direction == "backward")
            self.steps += [step] * len(of_step)
            self.uses += [Use(index, step.direction == "backward", step.micro_batch) for index in of_step]
        # On the last stage `rush` counts for all passes behind the last forward pass but the first of them.
        self.closing = self.order[-1:] if ahead else self.order[len(self.order) - len(self.emptying) - 1 :]
        self.last = max(step.micro_batch for step in self.order)
        self.turned_back = max(number for number, step in enumerate(self.order) if step.micro_batch == 0) + 1
        # The last stage's forward and backward passes in turn: gradients come that far apart up to the second of these.
        apart = (GROUP if len(self.chunks) > 1 else 1) * ahead
        self.awaited, self.spaced = self.emptying[:apart], self.emptying[apart:]
        self.drained = self.steps.index(self.emptying[0]) if self.emptying else len(self.uses)

    def settling(self, begun: int) -> list[Step]:
        """The passes from a place on that `PlayedStage.turn` tells beside the first backward ones.

        With one chunk the stages in front have slack there, as they wait for the last one.
        """
        is_told = len(self.chunks) > 1 or not self.ahead
        between = self.order[begun : len(self.order) - len(self.emptying) - 1] if is_told else ()
        return [step for step in between if step.direction == "forward" or step.micro_batch > 0]

    @cached_property
    def ends(self) -> list[int]:
        """The places behind each pass."""
        return [place for place, crossing in enumerate(self.crossings) if place and crossing is not None] + [
            len(self.uses)
        ]

    @cached_property
    def crossings(self) -> list[int | None]:
        """Transfers between stages in front of every place where a pass begins; None at places inside of one."""
        pairs = zip([None, *self.steps], self.steps, strict=False)
        return [
            None if step is last else 0 if last is None else self._crosses(last, False) + self._crosses(step, True)
            for last, step in pairs
        ]

    def _crosses(self, step: Step, is_input: bool) -> bool:
        """Whether the input or the output of a pass comes from or goes to another stage."""
        at_start, at_end = step.chunk == self.chunks[0], step.chunk == self.chunks[-1]
        if is_input == (step.direction == "forward"):
            return self.waits or self.ahead > 0 and not at_start
        return self.ahead > 0 or self.waits and not at_end

    def noted(self, kinds: Sequence[str]) -> list[bool]:
        """Whether a peak beside the use at each place may be noted."""
        return [
            UPDATING in kinds
            if _updates(use)
            else PASSING in kinds or FIRST_PASSING in kinds and use.micro_batch != self.last
            for use in self.uses
        ]

    @cached_property
    def counts(self) -> list[bool]:
        """Whether the peak beside the use at each place counts, where it is noted."""
        group = 1 if len(self.chunks) == 1 else GROUP
        counted = []
        for place, use in enumerate(self.uses):
            # Of a forward pass the last use counts: no more is held before it.
            turns_back = use.backward or place + 1 < len(self.uses) and self.uses[place + 1].backward
            first = 0 if use.backward else self.ahead * group
            looked_at = use.micro_batch == first or use.micro_batch - first in range(STABLE, STABLE + group)
            looked_at |= use.backward and (use.micro_batch == self.last or self.steps[place] in self.emptying)
            counted.append(_updates(use) or turns_back and looked_at)
        return counted


def _updates(use: Use) -> bool:
    """Whether updates are made in front of a use or beside it."""
    return use.micro_batch == 0 and not use.backward


class _Run:
    """A stage that plays its passes once.

    Attributes:
        taken: seconds of the passes, with what they wait for of their own stage.
        ends: when they have ended.
        early, later: peaks beside the updates, and beside the first, a stable and the last micro-batches.
    """

    def __init__(self, played: StageChannels, passes: _Passes, noted: Sequence[str]) -> None:
        self.played, self._passes = played, passes
        self._noted = [may and counts for may, counts in zip(passes.noted(noted), passes.counts, strict=True)]
        # Buffers count beside uses whose peaks are noted alone, and those are looked at two uses late.
        self._held_until = 2 + max((place for place, may in enumerate(passes.noted(noted)) if may), default=-3)
        self._place = 0
        self._given = nothing = np.zeros_like(played.computed)
        self.taken: dict[Step, Floats] = dict.fromkeys(passes.order, nothing)
        self.ends: dict[Step, Floats] = {}
        self.early, self.later = [nothing], [nothing]
        self._window: list[tuple[int, Floats, Floats]] = []

    def fork(self) -> _Run:
        """The same run from here on, which notes no peaks."""
        other = copy(self)
        other.played, other.taken, other.ends = self.played.fork(), dict(self.taken), dict(self.ends)
        other._noted, other._held_until, other._window = [False] * len(self._noted), -1, []
        return other

    def mean(self, direction: str, micro_batches: range, chunk: int | None = None) -> Floats:
        """Seconds of some micro-batches in one direction, through one chunk or all of them, on average."""
        taken = (
            seconds
            for step, seconds in self.taken.items()
            if step.direction == direction and step.micro_batch in micro_batches and chunk in (None, step.chunk)
        )
        return sum(taken, start=np.zeros_like(self.played.computed)) / len(micro_batches)

    def read(self) -> Slowed:
        """The slowdowns of all jobs at the times at which they ran."""
        slots = self.played.slots
        return slowdowns_of(self.played.ran, slots.sent, slots.shared, slots.table)

    def play(
        self,
        forward_waits: bool,
        drains: Mapping[Step, Floats] | None = None,
        passes: int | None = None,
        until: int | None = None,
        waited: int | None = None,
    ) -> None:
        """Play the uses from where the run stands.

        Args:
            forward_waits: whether the stage has waited for the input of every forward pass.
            waited: for those among so many first passes alone.
            drains: seconds of passes on the stage behind, whose gradients the last backward passes wait for; None: not at all.
            passes: so many passes alone.
            until: up to this place alone, from where the run may be forked and goes on later; default to the end.
        """
        played, uses, steps, crossings = self.played, self._passes.uses, self._passes.steps, self._passes.crossings
        closes, before = [*(crossing is not None for crossing in crossings[1:]), True], played.computed
        if self._place == 0:
            played.holds = self._held_until >= 0
            played.begin(uses[0])
        for place in range(self._place, len(uses) if until is None else until):
            use, step, crossing, waits = uses[place], steps[place], crossings[place], False
            if crossing is not None:
                if len(self.ends) == passes:
                    break
                awaited = drains is not None and step in self._passes.awaited
                waits = awaited if use.backward else forward_waits and (waited is None or len(self.ends) < waited)
                before = played.computed
                if place and not waits:
                    before = played.transfer(crossing, blocks=self._passes.blocks, place=place)
                if drains is not None and step in self._passes.spaced:
                    # The stage behind takes as long for the same pass, but has no embedding, which the last one waits for.
                    paced_by = self._passes.emptying if step in self._passes.closing else [step]
                    self._given = self._given + np.min([drains[each] for each in paced_by], axis=0)
                    before = np.maximum(before, self._given)
                    played.wait(self._given)
            played.holds = place <= self._held_until
            begin = played.advance(place, waits=waits)
            if waits:
                before = self._given = begin
            if closes[place]:
                self.ends[step], self.taken[step] = played.computed, played.computed - before
            # Two uses late: the next one has loaded its gradients by then, and it is known when they leave.
            if len(self._window) > 1:
                self._note_peak(*self._window.pop(0))
            if self._noted[place]:
                self._window.append((place, begin, played.computed))
        if until is None:
            self.close()
        else:
            self._place = until

    def goes_on_like(self, other: _Run, lanes: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether all that follows takes as long as in another run of the same passes, which stands at the same place.

        Args:
            lanes: the place there of each strategy.
        """
        apart = np.abs(self.played.lags() - other.played.lags()[:, lanes])
        equal: NDArray[np.bool_] = np.all(apart <= ROUNDING * self.played.computed, axis=0)
        return equal

    def close(self) -> None:
        """Let leave what is left behind the last use."""
        self.played.leave()
        while self._window:
            self._note_peak(*self._window.pop(0))

    def _note_peak(self, place: int, begin: Floats, end: Floats) -> None:
        passes, parts, use = self._passes, self._passes.parts, self._passes.uses[place]
        peak, chunk = self.played.peak_bytes(place, begin, end), parts[use.index].chunk
        if passes.ahead and _updates(use):
            self.early.append(peak + self._saved(range(use.index + 1)))
            return
        ended = self._saved(range(use.index + 1, len(parts)), chunk)
        if passes.steps[place] in passes.spaced:
            # Backward passes in a row: more gradients wait to leave, and one pass fewer is in flight.
            ended = ended + self._saved(range(len(parts)), chunk)
        self.later.append(peak - ended)

    def _saved(self, indices: Iterable[int], chunk: int | None = None) -> Floats:
        """Bytes of one micro-batch that some of the parts (of a chunk) save on the device."""
        parts, slots = self._passes.parts, self.played.slots
        saved = (slots.saved(index) for index in indices if chunk in (None, parts[index].chunk))
        return sum(saved, start=np.zeros_like(self.played.computed))


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
