"""Models, layouts and the score of the closed loop (tools/benchmark_closed_loop.py): chosen plan against executed layouts.

A cell is one model on links of one rate. Its rows are all layouts of a grid, each predicted and run, or refused with the rule
that refuses it, and the plan that the tuner chose.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from moe_overlap.tuner.search.space import UniformLayout
from tools.bench.figures import Spread

BASE = """
    --max-position-embeddings 128 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --use-distributed-optimizer --mock-data --train-iters 100000 --lr 1e-4 --eval-iters 0 --num-workers 0
    --log-interval 1000000 --tokenizer-type NullTokenizer --vocab-size 1000 --global-batch-size 16
""".split()
MOE = """
    --moe-router-load-balancing-type none --moe-router-dtype fp32 --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
""".split()
FOUR_HEADS = "--num-attention-heads 4 --seq-length 128"
MODELS = {
    "moe": f"--num-layers 4 --hidden-size 256 --num-experts 8 --moe-ffn-hidden-size 192 {FOUR_HEADS}",
    "wide-experts": f"--num-layers 2 --hidden-size 256 --num-experts 8 --moe-ffn-hidden-size 512 {FOUR_HEADS}",
    "many-layers": f"--num-layers 8 --hidden-size 192 --num-experts 4 --moe-ffn-hidden-size 128 {FOUR_HEADS}",
    "dense": f"--num-layers 4 --hidden-size 256 --ffn-hidden-size 768 {FOUR_HEADS}",
}
"""Name -> the flags that tell a model from the others."""
SMALLEST = "smallest"
"""A model of few layouts, for a test: one head and samples that context parallelism does not divide."""
HEAVY_HEAD = "heavy-head"
"""A model whose head computes as much as its layers: equal stages are out of balance, and two ranks for the last are not."""
EVERY_MODEL = MODELS | {
    HEAVY_HEAD: f"--num-layers 4 --hidden-size 256 --ffn-hidden-size 768 {FOUR_HEADS} --vocab-size 16000",
    SMALLEST: "--num-layers 2 --hidden-size 256 --num-experts 4 --moe-ffn-hidden-size 256 --num-attention-heads 1"
    " --seq-length 126",
}


def job_of(model: str) -> list[str]:
    """The flags of a model's job, without a layout."""
    flags = EVERY_MODEL[model].split()
    return [*BASE, *flags, *(MOE if "--num-experts" in flags else [])]


def layout_flags_of(layout: UniformLayout) -> list[str]:
    """A layout as flags."""
    sizes = {
        "--tensor-model-parallel-size": layout.tensor,
        "--pipeline-model-parallel-size": layout.pipeline,
        "--expert-model-parallel-size": layout.expert,
        "--expert-tensor-parallel-size": layout.expert_tensor,
        "--micro-batch-size": layout.micro_batch,
    }
    flags = [word for flag, size in sizes.items() for word in (flag, str(size))]
    return [*flags, *(["--sequence-parallel"] if layout.tensor > 1 else [])]


def grid(layouts: Sequence[UniformLayout], micro_batches: Sequence[int]) -> Iterator[UniformLayout]:
    """The layouts of the comparison: one model chunk per stage, no context parallelism, experts whole or cut as attention is."""
    for layout in layouts:
        compared = layout.context == 1 and layout.virtual == 1 and layout.expert_tensor in (1, layout.tensor)
        if compared and layout.micro_batch in micro_batches:
            yield layout


