"""Small models with one feature each, trained as one process and as several. Called in the processes of a launch."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.multiprocess.reused_groups import reused_groups

MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --moe-token-dispatcher-type alltoall --mock-data --micro-batch-size 1
    --global-batch-size 4 --train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 --eval-iters 0
    --num-workers 0 --log-interval 1000000
"""

Losses = dict[int, float]
"""Step -> loss; those of prediction layers and of balancing are added."""


def train(folder: Path, feature: str, name: str, flags: str, first: bool) -> Losses:
    """Train in the group of this process. A feature's first run saves its weights before the first step, the others load them."""
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands import train as pretrain_moe

    log = folder / f"{feature}-{name}.jsonl"
    vocabulary = f"--make-vocab-size-divisible-by {256 if '--tensor-model-parallel-size 2' in flags else 512}"
    words = f"{MODEL} {vocabulary} {flags}".split()
    start = ["--save"] if first else ["--finetune", "--ckpt-step", "0", "--load"]
    parsed = parse([*words, *start, str(folder / f"{feature}-start"), "--log-json", str(log)])
    validate(parsed.config, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()), reused_groups():
        loop = pretrain_moe.assemble(parsed, dist.get_rank())
        if first:
            loop.save_now()
        loop.run()
    dist.barrier()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["step"]: sum(row[name] for name in row if name.endswith("loss")) for row in rows}


def train_alone_then_together(
    folder: Path, features: Mapping[str, str], layouts: Iterable[tuple[str, str, str]]
) -> dict[str, tuple[Losses, Losses, Losses]]:
    """Every feature in one process, its ranks sharing the work; then every layout in all of them.

    Args:
        features: name -> flags.
        layouts: feature, name, further flags.
    Returns:
        `feature: layout` -> losses of the reference, of the reference at another micro-batch (in bf16), of the layout.
    """
    import torch.distributed as dist

    from tests.multiprocess.checkpoint_runs import alone

    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine: dict[str, tuple[Losses, Losses]] = {}
    dist.barrier()  # a group that one rank leaves while another still connects fails there
    with alone(folder, 0):
        for feature, flags in list(features.items())[rank::world_size]:
            reference = train(folder, feature, "reference", flags, first=True)
            # What another order of summation does is asked only where it is more than rounding in the last digits.
            other = f"{flags} --micro-batch-size 2"
            mine[feature] = reference, train(folder, feature, "spread", other, False) if "--bf16" in flags else {}
    gathered: list[dict[str, tuple[Losses, Losses]]] = [{}] * world_size
    dist.all_gather_object(gathered, mine)
    references = {feature: losses for part in gathered for feature, losses in part.items()}
    results = {}
    for feature, name, flags in layouts:
        losses = train(folder, feature, name, f"{features[feature]} {flags}", first=False)
        results[f"{feature}: {name}"] = (*references[feature], losses)
    return results
