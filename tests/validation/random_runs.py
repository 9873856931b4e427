"""Random runs for property tests: any model, layout, GPU and decision about states that flags accept, on graphs by hand.

A draw that a rule of the flags refuses is drawn again: properties are those of runs that exist.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import Cluster, known_gpus, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Offload
from moe_overlap.tuner.problem import Problem
from tests.validation.golden_graphs import golden_graphs

GPUS = [name for name in known_gpus() if not name.startswith("_")]
RUN = """--max-position-embeddings 65536 --bf16 --train-iters 10 --lr 1e-4 --attention-dropout 0 --hidden-dropout 0
    --position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm
    --untie-embeddings-and-output-weights"""
PRECISIONS = {
    "fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}
UNITS = {"fp8": "fp8_tflops", "mxfp8": "fp8_tflops", "nvfp4": "fp4_tflops"}
"""Precision -> the rate that a GPU must be described with."""
LATENT = """--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128"""
DISPATCHERS = ("alltoall", "alltoall", "flex --moe-enable-deepep", "flex --moe-flex-dispatcher-backend hybridep")
SHARES = (0.0, 0.0, 0.0, 0.5, 1.0)
"""Offloaded shares of states; most runs offload nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One configuration.

    Attributes:
        words: flags but those of layers and of the sequence, which properties change.
        layers, sequence: their values.
        step_of_layers: the smallest number by which layers may grow.
    """

    words: tuple[str, ...]
    cluster: Cluster
    layers: int
    sequence: int
    step_of_layers: int
    zero_level: int
    offload: Offload

    @property
    def is_decoupled(self) -> bool:
        """Whether parameter groups step by themselves, so that its closed form only ranks."""
        return self.zero_level > 1 or any(dataclasses.astuple(self.offload))

    def problem(self, layers: int | None = None, sequence: int | None = None) -> Problem:
        """The problem of the run, whose plan has the run's decisions about states.

        Raises:
            ConfigError: nobody runs it.
        """
        changed = f"--num-layers {layers or self.layers} --seq-length {sequence or self.sequence}"
        problem = problem_of([*self.words, *changed.split()], self.cluster, {"graphs": golden_graphs})
        stages = tuple(
            dataclasses.replace(stage, zero_level=self.zero_level, offload=self.offload)
            for stage in problem.plan.stages
        )
        return dataclasses.replace(problem, plan=dataclasses.replace(problem.plan, stages=stages))


def random_runs(seed: int, count: int) -> Iterator[tuple[Run, Problem]]:
    """So many runs that flags accept, each with its problem."""
    draw, found = random.Random(seed), 0
    while found < count:
        run = _drawn(draw)
        try:
            problem = run.problem()
        except ConfigError:
            continue
        found += 1
        yield run, problem


def _drawn(draw: random.Random) -> Run:
    """Any run; flags may refuse it."""
    gpu, gpus = draw.choice(GPUS), draw.choice((8, 16, 32, 64))
    tensor, context, stages = (draw.choice(sizes) for sizes in ((1, 1, 2, 4, 8), (1, 1, 2, 4), (1, 1, 2, 4)))
    while tensor * context * stages > gpus:
        tensor, context, stages = max(1, tensor // 2), max(1, context // 2), max(1, stages // 2)
    data, micro_batch = gpus // (tensor * context * stages), draw.choice((1, 2, 4))
    virtual = draw.choice((1, 1, 2)) if stages > 1 else 1
    flags = [
        RUN,
        f"--tensor-model-parallel-size {tensor} --context-parallel-size {context}",
        f"--pipeline-model-parallel-size {stages} --micro-batch-size {micro_batch}",
        f"--global-batch-size {data * micro_batch * stages * draw.choice((1, 2, 3, 8))}",
        f"--hidden-size {draw.choice((1024, 2048, 4096, 7168))} --ffn-hidden-size {draw.choice((4096, 14336))}",
        f"--num-attention-heads {draw.choice((16, 32))} --vocab-size {draw.choice((32000, 128256))}",
        f"--num-virtual-stages-per-pipeline-rank {virtual}" if virtual > 1 else "",
        "--use-distributed-optimizer" if (sharded := draw.random() < 0.8) else "",
        f"--cp-comm-type {draw.choice(('p2p', 'a2a', 'all_gather'))}" if context > 1 else "",
        LATENT if (is_latent := draw.random() < 0.2) else "",
        f"--group-query-attention --num-query-groups {draw.choice((4, 8))}" if not is_latent else "",
        "--overlap-grad-reduce" if (reduces := draw.random() < 0.5) else "",
        "--overlap-param-gather" if sharded and reduces and draw.random() < 0.7 else "",
        "--grad-reduce-in-bf16" if draw.random() < 0.2 else "",
    ]
    flags += _recomputation(draw)
    is_moe = draw.random() < 0.6
    flags += _experts(draw, tensor * context * data, is_latent) if is_moe else []
    flags.append("--sequence-parallel" if tensor > 1 and (is_moe or draw.random() < 0.7) else "")
    described = shipped_cluster(gpu, gpus).group_of(0).gpu
    formats = [name for name in PRECISIONS if getattr(described, UNITS[name])]
    flags.append(PRECISIONS[draw.choice(formats)] if formats and draw.random() < 0.4 else "")
    graphs = draw.random()
    flags.append("--cuda-graph-impl local --cuda-graph-scope full_iteration" if graphs < 0.1 else "")
    shares = {name: draw.choice(SHARES) for name in ("weights", "gradients", "optimizer", "activations")}
    moves = draw.random() < 0.2
    return Run(
        words=tuple(" ".join(flags).split()),
        cluster=shipped_cluster(gpu, gpus),
        layers=stages * virtual * draw.choice((1, 2, 3)),
        sequence=draw.choice((1024, 4096, 8192)),
        step_of_layers=stages * virtual,
        zero_level=draw.choice((0, 1, 1, 2, 3)) if moves else int(sharded),
        offload=Offload(**shares) if moves else Offload(),
    )


def _recomputation(draw: random.Random) -> list[str]:
    chosen = draw.random()
    if chosen < 0.2:
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    return ["--recompute-granularity selective --recompute-modules core_attn"] if chosen < 0.4 else []


def _experts(draw: random.Random, ranks: int, is_latent: bool) -> list[str]:
    """Flags of experts spread over some of the ranks of a stage."""
    experts, split = draw.choice((8, 32, 64)), draw.choice((1, 1, 1, 2))
    over = draw.choice(
        [size for size in (1, 2, 4, 8, 16, 32, 64) if ranks % (size * split) == 0 and size <= experts] or [1]
    )
    dispatcher = draw.choice(DISPATCHERS)
    return [
        f"--num-experts {experts} --moe-router-topk {draw.choice((1, 2, 4, 8))}",
        f"--moe-ffn-hidden-size {draw.choice((768, 2048))} --moe-token-dispatcher-type {dispatcher}",
        f"--expert-model-parallel-size {over} --expert-tensor-parallel-size {split}",
        f"--moe-shared-expert-intermediate-size {draw.choice((1024, 2048))}" if draw.random() < 0.3 else "",
        "--mtp-num-layers 1" if is_latent and draw.random() < 0.5 else "",
        "--overlap-moe-expert-parallel-comm" if draw.random() < 0.2 else "",
    ]
