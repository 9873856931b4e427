"""A step in which not everything is on the device at once: ZeRO 2 and 3, and offloading.

Every part (`embedding`, `L3`, `head`) steps by itself, in front of its first forward pass: such a list begins with the update
that the gradients of the step before ask for, and ends with their norm. A step of everything at the end would need all states
at once.

Around the passes, which stay as they are:
1. A part's update, in the order of the parts: its states and gradients come from the host, it steps, they go back. States of
   two parts at most are on the device. Updated shards are gathered (ZeRO 1, 2). It waits for no earlier stage, so that the
   stages behind the first do it while they wait for their first micro-batch (Mist, figure 10). Where weights are offloaded it
   belongs to step 2.
2. What a use needs comes while the use before it computes: weights from the host, the gather of shards (ZeRO 3), saved
   activations and gradient sums from the host. It waits until the last use that has ended frees its place: two parts are there
   at most. What the use before has loaded stays.
3. Behind a forward use the activations it saved go to the host.
4. Behind the last instruction that adds to a part's gradient in a micro-batch: the reduce-scatter of that micro-batch (ZeRO 2,
   3) or, in the last one, the reduction of the sum; then the share that moves goes to the host, its norm taken.
5. A use begins when what left two uses before, activations or gradient sums, has left: slow copies hold computation up and do
   not fill the device.

Buffers: as part_drafts.py names them. Channels: `h2d` and `d2h` for copies, `optimizer` for steps, `dp` for collectives.

Source: Mist, section 5.1. Beyond it: a micro-batch's first gradient sum is not fetched, and steps have a channel of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from moe_overlap.plan.instructions import OPTIMIZER
from moe_overlap.plan.list_builder import Draft, ListBuilder
from moe_overlap.plan.lower_update import is_replicated, norm_of, optimizer_parts
from moe_overlap.plan.part_drafts import PartDrafts
from moe_overlap.plan.part_uses import Use, gradient_ends, gradients_of, is_backward, part_of, uses_of
from moe_overlap.plan.plan import Offload

NORM = "state.norm"
T = TypeVar("T")


@dataclass(slots=True)
class DecoupledLowering:
    """Writes one step of one stage.

    Attributes:
        while_waiting: False lets everything wait until the first micro-batch has arrived, to measure what waiting hides.
        _earliest: what nothing may start before.
        _ended: the last instruction of the last use that has ended.
        _gone: optimizer, gradients, activations -> instructions behind which a part's share of them is off the device.
        _updated, _used: parts that have stepped; whose weights have been used since.
        _written: buffers of a micro-batch that have content.
        _away: parts whose gradient sums are on the host.
    """

    parts: PartDrafts
    to: ListBuilder
    while_waiting: bool = True
    _earliest: tuple[int, ...] = ()
    _ended: tuple[int, ...] = ()
    _gone: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _updated: set[str] = field(default_factory=set)
    _used: set[str] = field(default_factory=set)
    _written: set[str] = field(default_factory=set)
    _away: set[str] = field(default_factory=set)

    @property
    def _offload(self) -> Offload:
        return self.parts.stage.offload

    def write(self, drafts: Sequence[Draft]) -> None:
        """The whole step around its passes."""
        plan = self.parts.plan
        names = optimizer_parts(plan, self.parts.stage_index, self.parts.model)
        places = iter(range(len(drafts)))
        if not self.while_waiting and drafts[0].kind == "point-to-point":
            self._earliest = (self.to.append(drafts[next(places)]),)
        if self._offload.weights == 0:
            for part in names:
                self._update(part)
        uses, ends = uses_of(drafts), gradient_ends(drafts)
        befores: list[Use | None] = [None, *uses]
        loads = _by_place(
            (before.first if before else 0, (before, use)) for before, use in zip(befores, uses, strict=False)
        )
        left = _by_place((use.last, use) for use in uses)
        leaving = {use.first: "gradients" if use.backward else "activations" for use in uses}
        complete = _by_place((place, key) for key, place in ends.items())
        last = {part: max(place for (other, _), place in ends.items() if other == part) for part, _ in ends}
        for before, use in loads.pop(0, []):
            self._load(use, before)
        for place in places:
            for before, use in loads.get(place, []):
                self._load(use, before)
            draft = drafts[place]
            room = self._two_back(leaving[place]) if place in leaving else ()
            number = self.to.append(self._with_weights(self._with_gradients(draft)), room)
            for ended in left.get(place, []):
                self._leave(ended, number)
            for part, micro_batch in complete.get(place, ()):
                self._gradient(part, draft.chunk, micro_batch, is_last=last[part] == place)
        totals = tuple(f"gradient.{part}" for part in names)
        self.to.append(norm_of(plan, totals, NORM))

    def _two_back(self, what: str) -> tuple[int, ...]:
        """What must have ended so that no more than the part before still holds its share of something."""
        return tuple(self._gone[what][-2:-1])

    def _update(self, part: str) -> None:
        """Step 1."""
        offload, parts = self._offload, self.parts
        back = (*self._earliest, *self._two_back("optimizer"))
        if offload.optimizer > 0:
            self.to.append(parts.fetch(part, "optimizer", f"state.{part}"), back)
        if offload.gradients > 0:
            self.to.append(parts.fetch(part, "gradients", f"gradient.{part}"), back)
        step = Draft(
            kind="optimizer",
            name=f"optimizer.{part}",
            channel=OPTIMIZER,
            reads=(*parts.sums(part), *parts.states(part), NORM),
            writes=(*parts.stored(part), *parts.states(part)),
        )
        number = self.to.append(step, (*self._earliest, *(self._ended if offload.weights > 0 else ())))
        if offload.optimizer > 0:
            number = self.to.append(parts.store(part, "optimizer", f"state.{part}"))
        self._gone["optimizer"].append(number)
        if is_replicated(parts.stage) and parts.stage.zero_level in (1, 2):
            self.to.append(parts.gather(part, into=parts.stored(part)))
        if offload.weights > 0:
            self.to.append(parts.store(part, "weights", f"weights.{part}"))
        self._updated.add(part)

    def _load(self, use: Use, before: Use | None) -> None:
        """Step 2."""
        parts, limit = self.parts, (*self._earliest, *self._ended)
        there = parts.weights(before.part, before.backward) if before else ()
        for part in parts.weights(use.part, use.backward):
            if part in there:
                continue
            if part not in self._updated:
                self._update(part)
            elif self._offload.weights > 0 and part in self._used:
                self.to.append(parts.fetch(part, "weights", f"weights.{part}", use), limit)
            self._used.add(part)
            if parts.gathers:
                self.to.append(parts.gather(part, (f"weights.{part}",), use), limit)
        if use.backward and use.is_layer and self._offload.activations > 0:
            saved = f"activations.{use.part}.m{use.micro_batch}"
            self.to.append(parts.fetch(use.part, "activations", saved, use), limit)
        for part in use.adds_to if use.backward else ():
            if part in self._away:
                self.to.append(parts.fetch(part, "gradients", f"gradient.{part}", use), limit)
                self._away.remove(part)

    def _leave(self, use: Use, number: int) -> None:
        """Step 3; `number`: the last instruction of the use."""
        self._ended = (number,)
        if not use.backward and use.is_layer and self._offload.activations > 0:
            draft = self.parts.store(use.part, "activations", f"activations.{use.part}.m{use.micro_batch}", use)
            self._gone["activations"].append(self.to.append(draft))

    def _gradient(self, part: str, chunk: int | None, micro_batch: int, is_last: bool) -> None:
        """Step 4."""
        parts, moved = self.parts, f"moved.gradient.{part}"
        if parts.scatters or (is_replicated(parts.stage) and is_last):
            own = (f"dweights.{part}.m{micro_batch}",) if parts.scatters else ()
            known = [name for name in parts.sums(part) if name != moved or name in self._written]
            self.to.append(parts.reduction(part, (*own, *known), chunk, micro_batch))
            self._written.add(moved)
        if self._offload.gradients > 0:
            draft = replace(parts.store(part, "gradients", f"gradient.{part}"), chunk=chunk, micro_batch=micro_batch)
            self._gone["gradients"].append(self.to.append(draft))
            self._away.add(part)

    def _with_weights(self, draft: Draft) -> Draft:
        """A computation also reads its weights, and its activations where they move."""
        part = part_of(draft)
        if not part:
            return draft
        needed = self.parts.weights(part, is_backward(draft))
        reads = [
            name for one in needed for name in ((f"weights.{one}",) if self.parts.gathers else self.parts.stored(one))
        ]
        writes: list[str] = []
        if self._offload.activations > 0 and part not in ("embedding", "head"):
            saved = f"moved.activations.{part}.m{draft.micro_batch}"
            reads += [saved] if saved in self._written else []
            writes += [] if is_backward(draft) else [saved]
            self._written.add(saved)
        return replace(draft, reads=(*draft.reads, *reads), writes=(*draft.writes, *writes))

    def _with_gradients(self, draft: Draft) -> Draft:
        """What adds to a gradient adds to that of its micro-batch where it is scattered, and to the share that moves."""
        for part in gradients_of(draft):
            if self.parts.scatters:
                own = f"dweights.{part}.m{draft.micro_batch}"
                known = (own,) if own in self._written else ()
                reads = _exchanged(draft.reads, f"gradient.{part}", known)
                draft = replace(draft, reads=reads, writes=_exchanged(draft.writes, f"gradient.{part}", (own,)))
                self._written.add(own)
            elif self._offload.gradients > 0:
                moved = f"moved.gradient.{part}"
                known = (moved,) if moved in self._written else ()
                draft = replace(draft, reads=(*draft.reads, *known), writes=(*draft.writes, moved))
                self._written.add(moved)
        return draft


def _exchanged(names: tuple[str, ...], old: str, new: tuple[str, ...]) -> tuple[str, ...]:
    """The names with one of them replaced."""
    return tuple(other for name in names for other in (new if name == old else (name,)))


def _by_place(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Place -> what happens there, in order."""
    found: dict[int, list[T]] = {}
    for place, what in pairs:
        found.setdefault(place, []).append(what)
    return found
