"""Decide how a run overlaps its communication: `tools/autotune.py --overlap-only`.

    python tools/autotune.py --overlap-only --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64 --output tuned
    torchrun ... pretrain_moe.py @tuned/megatron_args.txt

For the parallel layout of the flags, ways to hide all-to-all are searched and their steps predicted. Written to --output:
plan.json (where something is overlapped), megatron_args.txt (the flags that run it), trace.json (the predicted step with few
micro-batches, for ui.perfetto.dev). Printed: what was chosen, and why the others were not.

    torchrun ... pretrain_moe.py @tuned/megatron_args.txt --trace measured.json
    python tools/autotune.py --overlap-only ... --refine measured.json --output tuned2

With traces of runs of the same job, whatever they overlap, its prices are refined by what was measured (moe_overlap/refining.py);
the plan that was measured stays where nothing is predicted to be faster. A trace is of a run's last step: let it make a few.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.cli.arguments import expand_files
from moe_overlap import VERSION_LINE
from moe_overlap.commands.job_arguments import add_job_arguments, cluster_of, words_of
from moe_overlap.commands.predict import as_json, write_trace
from moe_overlap.describe.cluster import GIB
from moe_overlap.describe.errors import ConfigError
from moe_overlap.overlap_candidates import PLAIN, Candidate
from moe_overlap.overlap_tuning import Tuned, tune_overlap
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.serialize import save_plan
from moe_overlap.refining import refinement_json, refinement_lines
from moe_overlap.tuner.search.layer.mechanisms import ClassChoice, Mix, Tried

# What was decided for each class of layers, as text and JSON: a part of the answer of tools/autotune.py.


def classes_json(mix: Mix | None) -> dict[str, Any] | None:
    """Steps are those without deferred weight gradients; null where no plan with overlap fits."""
    if mix is None:
        return None
    return {
        "step_seconds": mix.seconds,
        "differs_from_uniform": mix.changed,
        "predictions": mix.predictions,
        "complete": mix.complete,
        "classes": [_class_json(one) for one in mix.classes],
    }


def _class_json(one: ClassChoice) -> dict[str, Any]:
    others = [
        {"mechanism": name, "refused": tried.refused}
        if tried.seconds is None
        else {"mechanism": name, "step_seconds": tried.seconds}
        for name, tried in one.others
    ]
    return {"class": one.alike.name, "layers": list(one.alike.layers), "mechanism": one.chosen, "others": others}


def classes_text(mix: Mix | None) -> list[str]:
    """A line for each class, and one for each of its other mechanisms."""
    if mix is None:
        return ["", "by class of layers: nothing that overlaps fits"]
    kind = "a mix" if mix.changed else "no mix is shorter"
    ended = "" if mix.complete else ", ended by their number"
    head = f"by class of layers: {kind}, {mix.seconds:.4f} s a step without deferred weight gradients"
    lines = ["", f"{head}; {mix.predictions} predictions{ended}"]
    for one in mix.classes:
        lines.append(f"           {_shown(one.alike.layers)} ({one.alike.name}): {one.chosen}")
        lines += [f"             not {name}: {_why_of_class(tried, mix.seconds)}" for name, tried in one.others]
    return lines


def _why_of_class(tried: Tried, chosen: float) -> str:
    return tried.refused if tried.seconds is None else f"{tried.seconds:.4f} s ({tried.seconds / chosen - 1:+.2%})"


def _shown(layers: tuple[int, ...]) -> str:
    """`L3 L7 … L59 (15)`."""
    if len(layers) <= 4:
        return " ".join(f"L{layer}" for layer in layers)
    return f"L{layers[0]} L{layers[1]} … L{layers[-1]}, {len(layers)} layers"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        if not arguments.overlap_only:
            rule = "parallelism and memory are not searched yet"
            raise ConfigError("--overlap-only", "missing", rule, "add it to decide the overlap of these flags")
        cluster = cluster_of(arguments)
        limits = SearchLimits(
            max_partitions=arguments.overlap_max_partitions,
            group_seconds=arguments.overlap_group_seconds,
            range_limit=arguments.overlap_range_limit,
        )
        given = {"software": arguments.software, "expert_load": arguments.expert_load}
        tuned = tune_overlap(words_of(arguments), cluster, limits, arguments.time_limit, arguments.refine, **given)
        folder = Path(arguments.output)
        write_run(folder, tuned.chosen)
        write_trace(folder / "trace.json", tuned.step)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(tuned_json(tuned), indent=1) if arguments.json else tuned_text(tuned, folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    add_job_arguments(parser)
    parser.add_argument("--output", metavar="DIR", required=True, help="where the plan, the flags and the trace go")
    parser.add_argument("--overlap-only", action="store_true", help="keep the parallel layout, decide the overlap")
    parser.add_argument("--overlap-max-partitions", metavar="N", type=int, default=8, help="most partitions of a range")
    parser.add_argument(
        "--overlap-group-seconds", metavar="S", type=float, default=0.0, help="shorter operators are moved together"
    )
    parser.add_argument("--overlap-range-limit", metavar="N", type=int, default=16, help="most groups in a range")
    parser.add_argument("--time-limit", metavar="S", type=float, default=5.0, help="of each weight-gradient schedule")
    parser.add_argument("--software", metavar="RELEASE", help="efficiencies of a release, as 26.04; default the newest")
    parser.add_argument("--expert-load", metavar="FILE", help="recorded by --log-expert-load; default balanced routing")
    parser.add_argument(
        "--refine",
        metavar="TRACE",
        nargs="+",
        default=(),
        help="of --trace of pretrain_moe.py: what runs of this job took",
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    return parser


def write_run(folder: Path, chosen: Candidate) -> None:
    """Flags of a run, and the plan where there is one; ConfigError where they cannot be written."""
    target = folder / "megatron_args.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        words = list(expand_files(chosen.words))
        if chosen.name != PLAIN:
            assert chosen.prediction is not None
            plan = dataclasses.replace(chosen.decided, predicted=chosen.prediction.predicted)
            save_plan(plan, folder / "plan.json")
            words += ["--plan", str(folder / "plan.json")]
        target.write_text(_lines(words), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None


def _lines(words: Sequence[str]) -> str:
    """A flag and its values on each line."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return "".join(" ".join(line) + "\n" for line in lines)


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """The answer for programs: the chosen plan as tools/predict.py prints it, and the others."""
    assert tuned.chosen.prediction is not None
    refined = {} if tuned.refinement is None else {"refinement": refinement_json(tuned.refinement)}
    decided = {
        "chosen": tuned.chosen.name,
        "plain_step_seconds": tuned.plain_seconds,
        "dropped_flags": list(tuned.chosen.dropped),
        "layer_classes": classes_json(tuned.mix),
        "runners_up": [_as_json(other) for other in tuned.others],
        "search": {"seconds": tuned.search_seconds},
    }
    return as_json(tuned.chosen.prediction) | refined | decided


