"""Runs of the ranks of test_partitions.py: the same job through megatron-core's schedule and through the executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.multiprocess.reused_groups import reused_groups

BASE = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --moe-token-dispatcher-type irregular --micro-batch-size 4 --global-batch-size 16 --train-iters 4
    --lr 1e-3 --mock-data --vocab-size 257 --tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --log-interval 1000
"""
GPT_OSS = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --group-query-attention --num-query-groups 2 --position-embedding-type yarn --rotary-scaling-factor 4
    --yarn-original-max-position-embeddings 8 --window-size 7,0 --window-attn-skip-freq 2 --softmax-type learnable
    --normalization RMSNorm --quick-geglu --activation-func-clamp-value 0.05 --glu-linear-offset 1.0 --attention-dropout 0
    --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --untie-embeddings-and-output-weights
    --moe-token-dispatcher-type irregular --micro-batch-size 4 --global-batch-size 16 --train-iters 4
    --lr 1e-3 --mock-data --vocab-size 257 --tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --log-interval 1000
"""
"""The same with everything that is peculiar to GPT-OSS; biases in every linear among it. The clamp is met."""
CROWDED = (
    "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0"
)
"""With a bias on the router: every token goes to the last expert, so that the other experts and one rank get none."""

Curve = list[tuple[float, float]]


def curves(
    variants: dict[str, str], crowded: dict[str, str] | None = None, steps: int = 3, base: str = BASE
) -> dict[str, Curve]:
    """Loss and gradient norm of the first steps of every variant, flags added to a base, then loss and tokens of an evaluation.

    Args:
        crowded: variants that run with CROWDED.
    """
    found = {name: _curve(*assembled(flags, base), steps) for name, flags in variants.items()}
    for name, flags in (crowded or {}).items():
        job, feed = assembled(f"{flags} {CROWDED}")
        biases = [module.expert_bias for module in job.machinery.chunks[0].modules() if hasattr(module, "expert_bias")]
        for bias in biases:
            bias.copy_(bias.new_tensor([0.0] * (len(bias) - 1) + [9.0]))
        found[name] = _curve(job, feed, steps)
        # What got tokens is pushed down, what got none is pulled up.
        assert biases and all(bias[-1] < 9.0 and (bias[:-1] > 0).all() for bias in biases), biases
    return found


def peak_bytes(variants: dict[str, str]) -> dict[str, int]:
    """Most bytes that one step of every variant holds on this rank beside parameters, gradients and optimizer state."""
    from megatron.training.report.reports import StorageTracker, held_tensors

    found = {}
    for name, flags in variants.items():
        job, feed = assembled(flags)
        _step(job, 0, feed)
        held = held_tensors(job.machinery.chunks, job.machinery.optimizer)
        with StorageTracker(held) as tracker:
            before = tracker.bytes
            _step(job, 1, feed)
        found[name] = tracker.peak_bytes - before
    return found


def dense_passes(flags: str) -> int:
    """How often one step runs the first layer's dense MLP, with its only micro-batch."""
    job, feed = assembled(flags)
    calls: list[None] = []
    layer = job.machinery.chunks[0].module.decoder.layers[0]
    layer.mlp.linear_fc1.register_forward_hook(lambda *_: calls.append(None))
    _step(job, 0, feed)
    return len(calls)


def spans_of_a_step(flags: str) -> list[tuple[str, str, float, float]]:
    """Name, channel, start and end of what a step recorded, its update left out. Collective."""
    job, feed = assembled(flags)
    spans = job.machinery.runner.run(job.schedule.instructions, feed, 0).spans
    return [(s.name, s.channel, s.start, s.end) for s in spans if not s.name.startswith(("optimizer", "parameters"))]


def assembled(flags: str, base: str = BASE) -> tuple[Any, Any]:
    """The run of these flags added to a base, and its samples. Collective."""
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands import train as pretrain_moe

    parsed = parse([*base.split(), *flags.split()])
    validate(parsed.config, dist.get_world_size())
    with reused_groups():
        job = pretrain_moe.assemble(parsed, dist.get_rank()).job
    feed = job.batches("train", 0)
    assert feed is not None
    return job, _uneven(feed)


def _curve(job: Any, feed: Any, steps: int) -> Curve:
    curve = [_step(job, step, feed) for step in range(steps)]
    evaluated = _evaluated(job, feed, steps - 1)
    return [*curve, (evaluated.loss, float(evaluated.tokens))]


def _evaluated(job: Any, feed: Any, step: int) -> Any:
    """The result of an evaluation; of its micro-batches nothing is kept behind their passes."""
    from moe_overlap.runtime.executor.execute import PlanExecutor

    runner, states = job.machinery.runner, []
    if isinstance(runner, PlanExecutor):
        state_of = runner._state
        runner._state = lambda *arguments: states.append(state_of(*arguments)) or states[-1]
    result = runner.evaluate(job.schedule.instructions, feed, step)
    kept = {name: len(getattr(s, name)) for s in states for name in ("segments", "handles", "chunks", "normed")}
    assert not any(kept.values()), kept
    return result


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
    return uneven_step(job, step, feed, job.machinery.runner)


def uneven_step(job: Any, step: int, feed: Any, runner: Any) -> tuple[float, float]:
    """Loss and gradient norm of one step of a job by a runner of its own."""
    result = runner.run(job.schedule.instructions, feed, step)
    job.machinery.scheduler.step(increment=job.schedule.global_batch_size)
    return result.loss, result.grad_norm


def write_plan(path: Path, flags: str, layers: dict[int, dict[str, Any]]) -> str:
    """The plan of flags for two ranks, with some fields of some layers replaced; returns its name."""
    import dataclasses

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.plan_flags import plan_from_flags
    from moe_overlap.plan.serialize import save_plan

    config = parse([*BASE.split(), *flags.split()]).config
    plan = plan_from_flags(config, describe_model(config, 257), 2)
    (stage,) = plan.stages
    changed = [dataclasses.replace(layer, **layers.get(layer.layer, {})) for layer in stage.overlap.layers]
    overlap = dataclasses.replace(stage.overlap, layers=tuple(changed))
    save_plan(dataclasses.replace(plan, stages=(dataclasses.replace(stage, overlap=overlap),)), path)
    return str(path)
