"""ZeRO 2 and 3, and offloading: steps in which parameter groups move on and off the device.

Terms. A part is a parameter group: it is stored, moved and updated as a unit (`embedding`, `L3`, `mtp0`, `head`). A use is one
pass of one micro-batch through a part: from its first computation in the list to its last.

Every part is updated separately, before its first forward pass: such a list begins with the update by the previous step's
gradients, and ends with the norm of its own. An update of all parts at the end would need all states on the device at once.
A list has no updates if the step before has left none: in the first step, and after a flush. `lower_updates` writes the flush:
the updates alone, run at the end and before an evaluation, a save or a norm of the parameters.

Added around the passes, whose order does not change:
1. The update of each part, in order: prefetch of its states and gradients, optimizer step, offload of its states. At most two
   parts' states are on the device. Updated shards are gathered (ZeRO 1, 2). The update waits for no earlier stage, so later
   stages run it while they wait for their first micro-batch (Mist, figure 10). With offloaded weights it belongs to step 2.
2. While one use computes, the next one is loaded: prefetch of weights, gather of shards (ZeRO 3), prefetch of saved activations
   and gradient sums. Loading waits for the end of the last completed use, so at most two parts are on the device. Parts that the
   previous use has already loaded are not loaded again. The prefetch of a gradient sum also waits for step 5's offload.
3. After a forward use, its saved activations are offloaded.
4. After the last instruction of a micro-batch that adds to a part's gradient: the reduce-scatter of that micro-batch's gradient
   (ZeRO 2, 3) or, in the last micro-batch, the reduction of the sum; then the offload of the moving share.
5. A use waits until the activations or gradient sums of the second-to-last use of its direction are offloaded: slow copies delay
   computation instead of filling the device.
6. Before the norm, `gradients` completes the sums that other groups share: tied embeddings, tensor ranks, the division by tokens.

Buffers: `parameters.L3`, `gradient.L3`, `state.L3` are the shares that stay on the device; `moved.*` is the offloaded share while
on the device and `host.*` on the host; `weights.L3` are gathered weights; `dweights.L3.m0` is the gradient of one micro-batch
before the reduce-scatter. Channels: `h2d` and `d2h` for copies, `optimizer` for optimizer steps, `dp` for collectives.

Parameter stores (runtime/state/store.py) execute such a list, but for offloaded gradients (capabilities.py).

Source: Mist, section 5.1. Differences: the first gradient sum of a step is not fetched, and optimizer steps have their own
channel.
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
from moe_overlap.plan.lowering.gradient_buckets import DATA_CHANNEL, completion_of, norm_of, optimizer_parts
from moe_overlap.plan.operators import Copied, GroupKind, OperatorKind, parse_group, state_operator
from moe_overlap.plan.plan import Offload, Plan, StagePlan
from moe_overlap.plan.sizes import PartSize


@dataclass(frozen=True, slots=True)
class Use:
    """One use.

    Attributes:
        first, last: places in the list.
        adds_to: parts whose gradient sums a backward use adds to: its own, and for prediction layers those of shared weights.
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
        """Whether it belongs to a layer, which saves enough activations to offload."""
        return self.part not in ("embedding", "head")


def part_of(draft: Draft | Instruction) -> str:
    """The part of a computation in a pass; the empty string for other instructions."""
    if draft.kind != "compute":
        return ""
    return draft.operator.group


