"""Short fp16 runs of the real training program, for test_fp16.py. Called in the processes of a launch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tests.multiprocess.checkpoint_runs import MODEL, TRAINING, train

Rows = list[dict[str, Any]]
"""The rows that --log-json wrote, one for every step."""

EP2, PP2 = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
FP16 = "--fp16 --initial-loss-scale 65536"
OVERFLOWS = f"--fp16 --initial-loss-scale {2**40} --hysteresis 2 --train-iters 8 --lr-decay-iters 4"
"""No fp16 gradient holds a first scale like this."""
PREDICTION = "--mtp-num-layers 2 --mtp-loss-scaling-factor 2"
SAVED_STEP = 4
WINDOW = f"--fp16 --initial-loss-scale {2**19} --loss-scale-window 3 --hysteresis 1 --train-iters 8 --lr 3e-2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
LISTED = "--moe-gate topk --moe-token-dispatcher-type irregular"
EXECUTOR = f"{LISTED} --moe-overlap-partitions 2 --defer-weight-gradients --micro-batch-size 2"
IN_GAPS = "--overlap-grad-reduce --ddp-bucket-size 1000"


def rows_of(folder: Path, name: str, flags: str, model: str = MODEL) -> Rows:
    """Train; the rows of this rank's own file are in no other's way."""
    import torch.distributed as dist

    train(folder, name, flags, model)
    rank = dist.get_rank()
    log = folder / (f"{name}.jsonl" + (f".rank{rank}" if rank else ""))
    return [json.loads(line) for line in log.read_text().splitlines()]


def fast_runs(place: str) -> dict[str, Rows]:
    """Every run of a rank: near fp32, overflowing, stopped and resumed, hurt on one rank only."""
    folder = Path(place)
    saving, loading = (
        f"--save {folder}/saved --save-interval {SAVED_STEP}",
        f"--load {folder}/saved --ckpt-step {SAVED_STEP}",
    )
    return {
        "fp32": rows_of(folder, "fp32", EP2),
        "fp16": rows_of(folder, "fp16", f"{EP2} {FP16}"),
        "overflows": rows_of(folder, "overflows", f"{EP2} {OVERLAP} {OVERFLOWS} --log-num-zeros-in-grad"),
        "whole": rows_of(folder, "whole", f"{EP2} {WINDOW} {saving}"),
        "again": rows_of(folder, "again", f"{EP2} {WINDOW} {loading}"),
        "hurt": hurt(folder),
    }


def hurt(folder: Path) -> Rows:
    """The second rank's experts, which no other rank holds, get an infinite gradient in the second step.

    megatron-core moves only the scaler of the experts then, though it scales the loss by that of the dense weights.
    """
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from moe_overlap.commands import train as pretrain_moe

    words = f"{MODEL} {TRAINING} {EP2} {FP16} --hysteresis 1 --log-json {folder}/hurt.jsonl"
    loop = pretrain_moe.assemble(parse(words.split()), dist.get_rank())
    feed = loop.job.batches("train", 0)
    assert feed is not None
    experts = [p for name, p in loop.job.machinery.chunks[0].named_parameters() if "local_experts" in name]
    rows: Rows = []
    for step in range(1, 5):
        hook = (
            experts[0].register_hook(lambda gradient: gradient * float("inf"))
            if dist.get_rank() == step - 1 == 1
            else None
        )
        before = [p.detach().clone() for p in loop.job.machinery.chunks[0].parameters()]
        loop.step(step, feed)
        still = all((a == b).all() for a, b in zip(before, loop.job.machinery.chunks[0].parameters(), strict=True))
        rows.append({"still": still, "scale": float(loop.job.machinery.optimizer.get_loss_scale())})
        if hook is not None:
            hook.remove()
    return rows


def slow_runs(place: str) -> dict[str, Rows]:
    """Other layouts, the executor, and a constant scale."""
    folder = Path(place)
    found = {}
    for name, layout in (("tp2", TP2), ("pp2", PP2), ("ep2", EP2)):
        found[f"{name}, fp32"] = rows_of(folder, f"{name}-fp32", layout)
        found[name] = rows_of(folder, name, f"{layout} {FP16}")
        found[f"{name}, overflows"] = rows_of(folder, f"{name}-overflows", f"{layout} {OVERFLOWS}")
        saving = f"--save {folder}/{name}-saved --save-interval {SAVED_STEP}"
        found[f"{name}, whole"] = rows_of(folder, f"{name}-whole", f"{layout} {WINDOW} {saving}")
        loading = f"--load {folder}/{name}-saved --ckpt-step {SAVED_STEP}"
        found[f"{name}, again"] = rows_of(folder, f"{name}-again", f"{layout} {WINDOW} {loading}")
    for name, flags in (("", FP16), (", overflows", OVERFLOWS)):
        listed = f"{EP2} {flags} {LISTED} --micro-batch-size 2"
        found[f"listed{name}"] = rows_of(folder, f"listed{name}", listed)
        found[f"executor{name}"] = rows_of(folder, f"executor{name}", f"{EP2} {flags} {EXECUTOR}")
        found[f"in gaps{name}"] = rows_of(folder, f"gaps{name}", f"{EP2} {flags} {EXECUTOR} {IN_GAPS}")
    for name, layout in (("predicting, ep2", EP2), ("predicting, pp2", PP2)):
        found[f"{name}, fp32"] = rows_of(folder, f"{name}-fp32", f"{layout} {PREDICTION}")
        found[name] = rows_of(folder, name, f"{layout} {FP16} {PREDICTION}")
    found["constant"] = rows_of(folder, "constant", f"{EP2} --fp16 --loss-scale 256")
    found["constant, too large"] = stopped(folder, f"{EP2} --fp16 --loss-scale {2.0**40}")
    return found


def stopped(folder: Path, flags: str) -> Rows:
    """The error of a run that must not go on; no row where it has none."""
    from megatron.training.training import TrainingFailed

    with contextlib.suppress(StopIteration):
        try:
            train(folder, "stopped", flags)
        except TrainingFailed as error:
            return [{"error": str(error)}]
    return []
