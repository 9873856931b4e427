"""The answer of a plan search: as data, as JSON, as about ten lines, and as the files of a run."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_overlap.describe.cluster import start_flags
from moe_overlap.plan.serialize import as_values
from moe_overlap.plan_search.results import (
    APART,
    TIE,
    Finalist,
    Leeway,
    PlanSearch,
    Screened,
)
from moe_overlap.report.answer import (
    SHOWN_RUNNERS_UP,
    Answer,
    answer_lines,
    exposed_seconds,
    line,
    plan_sentence,
    runner_up,
    runner_up_lines,
    stages_sentence,
    training_json,
    untried_lines,
    unwritten_lines,
)
from moe_overlap.report.answer_files import run_texts, write_run_files
from moe_overlap.report.changes import change_lines, changes_json, helpful
from moe_overlap.report.prediction import prediction_json
from moe_overlap.report.sharding import sharding_details, sharding_json, sharding_lines
from moe_overlap.report.tuning import answers_graphs, graphs_json, graphs_lines
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.host import WORTH_A_LOOK
from moe_overlap.tuner.search.dispatchers import FIRST, LIBRARIES
from moe_overlap.tuner.search.pipeline.per_stage import StageSearch
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.write.dispatcher_flags import FLAGS
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, arguments_to_add
from moe_overlap.tuner.write.upstream_rules import PAIRED

EXECUTED = "--target moe-overlap: the best plan that runs today"
EARLY = "stopped early: better plans may be left"
ENDED = {
    Status.OPTIMAL: "the best is proven",
    Status.FEASIBLE: "the best is found, not proven",
    Status.INFEASIBLE: "none fits",
    Status.TIME_LIMIT: "stopped early",
    Status.CUT_OFF: "none is faster",
}
"""How a search of unlike stages ended, as text."""


# Data


def search_json(search: PlanSearch, train_tokens: float | None = None) -> dict[str, Any]:
    """The answer as JSON: the prediction of the chosen plan as in tools/predict.py, the plan itself, and the other candidates."""
    counts, solution = search.uniform.counts, search.solution
    executed = search.refusal is None
    training = training_json(search.prediction, search.cluster, train_tokens)
    return (
        prediction_json(search.prediction)
        | training
        | {
            "target": search.target,
            "search_space": search.space,
            "chosen": search.chosen.name,
            **({} if not search.dispatchers else {"dispatchers": _dispatchers_json(search)}),
            **({} if search.sharding is None else {"sharding": sharding_json(search.sharding)}),
            "simulated_step_seconds": simulated_json(search.chosen),
            "plan": as_values(search.plan),
            "arguments": search.written.arguments if executed else [],
            "not_executed": search.refusal,
            "written_for": search.written_for if executed else None,
            "overlap": None if search.tuned is None else search.tuned.chosen.name,
            "why_no_overlap": search.why_plain or None,
            "graphs": graphs_json(search.graphs),
            "baseline_step_seconds": None if search.baseline is None else search.baseline.predicted.step_seconds,
            "equal_stages_step_seconds": search.equal_stages_seconds,
            "changes": [] if search.baseline is None else changes_json(search.changes),
            "dropped_flags": [name for name, _ in search.written.left_out] if executed else [],
            "runners_up": [
                {
                    "name": other.name,
                    "step_seconds": other.seconds,
                    "simulated_step_seconds": simulated_json(other),
                    "needed_bytes": other.prediction.fullest.needed_bytes,
                    "fits": other.prediction.fits,
                    "arguments": list(other.plan_arguments),
                    "not_executed": other.refusal,
                }
                for other in search.others
            ],
            "overlap_screened": [dataclasses.asdict(layout) for layout in search.screened],
            "refused": [{"name": name, "rule": rule} for name, rule in search.refused],
            "frontier": [
                {"name": plan.name, "step_seconds": plan.seconds, "needed_bytes": plan.needed_bytes}
                for plan in search.uniform.frontier
            ],
            "search": {
                "seconds": search.seconds,
                "evaluations": counts.evaluated,
                "stage_evaluations": counts.stages,
                "pruned": counts.too_large + counts.too_slow,
                "pruned_by_memory": counts.too_large,
                "pruned_by_time": counts.too_slow,
                "not_reached": counts.not_reached,
                "layouts": counts.layouts,
                "objective": solution.objective,
                "bound": solution.bound,
                "gap": solution.gap,
                "status": solution.status.value,
                "ended_early": search.ended_early,
                **({} if search.staged is None else {"per_stage": _staged_json(search.staged)}),
            },
        }
    )


def _dispatchers_json(search: PlanSearch) -> dict[str, Any]:
    """The dispatcher of the plan, and the results of the others."""
    return {
        "chosen": search.chosen.problem.features.dispatcher,
        "first": FIRST,
        "further": [
            {
                "name": outcome.name,
                "step_seconds": None if outcome.best is None else outcome.best.seconds,
                "layouts": outcome.layouts,
                "evaluations": outcome.priced,
            }
            for outcome in search.dispatchers
        ],
    }


def _staged_json(staged: StageSearch) -> dict[str, Any]:
    """The search over unlike stages as JSON: its size, and its bound for the searched layouts."""
    solution = staged.solution
    return {
        "layouts": staged.layouts,
        "candidates": staged.candidates,
        "kept": staged.on_frontier,
        "objective": None if solution.value is None else solution.objective,
        "bound": None if math.isinf(solution.bound) else solution.bound,
        "gap": None if solution.value is None else solution.gap,
        "status": solution.status.value,
        "seconds": solution.seconds,
        "mesh_programs": staged.programs,
        "mesh_stages": staged.mesh_stages,
    }


def simulated_json(finalist: Finalist) -> float | None:
    """Simulated seconds of a step; None if the plan was not simulated."""
    return None if finalist.simulated is None else finalist.simulated_seconds


# Text


def search_lines(
    search: PlanSearch, folder: Path | None, files: Sequence[str], train_tokens: float | None
) -> list[str]:
    """The answer as text.

    Args:
        folder, files: the folder of the answer, None if it is only printed, and the names of its files.
    """
    return [*answer_lines(answer_of(search, train_tokens)), *closing_lines(search, folder, files)]


def search_sentence(search: PlanSearch) -> str:
    """The chosen plan as text; for unlike meshes its name, because no stage represents the others."""
    sentence = search.chosen.name if search.plan.transfers else plan_sentence(search.plan)
    if not search.is_upstream:
        return sentence
    overlap = (
        "; overlap: two micro-batches at a time"
        if PAIRED[0] in (*search.arguments, *search.chosen.plan_arguments)
        else ""
    )
    return f"{sentence}{overlap}; for unmodified Megatron-LM"


def answer_of(search: PlanSearch, train_tokens: float | None = None) -> Answer:
    """The answer about the chosen plan; runners-up keep their rank, which is that of the simulated steps."""
    chosen, others = search.chosen, []
    for other in search.others:
        # The name of a plan of unlike stages lists every stage.
        name = plan_sentence(other.plan) if other.is_staged else other.name
        shown = runner_up(name, other.prediction, search.prediction)
        if search.tuned is None and (chosen.is_apart or other.is_apart):
            shown = dataclasses.replace(
                shown, simulated_change=other.simulated_seconds / chosen.simulated_seconds - 1.0
            )
        others.append(shown)
    return Answer(
        plan=search.plan,
        prediction=search.prediction,
        cluster=search.cluster,
        chosen=search_sentence(search),
        train_tokens=train_tokens,
        runners_up=others,
        try_next=[] if search.refusal is None else [EXECUTED],
        is_upstream=search.is_upstream,
        is_searched=True,
        leeway=Leeway(no_overlap=_no_other_overlap(search)),
    )


def _no_other_overlap(search: PlanSearch) -> str:
    """Why a search for this runtime cannot find an overlap either; empty if it can."""
    if search.target == "any":
        return "the search has compared it"
    refusal = search.chosen.problem.listed.refusal
    return "" if refusal is None else str(refusal)


def detail_lines(search: PlanSearch) -> list[str]:
    """The lines of --verbose: the other runners-up, every change of the user's flags, the extent of the search, CUDA graphs,
    layouts screened for overlap, free sharding, refused plans."""
    changes = [] if search.baseline is None else change_lines(search.changes, search.baseline)
    sharding = [] if search.sharding is None else sharding_details(search.sharding)
    return [
        *runner_up_lines(answer_of(search))[SHOWN_RUNNERS_UP:],
        *changes,
        *_simulated_lines(search),
        *([] if search.chosen.is_staged or search.ended_early else _stages_lines(search)),
        *searched_lines(search),
        *([] if answers_graphs(search.graphs, search.prediction) else _graphs_lines(search)),
        *_screened_lines(search.screened),
        *sharding,
        *refused_lines(search.refused),
    ]


def refused_lines(refused: Sequence[tuple[str, str]]) -> list[str]:
    """The refused plans: a line per flag, with its first refused plan."""
    by_flag: dict[str, list[tuple[str, str]]] = {}
    for name, rule in refused:
        by_flag.setdefault(rule.split(maxsplit=1)[0].rstrip(":"), []).append((name, rule))
    lines = []
    for plans in by_flag.values():
        (name, rule), more = plans[0], len(plans) - 1
        others = f" (and {more:,} more plan{'s' * (more > 1)} for this flag: --json)" if more else ""
        lines.append(line("refused", f"{name}: {rule}{others}"))
    return lines


def _graphs_lines(search: PlanSearch) -> list[str]:
    """The line on CUDA graphs; empty if the plan follows no lists."""
    return [line("graphs", text) for text in graphs_lines(search.graphs, search.prediction)]


def _screened_lines(screened: Sequence[Screened]) -> list[str]:
    """Layouts that may gain by overlap, with the step of their simplest plan."""
    lines = []
    for layout in screened:
        took = layout.refused if layout.seconds is None else f"{layout.seconds:.3f} s in its simplest form"
        lines.append(line("overlapped", f"{layout.name}, {layout.way}: at least {layout.least_seconds:.3f} s; {took}"))
    return lines


def closing_lines(search: PlanSearch, folder: Path | None, files: Sequence[str]) -> list[str]:
    """Lines on the user's layout, what the plan decides and drops, the files, and the command to run.

    Args:
        folder: the folder of the files; None if nothing is written.
    """
    lines = []
    if search.baseline is not None:
        lines.append(line("your flags", _flags_sentence(search, search.baseline)))
    elif search.baseline_refusal:
        lines.append(line("your flags", f"do not run on these GPUs: {search.baseline_refusal}"))
    if search.chosen.is_staged or search.ended_early:
        lines += _stages_lines(search)
    if search.kept_micro_batch is not None:
        lines.append(
            line(
                "kept",
                f"--micro-batch-size {search.kept_micro_batch}: with --moe-expert-capacity-factor another size drops different "
                "tokens; --allow-micro-batch-change searches the others",
            )
        )
    lines += _dispatcher_lines(search)
    exposed = exposed_seconds(search.prediction.breakdown).get("expert", 0.0)
    if search.why_plain and exposed >= WORTH_A_LOOK * search.prediction.predicted.step_seconds:
        lines.append(line("overlap", f"none helps: {search.why_plain}"))
    lines += _graphs_lines(search) if answers_graphs(search.graphs, search.prediction) else []
    if search.refusal is None:
        lines += [line("without", f"{name}: {reason}") for name, reason in search.written.left_out]
    else:
        lines.append(line("not run", f"pretrain_moe.py refuses it today: {search.refusal}"))
    if search.ended_early:
        lines += searched_lines(search)
    if search.sharding is not None:
        lines += sharding_lines(search.sharding)
    if search.refusal is None and not search.is_upstream:
        lines += untried_lines(search.plan)
    if folder is None:
        return [*lines, *unwritten_lines()]
    lines.append(line("written", f"{folder}: {', '.join(files)}"))
    if search.refusal is not None:
        return lines
    ranks = start_flags(search.plan.world_size, search.cluster.group_of(0).gpus_per_node)
    direct = f"python pretrain_moe.py {ranks}{shlex.quote(f'@{folder / ARGUMENTS}')}"
    start = f"sbatch {shlex.quote(str(folder / SCRIPT))}" if SCRIPT in files else direct
    added = arguments_to_add(search.written.flags, search.written_for)
    lines.append(line("next", f"{start} {added}".rstrip()))
    return lines


def _flags_sentence(search: PlanSearch, baseline: Prediction) -> str:
    """The step of the user's own layout, what the plan gains over it, and the single change that gains most and fits."""
    before = baseline.predicted.step_seconds
    gain = before / search.prediction.predicted.step_seconds
    fast = f"{gain:.2f} times as fast"
    verdict = baseline.memory_verdict.replace("does", "do")
    text = (
        f"{before:.3f} s: the plan is {fast}"
        if baseline.fits
        else f"{verdict} ({before:.3f} s): the plan fits and is {fast}"
    )
    if gain < 1.0 - APART and baseline.fits:
        text += "; keep your flags"
    for change in helpful(search.changes, baseline)[:1]:
        if change.gain(baseline) < TIE * before or change.prediction is None or not change.prediction.fits:
            continue
        text += f"; its best single change ({change.sentence}): {change.saved(baseline)}"
    text += f"; --search-space {search.wider_space} has plans like yours" if search.wider_space else ""
    return text + "".join(f"; assumed: {assumption}" for assumption in baseline.assumed)


