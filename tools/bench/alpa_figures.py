"""Alpa's comparisons as searches: parts of its space against all of it, search time over GPUs; and two full-size searches.

GPT and MoE grow with the GPUs as in the paper's evaluation, on nodes of p3.16xlarge: eight V100 of 16 GB, 25 Gb/s per node. Alpa
offloads nothing, and neither do these spaces, except the last one, `full`. The V100 was not calibrated under Megatron, so it gets
the A100's efficiencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from moe_overlap.tuner.search.space import FULL, LEVELS, Restriction, SearchSpace
from tools.bench.paper_searches import Machines, Outcome
from tools.bench.paper_spaces import PAPER_SPACES, Figure, PaperCase, Space, seconds_and_gains, sizes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPT = {"350m": 1, "1.3b": 4, "2.6b": 8, "6.7b": 16, "15b": 32, "39b": 64}
"""Size -> GPUs."""
MOE = {"380m": 1, "690m": 2, "1.3b": 4, "2.4b": 8, "10b": 16, "27b": 32, "70b": 64}
V100 = "V100-16GB (p3.16xlarge)"
PAPER = {
    "gpt": {
        1: "45 TFLOP/s a GPU, Megatron 48",
        4: "58, Megatron 56",
        8: "62, Megatron 50",
        16: "60, Megatron 57",
        32: "60, Megatron 58; equal layer 60, equal operator 40",
        64: "57, Megatron 58",
    },
    "moe": {
        1: "46 TFLOP/s a GPU, DeepSpeed 34",
        2: "43, DeepSpeed 33, intra-only 42, inter-only 41",
        4: "40, DeepSpeed 35, intra-only 41, inter-only 38",
        8: "46, DeepSpeed 40, intra-only 47, inter-only 40",
        16: "45, DeepSpeed 13, intra-only 23, inter-only 31",
        32: "39, DeepSpeed 4, intra-only 2, inter-only out of memory",
        64: "37, DeepSpeed fails, intra-only 0.2, inter-only out of memory",
    },
}
"""Family -> GPUs -> figures of the paper's artifact, among them those of Alpa's plan."""

ALPA = SearchSpace("Alpa's", recomputes=True, zero_levels=LEVELS, frees_stages=True, meshes=(Restriction.FREE,))
SPACES = (
    Space(name="data", space=PAPER_SPACES["data"]),
    Space(name="ZeRO-2", space=PAPER_SPACES["zero2"]),
    Space(name="ZeRO-3", space=PAPER_SPACES["zero3"]),
    # Only the plan: the gain of the best sharding of every operator is a separate question.
    Space(name="intra-only", space=replace(PAPER_SPACES["intra-only"], shards_operators=False)),
    Space(name="inter-only", space=PAPER_SPACES["inter-only"]),
    Space(name="equal layer", space=replace(PAPER_SPACES["equal-layer"], offloads=())),
    Space(name="equal operator", space=PAPER_SPACES["equal-operator"]),
    Space(name="Alpa's", space=ALPA),
    Space(name="full", space=FULL),
)


def job(family: str, size: str, gpus: int) -> PaperCase:
    """A model of the evaluation on a number of V100."""
    machines = Machines(gpu=V100, gpus=gpus, network_gb_per_s=25 / 8 / 8, like="A100")
    flags = (f"@{EXAMPLES / f'alpa-{family}-{size}.args'}",)
    name = f"{family.upper() if family == 'gpt' else 'MoE'}-{size.upper()}, {gpus} V100"
    paper = PAPER[family].get(gpus, "") if {**GPT, **MOE}.get(size) == gpus else ""
    return PaperCase(name=name, arguments=flags, machines=machines, paper=paper)


def sizes_of(family: str) -> tuple[PaperCase, ...]:
    """All sizes of a family, each on its GPUs."""
    of_family = GPT if family == "gpt" else MOE
    return tuple(job(family, size, gpus) for size, gpus in of_family.items())


def spaces(family: str) -> Figure:
    """Parts of the space against all of it."""
    return Figure(name=f"Alpa, {family}", spaces=SPACES, cases=sizes_of(family), columns=seconds_and_gains)


def search_time() -> Figure:
    """One model over the number of GPUs."""
    paper = "compilation time grows linearly with the model and with the GPUs; at most several hours, with profiling"
    cases = tuple(replace(job("gpt", "2.6b", gpus), paper=paper) for gpus in (8, 16, 32, 64))
    space = (Space(name="Alpa's", space=ALPA),)
    return Figure(name="Alpa, search time", spaces=space, cases=cases, columns=search_costs, widens=False)


def large() -> Figure:
    """The two searches whose time and memory have a goal."""
    full = (Space(name="full", space=FULL),)
    cases = (
        PaperCase(
            name="GPT-22B, 32 L4",
            arguments=(f"@{EXAMPLES / 'mist-gpt-22b.args'}",),
            machines=Machines(gpu="L4", gpus=32),
            paper="goal: 120 s and 6 GB; Mist's released tuner about 2,300 CPU s, extrapolated",
        ),
        PaperCase(
            name="DeepSeek-V3, 1024 H100",
            arguments=(f"@{EXAMPLES / 'deepseek-v3.args'}",),
            machines=Machines(gpu="H100", gpus=1024),
            paper="goal: 600 s and 6 GB",
        ),
    )
    return Figure(name="Full size", spaces=full, cases=cases, columns=search_costs, widens=False)


def search_costs(outcomes: Mapping[str, Outcome]) -> dict[str, float | None]:
    """The step, and the costs of the search: processor seconds, processor seconds of its captures, memory, layouts."""
    columns: dict[str, float | None] = {}
    for name, outcome in outcomes.items():
        columns[f"{name} seconds"] = outcome.seconds
        columns["capture CPU seconds"] = outcome.capture_cpu_seconds
        columns["GiB"] = outcome.rss_gib
        columns["layouts"] = float(outcome.layouts)
    return columns | sizes(outcomes)


FIGURES = {
    "alpa-gpt": lambda: spaces("gpt"),
    "alpa-moe": lambda: spaces("moe"),
    "alpa-time": search_time,
    "large": large,
}
"""Name for --only -> the figure."""
