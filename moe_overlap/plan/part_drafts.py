"""What a stage whose parts step by themselves stores of a part, and the copies and collectives that move it.

Buffers: `parameters.L3`, `gradient.L3`, `state.L3` are what stays on the device; `moved.*` is the offloaded share while it is
there and `host.*` its home; `weights.L3` are gathered weights; `dweights.L3.m0` is the gradient of one micro-batch before it is
scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import payload
from moe_overlap.plan.instructions import TO_DEVICE, TO_HOST
from moe_overlap.plan.list_builder import Draft
from moe_overlap.plan.lower_update import DATA_CHANNEL, is_replicated
from moe_overlap.plan.part_uses import Use
from moe_overlap.plan.payload import PartSize
from moe_overlap.plan.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class PartDrafts:
    """Of one stage.

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
        if part.startswith("mtp"):
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
        name, shards = f"parameters.{part}", self.stored(part)
        draft = Draft(kind="collective", name=name, channel=DATA_CHANNEL, reads=shards, writes=into, bytes=sent)
        return _at(draft, use)

    def reduction(self, part: str, reads: tuple[str, ...], chunk: int | None, micro_batch: int) -> Draft:
        """The gradient of a micro-batch, or of the step, summed over the replicas."""
        return Draft(
            kind="collective",
            name=f"gradients.{part}",
            channel=DATA_CHANNEL,
            chunk=chunk,
            micro_batch=micro_batch,
            reads=reads,
            writes=self.sums(part),
            bytes=self._size(part).reduction_bytes(self.stage),
        )

    def fetch(self, part: str, what: str, buffer: str, use: Use | None = None) -> Draft:
        """The offloaded share of something, from the host; `buffer` without `host.` and `moved.`."""
        return _at(self._copy("prefetch", part, what, f"host.{buffer}", f"moved.{buffer}", TO_DEVICE), use)

    def store(self, part: str, what: str, buffer: str, use: Use | None = None) -> Draft:
        """The same, to the host."""
        return _at(self._copy("offload", part, what, f"moved.{buffer}", f"host.{buffer}", TO_HOST), use)

    def _copy(self, action: str, part: str, what: str, source: str, target: str, channel: str) -> Draft:
        name, size = f"{action}.{part}.{what}", getattr(self.stage.offload, what) * self._stored_bytes(part, what)
        return Draft(kind="copy", name=name, channel=channel, reads=(source,), writes=(target,), bytes=round(size))

    def _stored_bytes(self, part: str, what: str) -> int:
        """Bytes of a part's weights, gradients or states on this rank, or of a layer's saved activations."""
        if what == "activations":
            return self.saved_bytes.get(part, 0)
        return self._size(part).stored_bytes(self.stage, what, self.plan.precision)

    def _size(self, part: str) -> PartSize:
        return payload.part_size(part, self.plan, self.stage, self.model)


def _at(draft: Draft, use: Use | None) -> Draft:
    """For one use; what belongs to none stays."""
    return replace(draft, chunk=use.chunk, micro_batch=use.micro_batch) if use else draft
