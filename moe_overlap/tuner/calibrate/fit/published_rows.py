"""Rows of mlperf_v6.csv and moe_recipes.csv, which are all test rows: nothing is fitted to them.

Rows of moe_recipes.csv carry all of their arguments, rows of mlperf_v6.csv every setting that matters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_overlap.tuner.calibrate.fit.rows import (
    BF16_GRADIENTS,
    DATA,
    FUSED_LOSS,
    Habits,
    MeasuredRow,
    records,
    scored_measurements,
    table,
)


@dataclass(frozen=True, slots=True)
class PublishedRow(MeasuredRow):
    """A row of a file of its own.

    Attributes:
        file: `mlperf` or `recipe`.
    """

    file: str

    @property
    def name(self) -> str:
        """The row in tables: its line, behind the file's name."""
        return f"{self.file}{self.number}"

    @property
    def routing(self) -> str:
        """The kind of routing: natural or forced; empty for a dense model."""
        return ("natural" if self["routing"] == "natural" else "forced") if self.is_moe else ""

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run, as its source names it."""
        content: dict[str, Any] = json.loads(self["flags_json"])
        return content

    @property
    def seconds(self) -> float:
        """Measured seconds of a step; of a recipe, Megatron's own operations per step over the published rate."""
        if derived := self.settings.get("derived"):
            return float(derived["megatron_flops_per_step"]) / (float(self["value"]) * 1e12 * self.gpus)
        return super(PublishedRow, self).seconds

    @property
    def habits(self) -> Habits:
        """Every run of MLPerf fuses its loss; a recipe has all of its arguments."""
        return Habits(arguments=FUSED_LOSS)

    @property
    def flags(self) -> list[str]:
        """The Megatron flags of the run."""
        if self.file == "recipe":
            return _recipe_flags(self)
        return [*super(PublishedRow, self).flags, *_mlperf_flags(self)]


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Every row of mlperf_v6.csv and moe_recipes.csv."""
    files = {"mlperf": table(DATA / "mlperf_v6.csv"), "recipe": table(DATA / "moe_recipes.csv")}
    return tuple(
        PublishedRow(number, row, name)
        for name, frame in files.items()
        for number, row in zip(frame.index, records(frame), strict=True)
    )


def scored_rows() -> list[MeasuredRow]:
    """Rows of all files that count in a table of errors."""
    return [*scored_measurements(), *(row for row in published_rows() if row["scored"] == "yes")]


def _recipe_flags(row: PublishedRow) -> list[str]:
    """Arguments that are written out, and a vocabulary."""
    arguments = ["--vocab-size", str(row.facts["vocab"]), "--train-iters", "10", "--lr", "1e-4"]
    for name, value in row.settings["args"].items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        arguments += [flag, *map(str, values)]
    return arguments


def _mlperf_flags(row: PublishedRow) -> list[str]:
    """Settings of a run of MLPerf: Megatron-Bridge's variables, as far as a flag of Megatron says the same."""
    settings = row.settings
    arguments = ["--cuda-graph-impl", "local", "--cuda-graph-scope", str(settings["CUDA_GRAPH_SCOPE"])]
    if int(row["ep"]) > 1:
        arguments += ["--moe-token-dispatcher-type", settings["MOE_TOKEN_DISPATCHER_TYPE"]]
        arguments += ["--moe-flex-dispatcher-backend", settings["MOE_FLEX_DISPATCHER_BACKEND"]]
    arguments += ["--overlap-moe-expert-parallel-comm"] if settings.get("OVERLAP_MOE_EXPERT_PARALLEL_COMM") else []
    arguments += ["--delay-wgrad-compute"] if settings.get("DELAY_WGRAD_COMPUTE") else []
    arguments += ["--moe-paged-stash"] if settings.get("MOE_PAGED_STASH") else []
    arguments += ["--use-transformer-engine-op-fuser"] if settings.get("USE_TE_OPS") else []
    arguments += ["--moe-router-fusion"] if settings.get("MOE_ROUTER_FUSION") else []
    arguments += [BF16_GRADIENTS] if settings.get("grad_reduce_in_fp32") is False else []
    if int(row["cp"]) > 1:
        arguments += ["--cp-comm-type", settings["cp_comm_type"]]
    if settings.get("PIPELINE_LAYOUT"):
        arguments += ["--pipeline-model-parallel-layout", settings["PIPELINE_LAYOUT"]]
    return arguments
