"""Measure the gain of reducing a gradient in the gaps between all-to-alls, and its cost for the all-to-alls.

    tools/benchmark_gradient_gaps.py [--namespaces | --emulator] [--mbit 500] [--repeats 5] [--json] [flags of pretrain_moe.py]

Two ranks, each on its own host, are joined by links of a given rate; operators sleep for the seconds below, communication is
real. The gradient of the head, 100 MB unless flags change the model, is complete when the backward passes of the layers begin.
Four variants take turns: it is not reduced; reduced in buckets that fill the gaps; in one collective that starts immediately; and
in one collective after the last backward pass. The size of a bucket is what the shortest gap can carry.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model, known_vocab_size
from megatron.training.cli.validation import validate
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.gradient_buckets import gaps
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.operators import BACKWARD, WEIGHT_GRADIENT, parse_operator
from moe_overlap.plan.sizes import GRADIENT_BYTES
from tools.bench.bed import require_namespaces
from tools.bench.launch import RankFailed, links_name, ranks_on_bed, report_failure
from tools.bench.variants import HEAD, MODEL, Reduction, Variant, deferral, job_flags
from tools.bench.worker import ORDER_STEP, ORDER_USE

RANKS = 2
GATE = "topk"
FLAGS = (*MODEL, "--num-layers", "4", "--tokenizer-type", "NullTokenizer", "--vocab-size", "51200")
IN_ONE = ("--overlap-grad-reduce", "--ddp-bucket-size", str(1 << 40))
SECONDS = {
    "embedding": 0.005,
    "attention": 0.05,
    "moe.gate": 0.01,
    "moe.experts": 0.06,
    "moe.merge": 0.005,
    "head.norm": 0.002,
    "head.loss": 0.02,
}
"""Seconds of an operator; backward, without its deferred weight gradients, it takes twice as long."""
WEIGHT_GRADIENT_SECONDS = 0.01
SHARE = 0.9
"""Share of the shortest gap's bytes that a bucket takes."""
REDUCTIONS: tuple[Reduction, ...] = ("none", "in gaps", "at once", "at the end")


def list_of(flags: Sequence[str]) -> tuple[Instruction, ...]:
    """The list of rank 0."""
    parsed = parse(flags)
    validate(parsed.config, RANKS)
    vocabulary = known_vocab_size(parsed.config)
    assert vocabulary is not None, "the tokenizer says how large its vocabulary is"
    model = describe_model(parsed.config, vocabulary, parsed.name)
    return lower(plan_from_flags(parsed.config, model, RANKS), model, 0)


def seconds_of(name: str) -> float:
    """Seconds for which a computation sleeps."""
    operator = parse_operator(name)
    if operator.phase == WEIGHT_GRADIENT:
        return WEIGHT_GRADIENT_SECONDS
    return SECONDS[operator.kind] * (2 if operator.phase == BACKWARD else 1)


def shortest_gap(instructions: Sequence[Instruction]) -> float:
    """Seconds of the shortest gap of the backward pass that an all-to-all follows."""
    backward = [gap for gap in gaps(instructions)[:-1] if all(i.in_backward_pass for i in gap)]
    return min(sum(seconds_of(i.name) for i in gap) for gap in backward)


def variants_of(flags: Sequence[str], bytes_per_second: float) -> tuple[list[Variant], dict[str, float]]:
    """The four variants, and the figures that size the buckets."""
    base = deferral(GATE).flags
    gap = shortest_gap(list_of([*flags, *base]))
    # A ring of D ranks sends (D - 1) / D of the reduced bytes.
    parameters = int(SHARE * gap * bytes_per_second * RANKS / (RANKS - 1) / GRADIENT_BYTES)
    in_buckets = (*base, "--overlap-grad-reduce", "--ddp-bucket-size", str(parameters))
    head = [i.bytes for i in list_of([*flags, *in_buckets]) if i.name == HEAD]
    sizes = {"shortest_gap_seconds": gap, "pieces": len(head), "sent_bytes": sum(head)}
    ways = dict.fromkeys(REDUCTIONS, (*base, *IN_ONE)) | {"in gaps": in_buckets}
    return [Variant(name, ways[name], reduction=name) for name in REDUCTIONS], sizes


def measure(arguments: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Measure all variants in turn; figures of the slowest rank."""
    chosen, sizes = variants_of(flags, arguments.mbit * 1e6 / 8)
    names = {i.name for v in chosen for i in list_of([*flags, *v.flags]) if i.micro_batch is not None}
    profile = {name: seconds_of(name) for name in names if not parse_operator(name).is_collective}
    measured: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in chosen}
    where = {"timer": True, "namespaces": arguments.namespaces, "mbit": arguments.mbit}
    with ranks_on_bed(RANKS, flags, [chosen], deferral(GATE), **where) as ranks:
        ranks.tell(do=ORDER_USE, profile=profile)
        for repeat in range(arguments.repeats + 1):
            for variant in chosen:
                answers = ranks.tell(do=ORDER_STEP, variant=variant.name, scale=1.0)
                if repeat > 0:  # the first one opens connections
                    measured[variant.name].append({key: max(a[key] for a in answers) for key in answers[0]})
    rows = {name: spreads(steps) for name, steps in measured.items()}
    return {"mbit": arguments.mbit, "links": links_name(arguments), **sizes, "variants": rows}


def spreads(steps: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Minimum, median and maximum of a step and of the sum of its all-to-alls' spans, in seconds."""
    by_figure = {}
    for name, figure in (("step", "whole"), ("exchanges", "exchanges")):
        values = [step[figure] for step in steps]
        by_figure[name] = [min(values), statistics.median(values), max(values)]
    return by_figure


def table(record: dict[str, Any]) -> str:
    """Aligned text."""
    rows = [f"{'reduction':<12}{'step s':<22}{'all-to-alls s':<22}"]
    for name, row in record["variants"].items():
        cells = [" ".join(f"{value:.3f}" for value in row[figure]) for figure in ("step", "exchanges")]
        rows.append(f"{name:<12}{cells[0]:<22}{cells[1]:<22}")
    size = f"{record['sent_bytes'] / 1e6:.1f} MB leave a rank, in {record['pieces']} buckets"
    gap = f"the shortest gap is {record['shortest_gap_seconds']:.3f} s, the links have {record['mbit']:g} Mbit/s"
    return "\n".join([f"{size}; {gap}", *rows])


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags that go on to pretrain_moe.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--namespaces", action="store_true")
    links.add_argument("--emulator", dest="namespaces", action="store_false")
    parser.add_argument("--mbit", type=float, default=500.0, help="rate of every rank's exit, in 10^6 bit/s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    arguments, rest = parse_arguments(argv)
    try:
        if arguments.repeats < 1:
            raise ConfigError("--repeats", arguments.repeats, "must be positive", "use at least 5")
        if arguments.namespaces:
            require_namespaces()
        record = measure(arguments, [*job_flags(RANKS, 1, 2), *FLAGS, *rest])
    except (ConfigError, RankFailed) as error:
        return report_failure(error)
    print(json.dumps(record, indent=1) if arguments.json else table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
