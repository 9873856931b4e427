"""What the overlap benchmark compares, as flags of pretrain_moe.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.plan.gate_rules import GATE_FACTS
from tools.link_bed.reduction_lists import Reduction

MODEL = """
    --num-layers 2 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 256 --seq-length 256
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --moe-ffn-hidden-size 1024
    --moe-router-load-balancing-type none --moe-router-dtype fp32
    --micro-batch-size 8 --mock-data --train-iters 100000 --lr 1e-4 --eval-iters 0 --num-workers 0 --log-interval 1000000
""".split()
"""The default job: 2048 tokens per rank and micro-batch; on two ranks 4 MiB leave a rank per exchange (two experts per token)."""
JOB = (*MODEL, "--tokenizer-type", "NullTokenizer", "--vocab-size", "1024")
"""The same with a vocabulary that flags tell, as predictions need it."""
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
    """One way to run the job.

    Attributes:
        flags: behind the job's own.
        plain: megatron-core's own dispatcher; runs in processes that import no overlap code.
        receive_first: its all-to-all is replaced by point-to-point.
        waits: every exchange is waited for where it starts.
        reach: operators on each side of a MoE layer that run in its partitions; None: what the flags say.
        reduction: when the gradient of the head is reduced, see reduction_lists.py; timer compute only.
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
    """All variants for one gate, in the order of their turns.

    Args:
        gate: of `--moe-gate`; the baselines use megatron-core's router.
        partitions, ranges: every combination is tried.
        degrees: of the Tutel-style pipeline; the last one also with deferral.
        reaches: ranges by number of operators, for every number of partitions.
        micro_batches: of a step; where there are several, the backward pass of one and the forward pass of another are
            interleaved, too.
    """
    plain, base = plain_flags(gate), base_flags(gate)
    found = [
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
            found.append(Variant(f"partitions {count} {name}", cut))
            found.append(Variant(f"both {count} {name}", (*cut, *DEFER)))
            if micro_batches > 1:
                found.append(Variant(f"all {count} {name}", (*cut, *DEFER, *INTERLEAVE)))
    widest = found[-1]
    if micro_batches > 1:
        found.append(Variant("micro-batches", (*base, *INTERLEAVE)))
        found.append(Variant("micro-batches and deferral", (*base, *DEFER, *INTERLEAVE)))
    for reach in reaches:
        for count in partitions:
            cut = (*base, "--moe-overlap-partitions", str(count), "--moe-overlap-range", "experts")
            found.append(Variant(f"partitions {count} reach {reach}", cut, reach=reach))
    return [*found, Variant(f"{widest.name}, waiting", widest.flags, waits=True)]


def deferral(gate: str) -> Variant:
    """Weight gradients deferred and nothing else: what profiles are measured on."""
    return Variant("deferral", (*base_flags(gate), *DEFER))


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
