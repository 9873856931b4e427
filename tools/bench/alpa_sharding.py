"""Alpa's intra-operator program: what megatron-core's layouts of one stage lose against a free sharding of every operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.sharding import sharding_details, sharding_lines
from tools.bench.paper_rows import Row
from tools.bench.paper_spaces import PAPER_SPACES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES = (("alpa-gpt-1.3b", "L4", 8), ("mixtral-8x7b", "H100", 64))
"""Model, GPU type and number of GPUs: those of examples/records/2026-11-23_intra_only."""


def row(model: str, gpu: str, gpus: int) -> Row:
    """The best plan of one stage, the best layout and the best free sharding of a model."""
    settings = SearchSettings(target="any", space=PAPER_SPACES["intra-only"], has_baseline=False)
    search = search_plan([f"@{EXAMPLES / f'{model}.args'}"], shipped_cluster(gpu, gpus), settings)
    searched = search.sharding
    assert searched is not None
    answer = searched.answer
    layout = None if answer is None or answer.nearest is None else answer.nearest.seconds
    free = None if answer is None or answer.best is None else answer.best.seconds
    return Row(
        figure="Alpa, intra-operator",
        case=f"{model}, {gpus} {gpu}: {search.chosen.name}",
        figures={
            "plan seconds": search.chosen.simulated_seconds,
            "layout seconds": layout,
            "free seconds": free,
            "layout / free": None if layout is None or free is None else layout / free,
        },
        paper="no figure: Alpa's baselines are other systems",
        notes=(*sharding_lines(searched), *sharding_details(searched)),
    )


def sharding() -> Iterator[Row]:
    """A row for each model."""
    for case in CASES:
        yield row(*case)
