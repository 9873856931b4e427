"""Frozen predictions, term by term: what a change of the cost model does to its prices, seen before it is merged.

    python -m tests.validation.golden_prices            # the differences between tests/golden/prices.json and today's prices
    python -m tests.validation.golden_prices --renew    # prints them, and writes the file anew

Prices are those of the shipped constants, on graphs written by hand (golden_graphs.py): no capture, no torch, the same bytes at
every renewal. Figures have twelve significant digits, so that sums in another order change none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.plan.plan import Offload
from moe_overlap.tuner.cost.prediction import estimate_plan
from tests.validation.golden_graphs import golden_graphs

FILE = Path(__file__).resolve().parents[1] / "golden" / "prices.json"
TOLERANCE = 1e-6
"""Relative."""
NOTHING = 1e-12
"""Seconds."""
RUN = """--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 --micro-batch-size 1 --train-iters 10
    --lr 1e-4 --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope"""
DENSE = f"""{RUN} --num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu
    --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --global-batch-size 64"""
GPT = f"""{RUN} --num-layers 8 --hidden-size 2048 --num-attention-heads 32 --global-batch-size 64"""
"""Heads of 64 numbers and tied embeddings."""
MOE = f"""{RUN} --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --swiglu
    --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --global-batch-size 128
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-token-dispatcher-type alltoall"""
GROUPS = "--group-query-attention --num-query-groups 4"
LATENT = f"""{MOE.replace(GROUPS, "")} --moe-layer-freq ([0]*1+[1]*7) --ffn-hidden-size 8192
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --mtp-num-layers 1 --moe-shared-expert-intermediate-size 2048"""
SHARDED, BESIDE = "--use-distributed-optimizer", "--overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
EIGHT = "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
LISTED = "--moe-token-dispatcher-type irregular --moe-gate topk --micro-batch-size 2"


@dataclass(frozen=True, slots=True)
class Case:
    """One prediction.

    Attributes:
        offload: shares of the states that stay on the host, which no flag says.
        loads: recorded load of every expert; empty: balanced.
    """

    flags: str
    gpu: str = "H100"
    gpus: int = 16
    offload: Offload = Offload()
    loads: tuple[int, ...] = ()


CASES: Mapping[str, Case] = {
    "dense, ZeRO-0": Case(DENSE),
    "dense, ZeRO-0, reduction beside the passes": Case(f"{DENSE} --overlap-grad-reduce"),
    "dense, ZeRO-1": Case(f"{DENSE} {SHARDED}"),
    "dense, ZeRO-1, states beside the passes": Case(f"{DENSE} {SHARDED} {BESIDE}", gpu="A100"),
    "dense, ZeRO-2": Case(f"{DENSE} {FSDP} optim_grads"),
    "dense, ZeRO-3": Case(f"{DENSE} {FSDP} optim_grads_params"),
    "dense, half of everything offloaded": Case(
        f"{DENSE} {SHARDED}", offload=Offload(weights=0.5, gradients=0.5, optimizer=0.5, activations=0.5)
    ),
    "dense, ZeRO-3, optimizer and activations offloaded": Case(
        f"{DENSE} {FSDP} optim_grads_params", offload=Offload(optimizer=1.0, activations=1.0)
    ),
    "dense, tensor and sequence parallel": Case(
        f"{DENSE} {SHARDED} --tensor-model-parallel-size 8 --sequence-parallel"
    ),
    "dense, tensor parallel": Case(f"{DENSE} {SHARDED} --tensor-model-parallel-size 4"),
    "dense, tensor parallel in slices": Case(
        f"{DENSE} {SHARDED} --tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap", gpu="B200"
    ),
    "dense, ring of context ranks": Case(f"{DENSE} {SHARDED} --context-parallel-size 4"),
    "dense, all-to-all of context ranks": Case(f"{DENSE} {SHARDED} --context-parallel-size 4 --cp-comm-type a2a"),
    "dense, gather of context ranks": Case(f"{DENSE} {SHARDED} --context-parallel-size 16 --cp-comm-type all_gather"),
    "dense, pipeline": Case(f"{DENSE} {SHARDED} --pipeline-model-parallel-size 4"),
    "dense, pipeline whose first stage is the slowest": Case(
        f"{DENSE} {SHARDED} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5"
    ),
    "dense, that pipeline with half of everything offloaded": Case(
        f"{DENSE} {SHARDED} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5",
        offload=Offload(weights=0.5, gradients=0.5, optimizer=0.5, activations=0.5),
    ),
    "dense, interleaved pipeline, optimizer and activations offloaded": Case(
        f"{DENSE} {SHARDED} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
        offload=Offload(optimizer=1.0, activations=1.0),
    ),
    "dense, interleaved pipeline": Case(
        f"{DENSE} {SHARDED} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    ),
    "dense, interleaved pipeline that waits for transfers": Case(
        f"{DENSE} {SHARDED} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--no-overlap-p2p-communication"
    ),
    "dense, all layers recomputed": Case(
        f"{DENSE} {SHARDED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "dense, two layers of a stage recomputed": Case(
        f"{DENSE} {SHARDED} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 2"
    ),
    "dense, attention recomputed, fp8": Case(
        f"{DENSE} {SHARDED} --recompute-granularity selective --recompute-modules core_attn "
        "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
    ),
    "dense, mxfp8": Case(f"{DENSE} {SHARDED} {BESIDE} --fp8-format e4m3 --fp8-recipe mxfp8", gpu="B200"),
    "dense, nvfp4, whole step in a graph": Case(
        f"{DENSE} {SHARDED} --fp4-format e2m1 --cuda-graph-impl local --cuda-graph-scope full_iteration", gpu="GB300"
    ),
    "GPT, fp16, tied embeddings in a pipeline": Case(
        f"{GPT.replace('--bf16', '--fp16')} {SHARDED} --pipeline-model-parallel-size 2"
    ),
    "GPT, scores through memory, dropout": Case(
        f"{GPT} --transformer-impl local --attention-dropout 0.1", gpu="L4", gpus=8
    ),
    "GPT, narrow heads in 8 bits, plain descent": Case(
        f"{GPT} --optimizer sgd --sgd-momentum 0.9 --fp8-format e4m3 --fp8-recipe mxfp8", gpu="GB300"
    ),
    "MoE, ZeRO-0": Case(f"{MOE} {EIGHT}"),
    "MoE, ZeRO-1": Case(f"{MOE} {SHARDED} {EIGHT} --tensor-model-parallel-size 2 --sequence-parallel"),
    "MoE, ZeRO-2": Case(f"{MOE} {FSDP} optim_grads {EIGHT}", gpus=32),
    "MoE, experts over two nodes": Case(
        f"{MOE} {SHARDED} --expert-model-parallel-size 16 --expert-tensor-parallel-size 1", gpus=32
    ),
    "MoE, experts cut in two": Case(
        f"{MOE} {SHARDED} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 2",
        gpus=32,
    ),
    "MoE, experts cut in four": Case(
        f"{MOE} {SHARDED} --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 4"
    ),
    "MoE, DeepEP": Case(
        f"{MOE} {SHARDED} --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 "
        "--moe-token-dispatcher-type flex --moe-enable-deepep"
    ),
    "MoE, DeepEP, routers that choose among groups of experts first": Case(
        f"{MOE} {SHARDED} --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --moe-router-num-groups 8 "
        "--moe-router-group-topk 2 --moe-token-dispatcher-type flex --moe-enable-deepep"
    ),
    "MoE, loss and experts as fused kernels, mxfp8": Case(
        f"{MOE} {SHARDED} {EIGHT} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
        "--use-transformer-engine-op-fuser --fp8-format e4m3 --fp8-recipe mxfp8",
        gpu="B200",
    ),
    "MoE, all-to-alls under another micro-batch, partial graphs": Case(
        f"{MOE} {SHARDED} {EIGHT} --overlap-moe-expert-parallel-comm --cuda-graph-impl transformer_engine "
        "--cuda-graph-scope attn moe_router",
        gpu="GB200",
    ),
    "MoE, all-to-alls under another micro-batch, 2 stages of 2 chunks": Case(
        f"{MOE} {SHARDED} {EIGHT} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    ),
    "MoE, one busy rank": Case(f"{MOE} {SHARDED} {EIGHT}", loads=(400, 300, *(100,) * 30)),
    "MoE, windows, small moments": Case(
        f"{MOE} {SHARDED} {EIGHT} --window-size 127,0 --window-attn-skip-freq 2 --use-precision-aware-optimizer "
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --grad-reduce-in-bf16"
    ),
    "MoE, two partitions of a micro-batch": Case(f"{MOE} {SHARDED} {EIGHT} {LISTED} --moe-overlap-partitions 2"),
    "MoE, two partitions in 8 bits": Case(
        f"{MOE} {SHARDED} {EIGHT} {LISTED} --moe-overlap-partitions 2 --fp8-format e4m3 --fp8-recipe mxfp8", gpu="B200"
    ),
    "MoE, deferred weight gradients in a pipeline": Case(
        f"{MOE} {SHARDED} {EIGHT} {LISTED} --pipeline-model-parallel-size 2 --defer-weight-gradients "
        "--max-deferred-bytes 100000000000"
    ),
    "MoE, two short micro-batches of static shape, replayed as graphs": Case(
        f"{MOE} {SHARDED} {EIGHT} {LISTED} --seq-length 512 --moe-overlap-micro-batches 2 --moe-overlap-cuda-graphs "
        "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
    ),
    "latent attention, interleaved, shared expert beside": Case(
        f"{LATENT} {SHARDED} {BESIDE} {EIGHT} --pipeline-model-parallel-size 2 --moe-shared-expert-overlap "
        "--pipeline-model-parallel-layout Ett|tt|tt|ttmL --fp8-format e4m3 --fp8-recipe mxfp8",
        gpu="GB200",
        gpus=32,
    ),
}


def prices(case: Case) -> dict[str, float]:
    """Term -> seconds or bytes of a case, at twelve significant digits."""
    cluster = shipped_cluster(case.gpu, case.gpus)
    with tempfile.TemporaryDirectory() as folder:
        recorded = None
        if case.loads:
            recorded = str(Path(folder) / "loads.jsonl")
            line = ExpertLoad(1, 1, 0, sum(case.loads), case.loads, (0,) * len(case.loads), 1.0).to_line()
            Path(recorded).write_text(line + "\n")
        problem = problem_of(case.flags.split(), cluster, {"graphs": golden_graphs, "expert_load": recorded})
    stages = tuple(dataclasses.replace(stage, offload=case.offload) for stage in problem.plan.stages)
    prediction = estimate_plan(dataclasses.replace(problem.plan, stages=stages), problem)
    terms: dict[str, float] = {"step_seconds": prediction.predicted.step_seconds, **prediction.breakdown}
    for index, stage in enumerate(prediction.predicted.stages):
        seconds = (stage.stable_seconds, stage.first_seconds, stage.last_seconds, stage.exposed_communication_seconds)
        for name, value in zip(("stable", "first", "last", "exposed"), seconds, strict=True):
            terms[f"stage {index} {name}_seconds"] = value
        for name, size in dataclasses.asdict(stage.peak_bytes_by_category).items():
            terms[f"stage {index} {name}_bytes"] = size
    # What is left of sums that cancel is nothing, and differs between machines.
    return {name: float(f"{value:.12g}") if abs(value) > NOTHING else 0.0 for name, value in terms.items()}


def golden() -> dict[str, dict[str, float]]:
    """The frozen prices of every case; empty where there is no file yet."""
    content: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return content


def differences(name: str, frozen: Mapping[str, float], today: Mapping[str, float]) -> Iterator[str]:
    """A line for every term of a case that is not what it was."""
    for term in dict.fromkeys((*frozen, *today)):
        before, now = frozen.get(term), today.get(term)
        if before is None or now is None:
            yield f"{name}: {term}: {_shown(before)} -> {_shown(now)}"
        elif not math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=1e-15):
            share = f" ({now / before - 1:+.2%})" if before else ""
            yield f"{name}: {term}: {before:.6g} -> {now:.6g}{share}"


def _shown(value: float | None) -> str:
    return "absent" if value is None else f"{value:.6g}"


def main(argv: list[str] | None = None) -> int:
    """Print what differs, and renew the file if asked; 1 where something differs and nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write tests/golden/prices.json anew")
    asked = parser.parse_args(argv)
    frozen, today = golden(), {name: prices(case) for name, case in CASES.items()}
    empty: dict[str, float] = {}
    lines = [
        line
        for name in dict.fromkeys((*frozen, *today))
        for line in differences(name, frozen.get(name, empty), today.get(name, empty))
    ]
    if asked.renew:
        FILE.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines) or "no price differs")
    return int(bool(lines) and not asked.renew)


if __name__ == "__main__":
    raise SystemExit(main())
