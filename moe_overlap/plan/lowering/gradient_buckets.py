"""The update at the end of a step as instructions, and the reduction of gradients in buckets, in the gaps between all-to-alls.

The update (`lower_update`): gradient reduction, norm, optimizer steps, gather of parameters. It ends every list (`parameters`
from ZeRO 1 on). Its collectives have 0 bytes if there are no replicas, or if weights are gathered in the next step
(weight_gathers.py): they still complete gradients that other groups share, and copy master weights.

Buckets. Terms. A parameter group (`embedding`, `L3`, `head`) is complete after the last instruction of the step that writes its
gradient, deferred weight gradients included. An all-to-all is pending until the first instruction that waits for it or for a
later one: their channel runs in order. A fused kernel counts as an all-to-all that also computes: it needs the link. A gap is the
computation between two all-to-alls while none is pending.

1. The buckets of complete groups wait in a queue, in order of completion; that order is the same on every rank of the stage.
2. Each gap starts with one bucket, which travels while the gap computes.
3. The next all-to-all waits for the bucket: the two never share the link. `gradient_chunk_bytes` is chosen so that a bucket ends
   within the shortest gap.
4. After the last all-to-all, and if no tokens are sent at all, buckets start as soon as their gradients are complete.

If all-to-alls stay inside a node, buckets use other links and waiting for gaps only delays them: with `reduce_at_once` all
buckets start as soon as their gradients are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import COMPUTE, DATA, Instruction, Kind
from moe_overlap.plan.lowering.dependencies import Draft, ListBuilder
from moe_overlap.plan.lowering.layers import COUNT_CHANNEL, EXPERT_CHANNEL
from moe_overlap.plan.operators import NORM, OperatorKind, state_operator
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.sizes import PartSize

DATA_CHANNEL = DATA
NORM_BYTES = 4
NORM_BUFFER = "norm"


def optimizer_parts(plan: Plan, stage_index: int, model: ModelDescription) -> tuple[str, ...]:
    """The parameter groups that the optimizer of a stage updates, in order: `embedding`, `L0`, …, `mtp0`, …, `head`.

    The stage of the prediction layers holds the word embedding or a copy of it.
    """
    parts = [f"L{layer}" for layer in plan.stages[stage_index].layers]
    if stage_index in (plan.embedding_stage, plan.mtp_stage):
        parts.insert(0, "embedding")
    if stage_index == plan.mtp_stage:
        parts += [f"mtp{depth}" for depth in range(model.mtp_layers)]
    if stage_index == plan.loss_stage:
        parts.append("head")
    return tuple(parts)


def lower_update(plan: Plan, stage_index: int, model: ModelDescription) -> Iterator[Draft]:
    """All instructions after the last backward pass; buckets of gradients are placed between the passes (`fill_gaps`)."""
    stage = plan.stages[stage_index]
    parts = optimizer_parts(plan, stage_index, model)
    sizes = {part: payload.part_size(part, plan, stage, model) for part in parts}
    totals = tuple(f"gradient.{part}" for part in parts)
    kind, channel = _meeting(plan)
    in_buckets = stage.overlap.gradient_chunk_bytes > 0
    sent = 0 if in_buckets else sum(sizes.values(), PartSize(0, 0)).reduction_bytes(stage)
    yield completion_of(plan, totals, sent)
    # Clipping scales by the norm over all ranks, so no parameter group can step earlier.
    yield norm_of(plan, totals)
    for part in parts:
        reads = (f"gradient.{part}", f"state.{part}", NORM_BUFFER)
        yield Draft(
            kind="optimizer",
            name=state_operator(OperatorKind.OPTIMIZER, part),
            reads=reads,
            writes=(f"parameters.{part}", f"state.{part}"),
        )
    if stage.zero_level > 0:
        # ZeRO: each replica has updated only its shard of the weights.
        shards = tuple(f"parameters.{part}" for part in parts)
        gathers = 0 if stage.overlap.overlap_param_gather else 1
        sent = gathers * sum(size.gather_bytes(stage, plan.precision) for size in sizes.values())
        name = str(OperatorKind.PARAMETERS)
        yield Draft(kind=kind, name=name, channel=channel, reads=shards, writes=shards, bytes=sent)


def _meeting(plan: Plan) -> tuple[Kind, str]:
    """Kind and channel of a collective over replicas; with a single rank it is a computation."""
    return ("compute", COMPUTE) if plan.world_size == 1 else ("collective", DATA_CHANNEL)


def completion_of(plan: Plan, totals: tuple[str, ...], sent: int = 0) -> Draft:
    """The end of all reductions of gradients; `sent`: bytes that a rank sends to replicas in it."""
    kind, channel = _meeting(plan)
    return Draft(kind=kind, name=str(OperatorKind.GRADIENTS), channel=channel, reads=totals, writes=totals, bytes=sent)


def norm_of(plan: Plan, totals: tuple[str, ...], buffer: str = NORM_BUFFER) -> Draft:
    """The norm of all gradients, over all ranks."""
    kind, channel = _meeting(plan)
    sent = 0 if plan.world_size == 1 else NORM_BYTES
    return Draft(kind=kind, name=str(NORM), channel=channel, reads=totals, writes=(buffer,), bytes=sent)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One reduction: bucket `index` of a parameter group's gradient.

    Attributes:
        sent_bytes: planned bytes that leave the rank.
    """

    part: str
    index: int
    sent_bytes: int


