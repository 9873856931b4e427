"""Mist's figures as searches: 2, 3, 5 with 16, 11 to 15, and two sentences of its section 3.

The spaces are the paper's, as far as our spaces can express them. `PARALLELISM` recomputes all layers or none, as the paper's
Megatron does. Sizes that are missing in the paper's text (layers of figure 14, batches of figure 15) are our choice, and marked
so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moe_overlap.tuner.search.space import LEVELS, ON_HOST, SEARCH_SPACES, SearchSpace
from tools.bench.paper_searches import Machines, Outcome
from tools.bench.paper_spaces import Figure, PaperCase, Space, gains, ratio, seconds_and_gains, sizes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPUS = {"1.3b": 2, "2.7b": 4, "7b": 8, "13b": 16, "22b": 32}
"""Size of a model -> the GPUs of figures 11 and 12 (table 4)."""
L4 = "L4"
UNFUSED = ("--attention-backend", "unfused")
A100_GIB, A100_NETWORK = 40.0, 6.25
"""AWS, table 3: 400 Gb/s for eight A100 of 40 GB."""
LAYERS = (32, 48, 64, 80)
"""Numbers of layers of figure 14; the text names 80."""
BATCHES = (128, 256, 512, 1024)
"""Global batch sizes of figure 15."""


def _space(name: str, **free: object) -> SearchSpace:
    return SearchSpace(**{"name": name, "recomputes": True, **free})  # type: ignore[arg-type]


NOTHING = Space(name="nothing", space=_space("nothing", recomputes=False))
PARALLELISM = Space(name="parallelism", space=_space("parallelism", all_layers=True))
RECOMPUTED = Space(name="recomputed layers", space=_space("recomputed layers", frees_stages=True))
ZERO = Space(name="ZeRO", space=_space("ZeRO", all_layers=True, zero_levels=LEVELS))
OFFLOADING = Space(name="offloading", space=_space("offloading", all_layers=True, offloads=ON_HOST))
HEURISTIC = Space(name="same in all stages", space=_space("same in all stages", offloads=("activations",)))
UNIFORM = Space(name="uniform", space=SEARCH_SPACES["offload"].any_target)
FULL = Space(name="full", space=SEARCH_SPACES["full"].any_target)
MEAN = Space(name="mean micro-batches", space=SEARCH_SPACES["full"].any_target, averages=True)

DIMENSIONS = (
    Space(name="base", space=_space("base", all_layers=True, frees_stages=True)),
    Space(name="+ ZeRO", space=_space("+ ZeRO", all_layers=True, frees_stages=True, zero_levels=LEVELS)),
    *(
        Space(name=name, space=_space(name, frees_stages=True, zero_levels=LEVELS, offloads=on_host))
        for name, on_host in (
            ("+ layers", ()),
            ("+ OO", ("optimizer",)),
            ("+ AO", ("optimizer", "activations")),
            ("+ GO", ("optimizer", "activations", "gradients")),
            ("+ WO", ON_HOST),
        )
    ),
)
"""Figure 5 and 16: each adds a dimension."""
ENUMERATED = (
    "3.8e6, 9.6e6, 9.6e6, 7.6e7, 6.1e8, 3.7e9, 1.9e10 points of the released tuner, counted for GPT-22B on 32 L4"
)


def job(family: str, size: str, machines: Machines, *flags: str, paper: str = "", name: str = "") -> PaperCase:
    """One of the example models."""
    title = name or f"{family.upper() if family == 'gpt' else family.capitalize()}-{size.upper()}"
    case_flags = (f"@{EXAMPLES / f'mist-{family}-{size}.args'}", *flags)
    return PaperCase(
        name=f"{title}, {machines.gpus} {machines.gpu}", arguments=case_flags, machines=machines, paper=paper
    )


def length(tokens: int) -> tuple[str, ...]:
    """Flags of a sequence length."""
    return "--seq-length", str(tokens), "--max-position-embeddings", str(tokens)


def _with_and_without(size: str, machines: Machines, flags: tuple[str, ...], paper: str) -> tuple[PaperCase, ...]:
    """A job with and without fused attention: the paper's section 3 does not name the one it used."""
    unfused = (*flags, *UNFUSED)
    name = f"GPT-{size.upper()}, unfused attention"
    return (
        job("gpt", size, machines, *flags, paper=paper),
        job("gpt", size, machines, *unfused, paper=paper, name=name),
    )


def figure_2() -> Figure:
    """GPT-2.7B on 4 L4 with 4,096 tokens: one dimension at a time."""
    paper = "nothing fits; 1.22 recomputed layers, 1.25 ZeRO, 1.16 offloading, 1.30 all, against full recomputation"
    cases = _with_and_without("2.7b", Machines(gpu=L4, gpus=4), (*length(4096), "--global-batch-size", "8"), paper)
    spaces = (PARALLELISM, NOTHING, RECOMPUTED, ZERO, OFFLOADING, FULL)
    return Figure(name="Mist 2", spaces=spaces, cases=cases, columns=seconds_and_gains)


def figure_3() -> Figure:
    """GPT-7B on 8 L4 with 512 samples: recomputation alone and everything."""
    paper = "1.22 against parallelism alone, 1.11 against recomputed layers"
    cases = _with_and_without("7b", Machines(gpu=L4, gpus=8), ("--global-batch-size", "512"), paper)
    return Figure(name="Mist 3", spaces=(PARALLELISM, RECOMPUTED, FULL), cases=cases, columns=seconds_and_gains)


def figure_5() -> Figure:
    """Points and seconds of each dimension, of every GPT."""
    cases = tuple(job("gpt", size, Machines(gpu=L4, gpus=gpus), paper=ENUMERATED) for size, gpus in GPUS.items())
    return Figure(name="Mist 5, 16", spaces=DIMENSIONS, cases=cases, columns=sizes)


