"""Loss equality over parallel layouts: `tools/compare_layouts.py [--steps 50] [--write [docs/results.md]] [--json FILE]`.

One process trains a small MoE and saves its weights before the first step; every layout loads them and trains on the same
samples. All layouts of a world size share one launch. The spread is the effect of another order of summation: the same process
with another micro-batch size. A layout agrees if at every step its loss is within 1e-5 (relative) of the reference, or, from the
second step on, within 3 times the largest spread up to that step. Rounding changes the loss by less than 1e-6. A larger
difference shows that a routing decision has differed; the run for the spread may not have this difference. If it first happens
after 20 steps, differences up to 1e-4 agree. A wrong gradient exceeds them within a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` and pretrain_moe.py are one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.compare import read_losses, relative_differences
from moe_overlap.commands.exits import end_process, interruptible
from tools.bench.marks import write_between_marks

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results.md"
LIMIT = 1e-5
SPREAD_FACTOR = 3.0
LARGEST_SPREAD = 1e-2
"""With a larger spread the two runs are different trainings, and their difference is no measure."""
ROUNDING, SETTLED_STEPS, DRIFT = 1e-6, 20, 1e-4
"""A layout that stays within ROUNDING for SETTLED_STEPS may drift to DRIFT once a routing decision has differed."""
REFERENCE, SPREAD = "one process", "one process, micro-batch 2"

MODEL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --qk-layernorm --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-experts 8
    --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
    --weight-decay 0.1 --adam-beta2 0.95 --eval-iters 0 --num-workers 0 --log-interval 1000000
""".split()


