"""The variants that the overlap benchmark compares, as flags of pretrain_moe.py.

`variants` lists them. Two of their fields have no flag: `reduction` moves the reduction of one gradient within a list
(`with_reduction`), and `reach` sets the ranges of partitions to any number of operators (`reaching`), the horizontal axis of
Lancet's figure 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.gates import GATE_FACTS
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.operators import ATTENTION, EXPERTS, GATE, MERGE, MLP, layer_operator
from moe_overlap.plan.overlap import LayerOverlap, Place, needs_whole_batch
from moe_overlap.plan.plan import Plan, StagePlan

Reduction = Literal["as listed", "none", "in gaps", "at once", "at the end"]
"""How a list reduces gradients, to measure the gain of the places that lowering chooses.

    as listed     every parameter group, as the plan says
    none          nothing is reduced
    in gaps       the head alone, as the plan says
    at once       the head alone, in one collective that starts when its gradient is complete
    at the end    the head alone, in one collective after the last backward pass
"""
HEAD = "gradients.head"


def with_reduction(instructions: Sequence[Instruction], reduction: Reduction) -> tuple[Instruction, ...]:
    """The list with its reductions moved; nothing but the executor's order is kept sound.

    Args:
        instructions: a list with reductions in buckets; the last two ways need the head in one bucket.
    """
    if reduction == "as listed":
        return tuple(instructions)
    head = [i for i in instructions if i.name == HEAD]
    others = [i for i in instructions if not i.operator.is_bucket]
    if reduction == "none":
        return tuple(others)
    if reduction == "in gaps":
        return tuple(i for i in instructions if i.name == HEAD or i in others)
    (bucket,) = head
    free = [dataclasses.replace(i, after=tuple(number for number in i.after if number != bucket.id)) for i in others]
    passes = [i for i in free if i.micro_batch is not None]
    complete = max(place for place, i in enumerate(passes) if bucket.reads[0] in i.writes)
    place = complete + 1 if reduction == "at once" else len(passes)
    return (*passes[:place], dataclasses.replace(bucket, after=()), *passes[place:], *free[len(passes) :])


MODEL = """
    --num-layers 2 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 256 --seq-length 256
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --moe-ffn-hidden-size 1024
    --moe-router-load-balancing-type none --moe-router-dtype fp32 --use-distributed-optimizer
    --micro-batch-size 8 --mock-data --train-iters 100000 --lr 1e-4 --eval-iters 0 --num-workers 0 --log-interval 1000000
""".split()
"""The default job: 2048 tokens per rank and micro-batch. On two ranks 4 MiB leave a rank per all-to-all, with top-2."""
JOB = (*MODEL, "--tokenizer-type", "NullTokenizer", "--vocab-size", "1024")
"""The default job with the vocabulary in flags, as predictions need it."""
TOP_2 = ("--moe-router-topk", "2")
GATE_FLAGS = {
    "switch": ("--moe-router-topk", "1", "--moe-router-pre-softmax"),
    "batch_prioritized": (*TOP_2, "--moe-expert-capacity-factor", "1.25"),
}
IRREGULAR = ("--moe-token-dispatcher-type", "irregular")
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
DEFER = ("--defer-weight-gradients",)
INTERLEAVE = ("--moe-overlap-micro-batches", "2")
CHUNKS = "--moe-overlap-capacity-chunks"
SEQUENTIAL = "irregular"
"""The variant that the others are measured against: same transport, nothing overlapped."""
PLAIN, RECEIVE_FIRST = "alltoall", "alltoall receive-first"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to execute the job.

    Attributes:
        flags: follow the job's flags.
        plain: megatron-core's own dispatcher; runs in processes that import no overlap code.
        receive_first: its all-to-all is replaced by point-to-point.
        waits: every all-to-all is waited for where it starts.
        reach: operators on each side of a MoE layer that run in its partitions; None: as the flags say.
        reduction: how gradients are reduced; timer compute only.
    """

    name: str
    flags: tuple[str, ...]
    plain: bool = False
    receive_first: bool = False
    waits: bool = False
    reach: int | None = None
    reduction: Reduction = "as listed"


def default_ranges(gate: str) -> tuple[str, ...]:
    """The widest range that a gate allows."""
    return ("around",) if GATE_FACTS[gate].partitionable_before else ("after",)


