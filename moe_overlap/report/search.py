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
    Finalist,
    Leeway,
    PlanSearch,
    Screened,
)
from moe_overlap.report.answer import (
    Answer,
    answer_lines,
    exposed_seconds,
    line,
    plan_sentence,
    runner_up,
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
from moe_overlap.tuner.cost.host import WORTH_A_LOOK
from moe_overlap.tuner.search.dispatchers import FIRST, LIBRARIES
from moe_overlap.tuner.search.pipeline.per_stage import StageSearch
from moe_overlap.tuner.write.dispatcher_flags import FLAGS
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, arguments_to_add
from moe_overlap.tuner.write.upstream_rules import PAIRED

EXECUTED = "--target moe-overlap: the best plan that runs today"
EARLY = "stopped early: better plans may be left"
SHOWN_CHANGES = 1
"""Changes of the user's flags in the short answer; --verbose and the JSON have all."""


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
        shown = runner_up(other.name, other.prediction, search.prediction)
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
    """The lines of --verbose: every change of the user's flags, CUDA graphs, screened layouts, free sharding, refused plans."""
    changes = [] if search.baseline is None else change_lines(search.changes, search.baseline)
    sharding = [] if search.sharding is None else sharding_details(search.sharding)
    return [
        *changes,
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
    """Lines on the user's layout, dropped flags, the extent of the search, the files, and the command to run.

    Args:
        folder: the folder of the files; None if nothing is written.
    """
    lines, counts = [], search.uniform.counts
    ended = f"; {EARLY}" if search.ended_early else ""
    if search.baseline is not None:
        before = search.baseline.predicted.step_seconds
        fits = "" if search.baseline.fits else f", and {search.baseline.memory_verdict}"
        gain = before / search.prediction.predicted.step_seconds
        keep = "; keep your flags" if gain < 1.0 - APART and search.baseline.fits else ""
        wider = f"; --search-space {search.wider_space} has plans like yours" if search.wider_space else ""
        assumed = "".join(f"; assumed: {text}" for text in search.baseline.assumed)
        sentence = f"{before:.3f} s{fits}: the plan is {gain:.2f} times as fast{keep}{wider}{assumed}"
        lines.append(line("your flags", sentence))
        lines += change_lines(helpful(search.changes, search.baseline)[:SHOWN_CHANGES], search.baseline)
    elif search.baseline_refusal:
        lines.append(line("your flags", f"do not run on these GPUs: {search.baseline_refusal}"))
    lines += _stages_lines(search)
    if search.kept_micro_batch is not None:
        lines.append(
            line(
                "kept",
                f"--micro-batch-size {search.kept_micro_batch}: with --moe-expert-capacity-factor another size drops different "
                "tokens; --allow-micro-batch-change searches the others",
            )
        )
    differing = [finalist for finalist in (search.chosen, *search.others) if finalist.is_apart]
    if differing:
        widest = max(differing, key=lambda finalist: abs(finalist.simulated_seconds / finalist.seconds - 1.0))
        lines.append(
            line(
                "simulated",
                f"in detail, {len(differing)} of the {1 + len(search.others)} best plans differ by over {100 * APART:g} %; "
                f"most: {widest.name} takes {widest.simulated_seconds:.3f} s, not {widest.seconds:.3f}",
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
    pruned = counts.too_large + counts.too_slow
    lines.append(
        line(
            "searched",
            f"{counts.layouts:,} layouts in {search.seconds:.0f} s: {counts.evaluated:,} evaluated with all their "
            f"choices of {'memory' if search.target == 'any' else 'recomputation'}, {pruned:,} pruned by bounds"
            f"{f', {counts.not_reached:,} not reached' if counts.not_reached else ''}{ended}",
        )
    )
    staged = search.staged
    if staged is not None and staged.programs:
        lines.append(
            line(
                "",
                f"{staged.programs} programs over cuts and sub-meshes, {staged.mesh_stages:,} stages priced for them, "
                f"{staged.solution.status.value}",
            )
        )
    if staged is not None and staged.layouts:
        priced = (
            f"{staged.candidates:,} candidates for their stages, {staged.on_frontier:,} of them not worse than another in both "
            f"time and memory, {staged.solution.status.value}"
        )
        outcome = priced if staged.candidates else "none can be faster, by lower bounds of their steps"
        lines.append(line("", f"{staged.layouts} layouts with stages that differ: {outcome}"))
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


def _stages_lines(search: PlanSearch) -> list[str]:
    """The line on the gain of unlike stages over equal ones; empty if no unlike stages were searched."""
    equal, seconds = search.equal_stages_seconds, search.prediction.predicted.step_seconds
    if equal is None or search.staged is None or not search.staged.layouts:
        return []
    if not search.chosen.is_staged:
        if search.ended_early:
            return [line("stages", "equal; the search ended before all plans with unequal stages were compared")]
        return [line("stages", "equal stages are fastest: other layers and recomputation by stage were searched, too")]
    if math.isinf(equal):
        return [line("stages", f"{stages_sentence(search.plan)}; no plan with equal stages fits")]
    gained = f"{equal - seconds:.3f} s ({(equal - seconds) / equal:.1%}) less than the best plan with equal stages"
    return [line("stages", f"{stages_sentence(search.plan)}: {gained}, {equal:.3f} s")]


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
