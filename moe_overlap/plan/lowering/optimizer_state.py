"""A step in which not everything is on the device at once: ZeRO 2 and 3, and offloading.

Terms. A part is a parameter group, which is stored, moved and stepped as one: `embedding`, `L3`, `mtp0`, `head`. A use
is one pass of one micro-batch through it: from its first computation in the list to its last.

Every part steps by itself, in front of its first forward pass: such a list begins with the update that the gradients of
the step before ask for, and ends with their norm. A step of everything at the end would need all states at once.

Around the passes, which stay as they are:
1. A part's update, in the order of the parts: its states and gradients come from the host, it steps, they go back. States of
   two parts at most are on the device. Updated shards are gathered (ZeRO 1, 2). It waits for no earlier stage, so that the
   stages behind the first do it while they wait for their first micro-batch (Mist, figure 10). Where weights are offloaded it
   belongs to step 2.
2. What a use needs comes while the use before it computes: weights from the host, the gather of shards (ZeRO 3), saved
   activations and gradient sums from the host. It waits until the last use that has ended frees its place: two parts are there
   at most. What the use before has loaded stays. A gradient sum also waits until the one that left two uses before has left.
3. Behind a forward use the activations it saved go to the host.
4. Behind the last instruction that adds to a part's gradient in a micro-batch: the reduce-scatter of that micro-batch (ZeRO 2,
   3) or, in the last one, the reduction of the sum; then the share that moves goes to the host, its norm taken.
5. A use begins when what left two uses before, activations or gradient sums, has left: slow copies hold computation up and do
   not fill the device.

Buffers: `parameters.L3`, `gradient.L3`, `state.L3` are what stays on the device; `moved.*` is the offloaded share while
it is there and `host.*` its home; `weights.L3` are gathered weights; `dweights.L3.m0` is the gradient of one
micro-batch before it is scattered. Channels: `h2d` and `d2h` for copies, `optimizer` for steps, `dp` for collectives.

No runner executes such a list (capabilities.py). It has no instruction that completes what other groups share (`gradients` of
gradient_buckets.py): where tied embeddings and the division by tokens belong is for the runner to decide that will follow it.

Source: Mist, section 5.1. Beyond it: a micro-batch's first gradient sum is not fetched, and steps have a channel of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import OPTIMIZER, TO_DEVICE, TO_HOST, BufferRole, Instruction, parse_buffer
from moe_overlap.plan.lowering.dependencies import Draft, ListBuilder
from moe_overlap.plan.lowering.gradient_buckets import DATA_CHANNEL, is_replicated, norm_of, optimizer_parts
from moe_overlap.plan.operators import Copied, GroupKind, OperatorKind, parse_group, state_operator
from moe_overlap.plan.plan import Offload, Plan, StagePlan
from moe_overlap.plan.sizes import PartSize


@dataclass(frozen=True, slots=True)
class Use:
    """One use.

    Attributes:
        first, last: places in the list.
        adds_to: parts whose gradient sums a backward use needs: its own, and those that prediction layers add to.
    """

    part: str
    backward: bool
    chunk: int | None
    micro_batch: int
    first: int
    last: int
    adds_to: tuple[str, ...]

    @property
    def is_layer(self) -> bool:
        """Whether it saves activations that are worth moving."""
        return self.part not in ("embedding", "head")


def part_of(draft: Draft | Instruction) -> str:
    """The part that an instruction of a pass computes; the empty string for what is no computation."""
    if draft.kind != "compute":
        return ""
    return draft.operator.group


def uses_of(drafts: Sequence[Draft]) -> list[Use]:
    """All uses, in order of their first computation."""
    found: dict[tuple[str, bool, int], list[int]] = {}
    for place, draft in enumerate(drafts):
        if part := part_of(draft):
            assert draft.micro_batch is not None
            found.setdefault((part, draft.operator.in_backward_pass, draft.micro_batch), []).append(place)
    return [
        Use(
            part,
            backward,
            drafts[places[0]].chunk,
            micro_batch,
            places[0],
            places[-1],
            tuple(dict.fromkeys([part, *(other for place in places for other in gradients_of(drafts[place]))])),
        )
        for (part, backward, micro_batch), places in found.items()
    ]


def gradients_of(draft: Draft) -> list[str]:
    """Parts whose gradient an instruction adds to."""
    written = map(parse_buffer, draft.writes)
    return [buffer.subject for buffer in written if buffer.word == BufferRole.GRADIENT]


def gradient_ends(drafts: Sequence[Draft]) -> dict[tuple[str, int], int]:
    """(part, micro-batch) -> place of the last instruction that adds to its gradient, deferred weight gradients included."""
    ends: dict[tuple[str, int], int] = {}
    for place, draft in enumerate(drafts):
        for part in gradients_of(draft):
            assert draft.micro_batch is not None
            ends[part, draft.micro_batch] = place
    return ends


@dataclass(frozen=True, slots=True)
class PartDrafts:
    """Writes the copies and collectives of the parameter groups of one stage.

    Attributes:
        saved_bytes: part -> bytes that its forward pass of a micro-batch keeps; the capture knows them. Copies of activations
            of parts that do not stand here have 0 bytes.
    """

    plan: Plan
    stage_index: int
    model: ModelDescription
    saved_bytes: Mapping[str, int]

    @property
    def stage(self) -> StagePlan:
        """The stage."""
        return self.plan.stages[self.stage_index]

    @property
    def scatters(self) -> bool:
        """Whether gradients are kept in shards."""
        return is_replicated(self.stage) and self.stage.zero_level >= 2

    @property
    def gathers(self) -> bool:
        """Whether weights are kept in shards."""
        return is_replicated(self.stage) and self.stage.zero_level == 3

    def weights(self, part: str, backward: bool) -> tuple[str, ...]:
        """Parts whose weights a part computes with.

        The head may share those of the embedding, whose gradient needs none; prediction layers embed and end in the head.
        """
        if part == "embedding" and backward:
            return ()
        if parse_group(part).kind is GroupKind.PREDICTION:
            return (part, "embedding", "head")
        shares = self.model.tied_embeddings and self.plan.loss_stage in (self.plan.embedding_stage, self.plan.mtp_stage)
        return ("head", "embedding") if part == "head" and shares else (part,)

    def sums(self, part: str) -> tuple[str, ...]:
        """A part's gradient sums: what stays and what moves."""
        moved = (f"moved.gradient.{part}",) if self.stage.offload.gradients > 0 else ()
        return (f"gradient.{part}", *moved)

    def stored(self, part: str) -> tuple[str, ...]:
        """A part's weights as they are stored: what stays and what moves."""
        moved = (f"moved.weights.{part}",) if self.stage.offload.weights > 0 else ()
        return (f"parameters.{part}", *moved)

    def states(self, part: str) -> tuple[str, ...]:
        """A part's optimizer states: what stays and what moves."""
        moved = (f"moved.state.{part}",) if self.stage.offload.optimizer > 0 else ()
        return (f"state.{part}", *moved)

    def gather(self, part: str, into: tuple[str, ...], use: Use | None = None) -> Draft:
        """Shards of a part's weights, gathered."""
        sent = self._size(part).gather_bytes(self.stage, self.plan.precision)
        name, shards = state_operator(OperatorKind.PARAMETERS, part), self.stored(part)
        draft = Draft(kind="collective", name=name, channel=DATA_CHANNEL, reads=shards, writes=into, bytes=sent)
        return _at(draft, use)

    def reduction(self, part: str, reads: tuple[str, ...], chunk: int | None, micro_batch: int) -> Draft:
        """The gradient of a micro-batch, or of the step, summed over the replicas."""
        return Draft(
            kind="collective",
            name=state_operator(OperatorKind.GRADIENTS, part),
            channel=DATA_CHANNEL,
            chunk=chunk,
            micro_batch=micro_batch,
            reads=reads,
            writes=self.sums(part),
            bytes=self._size(part).reduction_bytes(self.stage),
        )

    def fetch(self, part: str, what: Copied, buffer: str, use: Use | None = None) -> Draft:
        """The offloaded share of something, from the host; `buffer` without `host.` and `moved.`."""
        return _at(self._copy(OperatorKind.PREFETCH, part, what, f"host.{buffer}", f"moved.{buffer}", TO_DEVICE), use)

    def store(self, part: str, what: Copied, buffer: str, use: Use | None = None) -> Draft:
        """The same, to the host."""
        return _at(self._copy(OperatorKind.OFFLOAD, part, what, f"moved.{buffer}", f"host.{buffer}", TO_HOST), use)

    def _copy(self, action: OperatorKind, part: str, what: Copied, source: str, target: str, channel: str) -> Draft:
        name, size = (
            state_operator(action, part, what),
            getattr(self.stage.offload, what) * self._stored_bytes(part, what),
        )
        return Draft(kind="copy", name=name, channel=channel, reads=(source,), writes=(target,), bytes=round(size))

    def _stored_bytes(self, part: str, what: Copied) -> int:
        """Bytes of a part's weights, gradients or states on this rank, or of a layer's saved activations."""
        if what is Copied.ACTIVATIONS:
            return self.saved_bytes.get(part, 0)
        return self._size(part).stored_bytes(self.stage, what, self.plan.precision)

    def _size(self, part: str) -> PartSize:
        return payload.part_size(part, self.plan, self.stage, self.model)


