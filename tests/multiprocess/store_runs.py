"""Runs of the ranks of test_parameter_stores.py: one model under plans whose stages have any ZeRO levels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.plan.instructions import BufferRole as R
from moe_overlap.plan.instructions import Home, Instruction, parse_buffer
from moe_overlap.plan.lowering.dependencies import last_uses
from moe_overlap.plan.plan import Offload, Plan

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
        losses, norms: of each step, and the norm of all parameters after the last.
        evaluated: loss of an evaluation after them.
        weights: digest of this rank's weights after all updates.
        follows: whether the recorded spans of every step are those of its list, each once.
    """

    losses: list[float]
    norms: list[float]
    evaluated: float
    weights: str
    follows: bool


def with_levels(flags: str, world: int, levels: Sequence[int], offload: Sequence[Offload] = ()) -> Plan:
    """The plan of flags whose stages have these ZeRO levels and offloaded shares."""
    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.plan_flags import plan_from_flags

    config = parse(flags.split()).config
    plan = plan_from_flags(config, describe_model(config, 256), world)
    stages = zip(plan.stages, levels, offload or [Offload()] * len(levels), strict=True)
    return replace(plan, stages=tuple(replace(stage, zero_level=level, offload=of) for stage, level, of in stages))


def planned(folder: Path, flags: str, world: int, levels: Sequence[int], offload: Sequence[Offload] = ()) -> str:
    """The flags of a run by such a plan, whose file is written."""
    from moe_overlap.plan.serialize import save_plan

    name = hashlib.sha256(f"{flags}{offload}".encode()).hexdigest()[:8]
    path = folder / f"{name}-{'-'.join(map(str, levels))}.json"
    save_plan(with_levels(flags, world, levels, offload), path)
    return f"{flags} --plan {path}"


def trained(words: str, steps: int, on_stores: bool = False, spoiled: int = 0) -> Trained:
    """Train a few steps and evaluate. Collective.

    Args:
        on_stores: whether stores hold the states whatever the levels.
        spoiled: a step in which a gradient of the last rank is infinite; 0: none.
    """
    import torch
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        if on_stores:
            patch.setattr(Plan, "has_stores", property(lambda plan: True))
        loop = assembled(words)
    job, feed = loop.job, loop.job.batches("train", 0)
    results: list[Any] = []
    loop._report = lambda result, *_: results.append(result)
    now, follows = [0], True
    # Only weights that are kept in shards or offloaded may move: views, and streams of a device, read all others where they are.
    stores = [store for chunk in job.machinery.chunks for store in getattr(chunk, "stores", ())]
    keeps_weights = all(store.zero_level < 3 and not store._offload.weights for store in stores)
    addresses = [parameter.data_ptr() for chunk in job.machinery.chunks for parameter in chunk.module.parameters()]
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(job.machinery.chunks[-1].module.parameters())
        parameter.register_hook(lambda gradient: gradient * torch.inf if now[0] == spoiled else gradient)
    for step in range(1, steps + 1):
        instructions = job.schedule.lowered(
            job.schedule.global_batch_size, step > 1 and bool(job.schedule.left_updates)
        )
        now[0] = step
        spans = loop.step(step, feed)
        done = {(span.name, span.micro_batch, span.partition) for span in spans}
        listed = {(i.name, i.micro_batch or 0, i.partition) for i in instructions}
        # A step that moves nothing has no spans of an update at its end.
        follows &= done == listed or step == spoiled
    if keeps_weights:
        assert addresses == [p.data_ptr() for chunk in job.machinery.chunks for p in chunk.module.parameters()]
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    loop._flush()
    norms.append(job.machinery.parameter_norm())
    result = job.machinery.runner.evaluate(job.schedule.instructions, feed, steps)
    digest = hashlib.sha256()
    with job.checkpoints._whole_weights():
        for chunk in job.machinery.chunks:
            for _, parameter in sorted(chunk.module.named_parameters()):
                digest.update(parameter.detach().float().numpy().tobytes())
    skipped = [step for step, result in enumerate(results, 1) if not result.updated]
    assert skipped == ([spoiled] if spoiled else []) and torch.isfinite(torch.tensor(losses)).all()
    return Trained(losses, norms, result.loss, digest.hexdigest(), follows)


Run = tuple[str, int, bool] | tuple[str, int, bool, int]
"""The arguments of `trained`."""


