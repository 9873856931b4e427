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

Buffers: `parameters.L3`, `gradient.L3`, `state.L3` are what stays on the device; `moved.*` is the offloaded share while it is
there and `host.*` its home; `weights.L3` are gathered weights; `dweights.L3.m0` is the gradient of one micro-batch before it is
scattered. Channels: `h2d` and `d2h` for copies, `optimizer` for steps, `dp` for collectives.

Source: Mist, section 5.1. Beyond it: a micro-batch's first gradient sum is not fetched, and steps have a channel of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import payload
from moe_overlap.plan.instructions import OPTIMIZER, TO_DEVICE, TO_HOST
from moe_overlap.plan.list_builder import Draft, ListBuilder
from moe_overlap.plan.lower_update import DATA_CHANNEL, is_replicated, norm_of, optimizer_parts
from moe_overlap.plan.part_uses import Use, gradient_ends, gradients_of, is_backward, part_of, uses_of
from moe_overlap.plan.payload import PartSize
from moe_overlap.plan.plan import Plan, StagePlan

NORM = "state.norm"
T = TypeVar("T")


@dataclass(slots=True)
class DecoupledLowering:
    """Writes one step of one stage.

    Attributes:
        saved_bytes: part -> bytes that its forward pass of a micro-batch keeps; the capture knows them. Copies of activations
            of parts that do not stand here have 0 bytes.
        while_waiting: False lets everything wait until the first micro-batch has arrived, to measure what waiting hides.
        _earliest: what nothing may start before.
        _ended: the last instruction of the last use that has ended.
        _gone: optimizer, gradients, activations -> instructions behind which a part's share of them is off the device.
        _updated, _used: parts that have stepped; whose weights have been used since.
        _written: buffers of a micro-batch that have content.
        _away: parts whose gradient sums are on the host.
    """

    plan: Plan
    stage_index: int
    model: ModelDescription
    to: ListBuilder
    saved_bytes: Mapping[str, int]
    while_waiting: bool = True
    _earliest: tuple[int, ...] = ()
    _ended: tuple[int, ...] = ()
    _gone: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _updated: set[str] = field(default_factory=set)
    _used: set[str] = field(default_factory=set)
    _written: set[str] = field(default_factory=set)
    _away: set[str] = field(default_factory=set)

    @property
    def _stage(self) -> StagePlan:
        return self.plan.stages[self.stage_index]

    @property
    def _scatters(self) -> bool:
        """Whether gradients are kept in shards."""
        return is_replicated(self._stage) and self._stage.zero_level >= 2

    @property
    def _gathers(self) -> bool:
        """Whether weights are kept in shards."""
        return is_replicated(self._stage) and self._stage.zero_level == 3

    def write(self, drafts: Sequence[Draft]) -> None:
        """The whole step around its passes."""
        places = iter(range(len(drafts)))
        if not self.while_waiting and drafts[0].kind == "point-to-point":
            self._earliest = (self.to.append(drafts[next(places)]),)
        if self._stage.offload.weights == 0:
            for part in optimizer_parts(self.plan, self.stage_index, self.model):
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
        totals = tuple(f"gradient.{part}" for part in optimizer_parts(self.plan, self.stage_index, self.model))
        self.to.append(norm_of(self.plan, totals, NORM))

    def _two_back(self, what: str) -> tuple[int, ...]:
        """What must have ended so that no more than the part before still holds its share of something."""
        return tuple(self._gone[what][-2:-1])

    def _update(self, part: str) -> None:
        """Step 1."""
        offload, sums = self._stage.offload, self._sums(part)
        back = self._two_back("optimizer")
        limit = self._ended if offload.weights > 0 else ()
        states: tuple[str, ...] = (f"state.{part}",)
        moved: tuple[str, ...] = ()
        if offload.optimizer > 0:
            self._fetch(part, "optimizer", f"host.state.{part}", f"moved.state.{part}", after=back)
            states = (f"state.{part}", f"moved.state.{part}")
        if offload.gradients > 0:
            self._fetch(part, "gradients", f"host.gradient.{part}", f"moved.gradient.{part}", after=back)
        if offload.weights > 0:
            moved = (f"moved.weights.{part}",)
        step = Draft(
            kind="optimizer",
            name=f"optimizer.{part}",
            channel=OPTIMIZER,
            reads=(*sums, *states, NORM),
            writes=(f"parameters.{part}", *states, *moved),
        )
        number = self.to.append(step, (*self._earliest, *limit))
        if offload.optimizer > 0:
            number = self._store(part, "optimizer", f"moved.state.{part}", f"host.state.{part}")
        self._gone["optimizer"].append(number)
        if is_replicated(self._stage) and self._stage.zero_level in (1, 2):
            weights = (f"parameters.{part}", *moved)
            self.to.append(self._gather(part, weights, weights))
        if offload.weights > 0:
            self._store(part, "weights", f"moved.weights.{part}", f"host.weights.{part}")
        self._updated.add(part)

    def _load(self, use: Use, before: Use | None) -> None:
        """Step 2."""
        offload = self._stage.offload
        limit = (*self._earliest, *self._ended)
        there = self._weights(before.part, before.backward) if before else ()
        for part in self._weights(use.part, use.backward):
            if part in there:
                continue
            if part not in self._updated:
                self._update(part)
            elif offload.weights > 0 and part in self._used:
                self._fetch(part, "weights", f"host.weights.{part}", f"moved.weights.{part}", use, limit)
            self._used.add(part)
            if self._gathers:
                gather = self._gather(part, self._kept(part), (f"weights.{part}",))
                self.to.append(_at(gather, use), limit)
        if use.backward and use.is_layer and offload.activations > 0:
            name = f"activations.{use.part}.m{use.micro_batch}"
            self._fetch(use.part, "activations", f"host.{name}", f"moved.{name}", use, limit)
        for part in use.adds_to if use.backward else ():
            if part in self._away:
                name = f"gradient.{part}"
                self._fetch(part, "gradients", f"host.{name}", f"moved.{name}", use, limit)
                self._away.remove(part)

    def _leave(self, use: Use, number: int) -> None:
        """Step 3; `number`: the last instruction of the use."""
        self._ended = (number,)
        if not use.backward and use.is_layer and self._stage.offload.activations > 0:
            name = f"activations.{use.part}.m{use.micro_batch}"
            self._gone["activations"].append(self._store(use.part, "activations", f"moved.{name}", f"host.{name}", use))

    def _gradient(self, part: str, chunk: int | None, micro_batch: int, is_last: bool) -> None:
        """Step 4."""
        sums, moved = self._sums(part), f"moved.gradient.{part}"
        if self._scatters or (is_replicated(self._stage) and is_last):
            own = (f"dweights.{part}.m{micro_batch}",) if self._scatters else ()
            known = [name for name in sums if name != moved or name in self._written]
            reduction = Draft(
                kind="collective",
                name=f"gradients.{part}",
                channel=DATA_CHANNEL,
                chunk=chunk,
                micro_batch=micro_batch,
                reads=(*own, *known),
                writes=sums,
                bytes=self._size(part).reduction_bytes(self._stage),
            )
            self.to.append(reduction)
            self._written.update(sums)
        if self._stage.offload.gradients > 0:
            draft = self._copy("offload", part, "gradients", moved, f"host.gradient.{part}")
            self._gone["gradients"].append(self.to.append(replace(draft, chunk=chunk, micro_batch=micro_batch)))
            self._away.add(part)

    def _with_weights(self, draft: Draft) -> Draft:
        """A computation also reads its weights, and its activations where they move."""
        part = part_of(draft)
        if not part:
            return draft
        needed = self._weights(part, is_backward(draft))
        reads = [name for one in needed for name in ((f"weights.{one}",) if self._gathers else self._kept(one))]
        writes: list[str] = []
        if self._stage.offload.activations > 0 and part not in ("embedding", "head"):
            saved = f"moved.activations.{part}.m{draft.micro_batch}"
            reads += [saved] if saved in self._written else []
            writes += [] if is_backward(draft) else [saved]
            self._written.add(saved)
        return replace(draft, reads=(*draft.reads, *reads), writes=(*draft.writes, *writes))

    def _with_gradients(self, draft: Draft) -> Draft:
        """What adds to a gradient adds to that of its micro-batch where it is scattered, and to the share that moves."""
        for part in gradients_of(draft):
            if self._scatters:
                own = f"dweights.{part}.m{draft.micro_batch}"
                known = (own,) if own in self._written else ()
                reads = _exchanged(draft.reads, f"gradient.{part}", known)
                draft = replace(draft, reads=reads, writes=_exchanged(draft.writes, f"gradient.{part}", (own,)))
                self._written.add(own)
            elif self._stage.offload.gradients > 0:
                moved = f"moved.gradient.{part}"
                known = (moved,) if moved in self._written else ()
                draft = replace(draft, reads=(*draft.reads, *known), writes=(*draft.writes, moved))
                self._written.add(moved)
        return draft

    def _weights(self, part: str, backward: bool) -> tuple[str, ...]:
        """Parts whose weights a part computes with.

        The head may share those of the embedding, whose gradient needs none; prediction layers embed and end in the head.
        """
        if part == "embedding" and backward:
            return ()
        if part.startswith("mtp"):
            return (part, "embedding", "head")
        shares = self.model.tied_embeddings and self.plan.loss_stage in (self.plan.embedding_stage, self.plan.mtp_stage)
        return ("head", "embedding") if part == "head" and shares else (part,)

    def _sums(self, part: str) -> tuple[str, ...]:
        """A part's gradient sums: what stays and what moves."""
        moved = (f"moved.gradient.{part}",) if self._stage.offload.gradients > 0 else ()
        return (f"gradient.{part}", *moved)

    def _kept(self, part: str) -> tuple[str, ...]:
        """A part's weights as they are stored: what stays and what moves."""
        moved = (f"moved.weights.{part}",) if self._stage.offload.weights > 0 else ()
        return (f"parameters.{part}", *moved)

    def _gather(self, part: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Draft:
        sent = self._size(part).gather_bytes(self._stage, self.plan.precision)
        name = f"parameters.{part}"
        return Draft(kind="collective", name=name, channel=DATA_CHANNEL, reads=reads, writes=writes, bytes=sent)

    def _fetch(
        self, part: str, what: str, source: str, target: str, use: Use | None = None, after: Iterable[int] = ()
    ) -> None:
        draft = self._copy("prefetch", part, what, source, target)
        self.to.append(_at(draft, use), (*self._earliest, *after))

    def _store(self, part: str, what: str, source: str, target: str, use: Use | None = None) -> int:
        draft = self._copy("offload", part, what, source, target)
        return self.to.append(_at(draft, use))

    def _copy(self, action: str, part: str, what: str, source: str, target: str) -> Draft:
        share = getattr(self._stage.offload, what)
        return Draft(
            kind="copy",
            name=f"{action}.{part}.{what}",
            channel=TO_DEVICE if action == "prefetch" else TO_HOST,
            reads=(source,),
            writes=(target,),
            bytes=round(share * self._stored_bytes(part, what)),
        )

    def _stored_bytes(self, part: str, what: str) -> int:
        """Bytes of a part's weights, gradients or states on this rank, or of a layer's saved activations."""
        if what == "activations":
            return self.saved_bytes.get(part, 0)
        return self._size(part).stored_bytes(self._stage, what, self.plan.precision)

    def _size(self, part: str) -> PartSize:
        return payload.part_size(part, self.plan, self._stage, self.model)


def _at(draft: Draft, use: Use | None) -> Draft:
    """For one use; what belongs to none stays."""
    return replace(draft, chunk=use.chunk, micro_batch=use.micro_batch) if use else draft


def _exchanged(names: tuple[str, ...], old: str, new: tuple[str, ...]) -> tuple[str, ...]:
    """The names with one of them replaced."""
    return tuple(other for name in names for other in (new if name == old else (name,)))


def _by_place(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Place -> what happens there, in order."""
    found: dict[int, list[T]] = {}
    for place, what in pairs:
        found.setdefault(place, []).append(what)
    return found
