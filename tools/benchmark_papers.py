"""The papers' comparisons as predictions, beside the ratios that they print: `tools/benchmark_papers.py [--only NAME …] [--json]`

lancet   Lancet, figures 2, 11 to 13, 15 and 16: GPT2-S-MoE and GPT2-L-MoE with two experts a GPU on nodes of p4de (A100) and p3dn
         (V100), with the gates of Switch and of Batch Prioritized routing.
comet    COMET, figure 1(a): the share of communication in the forward pass of three models on 8 H800.
mist     Mist, figure 13: GPT on 8, 16 and 32 L4, tuned over search spaces that grow.

Nothing here is run on a GPU: both sides of every ratio are predicted with the shipped constants. The papers' texts print averages
and maxima; their bars are not in the text. No V100 was calibrated under Megatron: it gets the A100's efficiencies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.arguments import expand_files
from moe_overlap.api import Options, predict, simulated, tune
from moe_overlap.describe.cluster import Cluster, cluster_of, known_gpu, node_group, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import EXPERT
from moe_overlap.plan.overlap import Mechanism, SearchLimits
from moe_overlap.plan_search import SearchSettings, search_plan
from moe_overlap.report.tuning import Tuned
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants

ROOT = Path(__file__).resolve().parents[1]
SHARE = "all-to-all share"
NODE = 8
"""GPUs of a node of both clusters."""
MOST_PARTITIONS = 8
"""ρ of Lancet's experiments, section 7."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        case: what is trained, on which GPUs.
        figures: name -> value; seconds are named so, all others are ratios.
        paper: the paper's text on it.
        notes: what limits the comparison.
    """

    figure: str
    case: str
    figures: dict[str, float | None]
    paper: str
    notes: tuple[str, ...] = ()


# Lancet

HOOKED = "--overlap-param-gather"
"""A flag of the examples that runs with deferred weight gradients go without."""
V100 = "V100-32GB (p3dn.24xlarge)"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster of Lancet's section 7.

    Attributes:
        network_gb_per_s: of one GPU and direction: the node's network cards, shared by its GPUs.
        batch: samples a GPU takes of GPT2-S-MoE and GPT2-L-MoE.
    """

    name: str
    gpu: str
    network_gb_per_s: float
    batch: dict[str, int]
    options: Options

    def cluster(self, nodes: int) -> Cluster:
        """So many of its nodes."""
        group = node_group(known_gpu(self.gpu, "--gpu"), nodes, NODE) | {"network_gb_per_s": self.network_gb_per_s}
        return cluster_of({"name": f"{nodes} nodes of {self.name}", "groups": [group]}, "--cluster")


def with_a100_efficiencies() -> Constants:
    """Shipped constants in which the V100's efficiencies are the A100's.

    Those that were fitted to a V100 are of another program's runs on p3.16xlarge, whose collectives kept 11 % of the links busy.
    """
    constants = shipped_constants()
    return replace(constants, gpus={**constants.gpus, V100: constants.gpus["A100"]})


SITES = (
    Site(name="p4de", gpu="A100", network_gb_per_s=4 * 12.5 / NODE, batch={"s": 24, "l": 48}, options={}),
    Site(
        name="p3dn",
        gpu=V100,
        network_gb_per_s=12.5 / NODE,
        batch={"s": 16, "l": 8},
        options={"precision": "fp16", "constants": with_a100_efficiencies()},
    ),
)
PAPER_SPEEDUP = {
    ("p4de", "switch"): "at most 1.21, 1.17 on average",
    ("p3dn", "switch"): "at most 1.30, 1.22 on average",
    ("p4de", "batch_prioritized"): "at most 1.24, 1.17 on average",
    ("p3dn", "batch_prioritized"): "at most 1.24, 1.21 on average",
}
PAPER_EXPOSED = {"p4de": "up to 69 % less", "p3dn": "up to 83 % less"}
"""Communication that nothing hides, against the same program without Lancet (figure 13)."""


def lancet_words(model: str, gpus: int, batch: int, gate: str) -> list[str]:
    """The flags of GPT2-S-MoE or GPT2-L-MoE, which grow with the GPUs: two experts and so many samples each."""
    return [
        f"@{ROOT / 'examples' / f'gpt2-{model}-moe.args'}",
        *("--num-experts", str(2 * gpus), "--expert-model-parallel-size", str(gpus)),
        *("--micro-batch-size", str(batch), "--global-batch-size", str(batch * gpus), "--moe-gate", gate),
    ]


