"""Runs of the ranks of test_unlike_stages.py: one process and its weights, then plans whose stages have unlike shapes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Devices, Plan, Recompute, StagePlan
from moe_overlap.plan.tiles import with_transfers
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words

MODEL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --global-batch-size 8
    --lr 1e-3 --weight-decay 0.1 --adam-beta2 0.95 --mock-data --vocab-size 255 --tokenizer-type NullTokenizer
    --num-workers 0 --log-interval 1000
"""
UNTIED = "--untie-embeddings-and-output-weights"
Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A stage: its layers, samples of a micro-batch, ranks, and recomputed layers."""

    layers: int
    samples: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    again: int = 0

    @property
    def ranks(self) -> int:
        """GPUs of the stage."""
        return self.data * self.tensor * self.context


def unlike_plan(shapes: tuple[Shape, ...], flags: str, overlap: OverlapWords | None = None) -> Plan:
    """The plan whose stages have these shapes.

    Args:
        overlap: of the stages with several expert ranks.
    """
    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.plan_flags import plan_from_flags

    config = parse([*f"{MODEL} {flags}".split(), "--micro-batch-size", "1"]).config
    model = describe_model(config, 256)
    whole = plan_from_flags(config, model, 1)
    stages: list[StagePlan] = []
    rank = layer = 0
    for index, shape in enumerate(shapes):
        stage = replace(
            whole.stages[0],
            chunks=((layer, layer + shape.layers),),
            devices=Devices(mesh=(1, shape.ranks), ranks=tuple(range(rank, rank + shape.ranks))),
            micro_batch_size=shape.samples,
            gradient_accumulation_steps=whole.global_batch_size // (shape.samples * shape.data),
            tensor=shape.tensor,
            context=shape.context,
            data=shape.data,
            expert=shape.expert,
            expert_tensor=shape.expert_tensor or shape.tensor,
            recompute=Recompute(layers=shape.again, granularity="full") if shape.again else Recompute(),
            overlap=StageOverlap(),
        )
        if overlap is not None and shape.expert > 1:
            ends = {"holds_embedding": index == 0, "holds_head": index == len(shapes) - 1}
            stage = replace(stage, overlap=overlap_from_words(overlap, stage, model, **ends))
        stages.append(stage)
        rank, layer = rank + shape.ranks, layer + shape.layers
    return with_transfers(replace(whole, stages=tuple(stages), loss_stage=len(stages) - 1))


def curve_of(words: str, steps: int, save: str | None = None) -> Curve:
    """Loss and gradient norm of the first steps of a run, then loss and tokens of an evaluation. Collective.

    Args:
        save: a folder that takes the weights before the first step.
    """
    loop = _assembled(f"{words} --train-iters {steps}" + (f" --save {save}" if save else ""))
    job, feed = loop.job, loop.job.batches("train", 0)
    if save:
        loop.save_now()
    curve = []
    for step in range(steps):
        result = job.machinery.runner.run(job.schedule.instructions, feed, step)
        job.machinery.scheduler.step(increment=job.schedule.global_batch_size)
        curve.append((result.loss, result.grad_norm))
    evaluated = job.machinery.runner.evaluate(job.schedule.instructions, feed, steps - 1)
    return [*curve, (evaluated.loss, float(evaluated.tokens))]


def curves_of(plans: dict[str, str], steps: int) -> dict[str, Curve]:
    """The same of several runs, by name."""
    return {name: curve_of(words, steps) for name, words in plans.items()}


def trained(words: str, log: str) -> Curve:
    """Losses and gradient norms of a whole run, which loads and saves as its flags say. Collective."""
    import torch.distributed as dist

    _assembled(f"{words} --eval-iters 0 --log-json {log}").run()
    dist.barrier()
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def told_of_a_lost_rank(words: str) -> str:
    """What this rank says when the last one goes with its second receive. Collective."""
    import torch.distributed as dist

    from moe_overlap.runtime.step import CommunicationFailed

    job = _assembled(f"{words} --train-iters 1").job
    is_lost = dist.get_rank() == dist.get_world_size() - 1
    irecv, left = dist.irecv, [2]

    def leave(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise ConnectionAbortedError
        return irecv(*arguments, **named)

    dist.irecv = leave if is_lost else irecv
    try:
        job.machinery.runner.run(job.schedule.instructions, job.batches("train", 0), 1)
    except ConnectionAbortedError:
        return "gone"
    except CommunicationFailed as failed:
        return str(failed)
    finally:
        dist.irecv = irecv
    return ""


Step = tuple[dict[str, int], dict[str, int], int]


def one_step(words: str) -> Step:
    """What this rank does in one step, by operator: as recorded, and as its list has it; and the bytes that it sends over
    stage boundaries, counted where they are handed to torch.distributed."""
    import torch.distributed as dist

    job = _assembled(f"{words} --train-iters 1").job
    feed = job.batches("train", 0)
    sent, isend = [], dist.isend
    dist.isend = lambda tensor, *more, **named: sent.append(tensor.nbytes) or isend(tensor, *more, **named)  # type: ignore
    try:
        spans = job.machinery.runner.run(job.schedule.instructions, feed, 0).spans
    finally:
        dist.isend = isend
    # An operator that waits for collectives of its own has several spans.
    done = {(span.name, span.micro_batch, span.partition) for span in spans}
    listed = {(i.name, i.micro_batch or 0, i.partition) for i in job.schedule.instructions}
    return Counter(name for name, *_ in done), Counter(name for name, *_ in listed), sum(sent)


def one_step_of(plans: dict[str, str]) -> dict[str, Step]:
    """The same of several runs, by name."""
    return {name: one_step(words) for name, words in plans.items()}


def _assembled(words: str) -> Any:
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

    parsed = with_plan(parse(f"{MODEL} {words}".split()), dist.get_world_size())
    validate(parsed.config, parsed.layout_world or dist.get_world_size())
    return pretrain_moe.assemble(parsed, dist.get_rank())


def written(folder: Path, plans: dict[str, Plan], flags: str) -> dict[str, str]:
    """Flags of every plan, which begins with the weights that one process has saved."""
    loaded = f"--finetune --ckpt-step 0 --load {folder / 'start'}"
    return {name: f"{words} {loaded}" for name, words in planned(folder, plans, flags).items()}


def planned(folder: Path, plans: dict[str, Plan], flags: str) -> dict[str, str]:
    """Flags of every plan, whose file is written."""
    from moe_overlap.plan.serialize import save_plan

    found = {}
    for number, (name, plan) in enumerate(plans.items()):
        path = folder / f"{number}.json"
        save_plan(plan, path)
        # Tensor ranks pad the vocabulary to their multiple: so do both divisors that of one process.
        padded = f"--make-vocab-size-divisible-by {128 // plan.stages[0].tensor}"
        found[name] = f"{flags} {padded} --plan {path}"
    return found
