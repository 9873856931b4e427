"""The answer of `tune`: as JSON, as text, and as the files of a run.

About ten lines have the refinement by traces (if any), the chosen plan with its figures, and the runners-up with the reason why
each was not chosen; --verbose has every candidate, and the mechanism of every class of layers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_overlap.describe.cluster import GIB, Cluster, start_flags
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.capabilities import GRAPHS_FLAG as GRAPHS
from moe_overlap.plan_search.results import Leeway, Tuned
from moe_overlap.report.answer import Answer, answer_lines, devices, line, runner_up, untried_lines, unwritten_lines
from moe_overlap.report.answer_files import PLAN, put_away_others, run_texts, write_run_files
from moe_overlap.report.html import CandidateRow, Report, write_report
from moe_overlap.report.prediction import prediction_json
from moe_overlap.report.trace import write_trace
from moe_overlap.tuner.calibrate.refine import Refinement
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.search.layer.candidates import PLAIN, Candidate
from moe_overlap.tuner.search.layer.mechanisms import ClassChoice, Mix, Tried
from moe_overlap.tuner.search.layer.overlap import WORTH, GraphsChoice
from moe_overlap.tuner.write.argument_file import WrittenFlags
from moe_overlap.tuner.write.flags_left_out import LEFT_OUT
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, arguments_to_add

# JSON


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """The answer as JSON: the prediction of the chosen plan as in tools/predict.py, and the other candidates."""
    assert tuned.chosen.prediction is not None
    refined = {} if tuned.refinement is None else {"refinement": refinement_json(tuned.refinement)}
    decided = {
        "chosen": tuned.chosen.name,
        "plain_step_seconds": tuned.plain_seconds,
        "dropped_flags": list(tuned.dropped),
        "assumed": list(tuned.assumed),
        "layer_classes": classes_json(tuned.mix),
        "graphs": graphs_json(tuned.graphs),
        "runners_up": [_candidate_json(other) for other in tuned.others],
        "search": {"seconds": tuned.search_seconds},
    }
    return prediction_json(replace(tuned.chosen.prediction, launching=tuned.launching)) | refined | decided


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    if candidate.prediction is None:
        return {"name": candidate.name, "refused": candidate.refused}
    seconds = candidate.measured_seconds
    measured = {} if seconds is None else {"measured_step_seconds": seconds}
    return {"name": candidate.name, "step_seconds": candidate.seconds, "fits": candidate.prediction.fits, **measured}


def classes_json(mix: Mix | None) -> dict[str, Any] | None:
    """The classes of layers as JSON, with steps without deferred weight gradients; None if no plan with overlap fits."""
    if mix is None:
        return None
    return {
        "step_seconds": mix.seconds,
        "differs_from_uniform": mix.changed,
        "predictions": mix.predictions,
        "complete": mix.complete,
        "classes": [_class_json(choice) for choice in mix.classes],
    }


def _class_json(choice: ClassChoice) -> dict[str, Any]:
    others = [
        {"mechanism": name, "refused": tried.refused}
        if tried.seconds is None
        else {"mechanism": name, "step_seconds": tried.seconds}
        for name, tried in choice.others
    ]
    layers = list(choice.layer_class.layers)
    return {"class": choice.layer_class.name, "layers": layers, "mechanism": choice.chosen, "others": others}


def graphs_json(graphs: GraphsChoice | None) -> dict[str, Any] | None:
    """The choice on CUDA graphs as JSON; None if there is no choice."""
    if graphs is None:
        return None
    other = graphs.other
    return {
        "replayed": graphs.is_on,
        "other": graphs.name,
        "other_step_seconds": None if other is None else other.predicted.step_seconds,
        "other_fits": None if other is None else other.fits,
        "refused": graphs.refused,
    }


def refinement_json(refinement: Refinement) -> dict[str, Any]:
    """The refinement as JSON: the factor of every kind of instruction, and each measured step with its predictions."""
    return {
        "kinds": [
            {
                "kind": fitted.kind[0],
                "in_pieces": fitted.kind[1],
                "predicted_seconds": fitted.predicted_seconds,
                "measured_seconds": fitted.measured_seconds,
                "at_most": fitted.is_bound,
                "factor": fitted.factor,
                "taken_as_measured": fitted.is_taken,
            }
            for fitted in refinement.kinds
        ],
        "steps": [
            {
                "trace": str(step.path),
                "measured_seconds": step.seconds,
                "predicted_seconds": step.before_seconds,
                "refined_seconds": step.after_seconds,
                "waiting": step.waiting,
            }
            for step in refinement.steps
        ],
    }


# Text.


def tuned_lines(tuned: Tuned, folder: Path | None, cluster: Cluster, files: Sequence[str] = ()) -> list[str]:
    """The answer in about ten lines, in the form of a search; `tuned_details` has the rest.

    Args:
        folder: the folder of the answer; None if nothing is written.
        files: the names of its files.
    """
    chosen = tuned.chosen
    assert chosen.prediction is not None and chosen.plan is not None
    lines = [] if tuned.refinement is None else [*refined_lines(tuned.refinement)]
    lines += answer_lines(answer_of(tuned, cluster))
    lines += [line("overlap", _overlap_sentence(tuned))]
    if chosen.measured_seconds is not None:
        lines += [line("measured", f"{chosen.measured_seconds:.3f} s a step")]
    if answers_graphs(tuned.graphs, chosen.prediction):
        lines += [line("graphs", text) for text in graphs_lines(tuned.graphs, chosen.prediction)]
    lines += [line("without", f"{flag}: {LEFT_OUT[flag]}") for flag in tuned.dropped]
    lines += untried_lines(chosen.plan)
    if folder is None:
        return [*lines, *unwritten_lines()]
    lines += [line("written", f"{folder}: {', '.join(files)}")]
    if not chosen.prediction.fits:
        return [
            *lines,
            line("next", "tools/predict.py on these flags: it names the cheapest change that makes them fit"),
        ]
    if SCRIPT in files:
        added = arguments_to_add(grouped(tuned.arguments), "moe-overlap")
        return [*lines, line("next", f"sbatch {shlex.quote(str(folder / SCRIPT))} {added}".rstrip())]
    ranks = start_flags(chosen.plan.world_size, cluster.group_of(0).gpus_per_node)
    flags = shlex.quote(f"@{folder / ARGUMENTS}")
    return [*lines, line("next", f"python pretrain_moe.py {ranks}{flags}")]


def _overlap_sentence(tuned: Tuned) -> str:
    """The gain of the chosen overlap, and the number of those it was chosen among."""
    chosen = tuned.chosen
    gained = f"{chosen.name}: {tuned.plain_seconds / chosen.seconds:.2f} times as fast as {PLAIN} ({tuned.plain_seconds:.3f} s)"
    refused = sum(other.prediction is None for other in tuned.others)
    refusals = f"; {refused} more are refused" if refused else ""
    mixes = 0 if tuned.mix is None else tuned.mix.predictions
    mixed = f" and {mixes} mixes by class of layers" if mixes else ""
    compared = f"{1 + len(tuned.others) - refused} ways{mixed} were compared{refusals} (--verbose)"
    return f"{f'none is faster than {PLAIN}' if chosen.name == PLAIN else gained}; {compared}"


def answer_of(tuned: Tuned, cluster: Cluster) -> Answer:
    """The answer about the chosen overlap, with the other candidates as runners-up."""
    chosen = tuned.chosen
    assert chosen.prediction is not None
    others = [
        runner_up(other.name, other.prediction, chosen.prediction)
        for other in tuned.others
        if other.prediction is not None
    ]
    assumed = (*chosen.prediction.assumed, *tuned.assumed)
    prediction = replace(chosen.prediction, assumed=assumed, launching=tuned.launching)
    return Answer(
        plan=chosen.decided,
        prediction=prediction,
        cluster=cluster,
        runners_up=others,
        is_searched=True,
        leeway=Leeway(no_overlap="it is decided", keeps_layout=True),
    )


def answers_graphs(graphs: GraphsChoice | None, chosen: Prediction) -> bool:
    """Whether the short answer has a line on CUDA graphs; if they gain nothing, only --verbose has it.

    Args:
        chosen: the prediction of the chosen plan.
    """
    return graphs is not None and (graphs.is_on or graphs_help(graphs, chosen))


def tuned_details(tuned: Tuned) -> list[str]:
    """Lines of --verbose: refined prices, decisions of the chosen plan, all other candidates, all classes of layers."""
    lines = [] if tuned.refinement is None else [*kind_lines(tuned.refinement), ""]
    lines += [line("decided", text) for text in _decisions(tuned.chosen)]
    lines += [line("not", f"{other.name}: {_why(other, tuned.chosen)}") for other in tuned.others]
    prediction = tuned.chosen.prediction
    if prediction is not None and not answers_graphs(tuned.graphs, prediction):
        lines += [line("graphs", text) for text in graphs_lines(tuned.graphs, prediction)]
    return [*lines, *classes_text(tuned.mix)]


UNTRIED = "captured graphs have not run on hardware yet"


def graphs_lines(graphs: GraphsChoice | None, chosen: Prediction) -> list[str]:
    """The line on the alternative with, or without, CUDA graphs; empty if there is no choice.

    Args:
        chosen: the prediction of the chosen plan, for comparison.
    """
    if graphs is None:
        return []
    if graphs.other is None:
        return [f"none: {graphs.refused}"]
    seconds, other = chosen.predicted.step_seconds, graphs.other
    than = f"{other.predicted.step_seconds:.4f} s a step ({other.predicted.step_seconds / seconds - 1:+.1%})"
    if graphs.is_on:
        return [f"{GRAPHS}, as the flags ask; without it {than}; {UNTRIED}"]
    needed = other.fullest.needed_bytes / GIB
    fits = "" if other.fits else f", {other.memory_verdict}"
    # The overlap was chosen without graphs, which make launches cheaper: with them, more partitions may be faster.
    again = "search again with the flag; " if graphs_help(graphs, chosen) else ""
    return [f"with {GRAPHS} {graphs.name}: {than}, needs {needed:.1f} GiB{fits}; {again}{UNTRIED}"]


def graphs_help(graphs: GraphsChoice, chosen: Prediction) -> bool:
    """Whether an answer without CUDA graphs would fit and be significantly faster with them."""
    if graphs.is_on or graphs.other is None:
        return False
    return graphs.other.fits and graphs.other.predicted.step_seconds < chosen.predicted.step_seconds * (1.0 - WORTH)


def _figures(candidate: Candidate) -> str:
    assert candidate.prediction is not None
    needed = candidate.prediction.fullest.needed_bytes / GIB
    measured = "" if candidate.measured_seconds is None else f" (measured {candidate.measured_seconds:.4f} s)"
    return f"{candidate.seconds:.4f} s a step{measured}, needs {needed:.1f} GiB"


def _why(other: Candidate, chosen: Candidate) -> str:
    """Why another candidate was not chosen."""
    if other.prediction is None:
        return other.refused
    if not other.prediction.fits:
        return f"{_figures(other)}; {other.prediction.overflow[0]}"
    compared = f"{_figures(other)} ({other.seconds / chosen.seconds - 1:+.1%})"
    return f"{compared}, less than predictions tell apart" if other.seconds < chosen.seconds else compared


def _decisions(chosen: Candidate) -> list[str]:
    """Lines on the ranges, chunks and stages of the chosen plan, with the seconds that each hides."""
    lines = []
    for stage in chosen.ranges.stages if chosen.ranges is not None else ():
        for chosen_range in stage.ranges:
            lines.append(
                f"{chosen_range.first_operator} … {chosen_range.last_operator} in {chosen_range.partitions} parts: "
                f"{chosen_range.seconds * 1e3:.3f} ms a micro-batch, whole {chosen_range.uncut_seconds * 1e3:.3f}"
            )
        lines += [
            f"{lowered.first_operator} … {lowered.last_operator}: memory allows {lowered.most_partitions} parts"
            for lowered in stage.lowered
        ]
    if chosen.schedule is not None:
        for chunk in chosen.schedule.chunks:
            solution = chunk.solution
            lines.append(
                f"weight gradients of stage {chunk.stage}, chunk {chunk.chunk}: {solution.value * 1e3:.3f} ms under all-to-alls, "
                f"greedy {solution.greedy_value * 1e3:.3f}, at most {solution.bound * 1e3:.3f} (gap {solution.gap:.1%})"
            )
        for index, seconds in enumerate(chosen.schedule.bubble_slot_seconds):
            if seconds > 0:
                lines.append(
                    f"weight gradients of stage {index}: {seconds * 1e3:.3f} ms after its sends to the previous stage"
                )
    return lines


def classes_text(mix: Mix | None) -> list[str]:
    """A line for each class of layers, and one for each of its other mechanisms."""
    if mix is None:
        return ["", "by class of layers: nothing that overlaps fits"]
    kind = "a mix" if mix.changed else "no mix is shorter"
    ended = "" if mix.complete else ", ended by their number"
    head = f"by class of layers: {kind}, {mix.seconds:.4f} s a step without deferred weight gradients"
    lines = ["", f"{head}; {mix.predictions} predictions{ended}"]
    for choice in mix.classes:
        lines.append(
            f"           {_shown_layers(choice.layer_class.layers)} ({choice.layer_class.name}): {choice.chosen}"
        )
        lines += [f"             not {name}: {_why_of_class(tried, mix.seconds)}" for name, tried in choice.others]
    return lines


def _why_of_class(tried: Tried, chosen: float) -> str:
    return tried.refused if tried.seconds is None else f"{tried.seconds:.4f} s ({tried.seconds / chosen - 1:+.2%})"


def _shown_layers(layers: tuple[int, ...]) -> str:
    """`L3 L7 … L59, 15 layers`."""
    if len(layers) <= 4:
        return " ".join(f"L{layer}" for layer in layers)
    return f"L{layers[0]} L{layers[1]} … L{layers[-1]}, {len(layers)} layers"


def kind_lines(refinement: Refinement) -> list[str]:
    """A table of kinds of instructions that were both measured and predicted, and lines on the others."""
    both = [fitted for fitted in refinement.kinds if fitted.predicted_seconds and fitted.measured_seconds]
    lines = [f"{'kind':<34}{'predicted ms':>14}{'measured ms':>13}{'factor':>10}"]
    for fitted in both:
        name = f"{fitted.kind[0]}{', in pieces' if fitted.kind[1] else ''}"
        most = " (at most: it was hidden)" if fitted.is_bound else ""
        seconds = f"{fitted.predicted_seconds * 1e3:>14.2f}{fitted.measured_seconds * 1e3:>13.2f}"
        lines.append(f"{name:<34}{seconds}{fitted.factor or 1.0:>10.2f}{most}")
    lacking = [fitted for fitted in refinement.kinds if fitted not in both]
    for treatment, kinds in (
        ("not measured, priced as before", [fitted for fitted in lacking if fitted.predicted_seconds]),
        ("not predicted, taken as measured", [fitted for fitted in lacking if fitted.is_taken]),
        ("not predicted", [fitted for fitted in lacking if fitted.measured_seconds and not fitted.is_taken]),
    ):
        lines += [f"{treatment}: {', '.join(sorted({fitted.kind[0] for fitted in kinds}))}"] if kinds else []
    return lines


def refined_lines(refinement: Refinement) -> list[str]:
    """A line for each measured step, with its prediction before and after the refinement."""
    lines = []
    for step in refinement.steps:
        before, after = (seconds / step.seconds - 1.0 for seconds in (step.before_seconds, step.after_seconds))
        lines.append(
            line(
                "refined",
                f"{step.path}: step of {step.seconds:.4f} s, predicted {step.before_seconds:.4f} s ({before:+.1%}), "
                f"now {step.after_seconds:.4f} s ({after:+.1%}); ranks wait for slower ones {step.waiting:.1%} of what they "
                "compute",
            )
        )
    return lines


# Files.


def write_tuned(folder: Path, tuned: Tuned, cluster: Cluster, tell: Callable[[str], None]) -> list[str]:
    """Write the flags, the plan, the script, the page and the trace, replacing an earlier answer.

    Args:
        tell: receives a message about renamed files of the earlier answer.
    Returns:
        The names of the files. There is no script for a measured machine, which may lack Slurm, and no plan without overlap.
    Raises:
        ConfigError: the files cannot be written, or nodes have different numbers of GPUs.
    """
    files = [*write_run(folder, tuned, cluster), "report.html", "trace.json"]
    answer = answer_of(tuned, cluster)
    # Before page and trace, which are large: even if the disk is full, no earlier plan remains with the new flags.
    put_away_others(folder, files, tell)
    title = f"The overlap of {answer.plan.model.name} on {devices(cluster)}"
    write_report(folder / "report.html", Report(answer=answer, title=title, step=tuned.step, candidates=_rows(tuned)))
    write_trace(folder / "trace.json", tuned.step, "--output", as_new_file=True)
    return files


def _rows(tuned: Tuned) -> list[CandidateRow]:
    """The candidates of the page, the chosen one first."""
    rows = []
    for candidate in (tuned.chosen, *tuned.others):
        prediction, is_chosen = candidate.prediction, candidate is tuned.chosen
        seconds = None if prediction is None else candidate.seconds
        needed = None if prediction is None else float(prediction.fullest.needed_bytes)
        note = "" if is_chosen else _why(candidate, tuned.chosen)
        rows.append(
            CandidateRow(name=candidate.name, seconds=seconds, needed_bytes=needed, note=note, is_chosen=is_chosen)
        )
    return rows


def write_run(folder: Path, tuned: Tuned, cluster: Cluster | None = None) -> list[str]:
    """Write the flags of the chosen plan, the plan if it overlaps anything, and the script that starts them on a cluster.

    Args:
        cluster: None: no script is written.
    Returns:
        The names of the files.
    Raises:
        ConfigError: the files cannot be written, or nodes have different numbers of GPUs.
    """
    chosen, arguments, plan = tuned.chosen, list(tuned.arguments), None
    if chosen.name != PLAIN:
        assert chosen.prediction is not None
        plan = replace(chosen.decided, predicted=chosen.prediction.predicted)
        # A relative path: --plan is resolved from the folder of the argument file, so the folder can be moved.
        arguments += ["--plan", PLAN]
    written = WrittenFlags(flags=grouped(tuple(arguments)), text=_lines(arguments), left_out=())
    texts = {ARGUMENTS: written.text} if cluster is None else run_texts(written, chosen.decided, cluster, "moe-overlap")
    write_run_files(folder, texts, plan)
    return [*([] if plan is None else [PLAN]), *texts]


def _lines(arguments: Sequence[str]) -> str:
    """A flag and its values on each line."""
    lines: list[list[str]] = []
    for word in arguments:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return "".join(" ".join(fields) + "\n" for fields in lines)