def _at(draft: Draft, use: Use | None) -> Draft:
    """For one use; what belongs to none stays."""
    return replace(draft, chunk=use.chunk, micro_batch=use.micro_batch) if use else draft


# Under `state`, which is there when a step starts: the first updates clip by the norm of the step before.
NORM_STATE = "state.norm"
T = TypeVar("T")


@dataclass(slots=True)
class DecoupledLowering:
    """Writes one step of one stage.

    Attributes:
        _ended: the last instruction of the last use that has ended.
        _gone: optimizer, gradients, activations -> instructions behind which a part's share of them is off the device.
        _updated, _used: parts that have stepped; whose weights have been used since.
        _written: buffers of a micro-batch that have content.
        _away: parts whose gradient sums are on the host.
    """

    parts: PartDrafts
    to: ListBuilder
    _ended: tuple[int, ...] = ()
    _gone: dict[Copied, list[int]] = field(default_factory=lambda: defaultdict(list))
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
        # Step 1. Offloaded weights would leave again at once: their update waits for the part's first use (`_load`).
        if self._offload.weights == 0:
            for part in names:
                self._update(part)
        uses, ends = uses_of(drafts), gradient_ends(drafts)
        befores: list[Use | None] = [None, *uses]
        # A use is loaded where the one before begins, so that the copies have that whole use to hide behind.
        loads = _by_place(
            (before.first if before else 0, (before, use)) for before, use in zip(befores, uses, strict=False)
        )
        left = _by_place((use.last, use) for use in uses)
        leaving = {use.first: Copied.GRADIENTS if use.backward else Copied.ACTIVATIONS for use in uses}
        complete = _by_place((place, key) for key, place in ends.items())
        last = {part: max(place for (other, _), place in ends.items() if other == part) for part, _ in ends}
        for place, draft in enumerate(drafts):
            for before, use in loads.get(place, []):
                self._load(use, before)
            # Step 5.
            room = self._two_back(leaving[place]) if place in leaving else ()
            number = self.to.append(self._with_weights(self._with_gradients(draft)), room)
            for ended in left.get(place, []):
                self._leave(ended, number)
            for part, micro_batch in complete.get(place, ()):
                self._gradient(part, draft.chunk, micro_batch, is_last=last[part] == place)
        totals = tuple(f"gradient.{part}" for part in names)
        self.to.append(norm_of(plan, totals, NORM_STATE))

    def _two_back(self, what: Copied) -> tuple[int, ...]:
        """The instruction that must have ended so that no more than the part before still holds its share of something."""
        return tuple(self._gone[what][-2:-1])

    def _update(self, part: str) -> None:
        """Step 1."""
        offload, parts = self._offload, self.parts
        back = self._two_back(Copied.OPTIMIZER)
        if offload.optimizer > 0:
            self.to.append(parts.fetch(part, Copied.OPTIMIZER, f"state.{part}"), back)
        if offload.gradients > 0:
            self.to.append(parts.fetch(part, Copied.GRADIENTS, f"gradient.{part}"), back)
        step = Draft(
            kind="optimizer",
            name=state_operator(OperatorKind.OPTIMIZER, part),
            channel=OPTIMIZER,
            reads=(*parts.sums(part), *parts.states(part), NORM_STATE),
            writes=(*parts.stored(part), *parts.states(part)),
        )
        number = self.to.append(step, self._ended if offload.weights > 0 else ())
        if offload.optimizer > 0:
            number = self.to.append(parts.store(part, Copied.OPTIMIZER, f"state.{part}"))
        self._gone[Copied.OPTIMIZER].append(number)
        if is_replicated(parts.stage) and parts.stage.zero_level in (1, 2):
            self.to.append(parts.gather(part, into=parts.stored(part)))
        if offload.weights > 0:
            self.to.append(parts.store(part, Copied.WEIGHTS, f"weights.{part}"))
        self._updated.add(part)

    def _load(self, use: Use, before: Use | None) -> None:
        """Step 2."""
        parts, limit = self.parts, self._ended
        there = parts.weights(before.part, before.backward) if before else ()
        for part in parts.weights(use.part, use.backward):
            if part in there:
                continue
            if part not in self._updated:
                self._update(part)
            # Its update has left the weights on the device for the first use; later ones fetch them.
            elif self._offload.weights > 0 and part in self._used:
                self.to.append(parts.fetch(part, Copied.WEIGHTS, f"weights.{part}", use), limit)
            self._used.add(part)
            if parts.gathers:
                self.to.append(parts.gather(part, (f"weights.{part}",), use), limit)
        if use.backward and use.is_layer and self._offload.activations > 0:
            saved = f"activations.{use.part}.m{use.micro_batch}"
            self.to.append(parts.fetch(use.part, Copied.ACTIVATIONS, saved, use), limit)
        # The use before may be waiting for the same place (step 5): a fourth gradient would be there while it does.
        room = self._two_back(Copied.GRADIENTS)
        for part in use.adds_to if use.backward else ():
            if part in self._away:
                self.to.append(parts.fetch(part, Copied.GRADIENTS, f"gradient.{part}", use), (*limit, *room))
                self._away.remove(part)

    def _leave(self, use: Use, number: int) -> None:
        """Step 3; `number`: the last instruction of the use."""
        self._ended = (number,)
        if not use.backward and use.is_layer and self._offload.activations > 0:
            draft = self.parts.store(use.part, Copied.ACTIVATIONS, f"activations.{use.part}.m{use.micro_batch}", use)
            self._gone[Copied.ACTIVATIONS].append(self.to.append(draft))

    def _gradient(self, part: str, chunk: int | None, micro_batch: int, is_last: bool) -> None:
        """Step 4."""
        parts, moved = self.parts, f"moved.gradient.{part}"
        # Shards take every micro-batch's gradient; whole sums (ZeRO 0, 1) are reduced once, behind the last.
        if parts.scatters or (is_replicated(parts.stage) and is_last):
            own = (f"dweights.{part}.m{micro_batch}",) if parts.scatters else ()
            # The first micro-batch has no sum to add to: fetching its moved share would read what nobody has written.
            known = [name for name in parts.sums(part) if name != moved or name in self._written]
            self.to.append(parts.reduction(part, (*own, *known), chunk, micro_batch))
            self._written.add(moved)
        if self._offload.gradients > 0:
            draft = replace(
                parts.store(part, Copied.GRADIENTS, f"gradient.{part}"), chunk=chunk, micro_batch=micro_batch
            )
            self._gone[Copied.GRADIENTS].append(self.to.append(draft))
            self._away.add(part)

    def _with_weights(self, draft: Draft) -> Draft:
        """A computation also reads its weights, and its activations where they move."""
        part = part_of(draft)
        if not part:
            return draft
        needed = self.parts.weights(part, draft.operator.in_backward_pass)
        reads = [
            name for one in needed for name in ((f"weights.{one}",) if self.parts.gathers else self.parts.stored(one))
        ]
        writes: list[str] = []
        if self._offload.activations > 0 and part not in ("embedding", "head"):
            saved = f"moved.activations.{part}.m{draft.micro_batch}"
            reads += [saved] if saved in self._written else []
            writes += [] if draft.operator.in_backward_pass else [saved]
            self._written.add(saved)
        return replace(draft, reads=(*draft.reads, *reads), writes=(*draft.writes, *writes))

    def _with_gradients(self, draft: Draft) -> Draft:
        """A draft that adds to a gradient: to that of its micro-batch where it is scattered, and to the share that moves."""
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