def buckets_by_group(plan: Plan, stage_index: int, model: ModelDescription) -> dict[str, list[Bucket]]:
    """Parameter group -> its buckets; empty if the plan reduces gradients at the end of the step."""
    stage = plan.stages[stage_index]
    if stage.overlap.gradient_chunk_bytes == 0 or not stage.is_replicated:
        return {}
    parts = optimizer_parts(plan, stage_index, model)
    return {part: buckets_of(part, payload.part_size(part, plan, stage, model), stage) for part in parts}


def buckets_of(part: str, size: PartSize, stage: StagePlan) -> list[Bucket]:
    """Equal buckets of a parameter group, none of more than `gradient_chunk_bytes`."""
    count = -(-size.replicated_bytes(stage) // stage.overlap.gradient_chunk_bytes)
    sent = size.reduction_bytes(stage)
    # Differences of rounded prefixes: the bytes of the buckets add up exactly to those of the group.
    return [Bucket(part, n, sent * (n + 1) // count - sent * n // count) for n in range(count)]


def fill_gaps(passes: Sequence[Instruction], buckets: Mapping[str, Sequence[Bucket]], to: ListBuilder) -> None:
    """Write passes and buckets into a list; steps as above.

    Args:
        passes: forward and backward of all micro-batches of one rank.
        buckets: parameter group -> its buckets; every group is written by the passes.
    """
    # Step 1.
    completes = _completions(passes, buckets)
    last_exchange = max((i.id for i in passes if _is_exchange(i)), default=-1)
    waiting: deque[Bucket] = deque()
    link = _Link()
    travelling: list[int] = []
    places: dict[int, int] = {}
    for i in passes:
        ended = [places[number] for number in link.ended_by(i)]
        is_exchange = _is_exchange(i)
        if ended and not link.pending and i.channel == COMPUTE and not is_exchange:
            # Steps 2 and 4: a gap has room for one bucket; after the last all-to-all a bucket can
            # delay nothing. The bucket waits explicitly for the all-to-alls that have just ended:
            # its buffers would allow it to start earlier.
            free = len(waiting) if i.id > last_exchange else 1
            travelling += [_reduce(waiting.popleft(), ended, to) for _ in range(min(free, len(waiting)))]
        # Step 3. Counts travel over the same link as rows.
        shares_link = is_exchange or i.channel == COUNT_CHANNEL
        # Buckets shift the ids, so the builder derives the waits from the buffers again.
        places[i.id] = to.append(i, travelling if shares_link else ())
        if is_exchange:
            link.pending.append(i.id)
            travelling = []
        waiting.extend(bucket for part in completes.get(i.id, ()) for bucket in buckets[part])
        # Step 4.
        while waiting and not link.pending and i.id > last_exchange:
            _reduce(waiting.popleft(), (), to)
    for bucket in waiting:
        # The passes end in an all-to-all that is still pending: the buckets wait for the link.
        _reduce(bucket, [places[number] for number in link.pending], to)


def reduce_at_once(passes: Sequence[Instruction], buckets: Mapping[str, Sequence[Bucket]], to: ListBuilder) -> None:
    """Write passes into a list, and each bucket right after the instruction that completes its gradients."""
    completes = _completions(passes, buckets)
    for i in passes:
        to.append(i)
        for part in completes.get(i.id, ()):
            for bucket in buckets[part]:
                _reduce(bucket, (), to)


def gaps(passes: Sequence[Instruction]) -> list[list[Instruction]]:
    """The computation of each gap, in order; no all-to-all follows the last one."""
    gaps_of_passes: list[list[Instruction]] = []
    link = _Link()
    for i in passes:
        is_exchange = _is_exchange(i)
        if link.ended_by(i) and not link.pending and i.channel == COMPUTE and not is_exchange:
            gaps_of_passes.append([])
        if is_exchange:
            link.pending.append(i.id)
        elif gaps_of_passes and not link.pending and i.channel == COMPUTE:
            gaps_of_passes[-1].append(i)
    return gaps_of_passes


class _Link:
    """The pending all-to-alls, in order of their start."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    def ended_by(self, i: Instruction) -> list[int]:
        """The pending all-to-alls that have finished when `i` starts; they are removed."""
        # Their channel runs in order: a wait for one implies all before it.
        waited_for = max((number for number in i.after if number in self.pending), default=-1)
        ended = [number for number in self.pending if number <= waited_for]
        self.pending = [number for number in self.pending if number > waited_for]
        return ended


def _is_exchange(i: Instruction) -> bool:
    """Whether it sends tokens: an all-to-all or a fused kernel."""
    # Only fused kernels compute and send bytes.
    return i.channel == EXPERT_CHANNEL or (i.channel == COMPUTE and i.bytes > 0)


def _completions(passes: Sequence[Instruction], parts: Iterable[str]) -> dict[int, list[str]]:
    """Instruction id -> parameter groups whose gradient is complete after it."""
    last = {buffer: i.id for i in passes for buffer in i.writes}
    completes: dict[int, list[str]] = {}
    for part in parts:
        completes.setdefault(last[f"gradient.{part}"], []).append(part)
    return completes


def _reduce(bucket: Bucket, after: Iterable[int], to: ListBuilder) -> int:
    total = f"gradient.{bucket.part}"
    draft = Draft(
        kind="collective",
        name=state_operator(OperatorKind.GRADIENTS, bucket.part),
        channel=DATA_CHANNEL,
        partition=(bucket.index,),
        reads=(total,),
        writes=(total,),
        bytes=bucket.sent_bytes,
    )
    return to.append(draft, after)
