"""What the ranks of test_partitions.py run: the same job through megatron-core's schedule and through the executor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BASE = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --moe-token-dispatcher-type irregular --micro-batch-size 4 --global-batch-size 16 --train-iters 4
    --lr 1e-3 --mock-data --vocab-size 257 --tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --log-interval 1000
"""

Curve = list[tuple[float, float]]


def curves(variants: dict[str, str], steps: int = 3) -> dict[str, Curve]:
    """Loss and gradient norm of the first steps of every variant, flags added to BASE, then loss and tokens of an evaluation."""
    found = {}
    for name, flags in variants.items():
        job = _job(flags)
        feed = _uneven(job.batches("train", 0))
        found[name] = [_step(job, step, feed) for step in range(steps)]
        evaluated = job.runner.evaluate(job.instructions, feed)
        found[name].append((evaluated.loss, float(evaluated.tokens)))
    return found


def peak_bytes(variants: dict[str, str]) -> dict[str, int]:
    """Most bytes that one step of every variant holds on this rank beside parameters, gradients and optimizer state."""
    from megatron.training.memory import StorageTracker, held_tensors

    found = {}
    for name, flags in variants.items():
        job = _job(flags)
        feed = job.batches("train", 0)
        _step(job, 0, feed)
        held = held_tensors(job.chunks, job.optimizer)
        with StorageTracker(held) as tracker:
            before = tracker.bytes
            _step(job, 1, feed)
        found[name] = tracker.peak_bytes - before
    return found


def dense_passes(flags: str) -> int:
    """How often one step runs the first layer's dense MLP, with its only micro-batch."""
    job = _job(flags)
    calls: list[None] = []
    layer = job.chunks[0].module.decoder.layers[0]
    layer.mlp.linear_fc1.register_forward_hook(lambda *_: calls.append(None))
    _step(job, 0, job.batches("train", 0))
    return len(calls)


def _job(flags: str) -> Any:
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
    return pretrain_moe.assemble(parsed, dist.get_rank()).job


def _uneven(feed: Any) -> Iterator[Any]:
    """The batches, with unequally many tokens that count, and documents where the batches tell documents apart."""
    import torch

    for number, batch in enumerate(feed):
        counted = batch["tokens"] % (2 + number % 3) == 0
        made = {**batch, "loss_mask": counted.float()}
        if "attention_mask" in batch:
            document_BS = (batch["tokens"] % 5 == 0).cumsum(1)
            apart_BSS = document_BS[:, :, None] != document_BS[:, None, :]
            later_SS = torch.ones(apart_BSS.shape[1:], dtype=torch.bool).triu(1)
            made["attention_mask"] = (apart_BSS | later_SS)[:, None]
        yield made


def _step(job: Any, step: int, feed: Any) -> tuple[float, float]:
    job.runner.step = step
    result = job.runner.run(job.instructions, feed)
    job.scheduler.step(increment=job.global_batch_size)
    return result.loss, result.grad_norm