def variants(
    gate: str,
    partitions: Sequence[int],
    ranges: Sequence[str],
    degrees: Sequence[int],
    reaches: Sequence[int] = (),
    micro_batches: int = 1,
) -> list[Variant]:
    """List all variants for one gate, in the order of their turns.

    Args:
        gate: of `--moe-gate`; the baselines use megatron-core's router.
        partitions, ranges: every combination is tried.
        degrees: of the Tutel-style pipeline; the last one also with deferral.
        reaches: ranges by number of operators, for every number of partitions.
        micro_batches: of a step; where there are several, the backward pass of one and the forward pass of another are
            interleaved, too.
    """
    plain, base = plain_flags(gate), base_flags(gate)
    chosen = [
        Variant(PLAIN, plain, plain=True),
        Variant(RECEIVE_FIRST, plain, plain=True, receive_first=True),
        Variant(SEQUENTIAL, base),
        *(Variant(f"tutel {degree}", (*base, CHUNKS, str(degree))) for degree in degrees),
        deferral(gate),
        *(Variant(f"chunks {degree} and deferral", (*base, CHUNKS, str(degree), *DEFER)) for degree in degrees[-1:]),
    ]
    for name in ranges:
        for count in partitions:
            cut = (*base, "--moe-overlap-partitions", str(count), "--moe-overlap-range", name)
            chosen.append(Variant(f"partitions {count} {name}", cut))
            chosen.append(Variant(f"both {count} {name}", (*cut, *DEFER)))
            if micro_batches > 1:
                chosen.append(Variant(f"all {count} {name}", (*cut, *DEFER, *INTERLEAVE)))
    widest = chosen[-1]
    if micro_batches > 1:
        chosen.append(Variant("micro-batches", (*base, *INTERLEAVE)))
        chosen.append(Variant("micro-batches and deferral", (*base, *DEFER, *INTERLEAVE)))
    for reach in reaches:
        for count in partitions:
            cut = (*base, "--moe-overlap-partitions", str(count), "--moe-overlap-range", "experts")
            chosen.append(Variant(f"partitions {count} reach {reach}", cut, reach=reach))
    return [*chosen, Variant(f"{widest.name}, waiting", widest.flags, waits=True)]


def deferral(gate: str) -> Variant:
    """Weight gradients deferred and nothing else: what profiles are measured on."""
    return Variant("deferral", (*base_flags(gate), *DEFER))


def late_sends(gate: str) -> Variant:
    """Two micro-batches at a time whose forward pass sends to the next stage last."""
    return Variant(
        "micro-batches and deferral, late sends",
        (*base_flags(gate), *DEFER, *INTERLEAVE, "--moe-overlap-forward-send", "late"),
    )


def plain_flags(gate: str) -> tuple[str, ...]:
    """megatron-core's own dispatcher and router, as near to a gate as they come."""
    return (*ALLTOALL, *GATE_FLAGS.get(gate, TOP_2))


def base_flags(gate: str) -> tuple[str, ...]:
    """A gate of our own over the irregular dispatcher, nothing overlapped."""
    return (*IRREGULAR, *GATE_FLAGS.get(gate, TOP_2), "--moe-gate", gate)


def job_flags(ranks: int, micro_batches: int, experts_per_rank: int) -> list[str]:
    """Flags that grow with the number of ranks: every rank keeps its tokens and its experts (weak scaling)."""
    batch = int(MODEL[MODEL.index("--micro-batch-size") + 1]) * ranks * micro_batches
    sizes = {
        "--num-experts": experts_per_rank * ranks,
        "--expert-model-parallel-size": ranks,
        "--global-batch-size": batch,
    }
    return [word for flag, value in sizes.items() for word in (flag, str(value))]


def reaching(plan: Plan, model: ModelDescription, reach: int) -> Plan:
    """The plan with the ranges of all its partitioned layers replaced.

    Reach n means the MoE operators with up to n operators before them and up to n after them. An operator is an attention or a
    dense MLP. A range ends at the experts of its neighbours and at its model chunk; where two ranges meet, the operators between
    them belong to the later one first, and both become one pipeline.

    Args:
        reach: most operators on each side.
    """
    return dataclasses.replace(plan, stages=tuple(_stage(stage, model, reach) for stage in plan.stages))


def _stage(stage: StagePlan, model: ModelDescription, reach: int) -> StagePlan:
    layers = {layer.layer: layer for layer in stage.overlap.layers}
    for chunk in stage.chunks:
        places = [(n, part) for n in range(*chunk) for part in (ATTENTION, EXPERTS if model.moe_layers[n] else MLP)]
        used: set[Place] = set()
        cut = [n for n in range(*chunk) if n in layers and layers[n].mechanism == "partitioned"]
        for number in reversed(cut):
            at = places.index((number, EXPERTS))
            before = 0 if needs_whole_batch(layers[number]) else _free(places[:at][::-1], reach, used)
            after = _free(places[at + 1 :], reach, used)
            used.update(places[at - before : at + after + 1])
            layers[number] = _range(layers[number], places[at - before], places[at + after])
    overlap = dataclasses.replace(stage.overlap, layers=tuple(layers.values()))
    return dataclasses.replace(stage, overlap=overlap)


def _free(places: list[Place], reach: int, used: set[Place]) -> int:
    """Number of the next operators that the range may take, up to `reach`."""
    count = 0
    for place in places[:reach]:
        if place in used or place[1] == EXPERTS:
            break
        count += 1
    return count


def _range(layer: LayerOverlap, first: Place, last: Place) -> LayerOverlap:
    begins = layer_operator(first[0], GATE if first[1] == EXPERTS else first[1])
    ends = layer_operator(last[0], MERGE if last[1] == EXPERTS else last[1])
    return dataclasses.replace(layer, first_operator=begins, last_operator=ends)
