"""What the ranks of test_partitions.py run: the same job through megatron-core's schedule and through the executor."""

from __future__ import annotations

from typing import Any

BASE = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --moe-token-dispatcher-type irregular --moe-gate topk --micro-batch-size 4 --global-batch-size 16 --train-iters 4
    --lr 1e-3 --mock-data --vocab-size 257 --tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --log-interval 1000
"""

Curve = list[tuple[float, float]]


def curves(variants: dict[str, str]) -> dict[str, Curve]:
    """Loss and gradient norm of three steps of every variant, flags added to BASE. Collective."""
    found = {}
    for name, flags in variants.items():
        job, feed = assembled(flags)
        found[name] = [_step(job, step, feed) for step in range(3)]
    return found


def spans_of_a_step(flags: str) -> list[tuple[str, str, float, float]]:
    """Name, channel, start and end of what a step recorded, its update left out. Collective."""
    job, feed = assembled(flags)
    spans = job.runner.run(job.instructions, feed).spans
    return [(s.name, s.channel, s.start, s.end) for s in spans if not s.name.startswith(("optimizer", "parameters"))]


def assembled(flags: str) -> tuple[Any, Any]:
    """The run of these flags added to BASE, and its samples."""
    from megatron.training import cpu_backend
    from megatron.training.quiet import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    import pretrain_moe
    from megatron.training.arguments import parse
    from megatron.training.validation import validate

    parsed = parse([*BASE.split(), *flags.split()])
    validate(parsed.config, dist.get_world_size())
    job = pretrain_moe.assemble(parsed, dist.get_rank()).job
    feed = job.batches("train", 0)
    assert feed is not None
    return job, feed


def _step(job: Any, step: int, feed: Any) -> tuple[float, float]:
    job.runner.step = step
    result = job.runner.run(job.instructions, feed)
    job.scheduler.step(increment=job.global_batch_size)
    return result.loss, result.grad_norm