def _as_json(one: Candidate) -> dict[str, Any]:
    if one.prediction is None:
        return {"name": one.name, "refused": one.refused}
    measured = {} if one.measured_seconds is None else {"measured_step_seconds": one.measured_seconds}
    return {"name": one.name, "step_seconds": one.seconds, "fits": one.prediction.fits, **measured}


def tuned_text(tuned: Tuned, folder: Path) -> str:
    """The answer for a reader."""
    chosen = tuned.chosen
    gained = tuned.plain_seconds / chosen.seconds
    lines = [] if tuned.refinement is None else [*refinement_lines(tuned.refinement), ""]
    lines += [f"chosen     {chosen.name}: {_figures(chosen)}, {gained:.3f}x of {PLAIN} ({tuned.plain_seconds:.4f} s)"]
    assert chosen.prediction is not None
    lines += [f"does not fit: {text}" for text in chosen.prediction.overflow]
    lines += [f"without    {flag}: a list places that communication itself" for flag in chosen.dropped]
    lines += [f"           {line}" for line in _decisions(chosen)]
    lines += [f"not        {other.name}: {_why(other, chosen)}" for other in tuned.others]
    lines += classes_text(tuned.mix)
    lines += [
        "",
        f"searched   {tuned.search_seconds:.1f} s",
        f"written    {folder}: plan.json, megatron_args.txt, trace.json",
    ]
    lines += [f"next       torchrun ... pretrain_moe.py @{folder / 'megatron_args.txt'}"]
    return "\n".join(lines)


def _figures(one: Candidate) -> str:
    assert one.prediction is not None
    predicted = one.prediction.predicted
    peak = max(stage.peak_bytes for stage in predicted.stages) / GIB
    measured = "" if one.measured_seconds is None else f" (measured {one.measured_seconds:.4f} s)"
    return f"{one.seconds:.4f} s a step{measured}, peak {peak:.1f} GiB"


def _why(other: Candidate, chosen: Candidate) -> str:
    if other.prediction is None:
        return other.refused
    if not other.prediction.fits:
        return f"{_figures(other)}; does not fit: {other.prediction.overflow[0]}"
    compared = f"{_figures(other)} ({other.seconds / chosen.seconds - 1:+.1%})"
    return f"{compared}, no more than predictions err" if other.seconds < chosen.seconds else compared


def _decisions(chosen: Candidate) -> list[str]:
    lines = []
    for stage in chosen.ranges.stages if chosen.ranges is not None else ():
        for one in stage.ranges:
            lines.append(
                f"{one.first_operator} … {one.last_operator} in {one.partitions} parts: "
                f"{one.seconds * 1e3:.3f} ms a micro-batch, whole {one.uncut_seconds * 1e3:.3f}"
            )
        lines += [
            f"{one.first_operator} … {one.last_operator}: memory allows {one.most_partitions} parts"
            for one in stage.lowered
        ]
    if chosen.schedule is not None:
        for chunk in chosen.schedule.chunks:
            solution = chunk.solution
            lines.append(
                f"weight gradients of stage {chunk.stage}, chunk {chunk.chunk}: {solution.value * 1e3:.3f} ms under exchanges, "
                f"greedy {solution.greedy_value * 1e3:.3f}, at most {solution.bound * 1e3:.3f} (gap {solution.gap:.1%})"
            )
        for index, seconds in enumerate(chosen.schedule.behind_seconds):
            if seconds > 0:
                lines.append(
                    f"weight gradients of stage {index}: {seconds * 1e3:.3f} ms behind its sends to the stage before"
                )
    return lines


def run() -> int:
    """Entry point of `moe-tune` and `tools/autotune.py`."""
    # The search makes millions of small objects and no cycles of them: looking for some takes a quarter of its time.
    gc.disable()
    return main()