def uses_of(drafts: Sequence[Draft]) -> list[Use]:
    """All uses, in order of their first computation."""
    places_of_use: dict[tuple[str, bool, int], list[int]] = {}
    for place, draft in enumerate(drafts):
        if part := part_of(draft):
            assert draft.micro_batch is not None
            places_of_use.setdefault((part, draft.operator.in_backward_pass, draft.micro_batch), []).append(place)
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
        for (part, backward, micro_batch), places in places_of_use.items()
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
        saved_bytes: part -> bytes of activations that its forward pass of a micro-batch saves, from the capture; copies of
            activations of other parts have 0 bytes.
    """

    plan: Plan
    stage_index: int
    model: ModelDescription
    saved_bytes: Mapping[str, int]

    @property
    def stage(self) -> StagePlan:
        """The stage that is lowered."""
        return self.plan.stages[self.stage_index]

    @property
    def scatters(self) -> bool:
        """Whether gradients are kept in shards."""
        return self.stage.is_replicated and self.stage.zero_level >= 2

    @property
    def gathers(self) -> bool:
        """Whether weights are kept in shards."""
        return self.stage.is_replicated and self.stage.zero_level == 3

    @property
    def head_is_embedding(self) -> bool:
        """Whether the output weight is the embedding of the same stage."""
        return self.model.tied_embeddings and self.plan.loss_stage in (self.plan.embedding_stage, self.plan.mtp_stage)

    def weights(self, part: str, backward: bool) -> tuple[str, ...]:
        """Parts whose weights a computation of this part reads.

        A tied head reads the embedding's weights; the embedding's backward reads none; prediction layers read embedding and head.
        """
        if part == "embedding" and backward:
            return ()
        if parse_group(part).kind is GroupKind.PREDICTION:
            return (part, "embedding", "head")
        return ("head", "embedding") if part == "head" and self.head_is_embedding else (part,)

    def sums(self, part: str) -> tuple[str, ...]:
        """Buffers of a part's gradient sum: the share that stays and the share that moves."""
        moved = (f"moved.gradient.{part}",) if self.stage.offload.gradients > 0 else ()
        return (f"gradient.{part}", *moved)

    def stored(self, part: str) -> tuple[str, ...]:
        """Buffers of a part's stored weights: the share that stays and the share that moves."""
        moved = (f"moved.weights.{part}",) if self.stage.offload.weights > 0 else ()
        return (f"parameters.{part}", *moved)

    def states(self, part: str) -> tuple[str, ...]:
        """Buffers of a part's optimizer states: the share that stays and the share that moves."""
        moved = (f"moved.state.{part}",) if self.stage.offload.optimizer > 0 else ()
        return (f"state.{part}", *moved)

    def gather(self, part: str, into: tuple[str, ...], use: Use | None = None) -> Draft:
        """The all-gather of a part's weight shards."""
        sent = self._size(part).gather_bytes(self.stage, self.plan.precision)
        name, shards = state_operator(OperatorKind.PARAMETERS, part), self.stored(part)
        draft = Draft(kind="collective", name=name, channel=DATA_CHANNEL, reads=shards, writes=into, bytes=sent)
        return _at(draft, use)

    def reduction(self, part: str, reads: tuple[str, ...], chunk: int | None, micro_batch: int) -> Draft:
        """The reduction over replicas of a part's gradient: of a micro-batch, or of the step."""
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
        """The prefetch of an offloaded share; `buffer` without `host.` and `moved.`."""
        return _at(self._copy(OperatorKind.PREFETCH, part, what, f"host.{buffer}", f"moved.{buffer}", TO_DEVICE), use)

    def store(self, part: str, what: Copied, buffer: str, use: Use | None = None) -> Draft:
        """The offload of a share; `buffer` without `host.` and `moved.`."""
        return _at(self._copy(OperatorKind.OFFLOAD, part, what, f"moved.{buffer}", f"host.{buffer}", TO_HOST), use)

    def _copy(self, action: OperatorKind, part: str, what: Copied, source: str, target: str, channel: str) -> Draft:
        name, size = (
            state_operator(action, part, what),
            getattr(self.stage.offload, what) * self._stored_bytes(part, what),
        )
        return Draft(kind="copy", name=name, channel=channel, reads=(source,), writes=(target,), bytes=round(size))

    def _stored_bytes(self, part: str, what: Copied) -> int:
        """Bytes of a part's weights, gradients, states or saved activations on this rank."""
        if what is Copied.ACTIVATIONS:
            return self.saved_bytes.get(part, 0)
        return self._size(part).stored_bytes(self.stage, what, self.plan.precision)

    def _size(self, part: str) -> PartSize:
        return payload.part_size(part, self.plan, self.stage, self.model)


def host_bytes(plan: Plan, stage_index: int, model: ModelDescription) -> dict[Copied, float]:
    """Bytes that one rank of a stage keeps on the host of each state; activations, which depend on the capture, are left out."""
    stage = plan.stages[stage_index]
    sizes = [payload.part_size(part, plan, stage, model) for part in optimizer_parts(plan, stage_index, model)]
    return {
        what: getattr(stage.offload, what) * sum(size.stored_bytes(stage, what, plan.precision) for size in sizes)
        for what in Copied
        if what is not Copied.ACTIVATIONS
    }


def _at(draft: Draft, use: Use | None) -> Draft:
    """The draft with chunk and micro-batch of a use, if any."""
    return replace(draft, chunk=use.chunk, micro_batch=use.micro_batch) if use else draft


