"""Runs of the ranks of test_attached_losses.py: the gradient of one step, layout beside layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.multiprocess.reused_groups import reused_groups

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --init-method-std 0.2
    --untie-embeddings-and-output-weights --global-batch-size 8 --train-iters 1 --optimizer sgd --lr 1 --min-lr 1
    --lr-decay-style constant --weight-decay 0 --clip-grad 0 --mock-data --vocab-size 255
    --tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 --log-interval 1000
"""
Gradients = dict[str, list[float]]
"""Weight -> its gradient. A decoder layer has its number in the model, whichever stage holds it."""


class Case(NamedTuple):
    """A run.

    Attributes:
        flags: beside MODEL.
        alike: whether all samples have the same tokens, so that no value depends on what a micro-batch holds.
        uneven: whether samples have unlike numbers of tokens that count.
    """

    flags: str
    alike: bool = False
    uneven: bool = False


def gradients_of(cases: Mapping[str, Case]) -> dict[str, Gradients]:
    """The gradients of one step of each run, of the weights that every rank of a stage holds whole. Collective.

    A run with --save saves the weights before the step.
    """
    return {name: _gradients(case) for name, case in cases.items()}


def _gradients(case: Case) -> Gradients:
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from megatron.training.data import datasets
    from moe_overlap.commands import train

    parsed = parse(f"{MODEL} {case.flags}".split())
    validate(parsed.config, dist.get_world_size())
    with reused_groups(), patch.object(datasets, "part_of_batch", _of_changed(datasets.part_of_batch, case)):
        loop = train.assemble(parsed, dist.get_rank())
        job, before = loop.job, _weights(loop.job)
        if "--save" in case.flags:
            loop.save_now()
        job.machinery.runner.run(job.schedule.instructions, job.batches("train", 0), 0)
    # The learning rate is 1: a weight moves by its gradient.
    return {name: (before[name] - weight).flatten().tolist() for name, weight in _weights(job).items()}


def _of_changed(part_of_batch: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """`part_of_batch` of a micro-batch that has been changed as the case says."""
    import torch

    row = torch.randint(255, (17,), generator=torch.Generator().manual_seed(1))

    def changed(batch: dict[str, Any], size: int, rank: int) -> Any:
        tokens_BS = batch["tokens"]
        if case.uneven:
            # The limit is a sample's own: its mask is the same in every layout.
            batch["loss_mask"] = (tokens_BS % 8 > tokens_BS[:, :1] % 7).float()
        if case.alike:
            batch["tokens"], batch["labels"] = (part.expand_as(tokens_BS).clone() for part in (row[:-1], row[1:]))
        return part_of_batch(batch, size, rank)

    return changed


def _weights(job: Any) -> dict[str, Any]:
    """Copies of routers and norms, of which no rank of a stage holds a part."""
    weights = {}
    for model in job.machinery.runner.context.models:
        for name, weight in model.named_parameters():
            if "router" not in name and "norm" not in name:
                continue
            number = re.match(r"decoder\.layers\.(\d+)", name)
            if number:
                layer = model.decoder.layers[int(number[1])].layer_number
                name = f"L{layer}{name[number.end() :]}"
            weights[name] = weight.detach().clone().double()
    return weights
