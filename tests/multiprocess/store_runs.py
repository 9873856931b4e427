"""Runs of the ranks of test_parameter_stores.py: one model under plans whose stages have any ZeRO levels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_overlap.plan.plan import Plan

SIZES = """
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --lr 1e-3
    --weight-decay 0.1 --adam-beta2 0.95 --mock-data --vocab-size 255 --tokenizer-type NullTokenizer --num-workers 0
    --log-interval 1000 --train-iters 8 --lr-decay-style linear --eval-iters 1
"""
DENSE = f"{SIZES} --num-layers 2"
EXPERTS = f"""{SIZES} --num-layers 3 --moe-layer-freq [0,1,1] --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type irregular"""
BIASED = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rank knows of a run.

    Attributes:
        losses, norms: of each step.
        evaluated: loss of an evaluation after them.
        weights: digest of this rank's weights after all updates.
        follows: whether the recorded spans of every step are those of its list, each once.
    """

    losses: list[float]
    norms: list[float]
    evaluated: float
    weights: str
    follows: bool


def with_levels(flags: str, world: int, levels: Sequence[int]) -> Plan:
    """The plan of flags whose stages have these ZeRO levels."""
    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.plan_flags import plan_from_flags

    config = parse(flags.split()).config
    plan = plan_from_flags(config, describe_model(config, 256), world)
    stages = zip(plan.stages, levels, strict=True)
    return replace(plan, stages=tuple(replace(stage, zero_level=level) for stage, level in stages))


def planned(folder: Path, flags: str, world: int, levels: Sequence[int]) -> str:
    """The flags of a run by such a plan, whose file is written."""
    from moe_overlap.plan.serialize import save_plan

    path = folder / f"{hashlib.sha256(flags.encode()).hexdigest()[:8]}-{'-'.join(map(str, levels))}.json"
    save_plan(with_levels(flags, world, levels), path)
    return f"{flags} --plan {path}"


def trained(words: str, steps: int, on_stores: bool = False) -> Trained:
    """Train a few steps and evaluate. Collective.

    Args:
        on_stores: whether stores hold the states whatever the levels.
    """
    import torch

    if on_stores:
        Plan.has_stores = property(lambda plan: True)  # type: ignore[assignment,method-assign]
    loop = assembled(words)
    job, feed = loop.job, loop.job.batches("train", 0)
    results: list[Any] = []
    loop._report = lambda result, *_: results.append(result)
    follows = True
    for step in range(1, steps + 1):
        instructions = job.schedule.lowered(
            job.schedule.global_batch_size, step > 1 and bool(job.schedule.left_updates)
        )
        spans = loop.step(step, feed)
        done = {(span.name, span.micro_batch, span.partition) for span in spans}
        listed = {(i.name, i.micro_batch or 0, i.partition) for i in instructions}
        follows &= done == listed
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    loop._flush()
    result = job.machinery.runner.evaluate(job.schedule.instructions, feed, steps)
    digest = hashlib.sha256()
    with job.checkpoints._whole_weights():
        for chunk in job.machinery.chunks:
            for _, parameter in sorted(chunk.module.named_parameters()):
                digest.update(parameter.detach().float().numpy().tobytes())
    assert torch.isfinite(torch.tensor(losses)).all()
    return Trained(losses, norms, result.loss, digest.hexdigest(), follows)


def trained_each(runs: dict[str, tuple[str, int, bool]]) -> dict[str, Trained]:
    """The same of several runs, by name."""
    return {name: trained(*arguments) for name, arguments in runs.items()}


def assembled(words: str) -> Any:
    """The training loop of a run, with this rank's log beside the plan."""
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from megatron.training.plan_argument import with_plan
    from moe_overlap.commands import train as pretrain_moe

    parsed = with_plan(parse(words.split()), dist.get_world_size())
    validate(parsed.config, parsed.layout_world or dist.get_world_size())
    return pretrain_moe.assemble(parsed, dist.get_rank())
