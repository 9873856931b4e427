"""Short runs of the real training program, for the checkpoint tests. Called in the processes of a launch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.multiprocess.reused_groups import reused_groups

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --qk-layernorm --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
"""
UPSTREAM_MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --untie-embeddings-and-output-weights --num-experts 4 --moe-layer-freq 2 --moe-token-dispatcher-type alltoall
"""
"""Upstream's defaults: LayerNorm, GELU, biases, learned positions, dropout; every other layer is dense."""
TRAINING = """
    --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
    --weight-decay 0.1 --eval-iters 0 --num-workers 0 --log-interval 1000000
"""

Steps = dict[int, tuple[float, float]]
"""Step -> loss, gradient norm."""


def train(folder: Path, name: str, flags: str, model: str = MODEL) -> Steps:
    """Train as the flags say, in the group of this process; every rank gets the steps this run made."""
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands import train as pretrain_moe

    log = folder / f"{name}.jsonl"
    tensor = 2 if "--tensor-model-parallel-size 2" in flags else 1
    # The vocabulary is padded to a multiple of this times the tensor-parallel size: the same for every layout.
    vocabulary = f"--make-vocab-size-divisible-by {512 // tensor}"
    parsed = parse([*f"{model} {TRAINING} {vocabulary} {flags}".split(), "--log-json", str(log)])
    validate(parsed.config, dist.get_world_size())
    with reused_groups():
        pretrain_moe.assemble(parsed, dist.get_rank()).run()
    dist.barrier()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@contextlib.contextmanager
def alone(folder: Path, number: int) -> Iterator[None]:
    """Each process of the launch by itself, in a group of one; then all together again."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    method = f"file://{folder}/rendezvous-{number}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
