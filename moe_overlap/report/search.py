"""The answer of a plan search: as data, as JSON, as about ten lines, and as the files of a run."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.cluster import Cluster, start_flags
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import write_whole
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import as_values, save_plan
from moe_overlap.report.answer import (
    WORTH_A_LOOK,
    Answer,
    Leeway,
    answer_lines,
    exposed_seconds,
    line,
    plan_sentence,
    runner_up,
    stages_sentence,
    training_json,
)
from moe_overlap.report.changes import Change, change_lines, changes_json, helpful
from moe_overlap.report.finalist import APART, Finalist, Screened, is_paired
from moe_overlap.report.prediction import prediction_json
from moe_overlap.report.sharding import SearchedSharding, sharding_details, sharding_json, sharding_lines
from moe_overlap.report.tuning import GRAPHS, Tuned, answers_graphs, graphs_json, graphs_lines
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.host import Launching
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.dispatchers import FIRST, LIBRARIES, DispatcherOutcome
from moe_overlap.tuner.search.layer.candidates import PLAIN
from moe_overlap.tuner.search.layer.overlap import GraphsChoice
from moe_overlap.tuner.search.pipeline.per_stage import StageSearch
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.uniform import UniformSearch
from moe_overlap.tuner.write.argument_file import Target, WrittenFlags, argument_file
from moe_overlap.tuner.write.dispatcher_flags import FLAGS
from moe_overlap.tuner.write.flags_left_out import LEFT_OUT
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, job_on, run_environment, slurm_script, words_to_add
from moe_overlap.tuner.write.upstream_rules import PAIRED

EXECUTED = "--target moe-overlap: the best plan that runs today"
EARLY = "stopped early: better plans may be left"
SHOWN_CHANGES = 1
"""Changes of the user's flags in the short answer; --verbose and the JSON have all."""
MEASURE = "--pipeline-model-parallel-size"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSearch:
    """The chosen plan, the other candidates, and how to run the plan.

    Attributes:
        words: the user's flags without their layout.
        tuned: the overlap of the chosen plan, for this runtime; None without overlap.
        others: the other finalists, the fastest first.
        found: the search over uniform plans.
        refused: plans that rules across flags refuse, with the rule.
        baseline: the prediction of the user's layout; None if the flags have none.
        dropped: flags of the user that the run does not use, with the reason.
        staged: the search over plans with unlike stages; None if it did not run.
        equal_stages_seconds: step of the fastest plan with equal stages, its overlap included; None: no unlike stages were
            searched.
        is_interrupted: whether Ctrl-C ended it early.
        is_late: whether the time limit passed during the simulation of its best plans and the choice of their overlap.
        dispatchers: the other dispatchers that were evaluated; empty if the dispatcher of the flags is kept.
        why_plain: why the chosen plan has no overlap; empty if it has, or if overlap was not requested.
        screened: layouts that were evaluated for the all-to-alls that they can hide, the fastest first.
        changes: the differences from the user's layout, the largest gain first.
        graphs: whether lists are replayed as CUDA graphs, with the alternative; None if there is no choice.
        sharding: the best sharding of every operator, including shardings that nothing executes; None if the space excludes it.
        launching: the cost of launches from the host in the chosen plan.
        wider_space: a search space that includes plans like the user's layout, if this one does not; else empty.
        kept_micro_batch: the user's micro-batch size if another one would change the training; None: all sizes were searched.
    """

    target: str
    space: str
    cluster: Cluster
    words: tuple[str, ...]
    chosen: Finalist
    tuned: Tuned | None
    others: tuple[Finalist, ...]
    found: UniformSearch
    refused: tuple[tuple[str, str], ...]
    baseline: Prediction | None
    dropped: Mapping[str, str]
    seconds: float
    staged: StageSearch | None = None
    why_plain: str = ""
    screened: tuple[Screened, ...] = ()
    changes: tuple[Change, ...] = ()
    is_interrupted: bool = False
    is_late: bool = False
    dispatchers: tuple[DispatcherOutcome, ...] = ()
    graphs: GraphsChoice | None = None
    sharding: SearchedSharding | None = None
    launching: Launching | None = None
    wider_space: str = ""
    kept_micro_batch: int | None = None
    equal_stages_seconds: float | None = None

    @property
    def ended_early(self) -> bool:
        """Whether the time limit or Ctrl-C ended the search."""
        return self.is_interrupted or self.is_late or _solution(self).status is Status.TIME_LIMIT

    @property
    def problem(self) -> Problem:
        """The problem that prices the chosen plan, with CUDA graphs if the answer has them."""
        return self.chosen.problem.replaying(self.graphs is not None and self.graphs.is_on)

    @property
    def sentence(self) -> str:
        """The chosen plan as text; for unlike meshes its name, because no stage represents the others."""
        sentence = self.chosen.name if self.plan.transfers else plan_sentence(self.plan)
        if not self.is_upstream:
            return sentence
        overlap = (
            ", overlap: two micro-batches at a time" if PAIRED[0] in (*self.words, *self.chosen.plan_arguments) else ""
        )
        return f"{sentence}{overlap}, for unmodified Megatron-LM"

    @property
    def is_upstream(self) -> bool:
        """Whether the plan is written for unmodified Megatron-LM instead of this runtime."""
        return self.target == "megatron-lm" or is_paired(self.chosen)

    @property
    def written_for(self) -> Target:
        """The software that reads the flags of the plan."""
        return "megatron-lm" if self.is_upstream else "moe-overlap"

    @property
    def refusal(self) -> str | None:
        """Why nothing runs the chosen plan today; None if it is written as flags."""
        return self.chosen.refusal

    @property
    def prediction(self) -> Prediction:
        """The prediction of the chosen plan, with its overlap."""
        overlapped = self.tuned.chosen.prediction if self.tuned is not None else None
        return dataclasses.replace(overlapped or self.chosen.prediction, launching=self.launching)

    @property
    def plan(self) -> Plan:
        """The chosen plan, with its overlap."""
        return self.tuned.chosen.decided if self.tuned is not None else self.chosen.plan

    @property
    def written(self) -> WrittenFlags:
        """The flags that run the plan."""
        plan_file, arguments, plan_arguments = None, self.words, self.chosen.plan_arguments
        in_file = self.chosen.in_file
        if in_file:
            plan_file = "plan.json"
        if self.plan.transfers:
            # The plan's file has the layout; no flag expresses it.
            arguments, in_file = self.chosen.arguments, ()
        if self.tuned is not None and self.tuned.chosen.name != PLAIN:
            plan_file, arguments, plan_arguments, in_file = (
                "plan.json",
                self.tuned.arguments,
                (),
                (*in_file, *plan_arguments),
            )
        head = [f"{self.plan.model.name} on {self.cluster.gpus} × {self.cluster.group_of(0).gpu.name}"]
        # For any target the search may have chosen Megatron-LM's overlap.
        dropped = {name: reason for name, reason in self.dropped.items() if name not in plan_arguments}
        if self.tuned is not None:
            dropped |= {name: LEFT_OUT[name] for name in self.tuned.dropped}
        effects = {MEASURE: f"predicted step {self.prediction.predicted.step_seconds:.3f} s"}
        if self.dispatchers and self.tuned is None:
            evaluated = ", ".join((FIRST, *(outcome.name for outcome in self.dispatchers)))
            effects["--moe-token-dispatcher-type"] = f"predicted to be the fastest of {evaluated}"
        if self.baseline is not None:
            for change in self.changes:
                for flag in list(change.after)[:1]:
                    effect = f"in your flags, {change.effect(self.baseline)}"
                    effects[flag] = "; ".join(filter(None, (effects.get(flag), effect)))
        if plan_file is not None:
            dropped.pop("--plan", None)  # The chosen plan replaces it.
        if GRAPHS in arguments:
            dropped.pop(GRAPHS, None)
        # Dropped flags are added again, so that the file lists them with the reason.
        arguments = (*arguments, *(name for name in dropped if name not in arguments))
        return argument_file(
            arguments,
            self.plan,
            plan_arguments,
            self.written_for,
            effects=effects,
            dropped=dropped,
            plan_file=plan_file,
            in_file=in_file,
            head=head,
        )


