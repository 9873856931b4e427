"""The answer of a plan search: as data, as JSON, as about ten lines, and as the files that run it."""

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
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, arguments_to_add, job_on, run_environment, slurm_script
from moe_overlap.tuner.write.upstream_rules import PAIRED

EXECUTED = "--target moe-overlap: the best plan that runs today"
EARLY = "stopped early: better plans may be left"
SHOWN_CHANGES = 1
"""Changes of the user's flags that the short answer names; --verbose and the JSON have all."""
MEASURE = "--pipeline-model-parallel-size"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSearch:
    """The chosen plan, what else was looked at, and how to run it.

    Attributes:
        words: the user's flags without their layout.
        tuned: the overlap of the chosen plan, for this runtime; None where nothing is overlapped.
        others: the other finalists, from the fastest on.
        found: the search over uniform plans.
        refused: plans that rules across flags refuse, with the rule.
        baseline: of the user's own layout; None where the flags have none.
        dropped: flags of the user that the run goes without, with the reason.
        staged: the search over plans of unlike stages; None where there was none.
        equal_stages_seconds: of the fastest plan whose stages recompute alike, with its overlap; None: no others were searched.
        is_interrupted: whether Ctrl-C ended it early.
        is_late: whether the time limit passed while its best plans were simulated and their overlap was decided.
        dispatchers: the further dispatchers that were looked at; none where the flags' own is kept.
        why_plain: why the chosen plan overlaps nothing; empty where it does, or where overlap was not asked for.
        screened: layouts that were looked at for the all-to-alls that they may hide, the fastest first.
        changes: what the plan changes in the user's own layout, the largest gain first.
        graphs: whether lists are replayed as CUDA graphs, and the other way; None where there is none.
        sharding: the best sharding of every operator, whoever executes it; None where the space does not ask for it.
        launching: what launches from the host cost the chosen plan.
        wider_space: a search space that has plans like the user's own layout, where this one does not; else empty.
        kept_micro_batch: the user's, where another would change what is trained; None: all were searched.
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
        """Whether time or Ctrl-C ended the search."""
        return self.is_interrupted or self.is_late or _solution(self).status is Status.TIME_LIMIT

    @property
    def problem(self) -> Problem:
        """The problem that prices the chosen plan: with lists replayed as CUDA graphs where those of the answer are."""
        return self.chosen.problem.replaying(self.graphs is not None and self.graphs.is_on)

    @property
    def sentence(self) -> str:
        """The chosen plan in words; of unlike meshes no stage stands for the others."""
        words = self.chosen.name if self.plan.transfers else plan_sentence(self.plan)
        if not self.is_upstream:
            return words
        overlap = ", overlap: two micro-batches at a time" if PAIRED[0] in (*self.words, *self.chosen.said) else ""
        return f"{words}{overlap}, for unmodified Megatron-LM"

    @property
    def is_upstream(self) -> bool:
        """Whether the plan is written for unmodified Megatron-LM, and not for this runtime."""
        return self.target == "megatron-lm" or is_paired(self.chosen)

    @property
    def written_for(self) -> Target:
        """The software that the flags of the plan are for."""
        return "megatron-lm" if self.is_upstream else "moe-overlap"

    @property
    def refusal(self) -> str | None:
        """Why nothing runs the chosen plan today; None where it is written as flags."""
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
        plan_file, words, said = None, self.words, self.chosen.said
        in_file = self.chosen.in_file
        if in_file:
            plan_file = "plan.json"
        if self.plan.transfers:
            # The file says the layout, and no flag what its lists need.
            words, in_file = self.chosen.arguments, ()
        if self.tuned is not None and self.tuned.chosen.name != PLAIN:
            plan_file, words, said, in_file = "plan.json", self.tuned.arguments, (), (*in_file, *said)
        head = [f"{self.plan.model.name} on {self.cluster.gpus} × {self.cluster.group_of(0).gpu.name}"]
        # Megatron-LM's own overlap may be what the search found, whoever the target is.
        dropped = {name: reason for name, reason in self.dropped.items() if name not in said}
        if self.tuned is not None:
            dropped |= {name: LEFT_OUT[name] for name in self.tuned.dropped}
        effects = {MEASURE: f"predicted step {self.prediction.predicted.step_seconds:.3f} s"}
        if self.dispatchers and self.tuned is None:
            looked_at = ", ".join((FIRST, *(outcome.name for outcome in self.dispatchers)))
            effects["--moe-token-dispatcher-type"] = f"predicted to be the fastest of {looked_at}"
        if self.baseline is not None:
            for change in self.changes:
                for flag in list(change.after)[:1]:
                    own = f"in your flags, {change.effect(self.baseline)}"
                    effects[flag] = "; ".join(filter(None, (effects.get(flag), own)))
        if plan_file is not None:
            dropped.pop("--plan", None)  # The plan that was found stands in its place.
        if GRAPHS in words:
            dropped.pop(GRAPHS, None)
        # What the search took from the user's flags is among them again, so that it is listed with its reason.
        words = (*words, *(name for name in dropped if name not in words))
        return argument_file(
            words,
            self.plan,
            said,
            self.written_for,
            effects=effects,
            dropped=dropped,
            plan_file=plan_file,
            in_file=in_file,
            head=head,
        )


# Data


def search_json(search: PlanSearch, train_tokens: float | None = None) -> dict[str, Any]:
    """The answer for programs: the chosen plan as tools/predict.py prints it, the plan itself, and the others."""
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
                    "arguments": list(other.said),
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
    """The dispatcher of the plan, and what became of the others."""
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
    """The best over uniform plans and plans of unlike stages.

    With unlike stages the bound is proven for the layouts whose stages were freed, and for uniform plans of the others.
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
    """JSON of the search over unlike stages: its size, and what it proved of the layouts that it looked at."""
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
    """Simulated seconds of a step; None where the plan was not simulated."""
    return None if finalist.simulated is None else finalist.simulated_seconds


