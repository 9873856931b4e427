"""The papers' comparisons as predictions, next to the ratios in print: `tools/benchmark_papers.py [--only NAME …] [--json]`

lancet   Lancet, figures 2, 11 to 13, 15 and 16: GPT2-S-MoE and GPT2-L-MoE with two experts a GPU on nodes of p4de (A100) and p3dn
         (V100), with the gates of Switch and of Batch Prioritized routing.
comet    COMET, figure 1(a): the share of communication in the forward pass of three models on 8 H800.
mist-N   Mist, figure N (2, 3, 5 with 16, 11 to 15), `mist-averaging` and `mist-uniform`: tools/bench/mist_figures.py.
alpa-gpt, alpa-moe, alpa-time
         Alpa, parts of its space against the complete space, and search time: tools/bench/alpa_figures.py. `large` is there, too.
alpa-sharding
         Alpa, one stage in which each operator has its own sharding: tools/bench/alpa_sharding.py.

Nothing runs on a GPU: both sides of every ratio are predicted with the shipped constants. The texts of the papers give averages
and maxima, not the values of the bars. The V100 was not calibrated under Megatron, so it gets the A100's efficiencies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.arguments import expand_files
from moe_overlap.api import Options, predict, simulated, tune
from moe_overlap.describe.cluster import Cluster, cluster_of, known_gpu, node_group, shipped_cluster
from moe_overlap.plan.instructions import EXPERT
from moe_overlap.plan.overlap import Mechanism, SearchLimits
from moe_overlap.plan_search.results import Tuned
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants
from tools.bench import alpa_figures, mist_figures
from tools.bench.alpa_sharding import sharding
from tools.bench.paper_rows import Row, table
from tools.bench.paper_searches import KeptSearches
from tools.bench.paper_spaces import is_worse, rows, search_all

ROOT = Path(__file__).resolve().parents[1]
SHARE = "all-to-all share"
NODE = 8
"""GPUs of a node of both clusters."""
MOST_PARTITIONS = 8
"""ρ of Lancet's experiments, section 7."""
SEARCHED = {**mist_figures.FIGURES, **alpa_figures.FIGURES}
"""Comparisons that search over spaces."""


# Lancet

HOOKED = "--overlap-param-gather"
"""A flag of the examples that is dropped for Lancet's runs."""
V100 = "V100-32GB (p3dn.24xlarge)"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster of Lancet's section 7.

    Attributes:
        network_gb_per_s: bandwidth per GPU and direction: that of the node's network cards, shared by its GPUs.
        batch: samples per GPU, by model: s (GPT2-S-MoE) and l (GPT2-L-MoE).
    """

    name: str
    gpu: str
    network_gb_per_s: float
    batch: dict[str, int]
    options: Options

    def cluster(self, nodes: int) -> Cluster:
        """A cluster of this number of nodes."""
        group = node_group(known_gpu(self.gpu, "--gpu"), nodes, NODE) | {"network_gb_per_s": self.network_gb_per_s}
        return cluster_of({"name": f"{nodes} nodes of {self.name}", "groups": [group]}, "--cluster")


def with_a100_efficiencies() -> Constants:
    """Shipped constants with the A100's efficiencies for the V100.

    The V100's constants were fitted to another program's runs on p3.16xlarge, whose collectives used 11 % of the bandwidth.
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
"""Reduction of exposed communication, relative to the same program without Lancet (figure 13)."""


def lancet_arguments(model: str, gpus: int, batch: int, gate: str) -> list[str]:
    """The flags of GPT2-S-MoE or GPT2-L-MoE, whose sizes grow with the GPUs: two experts and `batch` samples per GPU."""
    return [
        f"@{ROOT / 'examples' / f'gpt2-{model}-moe.args'}",
        *("--num-experts", str(2 * gpus), "--expert-model-parallel-size", str(gpus)),
        *("--micro-batch-size", str(batch), "--global-batch-size", str(batch * gpus), "--moe-gate", gate),
    ]