def fastest(tuned: Tuned, defers: bool, mechanism: Mechanism | None = None) -> float | None:
    """Seconds of the fastest candidate with deferred weight gradients or without; None where there is none.

    Args:
        mechanism: that overlaps its layers; None asks for any.
    """
    seconds = [
        candidate.seconds
        for candidate in (tuned.chosen, *tuned.others)
        if candidate.prediction is not None
        and defers == (candidate.schedule is not None)
        and mechanism in (None, *(layer.mechanism for layer in candidate.decided.stages[0].overlap.layers))
    ]
    return min(seconds, default=None)


def lancet_row(site: Site, model: str, gate: str, nodes: int) -> Row:
    """One model with one gate on so many nodes."""
    cluster, limits = (
        site.cluster(nodes),
        SearchLimits(max_partitions=MOST_PARTITIONS, group_seconds=0.0, range_limit=16),
    )
    words = lancet_words(model, cluster.gpus, site.batch[model], gate)
    begun = time.process_time()
    tuned = tune(words, cluster, limits, **site.options)
    searched = time.process_time() - begun
    plain = tuned.plain_seconds
    kept = [word for word in expand_files(words) if word != HOOKED]
    deferral = predict([*kept, "--defer-weight-gradients"], cluster, **site.options).predicted.step_seconds
    tutel, partitioned = fastest(tuned, False, "tutel"), fastest(tuned, False)
    assert tuned.chosen.prediction is not None
    bare = predict(words, cluster, **site.options)
    exposed = bare.breakdown["exposed_expert_seconds"]
    left = tuned.chosen.prediction.breakdown["exposed_expert_seconds"]

    def gain(seconds: float | None) -> float | None:
        return None if seconds is None else plain / seconds

    figures = {
        "plain seconds": plain,
        SHARE: exposed / plain,
        "all hidden": plain / (plain - exposed),
        "best of 2, 4, 8 capacity chunks": gain(tutel),
        "weight gradients alone": gain(deferral),
        "partitions alone": gain(partitioned),
        "chosen": gain(tuned.chosen.seconds),
        "chosen against chunks": None if tutel is None else min(tutel, plain) / tuned.chosen.seconds,
        "exposed all-to-all less": 1.0 - left / exposed,
        "search CPU seconds": searched,
    }
    paper = f"{PAPER_SPEEDUP[site.name, gate]} (against the best baseline); exposed {PAPER_EXPOSED[site.name]}"
    case = f"GPT2-{model.upper()}-MoE, {gate}, {cluster.gpus} GPUs of {site.name}"
    return Row(figure="Lancet 11-13, 15, 16", case=case, figures=figures, paper=paper, notes=bare.extrapolating)


def lancet() -> Iterator[Row]:
    """All clusters, gates, models and numbers of nodes."""
    for site in SITES:
        for gate in ("switch", "batch_prioritized"):
            for model in ("s", "l"):
                for nodes in (2, 4, 8):
                    yield lancet_row(site, model, gate, nodes)


# COMET

COMET_MODELS = {"mixtral-8x7b": 8, "qwen2-moe-2.7b": 8, "phi-3.5-moe": 8}
"""Model -> expert ranks on the 8 GPUs of figure 1(a), which names no layout: that of FasterMoE in figure 9, EP = W."""
COMET_TOKENS = (4096, 8192)
"""Of one sample; the paper's sweep of input lengths, without its layouts of tensor-parallel experts."""
DISPATCHERS = ("alltoall", "allgather")
"""The paper names none; `allgather` is the default of its Megatron-LM's flags."""


