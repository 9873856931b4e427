"""Prints what megatron-core says: parameters of small models, rank by rank of a pretended world, and its defaults.

Run by test_parameters.py in a process of its own, because the CPU stand-ins must be there before megatron.core is.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

DENSE = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1 --make-vocab-size-divisible-by 16"
)
MOE = f"{DENSE} --num-experts 8 --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope"
LATENT = f"{MOE} --multi-latent-attention --kv-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
SINKS = "--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VARIANTS = {
    "upstream's defaults": (DENSE, 1),
    "dense, tensor and pipeline": (f"{DENSE} {TP2} --pipeline-model-parallel-size 2 --qk-layernorm", 4),
    "halves in parallel, one query group": (
        f"{DENSE} {TP2} --parallel-attention-mlp one-norm --group-query-attention --num-query-groups 1 --disable-bias-linear",
        2,
    ),
    "experts with biases": (f"{DENSE} --num-experts 4 --moe-layer-freq 2", 1),
    "experts, tied": (f"{MOE} --kv-channels 16 --qk-layernorm --add-qkv-bias", 1),
    "grouped queries, untied, expert parallel": (
        f"{MOE} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
        "--expert-model-parallel-size 4 --moe-ffn-hidden-size 32",
        4,
    ),
    "shared experts with a gate, tensor parallel": (
        f"{MOE} {TP2} --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --expert-tensor-parallel-size 1 "
        "--expert-model-parallel-size 2 --moe-ffn-hidden-size 32",
        2,
    ),
    "expert tensor parallel, interleaved": (
        f"{MOE} {TP2} --moe-ffn-hidden-size 32 --pipeline-model-parallel-size 2 --global-batch-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights",
        4,
    ),
    "windows, sinks and biases, expert parallel": (
        f"{DENSE} {SINKS} --quick-geglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --num-experts 4 "
        "--position-embedding-type yarn --rotary-scaling-factor 4 --moe-layer-freq 2 --expert-model-parallel-size 2",
        2,
    ),
    "sinks, tensor parallel": (f"{DENSE} {TP2} {SINKS} --num-experts 4 --expert-tensor-parallel-size 1", 2),
    "experts in a latent space": (
        f"{MOE} {TP2} --moe-latent-size 20 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 40",
        2,
    ),
    "experts in a latent space, biases, latent attention with sinks": (
        f"{LATENT.replace('--disable-bias-linear ', '')} {SINKS} --moe-latent-size 20 --expert-model-parallel-size 2",
        2,
    ),
    "predictions, tied, tensor and pipeline": (
        f"{MOE} {TP2} --moe-ffn-hidden-size 32 --mtp-num-layers 2 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Et*4|mmL",
        4,
    ),
    "latent attention and predictions, untied": (
        f"{LATENT} --mtp-num-layers 1 --untie-embeddings-and-output-weights --expert-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tmL",
        4,
    ),
    "latent attention, tied": (f"{LATENT} --moe-router-score-function sigmoid --moe-router-enable-expert-bias", 1),
    "latent attention with latent queries": (
        f"{LATENT} {TP2} --q-lora-rank 20 --qk-layernorm --moe-layer-freq [0]+[1]*3 --moe-ffn-hidden-size 32 "
        "--moe-shared-expert-intermediate-size 40 --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 "
        "--decoder-first-pipeline-num-layers 1",
        4,
    ),
}


def main() -> None:
    """One JSON object on stdout: `counts`, variant -> [[built, computed] per rank], and `defaults`, field -> text."""
    from megatron.training import cpu_backend

    cpu_backend.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {field.name: str(field.default) for field in dataclasses.fields(TransformerConfig)}
    counted = {name: counts(*variant) for name, variant in VARIANTS.items()}
    json.dump({"counts": counted, "defaults": defaults}, sys.stdout)


def counts(flags: str, world_size: int) -> list[tuple[int, int]]:
    """Parameters of each rank: built by megatron-core, and by the analytic formulas."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.dry_run import stage_parameters
    from megatron.training.cli.sizes import describe_model
    from megatron.training.cli.validation import validate
    from megatron.training.initialize import seed_everything
    from megatron.training.model.build import build_model
    from megatron.training.plan_flags import plan_from_flags
    from moe_overlap.runtime.groups import build_groups

    config = parse(flags.split()).config
    validate(config, world_size)
    model = describe_model(config, vocab_size=100)
    plan = plan_from_flags(config, model, world_size)
    results = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        groups = build_groups(plan)
        seed_everything(1, groups.collection)
        modules = build_model(config, model, plan, groups.collection, groups.stage, _stock_layer)
        built = sum(parameter.numel() for module in modules for parameter in module.parameters())
        results.append((built, stage_parameters(model, plan, groups.stage).total))
        dist.destroy_process_group()
    return results


def _stock_layer(spec: Any) -> Any:
    """megatron-core's own MoE layer is handed the groups by its caller."""
    if spec.submodules.mlp.params:
        spec.submodules.mlp.params.pop("pg_collection", None)
    return spec


if __name__ == "__main__":
    main()