@dataclasses.dataclass(frozen=True, slots=True)
class LoopRow:
    """One layout of a cell, or the chosen plan.

    Attributes:
        predicted_seconds: of a step; None if a rule refuses the layout.
        steps: measured seconds of every step.
        late_seconds: by how much the operators of a step took longer than their profile, the worst rank of the median step.
        refusal: the rule that refuses the layout, or why it failed; None if it ran.
    """

    name: str
    flags: tuple[str, ...]
    predicted_seconds: float | None = None
    steps: tuple[float, ...] = ()
    late_seconds: float = 0.0
    unknown: tuple[str, ...] = ()
    refusal: str | None = None

    @property
    def measured_seconds(self) -> float:
        """Median of the measured steps."""
        return statistics.median(self.steps)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopCell:
    """One model on links of one rate.

    Attributes:
        rows: the grid, without the chosen plan.
        chosen: the plan that the tuner chose; its name says which.
        layout: the grid's row with the layout of the chosen plan, which the overlap adds to; None if the grid lacks it.
    """

    model: str
    mbit: float
    rows: tuple[LoopRow, ...]
    chosen: LoopRow
    search_seconds: float

    @property
    def ran(self) -> list[LoopRow]:
        """The layouts that were run."""
        return [row for row in self.rows if row.steps]

    @property
    def best(self) -> LoopRow:
        """The fastest layout that was run."""
        return min(self.ran, key=lambda row: row.measured_seconds)

    @property
    def over_best(self) -> float:
        """Step of the chosen plan over that of the fastest layout, less one: negative where no layout of the grid is as fast."""
        return self.chosen.measured_seconds / self.best.measured_seconds - 1.0

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation of predicted and measured steps over the layouts that were run."""
        return spearman([row.predicted_seconds or math.nan for row in self.ran], [r.measured_seconds for r in self.ran])

    @property
    def picked(self) -> LoopRow:
        """The layout of the grid that is predicted to be the fastest."""
        return min(self.ran, key=lambda row: row.predicted_seconds or math.inf)

    @property
    def picked_over_best(self) -> float:
        """The same as `over_best` of the layout that is predicted to be the fastest."""
        return self.picked.measured_seconds / self.best.measured_seconds - 1.0


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's correlation of the ranks; equal values share the mean rank."""
    return statistics.correlation(ranks_of(predicted), ranks_of(measured))


def ranks_of(values: Sequence[float]) -> list[float]:
    """The rank of every value, from 1; equal values share the mean rank."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


COLUMNS = "model, Mbit/s, layouts run, refused, chosen, s (min median max), best layout, s, over best, picked over best, Spearman"


def table(cells: Sequence[LoopCell]) -> str:
    """A row for each cell, in Markdown."""
    names = COLUMNS.split(", ")
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *map(line, cells)])


def line(cell: LoopCell) -> str:
    """A cell as a row of the table."""
    best, spread = cell.best, Spread.of(list(cell.chosen.steps))
    columns = [
        cell.model,
        f"{cell.mbit:g}",
        str(len(cell.ran)),
        str(len(cell.rows) - len(cell.ran)),
        cell.chosen.name,
        f"{spread.min:.3f} {spread.median:.3f} {spread.max:.3f}",
        best.name,
        f"{best.measured_seconds:.3f}",
        f"{cell.over_best:+.1%}",
        f"{cell.picked_over_best:+.1%}",
        f"{cell.rank_correlation:.3f}",
    ]
    return f"| {' | '.join(columns)} |"


def rows_table(cell: LoopCell) -> str:
    """Every layout of a cell, the fastest first."""
    lines = [f"{'layout':<34}{'predicted s':>12}{'measured s':>12}{'error':>8}{'late s':>8}   min … max"]
    for row in sorted([*cell.ran, cell.chosen], key=lambda row: row.measured_seconds):
        predicted = row.predicted_seconds or math.nan
        error = predicted / row.measured_seconds - 1.0
        spread = f"{min(row.steps):.3f} … {max(row.steps):.3f}"
        lines.append(
            f"{row.name:<34}{predicted:>12.3f}{row.measured_seconds:>12.3f}{error:>+8.1%}{row.late_seconds:>8.3f}   {spread}"
        )
    lines += [f"{row.name:<34}{row.refusal}" for row in cell.rows if row.refusal]
    return "\n".join(lines)


def as_json(cell: LoopCell) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "model": cell.model,
        "link_mbit": cell.mbit,
        "search_seconds": cell.search_seconds,
        "over_best": cell.over_best,
        "picked_over_best": cell.picked_over_best,
        "spearman": cell.rank_correlation,
        "best": cell.best.name,
        "picked": cell.picked.name,
        "chosen": dataclasses.asdict(cell.chosen),
        "rows": [dataclasses.asdict(row) for row in cell.rows],
    }