def fastest(tuned: Tuned, defers: bool, mechanism: Mechanism | None = None) -> float | None:
    """Step seconds of the fastest candidate with or without deferred weight gradients; None if there is none.

    Args:
        mechanism: the mechanism that overlaps its layers; None: any.
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
    """One model with one gate on a number of nodes."""
    cluster, limits = (
        site.cluster(nodes),
        SearchLimits(max_partitions=MOST_PARTITIONS, group_seconds=0.0, range_limit=16),
    )
    arguments = lancet_arguments(model, cluster.gpus, site.batch[model], gate)
    begun = time.process_time()
    tuned = tune(arguments, cluster, limits, **site.options)
    searched = time.process_time() - begun
    plain = tuned.plain_seconds
    unhooked = [word for word in expand_files(arguments) if word != HOOKED]
    deferral = predict([*unhooked, "--defer-weight-gradients"], cluster, **site.options).predicted.step_seconds
    tutel, partitioned = fastest(tuned, False, "tutel"), fastest(tuned, False)
    assert tuned.chosen.prediction is not None
    bare = predict(arguments, cluster, **site.options)
    exposed_plain = bare.breakdown["exposed_expert_seconds"]
    exposed_chosen = tuned.chosen.prediction.breakdown["exposed_expert_seconds"]

    def gain(seconds: float | None) -> float | None:
        return None if seconds is None else plain / seconds

    figures = {
        "plain seconds": plain,
        SHARE: exposed_plain / plain,
        "all hidden": plain / (plain - exposed_plain),
        "best of 2, 4, 8 capacity chunks": gain(tutel),
        "weight gradients alone": gain(deferral),
        "partitions alone": gain(partitioned),
        "chosen": gain(tuned.chosen.seconds),
        "chosen against chunks": None if tutel is None else min(tutel, plain) / tuned.chosen.seconds,
        "exposed all-to-all less": 1.0 - exposed_chosen / exposed_plain,
        "search CPU seconds": searched,
    }
    paper = f"{PAPER_SPEEDUP[site.name, gate]} (against the best baseline); exposed {PAPER_EXPOSED[site.name]}"
    case = f"GPT2-{model.upper()}-MoE, {gate}, {cluster.gpus} GPUs of {site.name}"
    return Row(figure="Lancet 11-13, 15, 16", case=case, figures=figures, paper=paper, notes=bare.extrapolating)


def lancet() -> Iterator[Row]:
    """The rows of all clusters, gates, models and numbers of nodes."""
    for site in SITES:
        for gate in ("switch", "batch_prioritized"):
            for model in ("s", "l"):
                for nodes in (2, 4, 8):
                    yield lancet_row(site, model, gate, nodes)


# COMET

COMET_MODELS = {"mixtral-8x7b": 8, "qwen2-moe-2.7b": 8, "phi-3.5-moe": 8}
"""Model -> expert ranks on 8 GPUs. Figure 1(a) names no layout, so it is that of FasterMoE in figure 9: EP = W."""
COMET_TOKENS = (4096, 8192)
"""Tokens per sample: the paper's input lengths, without its layouts of tensor-parallel experts."""
DISPATCHERS = ("alltoall", "allgather")
"""The paper names no dispatcher; `allgather` is the default of its Megatron-LM."""


def comet_row(model: str, ranks: int, tokens: int, dispatcher: str) -> Row:
    """The forward pass of one model: the share of its all-to-alls."""
    arguments = [
        f"@{ROOT / 'examples' / f'{model}.args'}",
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--seq-length", str(tokens)),
        *("--expert-model-parallel-size", str(ranks), "--micro-batch-size", "1", "--global-batch-size", "8"),
        *("--max-position-embeddings", str(tokens), "--moe-token-dispatcher-type", dispatcher),
    ]
    step = simulated(arguments, shipped_cluster("H800", 8))
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
    """The rows of all models and lengths with each dispatcher, and their mean."""
    for dispatcher in DISPATCHERS:
        cases = itertools.product(COMET_MODELS.items(), COMET_TOKENS)
        rows = [comet_row(model, ranks, tokens, dispatcher) for (model, ranks), tokens in cases]
        yield from rows
        figures: dict[str, float | None] = {
            SHARE: statistics.mean(row.figures[SHARE] or 0.0 for row in rows),
        }
        yield Row(figure="COMET 1(a)", case=f"mean, {dispatcher}", figures=figures, paper="47 %")


# The command

WITHOUT_SPACES = {"lancet": lancet, "comet": comet, "alpa-sharding": sharding}
"""Comparisons without searches over spaces."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(prog="benchmark_papers.py", description=__doc__.partition("\n")[0])
    names = (*WITHOUT_SPACES, *SEARCHED)
    command.add_argument("--only", action="append", choices=names, help="may repeat; default all")
    command.add_argument(
        "--cpu-seconds", type=float, default=600.0, help="of each search over plans; then the best so far"
    )
    command.add_argument(
        "--all-cpu-seconds", type=float, default=math.inf, help="of all searches together; what is left stays unknown"
    )
    command.add_argument("--most-gpus", type=int, default=1024, help="cases of searches on more GPUs are left out")
    command.add_argument("--kept", type=Path, help="file of searches that are done: they are not done again")
    command.add_argument("--only-kept", action="store_true", help="search nothing; show what --kept has")
    command.add_argument("--json", action="store_true", help="print nothing but JSON")
    return command


def rows_of(name: str, searches: KeptSearches, most_gpus: int) -> Iterator[Row]:
    """The rows of a comparison."""
    if name in SEARCHED:
        return rows(SEARCHED[name](), searches, most_gpus)
    return WITHOUT_SPACES[name]()


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print the comparisons; returns 1 if the widest space of a figure has a slower plan than another space."""
    arguments = parser().parse_args(argv)
    searches = KeptSearches(
        path=arguments.kept,
        cpu_seconds=arguments.cpu_seconds,
        only_kept=arguments.only_kept,
        budget=arguments.all_cpu_seconds,
    )
    answer, worse = {}, []
    names = arguments.only or (*WITHOUT_SPACES, *SEARCHED)
    search_all([SEARCHED[name]() for name in names if name in SEARCHED], searches, arguments.most_gpus)
    for name in names:
        done = []
        for row in rows_of(name, searches, arguments.most_gpus):
            print(row.case, file=sys.stderr)
            done.append(row)
        answer[name] = [asdict(row) for row in done]
        worse += [
            f"{name}: {row.case}: the widest space has a slower plan than another" for row in done if is_worse(row)
        ]
        if not arguments.json:
            print("\n".join([f"## {name.capitalize()}", "", *table(done), ""]))
    if arguments.json:
        print(json.dumps(answer, indent=1))
    print("\n".join(worse), end="\n" if worse else "", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