# Text


def search_lines(search: PlanSearch, folder: Path, files: Sequence[str], train_tokens: float | None) -> list[str]:
    """The answer for a reader.

    Args:
        folder, files: where the answer is written, and under which names.
    """
    return [*answer_lines(answer_of(search, train_tokens)), *closing_lines(search, folder, files)]


def answer_of(search: PlanSearch, train_tokens: float | None = None) -> Answer:
    """The answer about the chosen plan; runners-up stand in their order, with simulated steps where they were simulated."""
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
    """Why a search for this runtime, too, would find no overlap; empty where it may."""
    if search.target == "any":
        return "the search has compared it"
    refusal = search.chosen.problem.listed.refusal
    return "" if refusal is None else str(refusal)


def detail_lines(search: PlanSearch) -> list[str]:
    """The lines of --verbose: every change of the user's flags, CUDA graphs, the plans that rules refuse, and what no layout
    shards."""
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
    """The plans that rules refuse: a line for each flag, with the first of its plans."""
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
    """A line on lists that are replayed as CUDA graphs, or not; none where no list is run."""
    return [line("graphs", text) for text in graphs_lines(search.graphs, search.prediction)]


def _screened_lines(screened: Sequence[Screened]) -> list[str]:
    """Layouts that may gain by overlap, and what the simplest plan of each takes."""
    lines = []
    for layout in screened:
        took = layout.refused if layout.seconds is None else f"{layout.seconds:.3f} s in its simplest form"
        lines.append(line("overlapped", f"{layout.name}, {layout.way}: at least {layout.least_seconds:.3f} s; {took}"))
    return lines


def closing_lines(search: PlanSearch, folder: Path, files: Sequence[str]) -> list[str]:
    """The user's own layout, flags that are left out, how far the search went, what is written, and how to run it."""
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
    apart = [finalist for finalist in (search.chosen, *search.others) if finalist.is_apart]
    if apart:
        widest = max(apart, key=lambda finalist: abs(finalist.simulated_seconds / finalist.seconds - 1.0))
        lines.append(
            line(
                "simulated",
                f"{len(apart)} of {1 + len(search.others)} plans differ by more than {APART:.0%} from their "
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
            f"choices of {'memory' if search.target == 'any' else 'recomputation'}, {pruned:,} ruled out by bounds"
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
    added = arguments_to_add(search.written.flags, search.written_for)
    lines.append(line("next", f"{start} {added}".rstrip()))
    return lines


def _stages_lines(search: PlanSearch) -> list[str]:
    """The gain of stages that decide for themselves over the best plan with equal ones; none where no others were searched."""
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
    """The dispatcher of the plan where it was searched, and the others; none where layers overlap, which bring their own."""
    if not search.dispatchers or search.tuned is not None:
        return []
    name = search.chosen.problem.features.dispatcher
    needed = f", a library that must be installed ({' '.join(FLAGS[name])})" if name in LIBRARIES else ""
    others = [other for other in (FIRST, *(outcome.name for outcome in search.dispatchers)) if other != name]
    best: dict[str, float] = {}
    for finalist in (search.chosen, *search.others):
        best.setdefault(finalist.problem.features.dispatcher, finalist.seconds)
    said = [f"{other} {best[other]:.3f} s" if other in best else f"{other} not faster" for other in others]
    return [line("dispatcher", f"{name}{needed}; {', '.join(said)}")]


# Files


def write_search(folder: Path, search: PlanSearch) -> list[str]:
    """Write the plan, the flags that run it and the script that starts it.

    Returns:
        The names of the files. A machine that was measured gets no script: it may know no Slurm. A plan that nothing runs is
        written alone.
    Raises:
        ConfigError: they cannot be written, or nodes have unlike numbers of GPUs.
    """
    plan = dataclasses.replace(search.plan, predicted=search.prediction.predicted)
    texts = _run_texts(search, plan) if search.refusal is None else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The plan first: an earlier one beside new flags, which name it, would be run without a word.
        save_plan(plan, folder / "plan.json")
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None
    return [*texts, "plan.json"]


def _run_texts(search: PlanSearch, plan: Plan) -> dict[str, str]:
    """The flags and the script by the names of their files."""
    written = search.written
    target = search.written_for
    environment = run_environment(plan, written.flags, search.cluster.group_of(0).gpu.architecture, target)
    texts = {ARGUMENTS: written.text}
    if search.cluster.measured is None:
        texts[SCRIPT] = slurm_script(job_on(search.cluster, plan.model.name), target, written, environment)
    return texts
