"""Predict a training step before running it: seconds, throughput, and the memory of every stage.

    python tools/predict.py --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64

Reads Megatron flags, prints a summary or, with --json, everything; --trace FILE writes the step as it is simulated, for
ui.perfetto.dev and tools/compare_trace.py. torch is imported only to capture a layout that is not cached.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_overlap import VERSION_LINE
from moe_overlap.commands.job_arguments import add_job_arguments, cluster_of, words_of
from moe_overlap.describe.cluster import GIB, Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.trace import write_ranks
from moe_overlap.predicting import PRECISIONS, predict, simulated
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.simulate.step import SimulatedStep

GIVEN = ("precision", "software", "expert_load", "plan")
"""Options that `predict` takes as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake. A plan that does not fit is an answer, not a mistake."""
    arguments = _parser().parse_args(argv)
    try:
        cluster = cluster_of(arguments)
        words, given = words_of(arguments), {name: getattr(arguments, name) for name in GIVEN}
        prediction = predict(words, cluster, **given)
        step = simulated(words, cluster, **given) if arguments.trace is not None else None
        if step is not None:
            write_trace(arguments.trace, step)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = None if step is None else step.simulation.step_seconds
    if arguments.json:
        played = {} if seconds is None else {"simulated_step_seconds": seconds}
        print(json.dumps(as_json(prediction) | played, indent=1))
        return 0
    print(as_text(prediction, cluster))
    if seconds is not None:
        print(f"simulated: {seconds:.3f} s, with what the plan overlaps; {arguments.trace}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    add_job_arguments(parser)
    parser.add_argument("--plan", metavar="FILE", help="a plan that decides in place of the flags")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="in place of what the flags say")
    parser.add_argument("--software", metavar="RELEASE", help="efficiencies of a release, as 26.04; default the newest")
    parser.add_argument("--expert-load", metavar="FILE", help="recorded by --log-expert-load; default balanced routing")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a simulated step: one rank per stage, for ui.perfetto.dev"
    )
    return parser


def write_trace(path: str | Path, step: SimulatedStep) -> None:
    """Spans and kept bytes of a simulated step; ConfigError where the file cannot be written."""
    ranks = list(step.prices)
    try:
        write_ranks(
            Path(path),
            {rank: step.simulation.spans(rank) for rank in ranks},
            {rank: step.kept_bytes(rank) for rank in ranks},
        )
    except OSError as error:
        raise ConfigError("--trace", str(path), f"cannot be written: {error.strerror}", "give another file") from None


def as_json(prediction: Prediction) -> dict[str, Any]:
    """The answer for programs."""
    predicted = prediction.predicted
    return {
        "step_seconds": predicted.step_seconds,
        "tokens_per_second_per_gpu": predicted.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": predicted.model_tflops_per_gpu,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "does_not_fit": prediction.overflow,
        "capacity_bytes": prediction.capacity_bytes,
        "extrapolating": bool(prediction.extrapolating),
        "extrapolating_because": list(prediction.extrapolating),
        "not_modelled": list(prediction.not_modelled),
        "computed_early": list(prediction.computed_early),
        "breakdown": prediction.breakdown,
        "provenance": dataclasses.asdict(predicted.provenance),
        "stages": [dataclasses.asdict(stage) for stage in predicted.stages],
    }


def as_text(prediction: Prediction, cluster: Cluster) -> str:
    """The answer for a reader."""
    predicted, seconds = prediction.predicted, prediction.predicted.step_seconds
    lines = [
        f"step          {seconds:.3f} s on {cluster.gpus} × {cluster.group_of(0).gpu.name}",
        f"throughput    {predicted.tokens_per_second_per_gpu:.0f} tokens/s, "
        f"{predicted.model_tflops_per_gpu:.0f} TFLOP/s per GPU, MFU {prediction.mfu:.1%}",
        "",
    ]
    for name, part in prediction.breakdown.items():
        lines.append(f"  {name.removesuffix('_seconds').replace('_', ' '):<20}{part:>10.3f} s {part / seconds:>7.1%}")
    lines += ["", f"  {'stage':<7}{'micro-batch s':>14}{'peak GiB':>10}  of it"]
    for index, stage in enumerate(predicted.stages):
        peaks = dataclasses.asdict(stage.peak_bytes_by_category)
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in peaks.items() if size > GIB / 20)
        lines.append(f"  {index:<7}{stage.stable_seconds:>14.4f}{stage.peak_bytes / GIB:>10.1f}  {parts}")
    lines.append("")
    lines += [f"does not fit: {text}" for text in prediction.overflow]
    lines += [f"extrapolating: {reason}" for reason in prediction.extrapolating]
    lines += [f"not modelled: {flag}" for flag in prediction.not_modelled]
    lines += [f"computed early for lack of room: {text}" for text in prediction.computed_early]
    return "\n".join(lines).rstrip()
