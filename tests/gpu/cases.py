"""The paths that a GPU takes, each as flags beside one small model; every case starts from the same weights."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 64 --moe-layer-freq [0,1,0,1] --moe-aux-loss-coeff 0 --vocab-size 500
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
    --weight-decay 0.1 --eval-iters 0 --num-workers 0 --log-interval 1000000 --mock-data
""".split()
IRREGULAR = "--moe-token-dispatcher-type irregular --moe-gate topk"
EP, PP, TWO = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--moe-overlap-partitions 2"
DEFER, PAIRS = "--defer-weight-gradients", "--moe-overlap-micro-batches 2"
CAPACITY = "--moe-expert-capacity-factor 1.0"
STATIC, GRAPHS = f"{CAPACITY} --moe-pad-expert-input-to-capacity", "--moe-overlap-cuda-graphs"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
EXACT, HALF = 1e-4, 2e-2
"""Largest relative difference of a loss between GPU and CPU: fp32 in another order of sums, and half precision."""
GROUPED = "--group-query-attention --num-query-groups 2"
MODELS = {
    "plain": GROUPED,
    "normed queries": f"{GROUPED} --qk-layernorm",
    "latent attention": "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16",
    "shared expert": f"{GROUPED} --moe-shared-expert-intermediate-size 64",
    # A partition of 64 tokens reaches no more than half of them.
    "idle experts": f"{GROUPED} --num-experts 128 --moe-router-topk 1 --moe-router-pre-softmax",
}
"""What a case adds to MODEL; cases of one model start from the same weights."""


@dataclass(frozen=True, slots=True)
class Case:
    """One path.

    Attributes:
        ranks: as many GPUs, or gloo processes.
        tensor: tensor-parallel ranks, which decide how the vocabulary is padded.
        on_gpu: flags that GPUs get and CPUs do not.
        model: a name of MODELS.
        resumes: whether the run stops in the middle, saves, and goes on in another one.
    """

    name: str
    ranks: int
    flags: str
    tolerance: float = EXACT
    tensor: int = 1
    on_gpu: str = ""
    model: str = "plain"
    resumes: bool = False

    def words(self, device: str = "cuda") -> list[str]:
        """Its command line; the padded vocabulary is that of all cases."""
        more = self.on_gpu.split() if device == "cuda" else []
        return [
            *MODEL,
            *MODELS[self.model].split(),
            "--make-vocab-size-divisible-by",
            str(512 // self.tensor),
            *self.flags.split(),
            *more,
        ]


CASES = (
    Case("megatron-core alone", 1, "--moe-token-dispatcher-type alltoall"),
    Case("bf16", 1, "--moe-token-dispatcher-type alltoall --bf16", HALF),
    Case("fp16", 1, "--moe-token-dispatcher-type alltoall --fp16", HALF),
    Case("experts as grouped products", 1, "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --bf16", HALF),
    Case("all layers recomputed", 1, f"--moe-token-dispatcher-type alltoall {FULL}"),
    Case("SGD", 1, "--moe-token-dispatcher-type alltoall --optimizer sgd --lr 1e-1"),
    Case(
        "a mask beside grouped queries", 1, "--moe-token-dispatcher-type alltoall --reset-attention-mask --bf16", HALF
    ),
    Case("data ranks", 2, "--moe-token-dispatcher-type alltoall --overlap-grad-reduce --overlap-param-gather"),
    Case("expert ranks under megatron-core", 2, f"{EP} --moe-token-dispatcher-type alltoall"),
    Case("irregular all-to-all under megatron-core", 2, f"{EP} {IRREGULAR}"),
    Case("partitions", 2, f"{EP} {IRREGULAR} {TWO}"),
    Case("partitions behind the gate", 2, f"{EP} {IRREGULAR} {TWO} --moe-overlap-range after"),
    Case("deferred weight gradients", 2, f"{EP} {IRREGULAR} {DEFER}"),
    Case("partitions, deferred", 2, f"{EP} {IRREGULAR} {TWO} {DEFER}"),
    Case("partitions, deferred, bf16", 2, f"{EP} {IRREGULAR} {TWO} {DEFER} --bf16", HALF),
    Case("partitions, deferred, recomputed", 2, f"{EP} {IRREGULAR} {TWO} {DEFER} {FULL}"),
    Case("two micro-batches", 2, f"{EP} {IRREGULAR} {PAIRS} {DEFER}"),
    Case("chunks of capacity", 2, f"{EP} {IRREGULAR} {CAPACITY} --moe-overlap-capacity-chunks 2"),
    Case("capacity passed between partitions", 2, f"{EP} {IRREGULAR} {CAPACITY} {TWO}"),
    Case("static capacity", 2, f"{EP} {IRREGULAR} {STATIC} {DEFER}"),
    Case("captured graphs", 2, f"{EP} {IRREGULAR} {STATIC} {PAIRS} {DEFER}", on_gpu=GRAPHS),
    Case("captured graphs, partitions, bf16", 2, f"{EP} {IRREGULAR} {TWO} {DEFER} --bf16", HALF, on_gpu=GRAPHS),
    Case("rows summed in a fixed order", 2, f"{EP} {IRREGULAR} {TWO} {DEFER} --deterministic-mode"),
    Case("gradient pieces", 2, f"{EP} {IRREGULAR} {TWO} {DEFER} --overlap-grad-reduce --ddp-bucket-size 20000"),
    Case("pipeline", 2, f"{PP} --moe-token-dispatcher-type alltoall"),
    Case("tensor ranks", 2, f"{TENSOR} --moe-token-dispatcher-type alltoall", tensor=2),
    Case("context ranks", 2, "--context-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    Case("pipeline of partitions", 4, f"{PP} {EP} {IRREGULAR} {TWO} {DEFER}"),
    Case("virtual stages", 4, f"{PP} {VIRTUAL} {EP} {IRREGULAR} {DEFER}"),
    Case("partitions, normed queries", 2, f"{EP} {IRREGULAR} {TWO} {DEFER}", model="normed queries"),
    Case("partitions, latent attention", 2, f"{EP} {IRREGULAR} {TWO} {DEFER}", model="latent attention"),
    Case(
        "partitions, shared expert",
        2,
        f"{EP} {IRREGULAR} {TWO} {DEFER}",
        model="shared expert",
    ),
    Case("experts without rows", 2, f"{EP} {IRREGULAR} {TWO} {DEFER} --bf16", HALF, model="idle experts"),
    Case("partitions over context ranks", 2, f"--context-parallel-size 2 {EP} {IRREGULAR} {TWO} {DEFER}"),
    Case("saved and loaded", 2, f"{EP} {IRREGULAR} {TWO} {DEFER}", resumes=True),
    Case("virtual stages under megatron-core", 2, f"{PP} {VIRTUAL} --moe-token-dispatcher-type alltoall"),
    Case("four context ranks", 4, "--context-parallel-size 4 --moe-token-dispatcher-type alltoall"),
    Case("tensor and expert ranks", 4, f"{TENSOR} {EP} --expert-tensor-parallel-size 1 {IRREGULAR}", tensor=2),
)
BY_NAME = {case.name: case for case in CASES}