def _simulated_lines(search: PlanSearch) -> list[str]:
    """The line on plans whose simulated step is not the predicted one; empty if all agree."""
    differing = [finalist for finalist in (search.chosen, *search.others) if finalist.is_apart]
    if not differing:
        return []
    widest = max(differing, key=lambda finalist: abs(finalist.simulated_seconds / finalist.seconds - 1.0))
    counted = (
        f"{len(differing)} of the {1 + len(search.others)} best plans are over {100 * APART:g} % from their predictions"
    )
    most = f"most: {widest.name}, {widest.simulated_seconds:.3f} s in place of {widest.seconds:.3f}"
    return [line("simulated", f"instruction by instruction, {counted}; {most}")]


def searched_lines(search: PlanSearch) -> list[str]:
    """The extent of the search: uniform layouts, sub-meshes, and unlike stages of one mesh."""
    counts, staged = search.uniform.counts, search.staged
    pruned = counts.too_large + counts.too_slow
    memory = "memory" if search.target == "any" else "recomputation"
    uniform = f"{counts.evaluated:,} evaluated with all their choices of {memory}, {pruned:,} pruned by bounds"
    if counts.not_reached:
        uniform += f", {counts.not_reached:,} not reached"
    ended = f"; {EARLY}" if search.ended_early else ""
    lines = [line("searched", f"{counts.layouts:,} layouts in {search.seconds:.0f} s: {uniform}{ended}")]
    if staged is not None and staged.programs:
        meshes = f"{staged.mesh_stages:,} stages priced in {staged.programs} programs"
        lines.append(line("", f"cuts and sub-meshes of unlike size: {meshes}; {ENDED[staged.solution.status]}"))
    if staged is not None and staged.layouts:
        candidates = (
            f"{staged.candidates:,} candidates, {staged.on_frontier:,} of them on a frontier of time and memory"
        )
        outcome = f"{candidates}; {ENDED[staged.solution.status]}"
        if not staged.candidates:
            outcome = "none can be faster, by lower bounds of their steps"
        lines.append(line("", f"stages that differ, in {staged.layouts} layouts: {outcome}"))
    return lines


