"""The answer of a plan search: as data, as JSON, as about ten lines, and as the files that run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import as_values, save_plan
from moe_overlap.report.answer import Answer, answer_lines, plan_sentence, runner_up
from moe_overlap.report.prediction import prediction_json
from moe_overlap.report.tuning import Tuned
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.candidates import PLAIN
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.uniform import UniformSearch
from moe_overlap.tuner.write.argument_file import Target, WrittenFlags, argument_file
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, job_on, run_environment, slurm_script

PLACED = "an instruction list places that communication itself"
MEASURE = "--pipeline-model-parallel-size"
APART = 0.01
"""Share of a predicted step by which its simulation may differ without being told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A plan that was written as flags, read again and predicted.

    Attributes:
        problem: the run under its plan, as read from the flags.
        arguments: the flags of the whole run; `said` are those that say the plan.
        simulated: simulated seconds of the step over the predicted ones; None where the plan was not simulated.
    """

    name: str
    problem: Problem
    prediction: Prediction
    arguments: tuple[str, ...]
    said: tuple[str, ...]
    simulated: float | None = None

    @property
    def plan(self) -> Plan:
        """The plan that the flags say."""
        return self.problem.plan

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.predicted.step_seconds

    @property
    def simulated_seconds(self) -> float:
        """Simulated seconds of a step, by which finalists are ordered; the predicted ones where it was not simulated."""
        return self.seconds * (1.0 if self.simulated is None else self.simulated)

    @property
    def is_apart(self) -> bool:
        """Whether simulation and prediction differ by more than `APART`."""
        return self.simulated is not None and abs(self.simulated - 1.0) > APART


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

    @property
    def prediction(self) -> Prediction:
        """Of the chosen plan, with its overlap."""
        overlapped = self.tuned.chosen.prediction if self.tuned is not None else None
        return overlapped or self.chosen.prediction

    @property
    def plan(self) -> Plan:
        """The chosen plan, with its overlap."""
        return self.tuned.chosen.decided if self.tuned is not None else self.chosen.plan

    @property
    def written(self) -> WrittenFlags:
        """The flags that run the plan."""
        plan_file, words, said = None, self.words, self.chosen.said
        if self.tuned is not None and self.tuned.chosen.name != PLAIN:
            plan_file, words, said = "plan.json", self.tuned.arguments, ()
        head = [f"{self.plan.model.name} on {self.cluster.gpus} × {self.cluster.group_of(0).gpu.name}"]
        target: Target = "megatron-lm" if self.target == "megatron-lm" else "moe-overlap"
        dropped = {**self.dropped, **(dict.fromkeys(self.tuned.dropped, PLACED) if self.tuned is not None else {})}
        effects = {MEASURE: f"predicted step {self.prediction.predicted.step_seconds:.3f} s"}
        return argument_file(
            words, self.plan, said, target, effects=effects, dropped=dropped, plan_file=plan_file, head=head
        )


# Data


def search_json(search: PlanSearch) -> dict[str, Any]:
    """The answer for programs: the chosen plan as tools/predict.py prints it, the plan itself, and the others."""
    counts, solution = search.found.counts, search.found.solution
    return prediction_json(search.prediction) | {
        "target": search.target,
        "search_space": search.space,
        "chosen": search.chosen.name,
        "simulated_step_seconds": simulated_json(search.chosen),
        "plan": as_values(search.plan),
        "arguments": search.written.arguments,
        "overlap": None if search.tuned is None else search.tuned.chosen.name,
        "baseline_step_seconds": None if search.baseline is None else search.baseline.predicted.step_seconds,
        "dropped_flags": [name for name, _ in search.written.left_out],
        "runners_up": [
            {
                "name": other.name,
                "step_seconds": other.seconds,
                "simulated_step_seconds": simulated_json(other),
                "needed_bytes": other.prediction.fullest.needed_bytes,
                "fits": other.prediction.fits,
                "arguments": list(other.said),
            }
            for other in search.others
        ],
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
            "layouts": counts.layouts,
            "objective": solution.objective,
            "bound": solution.bound,
            "gap": solution.gap,
            "status": solution.status.value,
        },
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
    prediction = search.prediction
    sentence = plan_sentence(search.plan)
    lines = answer_lines(
        Answer(
            plan=search.plan,
            prediction=prediction,
            cluster=search.cluster,
            chosen=f"{sentence}, for unmodified Megatron-LM" if search.target == "megatron-lm" else sentence,
            train_tokens=train_tokens,
            runners_up=[runner_up(other.name, other.prediction, search.chosen.prediction) for other in search.others],
        )
    )
    return [*lines, *closing_lines(search, folder, files)]


def closing_lines(search: PlanSearch, folder: Path, files: Sequence[str]) -> list[str]:
    """The user's own layout, flags that are left out, how far the search went, what is written, and how to run it."""
    lines, counts, solution = [], search.found.counts, search.found.solution
    ended = "" if solution.status is not Status.TIME_LIMIT else "; stopped early: better plans may be left"
    if search.baseline is not None:
        before = search.baseline.predicted.step_seconds
        fits = "" if search.baseline.fits else f", and {search.baseline.memory_verdict}"
        gain = before / search.prediction.predicted.step_seconds
        lines.append(f"{'your flags':<12}{before:.3f} s{fits}: the plan is {gain:.2f} times as fast")
    apart = [finalist for finalist in (search.chosen, *search.others) if finalist.is_apart]
    if apart:
        widest = max(apart, key=lambda finalist: abs(finalist.simulated_seconds / finalist.seconds - 1.0))
        lines.append(
            f"{'simulated':<12}{len(apart)} of {1 + len(search.others)} plans differ by more than {APART:.0%} from their "
            f"prediction, {widest.name} most: {widest.simulated_seconds:.3f} s instead of {widest.seconds:.3f}"
        )
    lines += [f"{'without':<12}{name}: {reason}" for name, reason in search.written.left_out]
    pruned = counts.too_large + counts.too_slow
    lines.append(
        f"{'searched':<12}{counts.layouts:,} layouts in {search.seconds:.0f} s: {counts.evaluated:,} evaluated with all their "
        f"choices of recomputation, {pruned:,} ruled out by bounds{ended}"
    )
    lines.append(f"{'written':<12}{folder}: {', '.join(files)}")
    start = f"sbatch {folder / SCRIPT}" if SCRIPT in files else f"torchrun … pretrain_moe.py @{folder / ARGUMENTS}"
    lines.append(f"{'next':<12}{start}")
    return lines


# Files


def write_search(folder: Path, search: PlanSearch) -> list[str]:
    """Write the plan, the flags that run it and the script that starts it.

    Returns:
        The names of the files. A machine that was measured gets no script: it may know no Slurm.
    Raises:
        ConfigError: they cannot be written, or nodes have unlike numbers of GPUs.
    """
    written = search.written
    plan = dataclasses.replace(search.plan, predicted=search.prediction.predicted)
    target: Target = "megatron-lm" if search.target == "megatron-lm" else "moe-overlap"
    environment = run_environment(plan, written.flags, search.cluster.group_of(0).gpu.architecture, target)
    texts = {ARGUMENTS: written.text}
    if search.cluster.measured is None:
        texts[SCRIPT] = slurm_script(job_on(search.cluster, plan.model.name), target, written, environment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        save_plan(plan, folder / "plan.json")
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None
    return [*texts, "plan.json"]
