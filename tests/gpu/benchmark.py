"""Steps on all GPUs of this machine, with overlap and without: `python -m tests.gpu.benchmark [--repeats 5] [--json]`

One model whose tokens travel: hidden 2048, 16 experts, bf16. Runs take turns; a figure is the median step of one run, and of each
kind of run the least, median and largest of its repeats stand there. `plain` is megatron-core's own schedule and dispatcher. All
runs route at random, so that loads are even. Under MOE_OVERLAP_GPU_TESTS=cpu a tiny model runs on two CPU ranks, which shows that
this program works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REHEARSED = os.environ.get("MOE_OVERLAP_GPU_TESTS") == "cpu"
STEPS, WARM = (6, 2) if REHEARSED else (30, 10)
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --moe-ffn-hidden-size 64 --seq-length 64"
    if REHEARSED
    else "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --moe-ffn-hidden-size 4096 --seq-length 4096 --bf16"
)
MODEL = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --num-experts 16 --moe-router-topk 2 --moe-aux-loss-coeff 0
    --lr 1e-4 --eval-iters 0 --num-workers 0 --mock-data --vocab-size 32000
    --log-interval 1000000 --micro-batch-size 4
"""
OURS = "--moe-token-dispatcher-type irregular --moe-gate random"
STATIC = "--moe-token-dispatcher-type irregular --moe-gate hash --moe-expert-capacity-factor 1.25"
STATIC += " --moe-pad-expert-input-to-capacity --moe-overlap-micro-batches 2 --defer-weight-gradients"
RUNS = {
    "plain": "--moe-token-dispatcher-type alltoall --moe-router-force-load-balancing",
    "irregular all-to-all": OURS,
    "deferred weight gradients": f"{OURS} --defer-weight-gradients",
    "2 partitions": f"{OURS} --moe-overlap-partitions 2",
    "2 partitions, deferred": f"{OURS} --moe-overlap-partitions 2 --defer-weight-gradients",
    "static capacity": STATIC,
}
if not REHEARSED:
    RUNS["static capacity, captured graphs"] = f"{STATIC} --moe-overlap-cuda-graphs"


def median_step(name: str, ranks: int, folder: Path) -> float:
    """Seconds of the median step of one run, without the first ones.

    Raises:
        SystemExit: the run failed, with what it said.
    """
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    words = [*SIZES.split(), *MODEL.split(), *RUNS[name].split(), "--global-batch-size", str(8 * ranks)]
    words += ["--train-iters", str(STEPS), "--expert-model-parallel-size", str(ranks), "--log-json", str(log)]
    words += ["--max-position-embeddings", words[words.index("--seq-length") + 1]]
    command = [sys.executable, "pretrain_moe.py", "--nproc-per-node", str(ranks), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if ended.returncode:
        raise SystemExit(f"{name}: {ended.stderr.strip() or ended.stdout.strip()}")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[WARM:])


def main(argv: Sequence[str] | None = None) -> int:
    """Take turns and print the table; 0 as well where fewer than two GPUs leave nothing to measure, which is said."""
    import torch

    parser = argparse.ArgumentParser(prog="tests.gpu.benchmark", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    arguments = parser.parse_args(argv)
    ranks = 2 if REHEARSED else torch.cuda.device_count()
    if ranks < 2:
        print(f"skipped: overlap needs 2 GPUs, this machine has {ranks}")
        return 0
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            for name, taken in seconds.items():
                taken.append(median_step(name, ranks, Path(folder)))
    device = "CPU, a rehearsal" if REHEARSED else torch.cuda.get_device_name()
    plain = statistics.median(seconds["plain"])
    if arguments.json:
        print(json.dumps({"device": device, "ranks": ranks, "step_seconds": seconds}, indent=1))
        return 0
    print(f"{ranks} × {device}, torch {torch.__version__}; seconds of a step over {arguments.repeats} runs")
    print("| run | least | median | largest | plain / run |\n|---|---|---|---|---|")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"| {name} | {min(taken):.4f} | {middle:.4f} | {max(taken):.4f} | {plain / middle:.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
