"""Training as pretrain_moe.py assembles it, with and without weight gradients put aside. Called in the processes of a launch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SIZES = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-token-dispatcher-type alltoall
    --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
    --weight-decay 0.1 --eval-iters 0 --num-workers 0 --log-interval 1000000
"""
MODERN = """
    --group-query-attention --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --qk-layernorm --moe-router-topk 2 --moe-ffn-hidden-size 32
    --moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
"""
UNTIED = "--untie-embeddings-and-output-weights"
STEPS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run on one rank."""

    steps: tuple[tuple[float, float], ...]
    """Loss and gradient norm of every step."""
    parameters: dict[str, str]
    """Name -> digest of its bytes."""
    names: tuple[str, ...] = ()
    peak_bytes: int = 0


def train(flags: str) -> Outcome:
    """Four steps as the flags say."""
    return _outcome(_assemble(flags), None, ())


def train_deferred(flags: str, max_bytes: int | None = None, break_queue: Any = None) -> Outcome:
    """The same with weight gradients put aside and computed at the end of each micro-batch's backward pass.

    Args:
        break_queue: is called with the queue before the first step.
    """
    from moe_overlap.runtime.weight_grad.queue import WeightGradQueue
    from tests.drained import drain_after_backward

    queue = WeightGradQueue(max_bytes)
    with _deferring(queue) as names:
        loop = _assemble(flags)
    for chunk in loop.job.machinery.chunks:
        drain_after_backward(chunk, queue)
    update = loop.job.machinery.runner._update
    run_instruction = update.run

    def checked(*arguments: Any) -> None:
        queue.assert_empty()
        run_instruction(*arguments)

    update.run = checked
    if break_queue is not None:
        break_queue(queue)
    return _outcome(loop, queue, tuple(names))


def _assemble(flags: str) -> Any:
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands import train as pretrain_moe

    tensor = 2 if "--tensor-model-parallel-size 2" in flags else 1
    parsed = parse(f"{SIZES} --make-vocab-size-divisible-by {512 // tensor} {flags}".split())
    validate(parsed.config, dist.get_world_size())
    return pretrain_moe.assemble(parsed, dist.get_rank())


@contextlib.contextmanager
def _deferring(queue: Any) -> Iterator[list[str]]:
    """Models built inside put their weight gradients into the queue; yields their names."""

    from megatron.training import optimizer
    from megatron.training.model import build as model
    from moe_overlap.runtime.weight_grad.split_linear import defer_weight_gradients

    build, names = model.build_model, []

    def build_split(*arguments: Any, **options: Any) -> Any:
        chunks = build(*arguments, **options)
        for chunk in chunks:
            names.extend(defer_weight_gradients(chunk, queue))
        return chunks

    wrap = optimizer.wrap_chunks

    def wrap_split(*arguments: Any, **options: Any) -> Any:
        return wrap(*arguments, **{**options, "weight_gradients_come_later": True})

    model.build_model = build_split
    optimizer.wrap_chunks = wrap_split
    try:
        yield names
    finally:
        model.build_model = build
        optimizer.wrap_chunks = wrap


def _outcome(loop: Any, queue: Any, names: tuple[str, ...]) -> Outcome:
    import torch

    job = loop.job
    feed = job.batches("train", 0)
    steps = []
    for _ in range(STEPS):
        result = job.machinery.runner.run(job.schedule.instructions, feed, 0)
        job.machinery.scheduler.step(increment=job.schedule.global_batch_size)
        steps.append((result.loss, result.grad_norm))
    digests = {}
    for number, chunk in enumerate(job.machinery.chunks):
        chunk.start_param_sync(force_sync=True)
        for name, parameter in chunk.named_parameters():
            raw = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
            digests[f"{number}.{name}"] = hashlib.sha256(raw).hexdigest()
    job.reporting.log.close()
    if queue is None:
        return Outcome(tuple(steps), digests)
    return Outcome(tuple(steps), digests, names, queue.peak_bytes)
