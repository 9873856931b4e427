"""A plan as aligned text: the run, one line per fact; then a table with a column per stage."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from moe_overlap.describe.cluster import GIB
from moe_overlap.plan.overlap import LayerOverlap, SearchLimits, StageOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.report.prediction import figure
from moe_overlap.tuner.cost.feasibility import needed_bytes

WIDEST_CELL = 28
"""Most characters of a cell's line."""
Row = tuple[str, list[str]]
"""Name of a row, and a cell for every stage."""


def format_plan(plan: Plan) -> str:
    """The run, one line per fact; then a table with a column per stage."""
    schedule = f"{plan.pipeline_schedule}, embedding on stage {plan.embedding_stage}, loss on stage {plan.loss_stage}"
    run = [
        ("model", plan.model.name),
        ("cluster", f"{plan.cluster.name}, {plan.world_size} ranks in {len(plan.stages)} stages"),
        ("batch", f"{plan.global_batch_size} samples of {plan.sequence_length} tokens, {plan.precision}"),
        ("schedule", schedule + ("" if plan.mtp_stage is None else f", MTP on stage {plan.mtp_stage}")),
    ]
    if plan.predicted is not None:
        rate = f"{figure(plan.predicted.tokens_per_second_per_gpu)} tokens/s/GPU"
        work = f"{figure(plan.predicted.model_tflops_per_gpu)} model TFLOP/s/GPU"
        run.append(("predicted", f"{plan.predicted.step_seconds:.4g} s per step, {rate}, {work}"))
    for transfer in plan.transfers:
        gather = "" if transfer.all_gather is None else f", then all-gather along {transfer.all_gather.axis}"
        run.append((f"S{transfer.from_stage}>S{transfer.to_stage}", f"{len(transfer.tiles)} tiles{gather}"))
    head = "".join(f"{name:<14}{text}\n" for name, text in run)
    return head + "\n" + format_columns(stage_rows(plan))


def stage_rows(plan: Plan) -> list[Row]:
    """Rows of the table of stages, without rows in which every stage has `-`."""
    rows: list[Row] = [("stage", [str(index) for index in range(len(plan.stages))])]
    columns = [_stage_column(stage) for stage in plan.stages]
    rows += [(name, [column[name] for column in columns]) for name in columns[0]]
    if plan.predicted is not None:
        needed = [f"{needed_bytes(stage) / GIB:.2f} GiB" for stage in plan.predicted.stages]
        rows.append(("memory needed", needed))
        rows.append(("micro-batch", [f"{stage.stable_seconds * 1e3:.3g} ms" for stage in plan.predicted.stages]))
    return [row for row in rows if any(cell != "-" for cell in row[1])]


def _stage_column(stage: StagePlan) -> dict[str, str]:
    overlap, recompute = stage.overlap, stage.recompute
    recomputed = f"{recompute.granularity} {recompute.layers} {','.join(recompute.modules)}".rstrip()
    shares = {"w": "weights", "g": "gradients", "o": "optimizer", "a": "activations"}
    offload = " ".join(
        f"{k} {getattr(stage.offload, v):.0%}" for k, v in shares.items() if getattr(stage.offload, v) > 0
    )
    layers = _shown_layers(overlap.layers, stage.layers)
    return {
        "layers": " ".join(f"{first}-{last - 1}" for first, last in stage.chunks),
        "devices": f"{stage.devices.mesh[0]} x {stage.devices.mesh[1]}",
        "ranks": format_ranks(stage.devices.ranks),
        "micro-batch size": str(stage.micro_batch_size),
        "micro-batches": str(stage.gradient_accumulation_steps),
        "tensor": str(stage.tensor),
        "context": str(stage.context),
        "data": str(stage.data),
        "expert": str(stage.expert),
        "expert tensor": str(stage.expert_tensor),
        "ZeRO": str(stage.zero_level),
        "recompute": "-" if recompute.granularity == "none" else recomputed,
        "offload": offload or "-",
        "overlap": layers or "-",
        "fewer parts": _shown_limits(overlap.search_limits),
        "deferred": f"{overlap.max_deferred_bytes / 2**20:g} MiB" if overlap.max_deferred_bytes else "-",
        "gradient chunk": _shown_chunk(overlap),
        "forward sends": "late" if overlap.sends_late else "-",
        "weights gathered": "under passes" if overlap.overlap_param_gather else "-",
    }


def _shown_chunk(overlap: StageOverlap) -> str:
    """`128 MiB`, with `at once` if reductions do not wait for gaps between all-to-alls."""
    if not overlap.gradient_chunk_bytes:
        return "-"
    return f"{overlap.gradient_chunk_bytes / 2**20:g} MiB{' at once' if overlap.reduce_at_once else ''}"


def _shown_limits(limits: SearchLimits | None) -> str:
    """`L3.attention…L6.moe.merge*2`: ranges for which memory allows fewer partitions than the search's limit."""
    lowered = () if limits is None else limits.lowered
    return " ".join(f"{limit.first_operator}…{limit.last_operator}*{limit.max_partitions}" for limit in lowered) or "-"


def _shown_layers(layers: Sequence[LayerOverlap], of_stage: Sequence[int]) -> str:
    """`L0-3:partitioned*2 L8:none`: runs of layers with the same mechanism; just `partitioned*2` if all layers have it."""
    if len(layers) == len(of_stage) > 1 and len(same := {_mechanism(layer) for layer in layers}) == 1:
        return same.pop()
    runs: list[tuple[int, int, str]] = []
    for layer in layers:
        mechanism = _mechanism(layer)
        if runs and runs[-1][1:] == (layer.layer - 1, mechanism):
            runs[-1] = runs[-1][0], layer.layer, mechanism
        else:
            runs.append((layer.layer, layer.layer, mechanism))
    return " ".join(f"L{first}{f'-{last}' if last > first else ''}:{mechanism}" for first, last, mechanism in runs)


def _mechanism(layer: LayerOverlap) -> str:
    """`partitioned*2`: the mechanism with its number of partitions or chunks; `fused(20/26)`: with its communicating blocks."""
    pieces, blocks = layer.partitions or layer.tutel_degree, layer.kernel_blocks
    split = "" if blocks is None else f"({blocks.dispatch}/{blocks.combine})"
    return layer.mechanism + (f"*{pieces}" if pieces else split)


def format_ranks(ranks: Sequence[int]) -> str:
    """`0-3` for consecutive ranks, otherwise the list."""
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _lines_of(cell: str) -> list[str]:
    """The lines of a cell, broken after spaces, and after commas if it is too long."""
    if len(cell) <= WIDEST_CELL:
        return [cell]
    return textwrap.wrap(cell.replace(",", ", "), WIDEST_CELL, break_long_words=False, break_on_hyphens=False)


def format_columns(rows: Sequence[Row]) -> str:
    """A table with names to the left and right-aligned columns; a long cell takes several lines."""
    head = max(len(name) for name, _ in rows)
    broken = [(name, [_lines_of(cell) for cell in cells]) for name, cells in rows]
    columns = zip(*(cells for _, cells in broken), strict=True)
    widths = [max(len(line) for cell in column for line in cell) for column in columns]
    lines = []
    for name, cells in broken:
        for number, row in enumerate(itertools.zip_longest(*cells, fillvalue="")):
            aligned = "  ".join(line.rjust(width) for line, width in zip(row, widths, strict=True))
            lines.append(f"{('' if number else name).ljust(head)}  {aligned}".rstrip() + "\n")
    return "".join(lines)
