"""Checks of the recorded spans of a step against the instruction list. Called in the processes of a launch."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

from moe_overlap.plan.instructions import INSIDE, communication_seconds, operator_spans
from moe_overlap.plan.operators import kind_of

MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall --mock-data --micro-batch-size 1 --global-batch-size 8
    --train-iters 2 --lr 1e-3 --eval-iters 0 --num-workers 0 --log-interval 1000000
"""
Step = tuple[object, ...]
"""Name, chunk and micro-batch of an operator; the name alone of what belongs to no micro-batch."""


def check_order(rows: dict[str, str]) -> dict[str, dict[str, str]]:
    """One step of every row.

    Args:
        rows: name -> flags.
    Returns:
        name -> channel -> the first difference on this rank; nothing where recorded and listed agree.
    """
    found = {}
    for name, flags in rows.items():
        spans, instructions = one_step(flags)
        assert "--tensor" in flags or not any(span.channel in INSIDE for span in spans), (
            "no collective is inside an operator"
        )
        if "allgather" in flags:
            # A plan does not say which dispatcher its plain layers use: this one sends its counts with the rows.
            instructions = [i for i in instructions if not i.name.endswith(".moe.count")]
        found[name] = differences(spans, instructions)
    return found


def inside_operators(flags: str) -> dict[str, Any]:
    """The collectives inside operators of one step on this rank.

    Returns:
        `kinds`: channel -> kinds of the operators in which they stand; `exposed`: seconds by which they make the exposed
        communication longer; `lanes`: names of the lanes of a trace of the step; `restored`: whether process groups have their
        own methods again; `order`: the differences between what ran and the list.
    """
    from torch.distributed import ProcessGroup

    before = dict(vars(ProcessGroup))
    spans, instructions = one_step(flags)
    inside = [span for span in spans if span.channel in INSIDE]
    apart, together = communication_seconds(spans)[1], communication_seconds(operator_spans(spans))[1]
    kinds: dict[str, list[str]] = {}
    for span in inside:
        kinds.setdefault(span.channel, []).append(kind_of(span.name))
    return {
        "kinds": {channel: sorted(set(names)) for channel, names in kinds.items()},
        "exposed": apart - together,
        "lanes": sorted({span.channel for span in spans}),
        "restored": dict(vars(ProcessGroup)) == before,
        "order": differences(spans, instructions),
    }


def one_step(flags: str, evaluate: bool = False) -> tuple[Any, Any]:
    """Recorded spans and instructions of one step on this rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands import train as pretrain_moe

    parsed = parse(f"{MODEL} {flags}".split())
    validate(parsed.config, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):
        job = pretrain_moe.assemble(parsed, dist.get_rank()).job
    feed = job.batches("train", 0)
    assert feed is not None
    runner, instructions = job.machinery.runner, job.schedule.instructions
    runner.evaluate(instructions, feed, 0)  # leaves nothing behind
    result = runner.evaluate(instructions, feed, 0) if evaluate else runner.run(instructions, feed, 0)
    assert not parallel_state.is_initialized() and not get_moe_layer_wise_logging_tracker()
    assert all(chunk.training is not evaluate for chunk in job.machinery.chunks)
    return result.spans, instructions


def differences(spans: Any, instructions: Any) -> dict[str, str]:
    """Channel -> the first place where what ran is not what was listed."""
    ran, listed = recorded_steps(spans), listed_steps(instructions)
    found = {}
    for channel in sorted(ran.keys() | listed.keys()):
        mine, theirs = ran.get(channel, []), listed.get(channel, [])
        if mine != theirs:
            place = next(
                (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
            )
            found[channel] = f"{place}: ran {mine[place : place + 3]}, listed {theirs[place : place + 3]}"
    return found


def recorded_steps(spans: Any) -> dict[str, list[Step]]:
    """Channel -> what ran on it, in order; a gate that the all-to-all of counts has cut in two counts once."""
    steps: dict[str, list[Step]] = {}
    for span in operator_spans(spans):
        if span.channel == "pp":
            steps.setdefault(f"pp.{span.name}", []).append((span.name,))
            continue
        whole = span.channel == "dp" or span.name.startswith("optimizer.")
        step: Step = (span.name,) if whole else (span.name, span.chunk, span.micro_batch)
        so_far = steps.setdefault(span.channel, [])
        if not (".moe.gate" in span.name and so_far and so_far[-1] == step):
            so_far.append(step)
    return steps


def listed_steps(instructions: Any) -> dict[str, list[Step]]:
    """Channel -> what the list puts on it, transfers by their name."""
    steps: dict[str, list[Step]] = {}
    for i in instructions:
        if i.kind == "point-to-point":
            steps.setdefault(f"pp.{i.name}", []).append((i.name,))
        else:
            whole = i.micro_batch is None
            channel = i.channel.partition(".")[0]  # as a span has it: counts stand among the exchanges
            steps.setdefault(channel, []).append((i.name,) if whole else (i.name, i.chunk, i.micro_batch))
    return steps


def check_broken_lists(flags: str) -> list[int]:
    """Swap every two neighbours of a channel, drop every instruction: how often no difference was found, and the attempts."""
    spans, instructions = one_step(flags)
    missed = attempts = 0
    for number in range(len(instructions)):
        changed: Sequence[Any] = [*instructions[:number], *instructions[number + 1 :]]
        attempts += 1
        missed += not differences(spans, changed)
        later = [
            n for n in range(number + 1, len(instructions)) if instructions[n].channel == instructions[number].channel
        ]
        if later and instructions[number].kind != "point-to-point":  # on those channels all names are the same
            changed = list(instructions)
            changed[number], changed[later[0]] = changed[later[0]], changed[number]
            attempts += 1
            missed += not differences(spans, changed)
    return [missed, attempts]


def check_evaluation(flags: str) -> dict[str, str]:
    """An evaluation runs the forward instructions of the list, each once; the transfers too."""
    spans, instructions = one_step(flags, evaluate=True)
    forward = Counter(
        i.name for i in instructions if i.micro_batch is not None and not i.name.endswith((".backward", ".recompute"))
    )
    ran = Counter(
        {name: len(steps) for channel in recorded_steps(spans).values() for name, steps in by_name(channel).items()}
    )
    return {
        name: f"ran {ran[name]}, listed {forward[name]}"
        for name in ran.keys() | forward.keys()
        if ran[name] != forward[name]
    }


def by_name(steps: list[Step]) -> dict[str, list[Step]]:
    """The steps of each operator."""
    named: dict[str, list[Step]] = {}
    for step in steps:
        named.setdefault(str(step[0]), []).append(step)
    return named