@dataclass(frozen=True, slots=True)
class ComparedLayout:
    """One way to spread the same model over processes."""

    name: str
    world_size: int
    flags: str
    tensor: int = 1

    def arguments(self) -> list[str]:
        """Its command line; the padded vocabulary is the same for every tensor-parallel size."""
        vocabulary = ["--make-vocab-size-divisible-by", str(512 // self.tensor)]
        tensor = ["--tensor-model-parallel-size", str(self.tensor)] + (
            ["--sequence-parallel"] if self.tensor > 1 else []
        )
        return [*MODEL, *vocabulary, *tensor, *self.flags.split()]


OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
EP, PP, VPP = "--expert-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
ETP, CP = "--expert-tensor-parallel-size", "--context-parallel-size"
LAYOUTS = (
    ComparedLayout(REFERENCE, 1, ""),
    ComparedLayout(SPREAD, 1, "--micro-batch-size 2"),
    ComparedLayout(
        "full recompute", 1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    ComparedLayout("DP2", 2, ""),
    ComparedLayout("DP2, overlapped reduce and gather", 2, OVERLAP),
    ComparedLayout("EP2", 2, f"{EP} 2"),
    ComparedLayout("EP2, overlapped reduce and gather", 2, f"{EP} 2 {OVERLAP}"),
    ComparedLayout("EP2, allgather dispatcher", 2, f"{EP} 2 --moe-token-dispatcher-type allgather"),
    ComparedLayout("TP2 with sequence parallel, ETP2", 2, "", tensor=2),
    ComparedLayout("TP2 with sequence parallel, EP2 ETP1", 2, f"{EP} 2 {ETP} 1", tensor=2),
    ComparedLayout("CP2", 2, f"{CP} 2"),
    ComparedLayout("CP2, EP2", 2, f"{CP} 2 {EP} 2"),
    ComparedLayout("PP2", 2, f"{PP} 2"),
    ComparedLayout("PP2, 2 virtual stages", 2, f"{PP} 2 {VPP} 2"),
    ComparedLayout("EP4", 4, f"{EP} 4"),
    ComparedLayout("EP2 × expert-DP2", 4, f"{EP} 2"),
    ComparedLayout("EP2 × PP2", 4, f"{EP} 2 {PP} 2"),
    ComparedLayout("EP2 × PP2, 2 virtual stages", 4, f"{EP} 2 {PP} 2 {VPP} 2"),
    ComparedLayout("CP2 × TP2, EP2 ETP2", 4, f"{CP} 2 {EP} 2", tensor=2),
    ComparedLayout("CP2 × PP2, EP2", 4, f"{CP} 2 {PP} 2 {EP} 2"),
    ComparedLayout("TP2 × PP2", 4, f"{PP} 2", tensor=2),
    ComparedLayout("TP2 × DP2, EP2 ETP2", 4, f"{EP} 2", tensor=2),
    ComparedLayout("TP2 × DP2, EP4 ETP1", 4, f"{EP} 4 {ETP} 1", tensor=2),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A layout against the reference."""

    layout: ComparedLayout
    steps: int
    worst: float
    """Largest relative difference of the loss."""
    spread_at_worst: float
    """The spread at that step."""
    decided_at: int | None
    """First step whose loss shows another routing decision; None if no step does."""
    agrees: bool


def run_layouts(layouts: Sequence[ComparedLayout], steps: int, folder: Path) -> dict[str, dict[int, float]]:
    """Train every layout; one launch per world size, the reference's first.

    Returns:
        name -> step -> loss.
    """
    for world_size in sorted({layout.world_size for layout in layouts}):
        names = [layout.name for layout in layouts if layout.world_size == world_size]
        command = [
            sys.executable,
            "-P",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            "--nproc-per-node",
            str(world_size),
        ]
        command += [__file__, "--steps", str(steps), "--worker", str(folder), *names]
        # A rank that a signal ends prints its position; torchrun prints only the signal.
        subprocess.run(command, check=True, env=os.environ | {"PYTHONFAULTHANDLER": "1"})
    return {layout.name: losses_of(folder, layout) for layout in layouts}


def compare(losses: Mapping[str, Mapping[int, float]], layouts: Sequence[ComparedLayout]) -> list[Comparison]:
    """Every layout but the reference, judged."""
    reference = dict(losses[REFERENCE])
    spread = relative_differences(reference, dict(losses[SPREAD]))
    assert max(spread.values()) < LARGEST_SPREAD, (
        f"another summation order moves the loss by {max(spread.values()):.1e}"
    )
    reached: dict[int, float] = {}
    for step in sorted(spread):
        # The spread of a chaotic trajectory grows: judge a step by the largest one seen up to it.
        reached[step] = max(spread[step], reached.get(step - 1, 0.0))
    rows = []
    for layout in layouts:
        if layout.name == REFERENCE:
            continue
        differences = relative_differences(reference, dict(losses[layout.name]))
        worst = max(differences, key=lambda step: differences[step])
        decided_at = next((step for step in sorted(differences) if differences[step] > ROUNDING), None)
        drift = DRIFT if decided_at is not None and decided_at > SETTLED_STEPS else 0.0
        agrees = all(d <= max(LIMIT, SPREAD_FACTOR * reached[step], drift) for step, d in differences.items())
        # Before the first update neither losses nor the spread may differ: a spread there would excuse every difference.
        agrees &= differences[min(differences)] <= LIMIT
        rows.append(Comparison(layout, len(differences), differences[worst], reached[worst], decided_at, agrees))
    return rows


def table(rows: Sequence[Comparison]) -> str:
    """The comparison as a Markdown table."""
    head = "| layout | ranks | steps | largest relative loss difference | routing differs from step | agrees |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in rows:
        verdict = "yes" if row.agrees else "NO"
        place = f"{row.layout.name} | {row.layout.world_size} | {row.steps}"
        lines.append(f"| {place} | {row.worst:.1e} | {row.decided_at or '-'} | {verdict} |")
    return "\n".join(lines) + "\n"


def train_here(names: Sequence[str], steps: int, folder: Path) -> None:
    """Train the layouts of this launch in this process, one after the other.

    Args:
        folder: for the weights of the reference and for all losses.
    """
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from megatron.training.initialize import start_process
    from moe_overlap.commands import train as pretrain_moe

    chosen = {layout.name: layout for layout in LAYOUTS}
    for name in names:
        layout = chosen[name]
        start = ["--save"] if name == REFERENCE else ["--finetune", "--ckpt-step", "0", "--load"]
        flags = [*layout.arguments(), "--train-iters", str(steps), "--log-json", str(_log(folder, layout))]
        parsed = parse([*flags, *start, str(folder / "step-0")])
        validate(parsed.config, layout.world_size)
        if not dist.is_initialized():
            start_process(parsed.config)
        loop = pretrain_moe.assemble(parsed, dist.get_rank())
        if name == REFERENCE:
            loop.save_now()
        loop.run()
    dist.destroy_process_group()


def losses_of(folder: Path, layout: ComparedLayout) -> dict[int, float]:
    """Step -> loss of a layout that was trained with this folder."""
    return read_losses(_log(folder, layout))


def _log(folder: Path, layout: ComparedLayout) -> Path:
    return folder / f"{LAYOUTS.index(layout):02d}.jsonl"


@interruptible
def main(argv: Sequence[str]) -> int:
    """Print the table; exit status 1 when a layout disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        help="replace the table between the marks <!-- layouts --> of this file; docs/results.md unless one is named",
    )
    parser.add_argument("--json", type=Path, help="write every loss to this file")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        train_here(arguments.worker[1:], arguments.steps, Path(arguments.worker[0]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        losses = run_layouts(LAYOUTS, arguments.steps, Path(folder))
    rows = compare(losses, LAYOUTS)
    text = table(rows)
    print(text, end="")
    if arguments.write:
        write_between_marks(arguments.write, "layouts", text)
    if arguments.json:
        arguments.json.write_text(json.dumps(losses, indent=1))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
