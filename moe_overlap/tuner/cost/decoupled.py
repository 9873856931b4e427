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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Concurrent
from moe_overlap.tuner.cost.stage import KindTerms, StateRates, Strategy, state_seconds, state_sizes

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class UseSeconds:
    """Seconds of the uses and the updates of each kind of part, with what runs beside them; [K, N] each."""

    forward: Floats
    first_forward: Floats
    """Of the first micro-batch: updates of the parts behind it run beside it."""
    backward: Floats
    last_backward: Floats
    """Of the last micro-batch: gradients are reduced beside it where they are reduced once a step."""
    weights: Floats
    """The offloaded share of weights, from the host for a forward use."""
    backward_weights: Floats
    gather: Floats
    """Shards of weights, gathered for a forward use (ZeRO 3)."""
    backward_gather: Floats
    activations_out: Floats
    activations_in: Floats
    gradients_in: Floats
    gradients_out: Floats
    scatter: Floats
    """Gradients of one micro-batch (ZeRO 2, 3)."""
    reduce: Floats
    """Gradient sums, once a step (ZeRO 0, 1)."""
    states_in: Floats
    """States and gradients that an update takes from the host."""
    states_out: Floats
    weights_out: Floats
    """Updated weights, to the host."""
    sweep: Floats
    """The optimizer step."""
    gather_updated: Floats
    """Updated shards of weights, gathered (ZeRO 1, 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UseBytes:
    """Bytes on the device while parts of each kind are used or updated, beyond what always stays there; [K, N] each."""

    weights: Floats
    """Offloaded weights and gathered ones."""
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


def play_stage(
    parts: Sequence[Part], seconds: UseSeconds, sizes: UseBytes, kind: ListKind, ahead: int, waits: bool
) -> PlayedStage:
    """Seconds of a stage.

    Args:
        parts: the stage's, in order of their forward pass.
        ahead: forward passes before the first backward pass; 0 on the last stage of a pipeline, 1 stands for more.
        waits: whether another stage stands before it.
    """
    played = _Played(parts, seconds, kind)
    order = _passes([*dict.fromkeys(part.chunk for part in parts)], ahead)
    uses = [Use(index, *step) for *step, chunk in order for index in _indices(parts, chunk, is_backward=step[0])]
    waiting = _Played(parts, seconds, kind)
    waiting.begin(uses[0])
    begin = played.computed
    turns: dict[bool, Floats] = {}
    for place, use in enumerate(uses):
        if use.micro_batch > 0:
            break
        waiting.load(uses[place + 1], use)
        if place == 0:
            begin = waiting.wait()
        waiting.compute(use)
        turns[use.backward] = waiting.computed
    waited = turns[False] - begin
    played.begin(uses[0])
    ends: dict[tuple[bool, int], Floats] = {}
    begin_of_last = None
    buffers: list[Floats] = []
    for place, use in enumerate(uses):
        if place + 1 < len(uses):
            played.load(uses[place + 1], use)
        if ahead and use.backward and use.micro_batch == LAST and begin_of_last is None:
            # The loads of two uses do not wait for the first of them to begin.
            begin_of_last = played.wait()
        begin = played.compute(use)
        ends[use.backward, use.micro_batch] = played.computed
        if use.micro_batch == STABLE + (0 if use.backward else ahead):
            neighbours = (uses[place - 1], use, uses[place + 1] if place + 1 < len(uses) else None)
            buffers.append(_use_bytes(parts, sizes, neighbours) + played.waiting_bytes(sizes, begin))
    stable = ends[True, STABLE] - ends[True, STABLE - 1]
    # Forward passes ahead stand before the first backward pass, so a cycle begins with a forward pass of a later micro-batch.
    forward = ends[False, STABLE + ahead] - ends[True, STABLE - 1]
    if begin_of_last is None:
        begin_of_last = ends[True, LAST - 1] + forward
    return PlayedStage(
        first_forward=ends[False, 0],
        waited_forward=waited,
        first_backward=_first_backward(ahead, waits, turns, ends, stable - forward),
        forward=forward,
        backward=stable - forward,
        last_backward=ends[True, LAST] - begin_of_last,
        tail=played.ended - ends[True, LAST],
        buffer_bytes=np.max([*buffers], axis=0),
        update_bytes=_update_bytes(parts, sizes, kind),
    )


def _first_backward(
    ahead: int, waits: bool, turns: Mapping[bool, Floats], ends: Mapping[tuple[bool, int], Floats], stable: Floats
) -> Floats:
    """Seconds of the first backward pass."""
    if ahead:
        return stable
    return turns[True] - turns[False] if waits else ends[True, 0] - ends[False, 0]


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


class _Played:
    """When the channels of a stage are free, and what has left it; arrays of [N]."""

    def __init__(self, parts: Sequence[Part], seconds: UseSeconds, kind: ListKind) -> None:
        self._parts, self._kind = parts, kind
        self._rows = {
            row: {name: getattr(seconds, name)[row] for name in UseSeconds.__dataclass_fields__}
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
        self._on_host: dict[tuple[str, int], Floats] = {}
        self._fetched: dict[int, Floats] = {}
        self._pending: list[tuple[Use, Floats]] = []
        self._reduced: list[tuple[int, Floats]] = []

    @property
    def ended(self) -> Floats:
        """When all channels have ended."""
        return np.max([*self._free.values()], axis=0)

    def begin(self, use: Use) -> None:
        """Write what stands in front of the first use."""
        if not self._kind.offloads_weights:
            self.update_all()
        self.load(use, None)

    def _step_beside(self, begin: Floats, end: Floats) -> Floats:
        """Optimizer steps of parts that are loaded while a use runs from `begin` to `end`; when both have ended."""
        for use, start in self._pending:
            # Two kernels at a time halve each other until the first of them ends.
            sweep = self._of(use.index)["sweep"]
            both = np.maximum(begin, start)
            common = np.maximum(0.0, np.minimum(end - both, sweep - (both - start)))
            end = end + common
            self._free["optimizer"] = start + sweep + common
            stepped = self._store_states(use.index, self._free["optimizer"])
            self._stepped[use.index] = stepped
            self._ready[use] = self._gather("gather", use.index, stepped, start)
        self._pending = []
        return end

    def wait(self) -> Floats:
        """Let the stage wait until all its channels are free, and on; when it goes on."""
        self._step_beside(self._free["compute"], self._free["compute"])
        self._free["compute"] = self.ended
        return self._free["compute"]

    def _of(self, index: int) -> dict[str, Floats]:
        return self._rows[self._parts[index].row]

    def _run(self, channel: str, after: Floats, seconds: Floats) -> Floats:
        """The end of work on a channel; `after` where there is none."""
        works = seconds > 0
        end = np.maximum(self._free[channel], after) + seconds
        self._free[channel] = np.where(works, end, self._free[channel])
        return np.where(works, end, after)

    def update_all(self) -> None:
        """Step 1."""
        first, sweeps = None, self._nothing
        for index in range(len(self._parts)):
            here = self._of(index)
            begin = self._fetch_states(index)
            first = begin if first is None else first
            sweeps = sweeps + here["sweep"]
            self._stepped[index] = self._store_states(index, self._run("optimizer", begin, here["sweep"]))
        # Optimizer steps share the device with the first forward pass, which ends no earlier than both take together.
        assert first is not None
        self._shared = first + sweeps

    def _fetch_states(self, index: int) -> Floats:
        return self._run("in", self._gone["states"][-2], self._of(index)["states_in"])

    def _store_states(self, index: int, stepped: Floats) -> Floats:
        """What follows an optimizer step; the end of what a use of the part waits for."""
        here = self._of(index)
        left = self._run("out", stepped, here["states_out"])
        self._gone["states"].append(left)
        whole = self._run("ranks", stepped, here["gather_updated"])
        self._on_host["weights", index] = self._run("out", whole, here["weights_out"])
        return whole

    def load(self, use: Use, before: Use | None) -> None:
        """Step 2: what a use needs, written when the use before it begins."""
        index, here, limit = use.index, self._of(use.index), self._last_use
        ready, phase = self._nothing, "backward_" if use.backward else ""
        shared = before is not None and before.index == index and not self._skips_weights(before)
        if not shared and not self._skips_weights(use):
            if index not in self._stepped:
                begin = np.maximum(self._fetch_states(index), limit)
                if before is None:
                    self._stepped[index] = self._store_states(index, self._run("optimizer", begin, here["sweep"]))
                    ready = self._gather("gather", index, self._stepped[index], limit)
                else:
                    self._pending.append((use, begin))
            else:
                stored = self._stepped[index]
                if self._kind.offloads_weights and ("used", index) in self._on_host:
                    stored = self._run(
                        "in", np.maximum(limit, self._on_host["weights", index]), here[f"{phase}weights"]
                    )
                ready = self._gather(f"{phase}gather", index, stored, limit)
            self._on_host["used", index] = self._nothing
        else:
            ready = self._stepped.get(index, self._nothing)
        if use.backward:
            saved = self._on_host.get((f"activations{index}", use.micro_batch), self._nothing)
            ready = np.maximum(ready, self._run("in", np.maximum(limit, saved), here["activations_in"]))
            if use.micro_batch > 0:
                away = self._on_host["gradients", index]
                self._fetched[index] = self._run("in", np.maximum(limit, away), here["gradients_in"])
                if not self._kind.scatters:
                    ready = np.maximum(ready, self._fetched[index])
        self._ready[use] = ready

    def _skips_weights(self, use: Use) -> bool:
        """The gradient of an embedding needs no weights."""
        return use.backward and self._parts[use.index].is_embedding

    def _gather(self, what: str, index: int, stored: Floats, limit: Floats) -> Floats:
        return self._run("ranks", np.maximum(stored, limit), self._of(index)[what])

    def compute(self, use: Use) -> Floats:
        """Steps 3 and 4; when the use begins."""
        here, index = self._of(use.index), use.index
        leaving = self._gone["gradients" if use.backward else "activations"][-2]
        begin = np.max([self._free["compute"], self._ready.pop(use), leaving], axis=0)
        if use.backward:
            taken = here["last_backward"] if use.micro_batch == LAST else here["backward"]
        else:
            taken = here["first_forward"] if use.micro_batch == 0 else here["forward"]
        end = begin + taken
        if not self._kind.offloads_weights and not use.backward and use.micro_batch == 0:
            self._shared = self._shared + taken
            end = np.maximum(end, self._shared) if index == len(self._parts) - 1 else end
        end = self._step_beside(begin, end)
        self._free["compute"] = self.computed = self._last_use = end
        if not use.backward:
            if self._parts[index].is_layer:
                left = self._run("out", end, here["activations_out"])
                self._on_host[f"activations{index}", use.micro_batch] = left
                self._gone["activations"].append(left)
            return begin
        reduced = end
        if use.micro_batch == LAST or self._kind.scatters:
            sum_there = self._fetched.get(index, self._nothing)
            both = here["scatter"] + (here["reduce"] if use.micro_batch == LAST else 0.0)
            reduced = self._run("ranks", np.maximum(end, sum_there), both)
            self._reduced.append((index, reduced))
        left = self._run("out", reduced, here["gradients_out"])
        self._on_host["gradients", index] = left
        # Where nothing leaves nothing is waited for.
        self._gone["gradients"].append(np.where(here["gradients_out"] > 0, left, 0.0))
        return begin

    def waiting_bytes(self, sizes: UseBytes, now: Floats) -> Floats:
        """Bytes of gradients of a micro-batch that wait to be scattered, besides that of the use at work."""
        waiting = self._nothing
        for index, end in self._reduced[-len(self._parts) - 1 :]:
            waiting = waiting + sizes.own_gradients[self._parts[index].row] * (end > now)
        return waiting


def _use_bytes(parts: Sequence[Part], sizes: UseBytes, uses: tuple[Use, Use, Use | None]) -> Floats:
    """Bytes beside one use, those of the use before that leave and of the use behind that arrive."""
    before, use, behind = uses
    arrives = [use] if behind is None or behind.index == use.index else [use, behind]
    total = sum(
        (
            sizes.weights[parts[one.index].row]
            for one in arrives
            if not (one.backward and parts[one.index].is_embedding)
        ),
        start=np.zeros_like(sizes.weights[0]),
    )
    for one, direction in ((before, False), (use, None), (behind, True)):
        if one is None:
            continue
        row = parts[one.index].row
        # A forward use leaves its activations behind, a backward use finds them; a gradient sum arrives and leaves.
        if parts[one.index].is_layer and direction in (None, one.backward):
            total = total + sizes.activations[row]
        if one.backward:
            total = total + sizes.gradients[row]
    if use.backward:
        total = total + sizes.own_gradients[parts[use.index].row]
    chunk = parts[use.index].chunk
    later = (part.row for index, part in enumerate(parts) if index > use.index and part.chunk == chunk)
    return total - sum((sizes.saved[row] for row in later), start=np.zeros_like(total))


def _update_bytes(parts: Sequence[Part], sizes: UseBytes, kind: ListKind) -> Floats:
    """Bytes beside the updates: states and gradients of two parts, and where each is updated in front of its first use all
    that a first forward pass holds."""
    moved = [sizes.states[part.row] + sizes.gradients[part.row] for part in parts]
    if not kind.offloads_weights:
        pairs = zip(moved, [*moved[1:], np.zeros_like(moved[0])], strict=True)
        return np.max([one + other for one, other in pairs], axis=0)
    held = np.zeros_like(moved[0])
    peaks = []
    for index, part in enumerate(parts):
        near = range(index, min(index + 2, len(parts)))
        peaks.append(held + sum(moved[i] + sizes.weights[parts[i].row] for i in near))
        held = held + sizes.saved[part.row]
    return np.max(peaks, axis=0)


def use_bytes(kinds: KindTerms, strategy: Strategy, rates: StateRates) -> UseBytes:
    """The bytes that move with the uses of every kind of part under every strategy."""
    sizes, level = state_sizes(kinds, strategy, rates), strategy.zero_level
    numbers = (kinds.dense_parameters + kinds.expert_parameters)[:, None]
    replicated = (strategy.data > 1) | (strategy.expert_data > 1)
    activations = kinds.saved_bytes[:, None] * kinds.is_layer[:, None] * strategy.offload_activations
    return UseBytes(
        weights=sizes.weights * strategy.offload_weights
        + np.where(replicated & (level >= 3), rates.weight_bytes * numbers, 0.0),
        activations=activations,
        gradients=sizes.gradients * strategy.offload_gradients,
        own_gradients=np.where(replicated & (level >= 2), rates.gradient_bytes * numbers, 0.0),
        states=sizes.optimizer * strategy.offload_optimizer,
        saved=kinds.saved_bytes[:, None] - activations,
    )


def use_seconds(kinds: KindTerms, strategy: Strategy, rates: StateRates, concurrent: Concurrent) -> UseSeconds:
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
    sweep = rates.optimizer_sweep * sizes.swept

    def beside(stream: int, *alone: Floats) -> Floats:
        """How many times as long a stream takes while the others work beside it."""
        own = alone[stream]
        return concurrent(*(np.minimum(own, other) for other in alone)) / np.where(own > 0, own, 1.0)

    def pass_of(
        compute: Floats, sent: Floats, ranks: Floats, into: Floats, out: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Slowdowns of a use and of the three streams beside it; `sent`: seconds of the use in which it sends tokens itself."""
        alone = np.broadcast_arrays(compute + nothing, ranks, into, out)
        slow = [beside(stream, *alone) for stream in range(4)]
        # All-to-alls of tokens and collectives of states halve each other's share of the links.
        both = sent * np.minimum(1.0, ranks / np.where(compute > 0, compute, 1.0))
        slow[0] = slow[0] + both / np.where(compute > 0, compute, 1.0)
        slow[1] = slow[1] + both / np.where(ranks > 0, ranks, 1.0)
        return tuple(slow)

    away, home = kinds.sent_forward_seconds, kinds.sent_backward_seconds
    spilled = np.where((level == 2) & (strategy.offload_gradients == 0), np.maximum(0.0, scatter - backward), 0.0)
    slow = pass_of(forward, away[:, None], gather + spilled, weights, activations)
    slow_first = pass_of(
        forward, away[:, None], gather + gather_updated, weights + states + gradients, activations + states
    )
    back = pass_of(backward, home[:, None], gather + scatter, weights + activations + gradients, gradients)
    back_last = pass_of(
        backward, home[:, None], gather + scatter + reduce, weights + activations + gradients, gradients
    )
    update = pass_of(sweep, nothing, gather_updated, states + gradients, states + weights)
    return UseSeconds(
        forward=forward * slow[0],
        first_forward=forward * slow_first[0],
        backward=backward * back[0],
        last_backward=backward * back_last[0],
        weights=weights * slow[2],
        backward_weights=weights * back[2],
        gather=gather * slow[1],
        backward_gather=gather * back[1],
        activations_out=activations * slow[3],
        activations_in=activations * back[2],
        gradients_in=gradients * back[2],
        gradients_out=gradients * back[3],
        scatter=scatter * back[1],
        reduce=reduce * back_last[1],
        states_in=(states + gradients) * update[2],
        states_out=states * update[3],
        weights_out=weights * update[3],
        sweep=sweep * update[0],
        gather_updated=gather_updated * update[1],
    )