def comet_row(model: str, ranks: int, tokens: int, dispatcher: str) -> Row:
    """The forward pass of one model: the share in which tokens travel."""
    words = [
        f"@{ROOT / 'examples' / f'{model}.args'}",
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--seq-length", str(tokens)),
        *("--expert-model-parallel-size", str(ranks), "--micro-batch-size", "1", "--global-batch-size", "8"),
        *("--max-position-embeddings", str(tokens), "--moe-token-dispatcher-type", dispatcher),
    ]
    step = simulated(words, shipped_cluster("H800", 8))
    forward = [
        ran for ran in step.ran(0) if not ran.instruction.in_backward_pass and not ran.instruction.operator.is_update
    ]
    spent = sum(ran.end - ran.start for ran in forward)
    moved = sum(ran.end - ran.start for ran in forward if ran.instruction.channel == EXPERT)
    return Row(
        figure="COMET 1(a)",
        case=f"{model}, {tokens} tokens a GPU, EP{ranks} on 8 H800, {dispatcher}",
        figures={"forward seconds": spent, SHARE: moved / spent},
        paper="47 % on average of the models",
    )


def comet() -> Iterator[Row]:
    """All models and lengths with each dispatcher, and their mean."""
    for dispatcher in DISPATCHERS:
        cases = itertools.product(COMET_MODELS.items(), COMET_TOKENS)
        rows = [comet_row(model, ranks, tokens, dispatcher) for (model, ranks), tokens in cases]
        yield from rows
        figures: dict[str, float | None] = {
            SHARE: statistics.mean(row.figures[SHARE] or 0.0 for row in rows),
        }
        yield Row(figure="COMET 1(a)", case=f"mean, {dispatcher}", figures=figures, paper="47 %")


# Mist

MIST_RUNS = (("mist-gpt-7b", 8), ("mist-gpt-13b", 16), ("mist-gpt-22b", 32))
MIST_SPACES = ("megatron", "recompute", "offload", "full")
MIST_PAPER = "recomputation 1.12, offloading 7 % more, unlike stages and micro-batches 9 % more, on average"


def mist_row(model: str, gpus: int, seconds: float) -> Row:
    """One model, tuned over every space; a space contains the one before."""
    words = [f"@{ROOT / 'examples' / f'{model}.args'}"]
    steps: dict[str, float | None] = {}
    notes = []
    for space in MIST_SPACES:
        settings = SearchSettings(
            target="any",
            space=space,
            seconds=seconds,
            overlap_limits=SearchLimits(max_partitions=MOST_PARTITIONS, group_seconds=0.0, range_limit=16),
            has_baseline=False,
        )
        begun = time.process_time()
        try:
            found = search_plan(words, shipped_cluster("L4", gpus), settings)
            steps[f"{space} seconds"] = found.chosen.seconds
            notes += [f"{space}: {found.chosen.name}{', ended early' if found.ended_early else ''}"]
        except ConfigError as error:
            steps[f"{space} seconds"] = None
            notes.append(f"{space}: {error}")
        steps[f"{space} CPU seconds"] = time.process_time() - begun
    first = steps["megatron seconds"]
    for space in MIST_SPACES[1:]:
        step = steps[f"{space} seconds"]
        steps[space] = None if step is None or first is None else first / step
    return Row(figure="Mist 13", case=f"{model}, {gpus} L4", figures=steps, paper=MIST_PAPER, notes=tuple(notes))


def mist(seconds: float) -> Iterator[Row]:
    """All runs."""
    for model, gpus in MIST_RUNS:
        yield mist_row(model, gpus, seconds)


# The command


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of one paper as a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [f"| case | {' | '.join(names)} | paper |", "|" + "---|" * (len(names) + 2)]
    for row in rows:
        values = (row.figures.get(name) for name in names)
        shown = ["" if value is None else f"{value:.3f}" for value in values]
        lines.append(f"| {row.case} | {' | '.join(shown)} | {row.paper} |")
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    return [*lines, "", *(f"- {note}" for note in notes)]


def main(argv: Sequence[str] | None = None) -> int:
    """Predict what is asked for and print it."""
    parser = argparse.ArgumentParser(prog="benchmark_papers.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=("lancet", "comet", "mist"), help="may repeat")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of each search over plans")
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    arguments = parser.parse_args(argv)
    papers: dict[str, Callable[[], Iterator[Row]]] = {
        "lancet": lancet,
        "comet": comet,
        "mist": lambda: mist(arguments.time_limit),
    }
    answer = {}
    for name in arguments.only or papers:
        rows = []
        for row in papers[name]():
            print(row.case, file=sys.stderr)
            rows.append(row)
        answer[name] = [asdict(row) for row in rows]
        if not arguments.json:
            print("\n".join([f"## {name.capitalize()}", "", *table(rows), ""]))
    if arguments.json:
        print(json.dumps(answer, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
