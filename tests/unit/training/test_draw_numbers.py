"""Gates that draw see every micro-batch of a run under a number of its own, also where steps hold unlike numbers of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron.training.cli.arguments import parse
from moe_overlap.commands import train as pretrain_moe
from moe_overlap.runtime.routing.gate import Gate

WORDS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-gate random --moe-token-dispatcher-type irregular "
    "--micro-batch-size 1 --step-batch-size-schedule 0:4 32:2 --train-samples 14 --lr 1e-3 --num-workers 0 --eval-iters 0"
)


def test_no_two_micro_batches_have_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    begin = Gate.begin

    def recorded(self: Any, *sizes: Any, **draws: Any) -> Any:
        numbers.append(draws["micro_batch"])
        return begin(self, *sizes, **draws)

    monkeypatch.setattr(Gate, "begin", recorded)
    fresh = not dist.is_initialized()
    if fresh:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pretrain_moe.assemble(parse(WORDS.split()), 0).run()
    if fresh:
        dist.destroy_process_group()
    # A step of four samples (32 tokens), then steps of two: numbers that grow with the step's own size would repeat.
    assert len(numbers) == len(set(numbers)) == 14 and numbers == sorted(numbers)