def _stages_lines(search: PlanSearch) -> list[str]:
    """The line on the gain of unlike stages over equal ones; empty if no unlike stages were searched."""
    equal, seconds = search.equal_stages_seconds, search.prediction.predicted.step_seconds
    if equal is None or search.staged is None or not search.staged.layouts:
        return []
    if not search.chosen.is_staged:
        if search.ended_early:
            return [line("stages", "equal; the search ended before all plans with unequal stages were compared")]
        return [
            line("stages", "equal stages are fastest; other layers and recomputation for each stage were searched, too")
        ]
    if math.isinf(equal):
        return [line("stages", f"{stages_sentence(search.plan)}; no plan with equal stages fits")]
    gained = f"unequal stages save {equal - seconds:.3f} s ({100 * (equal - seconds) / equal:.1f} %)"
    return [
        line("stages", f"{stages_sentence(search.plan)}: {gained}; the best plan with equal ones takes {equal:.3f} s")
    ]


def _dispatcher_lines(search: PlanSearch) -> list[str]:
    """The line on the searched dispatchers; empty if there was no choice, or with overlap, which has its own dispatcher."""
    if not search.dispatchers or search.tuned is not None:
        return []
    name = search.chosen.problem.features.dispatcher
    needed = f", a library that must be installed ({' '.join(FLAGS[name])})" if name in LIBRARIES else ""
    others = [other for other in (FIRST, *(outcome.name for outcome in search.dispatchers)) if other != name]
    best: dict[str, float] = {}
    for finalist in (search.chosen, *search.others):
        best.setdefault(finalist.problem.features.dispatcher, finalist.seconds)
    steps = [f"{other} {best[other]:.3f} s" if other in best else f"{other} not faster" for other in others]
    return [line("dispatcher", f"{name}{needed}; {', '.join(steps)}")]


# Files


def write_search(folder: Path, search: PlanSearch) -> list[str]:
    """Write the plan, its flags and the script that starts the run.

    Returns:
        The names of the files. There is no script for a measured machine, which may lack Slurm, and only the plan if nothing runs
        it.
    Raises:
        ConfigError: the files cannot be written, or nodes have different numbers of GPUs.
    """
    plan = dataclasses.replace(search.plan, predicted=search.prediction.predicted)
    texts = {} if search.refusal is not None else run_texts(search.written, plan, search.cluster, search.written_for)
    write_run_files(folder, texts, plan)
    return [*texts, "plan.json"]