def trained_each(runs: dict[str, Run]) -> dict[str, Trained]:
    """The same of several runs, by name."""
    return {name: trained(*arguments) for name, arguments in runs.items()}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        held: between steps: weights, gradient sums and optimizer states.
        moving: most bytes of weights and sums whose memory is taken and given back in a step.
        stored, used: the same by the plan: what the levels keep, and the most that the list has at a time.
        peak: most bytes of all tensors in the first step.
        largest: bytes of the largest group's weights.
    """

    held: int
    moving: int
    stored: int
    used: int
    peak: int
    largest: int


def memory(words: str) -> Memory:
    """The bytes of a run by a plan, and those that the plan says. Collective."""
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.report.reports import StorageTracker, elastic_tensors
    from moe_overlap.plan.lowering.gradient_buckets import optimizer_parts
    from moe_overlap.plan.serialize import load_plan
    from moe_overlap.plan.sizes import ACTIVATION_BYTES, part_size

    loop = assembled(words)
    job = loop.job
    loop._report = lambda *_: None
    feed = job.batches("train", 0)
    loop.step(1, feed)
    peak = loop._peak_bytes
    tracker = StorageTracker([], elastic_tensors(job.machinery.chunks))
    tracker._count = lambda tensor: None  # type: ignore[method-assign]
    loop._memory_tracker = lambda: tracker
    loop.step(2, feed)
    del loop._memory_tracker
    model = describe_model(parse(words.split()).config, 256)
    plan = load_plan(words.split()[-1])
    index = plan.stage_of(dist.get_rank())
    stage = plan.stages[index]
    sizes = {part: part_size(part, plan, stage, model) for part in optimizer_parts(plan, index, model)}
    held, moved = 0.0, dict[tuple[str, str], float]()
    for part, size in sizes.items():
        for kind, role in (("weights", R.WEIGHTS), ("gradients", ""), ("optimizer", R.STATE)):
            stored, share = size.stored_bytes(stage, kind, plan.precision), getattr(stage.offload, kind)
            held, moved[role, part] = held + (1.0 - share) * stored, share * stored
    group_bytes = {part: 4 * size.dense for part, size in sizes.items()}
    gathered_bytes = {part: ACTIVATION_BYTES[plan.precision] * size.dense for part, size in sizes.items()}
    listed = job.schedule.lowered(job.schedule.global_batch_size, True)
    used = most_at_a_time(listed, {R.WEIGHTS: gathered_bytes, R.D_WEIGHTS: group_bytes}, moved)
    at_rest, moving = loop._memory_tracker().bytes, tracker.peak_bytes - tracker.bytes
    return Memory(at_rest, moving, round(held), round(used), peak, max(group_bytes.values()))


def most_at_a_time(
    instructions: Sequence[Instruction], group_bytes: dict[str, dict[str, int]], moved: dict[tuple[str, str], float]
) -> float:
    """The most bytes that a list has of gathered weights, of gradients that are not scattered yet, and of offloaded shares.

    Args:
        group_bytes: of all weights and of all gradients, by role and parameter group.
        moved: of the offloaded share, by role and parameter group.
    """
    ends = last_uses(instructions)
    present: dict[str, float] = {}
    sent: dict[int, tuple[str, ...]] = {}
    most = 0.0
    for i in instructions:
        # What a gather sends is there until the gather has been waited for.
        for name in [name for number in list(sent) if number <= max(i.after, default=-1) for name in sent.pop(number)]:
            present.pop(name, None)
        for name in i.writes:
            buffer = parse_buffer(name)
            if buffer.home is Home.MOVED and (buffer.role, buffer.subject) in moved:
                present[name] = moved[buffer.role, buffer.subject]
            elif buffer.home is Home.DEVICE and buffer.role in group_bytes:
                present[name] = group_bytes[buffer.role][buffer.subject]
        if i.operator.is_bucket:
            present.pop(next((name for name in i.reads if parse_buffer(name).role is R.D_WEIGHTS), ""), None)
        most = max(most, sum(present.values()))
        sent |= {i.id: ends[i.id]} if i.operator.is_part_gather else {}
        for name in ends[i.id] if i.id not in sent else ():
            if parse_buffer(name).role is not R.D_WEIGHTS:
                present.pop(name, None)
    return most


def memory_each(words: dict[str, str]) -> dict[str, Memory]:
    """The same of several runs, by name."""
    return {name: memory(each) for name, each in words.items()}


def losses_of(words: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of a whole run, which loads and saves as its flags say. Collective."""
    loop = assembled(f"{words} --eval-iters 0")
    results: list[Any] = []
    loop._report = lambda result, *_: results.append((result.loss, result.grad_norm))
    loop.run()
    return results


def whole_runs(words: dict[str, str]) -> dict[str, list[Any]]:
    """Losses, gradient norms, and norms of the parameters after each step, of whole runs with evaluations, by name."""
    answers: dict[str, list[Any]] = {}
    for name, each in words.items():
        loop, steps = assembled(each), list[Any]()
        loop._report = lambda result, *_, loop=loop, steps=steps: steps.append(
            (result.loss, result.grad_norm, loop._optional(result, 1.0)["params_norm"])
        )
        loop.run()
        answers[name] = steps
    return answers


def resumed(words: dict[str, str], pairs: Sequence[tuple[str, str]], folder: str) -> dict[tuple[str, str], list[Any]]:
    """Runs that save after two of four steps, by name, and runs that load what another one has saved.

    Returns:
        (who saved, who loaded) -> losses and norms of the third and the fourth step; the saver itself has not stopped.
    """
    answers: dict[tuple[str, str], list[Any]] = {}
    for name in dict.fromkeys(saver for saver, _ in pairs):
        saving = f"--train-iters 4 --save {folder}/{name} --save-interval 2"
        answers[name, name] = losses_of(f"{words[name]} {saving}")[2:]
    for saver, loader in pairs:
        loading = f"--train-iters 4 --load {folder}/{saver} --ckpt-step 2"
        answers[saver, loader] = losses_of(f"{words[loader]} {loading}")
    return answers


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
