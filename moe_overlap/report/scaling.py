"""The answer of `--num-gpus 32,64,128`: a row for every number of GPUs, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.plan_search.results import ScalingRow
from moe_overlap.report.answer import (
    DAY_SECONDS,
    beware_lines,
    line,
    plan_sentence,
    shown_tokens,
    training_of,
    unwritten_lines,
)
from moe_overlap.report.search import EARLY, search_json

HEADINGS = ("GPUs", "step", "tokens/s per GPU", "efficiency")
OF_TRAINING = ("days", "GPU-hours")
FOR_WHOM = {"megatron-lm": "unmodified Megatron-LM", "moe-overlap": "this runtime", "any": "no runtime in particular"}
"""Target -> the software that runs its plans."""


@dataclass(frozen=True, slots=True)
class RowFigures:
    """Figures of a row.

    Attributes:
        efficiency: tokens per second and GPU, relative to the smallest number of GPUs with a plan.
        train_seconds, gpu_hours: of the full training; None if its tokens are unknown.
    """

    step_seconds: float
    tokens_per_second_per_gpu: float
    efficiency: float
    train_seconds: float | None
    gpu_hours: float | None


def figures_of(rows: Sequence[ScalingRow], train_tokens: float | None) -> list[RowFigures | None]:
    """The figures of every row; None for a row without a plan."""
    predictions = [None if row.search is None else row.search.prediction for row in rows]
    smallest = next(
        prediction.predicted.tokens_per_second_per_gpu for prediction in predictions if prediction is not None
    )
    figures: list[RowFigures | None] = []
    for row, prediction in zip(rows, predictions, strict=True):
        if prediction is None:
            figures.append(None)
            continue
        rate = prediction.predicted.tokens_per_second_per_gpu
        training = training_of(prediction, row.cluster, train_tokens) if train_tokens is not None else (None, None)
        figures.append(RowFigures(prediction.predicted.step_seconds, rate, rate / smallest, *training))
    return figures


def scaling_json(rows: Sequence[ScalingRow], train_tokens: float | None) -> list[dict[str, Any]]:
    """For every number of GPUs the search's JSON with its figures, or the reason why there is no plan."""
    values: list[dict[str, Any]] = []
    for row, figures in zip(rows, figures_of(rows, train_tokens), strict=True):
        if row.search is None or figures is None:
            values.append({"num_gpus": row.cluster.gpus, "reason": row.reason})
            continue
        scaling = {"num_gpus": row.cluster.gpus, "scaling_efficiency": figures.efficiency}
        values.append(search_json(row.search, train_tokens) | scaling)
    return values


def scaling_lines(rows: Sequence[ScalingRow], folder: Path | None, train_tokens: float | None) -> list[str]:
    """The table as text, with notes on its columns and the folders of the plans."""
    headings = HEADINGS if train_tokens is None else (*HEADINGS, *OF_TRAINING)
    table = [tuple(headings)]
    for row, figures in zip(rows, figures_of(rows, train_tokens), strict=True):
        table.append(_cells(row, figures))
    widths = [max(len(cells[column]) for cells in table if len(cells) > column) for column in range(len(headings))]
    last = ["plan", *map(_plan_text, rows)]
    lines = []
    for cells, text in zip(table, last, strict=True):
        figures_text = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"{figures_text}  {text}")
    planned = [row for row in rows if row.search is not None]
    first = planned[0]
    assert first.search is not None
    batch = f"{first.search.plan.global_batch_size:,} samples of {first.search.plan.sequence_length:,} tokens"
    target = FOR_WHOM[first.search.target]
    seconds = sum(row.search.seconds for row in planned if row.search is not None)
    devices = f"{first.cluster.gpus} × {first.cluster.group_of(0).gpu.name}"
    lines += dict.fromkeys(text for row in planned if row.search for text in beware_lines(row.search.prediction))
    lines.append(line("efficiency", f"tokens/s per GPU relative to {devices}; every step trains a batch of {batch}"))
    if train_tokens is not None:
        lines.append(line("training", f"{shown_tokens(train_tokens)} tokens"))
    lines.append(line("searched", f"{seconds:.0f} s, for {target}; everything is predicted, nothing was run"))
    if folder is None:
        lines += unwritten_lines()
    else:
        lines.append(line("written", ", ".join(str(folder / row.folder) for row in planned)))
    return lines


def _plan_text(row: ScalingRow) -> str:
    """The plan of a row with notes, or why there is none."""
    if row.search is None:
        return row.reason
    search = row.search
    notes = [f"not run: {search.refusal}"] if search.refusal is not None else []
    notes += [EARLY] if search.ended_early else []
    return "; ".join((plan_sentence(search.plan), *notes))


def _cells(row: ScalingRow, figures: RowFigures | None) -> tuple[str, ...]:
    if figures is None:
        return (str(row.cluster.gpus),)
    cells = (
        str(row.cluster.gpus),
        f"{figures.step_seconds:.3f} s",
        f"{figures.tokens_per_second_per_gpu:,.0f}",
        f"{100 * figures.efficiency:.1f} %",
    )
    if figures.train_seconds is None or figures.gpu_hours is None:
        return cells
    return (*cells, f"{figures.train_seconds / DAY_SECONDS:,.1f}", f"{figures.gpu_hours:,.0f}")