# Data


def search_json(search: PlanSearch, train_tokens: float | None = None) -> dict[str, Any]:
    """The answer as JSON: the prediction of the chosen plan as in tools/predict.py, the plan itself, and the other candidates."""
    counts, solution = search.found.counts, _solution(search)
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
                for plan in search.found.frontier
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


def _solution(search: PlanSearch) -> Solution[Any]:
    """The best solution over uniform plans and plans with unlike stages.

    The bound holds for layouts with freed stages that were searched, and for uniform plans of all others.
    """
    uniform = search.found.solution
    if search.staged is None:
        return uniform
    staged = search.staged.solution
    best = staged if staged.objective < uniform.objective else uniform
    status = uniform.status
    if status is not Status.TIME_LIMIT and staged.status in (Status.TIME_LIMIT, Status.FEASIBLE):
        status = staged.status
    bound = min(uniform.bound, staged.bound, best.objective)
    return dataclasses.replace(best, bound=bound, status=status, seconds=uniform.seconds + staged.seconds)


def _staged_json(staged: StageSearch) -> dict[str, Any]:
    """The search over unlike stages as JSON: its size, and its bound for the searched layouts."""
    solution = staged.solution
    return {
        "layouts": staged.layouts,
        "candidates": staged.candidates,
        "kept": staged.kept,
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


def search_lines(search: PlanSearch, folder: Path, files: Sequence[str], train_tokens: float | None) -> list[str]:
    """The answer as text.

    Args:
        folder, files: the folder of the answer, and the names of its files.
    """
    return [*answer_lines(answer_of(search, train_tokens)), *closing_lines(search, folder, files)]


def answer_of(search: PlanSearch, train_tokens: float | None = None) -> Answer:
    """The answer about the chosen plan; runners-up keep their rank and have simulated seconds if they were simulated."""
    others = [
        dataclasses.replace(runner_up(other.name, other.prediction, search.prediction), seconds=other.simulated_seconds)
        for other in search.others
    ]
    return Answer(
        plan=search.plan,
        prediction=search.prediction,
        cluster=search.cluster,
        chosen=search.sentence,
        train_tokens=train_tokens,
        runners_up=others,
        compared_seconds=None if search.tuned is not None else search.chosen.simulated_seconds,
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


def closing_lines(search: PlanSearch, folder: Path, files: Sequence[str]) -> list[str]:
    """Lines on the user's layout, dropped flags, the extent of the search, the files, and the command to run."""
    lines, counts = [], search.found.counts
    ended = f"; {EARLY}" if search.ended_early else ""
    if search.baseline is not None:
        before = search.baseline.predicted.step_seconds
        fits = "" if search.baseline.fits else f", and {search.baseline.memory_verdict}"
        gain = before / search.prediction.predicted.step_seconds
        keep = "; keep your flags" if gain < 1.0 - APART and search.baseline.fits else ""
        wider = f"; --search-space {search.wider_space} has plans like yours" if search.wider_space else ""
        lines.append(line("your flags", f"{before:.3f} s{fits}: the plan is {gain:.2f} times as fast{keep}{wider}"))
        lines += change_lines(helpful(search.changes, search.baseline)[:SHOWN_CHANGES], search.baseline)
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
                f"{len(differing)} of {1 + len(search.others)} plans differ by more than {APART:.0%} from their "
                f"prediction, {widest.name} most: {widest.simulated_seconds:.3f} s instead of {widest.seconds:.3f}",
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
            f"{staged.candidates:,} candidates for their stages, {staged.kept:,} of them not worse than another in both time and "
            f"memory, {staged.solution.status.value}"
        )
        outcome = priced if staged.candidates else "none can be faster, by lower bounds of their steps"
        lines.append(line("", f"{staged.layouts} layouts with stages that differ: {outcome}"))
    if search.sharding is not None:
        lines += sharding_lines(search.sharding)
    lines.append(line("written", f"{folder}: {', '.join(files)}"))
    if search.refusal is not None:
        return lines
    ranks = start_flags(search.plan.world_size, search.cluster.group_of(0).gpus_per_node)
    direct = f"python pretrain_moe.py {ranks}{shlex.quote(f'@{folder / ARGUMENTS}')}"
    start = f"sbatch {shlex.quote(str(folder / SCRIPT))}" if SCRIPT in files else direct
    added = words_to_add(search.written.flags, search.written_for)
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
    texts = _run_texts(search, plan) if search.refusal is None else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The plan first: otherwise, after a failure, new flags would silently run an earlier plan.
        save_plan(plan, folder / "plan.json")
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None
    return [*texts, "plan.json"]


def _run_texts(search: PlanSearch, plan: Plan) -> dict[str, str]:
    """File name -> text, for the flags and the script."""
    written = search.written
    target = search.written_for
    environment = run_environment(plan, written.flags, search.cluster.group_of(0).gpu.architecture, target)
    texts = {ARGUMENTS: written.text}
    if search.cluster.measured is None:
        texts[SCRIPT] = slurm_script(job_on(search.cluster, plan.model.name), target, written, environment)
    return texts