def figure_11() -> Figure:
    """All families with fused attention on both GPUs."""
    paper = {
        ("gpt", L4): "1.22 on average, at most 1.32",
        ("gpt", "A100"): "1.20 on average, at most 1.32",
        L4: "1.32 on average of all families, at most 1.59",
        "A100": "1.34 on average of all families, at most 1.72",
    }
    cases = tuple(
        job(family, size, machines, *flags, paper=paper.get((family, machines.gpu), paper[machines.gpu]))
        for size in GPUS
        for family in ("gpt", "llama", "falcon")
        for machines, flags in _both(size)
    )
    return Figure(name="Mist 11", spaces=(PARALLELISM, FULL), cases=cases, columns=seconds_and_gains)


def figure_12() -> Figure:
    """GPT without fused attention on both GPUs."""
    paper = "1.14 on average, at most 1.26; 13B on 16 A100: 1.00"
    cases = tuple(
        job("gpt", size, machines, *flags, *UNFUSED, paper=paper) for size in GPUS for machines, flags in _both(size)
    )
    return Figure(name="Mist 12", spaces=(PARALLELISM, FULL), cases=cases, columns=seconds_and_gains)


def _both(size: str) -> Iterator[tuple[Machines, tuple[str, ...]]]:
    """A size's GPUs of both kinds, each with its sequence length."""
    yield Machines(gpu=L4, gpus=GPUS[size]), length(2048)
    a100 = Machines(gpu="A100", gpus=GPUS[size], network_gb_per_s=A100_NETWORK, memory_gib=A100_GIB)
    yield a100, length(4096)


def figure_13() -> Figure:
    """The spaces that grow, from Megatron-LM's own on."""
    paper = "recomputation 1.12, offloading 7 % more, unlike micro-batches and stages 9 % more, on average"
    cases = tuple(job("gpt", size, Machines(gpu=L4, gpus=GPUS[size]), paper=paper) for size in ("7b", "13b", "22b"))
    recompute = Space(name="recompute", space=SEARCH_SPACES["recompute"].any_target)
    return Figure(
        name="Mist 13", spaces=(PARALLELISM, recompute, UNIFORM, FULL), cases=cases, columns=seconds_and_gains
    )


def figure_14() -> Figure:
    """GPT-22B with other numbers of layers on 32 L4."""
    machines = Machines(gpu=L4, gpus=32)
    cases = tuple(
        job(
            *("gpt", "22b", machines, "--num-layers", str(layers), *flags),
            name=f"GPT of {layers} layers{title}",
            paper="at most 1.32, most at 80 layers",
        )
        for title, flags in ((", unfused attention", UNFUSED), ("", ()))
        for layers in LAYERS
    )
    return Figure(name="Mist 14", spaces=(PARALLELISM, RECOMPUTED, FULL), cases=cases, columns=gains)


def figure_15() -> Figure:
    """GPT-22B with other batches on 32 L4, against a tuner that averages micro-batches."""
    machines, paper = Machines(gpu=L4, gpus=32), "imbalance-aware tuning 1.13 on average"
    cases = tuple(
        job("gpt", "22b", machines, "--global-batch-size", str(batch), name=f"GPT-22B, batch {batch}", paper=paper)
        for batch in BATCHES
    )
    return Figure(name="Mist 15", spaces=(MEAN, FULL), cases=cases, columns=averaged)


def averaging() -> Figure:
    """The cost of taking all micro-batches for their mean (section 3.2)."""
    paper = "7B on 8 L4: prediction wrong by at most 21.55 %; on average 9 % slower plans (figure 13)"
    cases = tuple(job("gpt", size, Machines(gpu=L4, gpus=gpus), paper=paper) for size, gpus in GPUS.items())
    return Figure(name="Mist 3.2, averaging", spaces=(MEAN, FULL), cases=cases, columns=averaged)


def uniform() -> Figure:
    """The loss of one decision for all stages (section 3.3): 2.7B as in figure 2, 7B as in figure 3."""
    cases = tuple(
        replace(case, paper=paper)
        for figure, paper in ((figure_2(), "loses 26 %"), (figure_3(), "loses 20 %"))
        for case in figure.cases
    )
    return Figure(name="Mist 3.3, uniform", spaces=(HEURISTIC, UNIFORM, FULL), cases=cases, columns=losses)


def averaged(outcomes: Mapping[str, Outcome]) -> dict[str, float | None]:
    """Steps, and of the averaging search how far its own objective is from the step that its plan is predicted to take."""
    mean = outcomes.get(MEAN.name)
    columns = seconds_and_gains(outcomes)
    error = None if mean is None else ratio(mean.objective, mean.seconds)
    columns["mean's own error"] = None if error is None else error - 1.0
    return columns


def losses(outcomes: Mapping[str, Outcome]) -> dict[str, float | None]:
    """Steps, and the share of its throughput that a space loses against the full one."""
    full = outcomes.get(FULL.name)
    columns = seconds_and_gains(outcomes)
    for name in (HEURISTIC.name, UNIFORM.name):
        if full is not None and name in outcomes:
            share = ratio(full.seconds, outcomes[name].seconds)
            columns[f"{name} loses"] = None if share is None else 1.0 - share
    return columns


FIGURES = {
    "mist-2": figure_2,
    "mist-3": figure_3,
    "mist-5": figure_5,
    "mist-11": figure_11,
    "mist-12": figure_12,
    "mist-13": figure_13,
    "mist-14": figure_14,
    "mist-15": figure_15,
    "mist-averaging": averaging,
    "mist-uniform": uniform,
}
"""Name for --only -> the figure."""