# A `state` buffer exists when a step starts: the first updates clip by the norm of the previous step.
NORM_STATE = "state.norm"
T = TypeVar("T")


@dataclass(slots=True)
class DecoupledLowering:
    """Writes one step of one stage.

    Attributes:
        _ended: the last instruction of the last completed use.
        _gone: state -> instructions after which a part's share of this state has left the device.
        _updated, _used: parts that have been updated; parts whose weights have been used since.
        _written: moved and per-micro-batch buffers that hold content.
        _on_host: parts whose gradient sums are on the host.
    """

    parts: PartDrafts
    to: ListBuilder
    _ended: tuple[int, ...] = ()
    _gone: dict[Copied, list[int]] = field(default_factory=lambda: defaultdict(list))
    _updated: set[str] = field(default_factory=set)
    _used: set[str] = field(default_factory=set)
    _written: set[str] = field(default_factory=set)
    _on_host: set[str] = field(default_factory=set)

    @property
    def _offload(self) -> Offload:
        return self.parts.stage.offload

    @property
    def _names(self) -> tuple[str, ...]:
        return optimizer_parts(self.parts.plan, self.parts.stage_index, self.parts.model)

    def write_updates(self) -> None:
        """Write the updates alone."""
        for part in self._names:
            self._update(part)

    def write(self, drafts: Sequence[Draft], updates: bool) -> None:
        """Write the step: updates if the step before has left any, passes with their loads and offloads, norm."""
        plan, names = self.parts.plan, self._names
        if not updates:
            self._updated.update(names)
            self._used.update(names)
        # Step 1. Offloaded weights would have to leave again: their update waits for the part's first use (`_load`).
        elif self._offload.weights == 0:
            self.write_updates()
        if self.parts.head_is_embedding:
            drafts = list(map(_adding_to_the_embedding, drafts))
        uses, ends = uses_of(drafts), gradient_ends(drafts)
        befores: list[Use | None] = [None, *uses]
        # Loading starts when the previous use begins, so the copies can hide under that whole use.
        loads = _by_place(
            (before.first if before else 0, (before, use)) for before, use in zip(befores, uses, strict=False)
        )
        ends_of_uses = _by_place((use.last, use) for use in uses)
        leaving = {use.first: Copied.GRADIENTS if use.backward else Copied.ACTIVATIONS for use in uses}
        complete = _by_place((place, key) for key, place in ends.items())
        last = {part: max(place for (other, _), place in ends.items() if other == part) for part, _ in ends}
        for place, draft in enumerate(drafts):
            for before, use in loads.get(place, []):
                self._load(use, before)
            # Step 5.
            room = self._two_back(leaving[place]) if place in leaving else ()
            number = self.to.append(self._with_weights(self._with_gradients(draft)), room)
            for used in ends_of_uses.get(place, []):
                self._leave(used, number)
            for part, micro_batch in complete.get(place, ()):
                self._gradient(part, draft.chunk, micro_batch, is_last=last[part] == place)
        totals = tuple(f"gradient.{part}" for part in names)
        self.to.append(completion_of(plan, totals))  # Step 6.
        self.to.append(norm_of(plan, totals, NORM_STATE))

    def _two_back(self, what: Copied) -> tuple[int, ...]:
        """The offload of the second-to-last part: after it, at most one part's share of this state is on the device."""
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
        if parts.stage.is_replicated and parts.stage.zero_level in (1, 2):
            self.to.append(parts.gather(part, into=parts.stored(part)))
        if offload.weights > 0:
            self.to.append(parts.store(part, Copied.WEIGHTS, f"weights.{part}"))
        self._updated.add(part)

    def _load(self, use: Use, before: Use | None) -> None:
        """Step 2."""
        parts, limit = self.parts, self._ended
        loaded = parts.weights(before.part, before.backward) if before else ()
        for part in parts.weights(use.part, use.backward):
            if part in loaded:
                continue
            if part not in self._updated:
                self._update(part)
            # The update leaves the weights on the device for the first use; later uses fetch them.
            elif self._offload.weights > 0 and part in self._used:
                self.to.append(parts.fetch(part, Copied.WEIGHTS, f"weights.{part}", use), limit)
            self._used.add(part)
            if parts.gathers:
                self.to.append(parts.gather(part, (f"weights.{part}",), use), limit)
        if use.backward and use.is_layer and self._offload.activations > 0:
            saved = f"activations.{use.part}.m{use.micro_batch}"
            self.to.append(parts.fetch(use.part, Copied.ACTIVATIONS, saved, use), limit)
        # The previous use may still wait for the same offload (step 5): without this wait a fourth gradient sum would be loaded.
        room = self._two_back(Copied.GRADIENTS)
        for part in use.adds_to if use.backward else ():
            if part in self._on_host:
                self.to.append(parts.fetch(part, Copied.GRADIENTS, f"gradient.{part}", use), (*limit, *room))
                self._on_host.remove(part)

    def _leave(self, use: Use, number: int) -> None:
        """Step 3. `number`: id of the last instruction of the use."""
        self._ended = (number,)
        if not use.backward and use.is_layer and self._offload.activations > 0:
            draft = self.parts.store(use.part, Copied.ACTIVATIONS, f"activations.{use.part}.m{use.micro_batch}", use)
            self._gone[Copied.ACTIVATIONS].append(self.to.append(draft))

    def _gradient(self, part: str, chunk: int | None, micro_batch: int, is_last: bool) -> None:
        """Step 4."""
        parts, moved = self.parts, f"moved.gradient.{part}"
        # Shards take every micro-batch's gradient; full sums (ZeRO 0, 1) are reduced once, after the last micro-batch.
        if parts.scatters or (parts.stage.is_replicated and is_last):
            scattered = (f"dweights.{part}.m{micro_batch}",) if parts.scatters else ()
            # In the first micro-batch the moving share of the sum does not exist yet.
            sums = [name for name in parts.sums(part) if name != moved or name in self._written]
            self.to.append(parts.reduction(part, (*scattered, *sums), chunk, micro_batch))
            self._written.add(moved)
        if self._offload.gradients > 0:
            draft = replace(
                parts.store(part, Copied.GRADIENTS, f"gradient.{part}"), chunk=chunk, micro_batch=micro_batch
            )
            self._gone[Copied.GRADIENTS].append(self.to.append(draft))
            self._on_host.add(part)

    def _with_weights(self, draft: Draft) -> Draft:
        """A computation that also reads its weights, and reads or writes its activations if they are offloaded."""
        part = part_of(draft)
        if not part:
            return draft
        needed = self.parts.weights(part, draft.operator.in_backward_pass)
        reads = [
            name
            for group in needed
            for name in ((f"weights.{group}",) if self.parts.gathers else self.parts.stored(group))
        ]
        writes: list[str] = []
        if self._offload.activations > 0 and part not in ("embedding", "head"):
            saved = f"moved.activations.{part}.m{draft.micro_batch}"
            reads += [saved] if saved in self._written else []
            writes += [] if draft.operator.in_backward_pass else [saved]
            self._written.add(saved)
        return replace(draft, reads=(*draft.reads, *reads), writes=(*draft.writes, *writes))

    def _with_gradients(self, draft: Draft) -> Draft:
        """A draft with its gradient sum replaced by the micro-batch's gradient (ZeRO 2, 3), or with the moving share added."""
        for part in gradients_of(draft):
            if self.parts.scatters:
                scattered = f"dweights.{part}.m{draft.micro_batch}"
                accumulated = (scattered,) if scattered in self._written else ()
                reads = _exchanged(draft.reads, f"gradient.{part}", accumulated)
                draft = replace(draft, reads=reads, writes=_exchanged(draft.writes, f"gradient.{part}", (scattered,)))
                self._written.add(scattered)
            elif self._offload.gradients > 0:
                moved = f"moved.gradient.{part}"
                accumulated = (moved,) if moved in self._written else ()
                draft = replace(draft, reads=(*draft.reads, *accumulated), writes=(*draft.writes, moved))
                self._written.add(moved)
        return draft


def _adding_to_the_embedding(draft: Draft) -> Draft:
    """A product with the output weight, which is the embedding: its gradient belongs to that part, too."""
    if draft.operator.kind is not OperatorKind.HEAD_LOSS or "gradient.head" not in draft.writes:
        return draft
    return replace(draft, reads=(*draft.reads, "gradient.embedding"), writes=(*draft.writes, "gradient.embedding"))


def _exchanged(names: tuple[str, ...], old: str, new: tuple[str, ...]) -> tuple[str, ...]:
    """The names, with `old` replaced by `new`."""
    return tuple(other for name in names for other in (new if name == old else (name,)))


def _by_place(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Place -> values, in order."""
    by_place: dict[int, list[T]] = {}
    for place, value in pairs:
        by_place.setdefault(place, []).append(value)
    return by_place
