"""The results of a search: finalists, the chosen plan with its overlap, and what was compared with it.

`report/` shows them; the searches of this folder and `api.py` make them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_overlap.describe.cluster import GIB, Cluster
from moe_overlap.describe.figures import VISIBLE_BYTES, difference
from moe_overlap.plan.capabilities import GRAPHS_FLAG as GRAPHS
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.calibrate.refine import Refinement
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.host import Launching
from moe_overlap.tuner.cost.simulate.step import SimulatedStep
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.dispatchers import FIRST, DispatcherOutcome
from moe_overlap.tuner.search.layer.candidates import PLAIN, Candidate
from moe_overlap.tuner.search.layer.intra_only import IntraOnly
from moe_overlap.tuner.search.layer.mechanisms import Mix
from moe_overlap.tuner.search.layer.overlap import GraphsChoice
from moe_overlap.tuner.search.pipeline.per_stage import StageSearch
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.uniform import UniformSearch
from moe_overlap.tuner.write.argument_file import Target, WrittenFlags, argument_file
from moe_overlap.tuner.write.flags_left_out import LEFT_OUT

MEASURE = "--pipeline-model-parallel-size"
SHARED = 1e-6
"""Largest difference of two shardings that count as equally fast, as a share of the step."""
TIE = 0.01
"""Share of a step below which predictions tell no plan from another."""
APART = 0.01
"""Largest difference between simulation and prediction that is not reported, as a share of the predicted step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A plan that was written as flags, parsed again and predicted.

    Attributes:
        problem: the run with this plan, as parsed from the flags.
        arguments: all flags of the run.
        plan_arguments: the flags among them that express the plan.
        in_file: flags whose decisions are in the plan's file instead: no flag expresses the recomputation of single stages.
        is_staged: whether layers and recomputation were chosen separately for each stage.
        refusal: why pretrain_moe.py refuses the plan; None if it, or the target, executes it.
        simulated: simulated over predicted seconds of the step; None if the plan was not simulated.
        lacks_lists: whether the prediction is still the closed form, which ignores tile waits (unlike meshes) and moved states
            (tuner/cost/prediction.py); such a plan should be simulated.
    """

    name: str
    problem: Problem
    prediction: Prediction
    arguments: tuple[str, ...]
    plan_arguments: tuple[str, ...]
    in_file: tuple[str, ...] = ()
    is_staged: bool = False
    refusal: str | None = None
    simulated: float | None = None
    lacks_lists: bool = False

    @property
    def plan(self) -> Plan:
        """The plan of the flags."""
        return self.problem.plan

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.predicted.step_seconds

    @property
    def simulated_seconds(self) -> float:
        """Simulated seconds of a step, which rank the finalists; the predicted ones if it was not simulated."""
        return self.seconds * (1.0 if self.simulated is None else self.simulated)

    @property
    def is_apart(self) -> bool:
        """Whether simulation and prediction differ by more than `APART`."""
        return self.simulated is not None and abs(self.simulated - 1.0) > APART


def is_paired(finalist: Finalist) -> bool:
    """Whether its layers use Megatron-LM's overlap, so that only Megatron-LM runs it."""
    return finalist.problem.features.overlap_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Screened:
    """A layout that was evaluated for the all-to-alls that it can hide.

    Attributes:
        way: the mechanism of overlap.
        least_seconds: lower bound of its step: all communication that can be hidden is hidden.
        seconds: simulated seconds of the simplest plan with this mechanism; None if it does not fit or a rule refuses it.
        refused: why there is no such plan.
    """

    name: str
    way: str
    least_seconds: float
    seconds: float | None
    refused: str = ""

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: the fastest first, then those without a plan."""
        return math.inf if self.seconds is None else self.seconds, self.least_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The chosen overlap, the other candidates, and how to execute it.

    Attributes:
        others: the other candidates: predicted ones, the fastest first, then refused ones.
        mix: the mechanism of every class of layers, without deferred weight gradients; None if no plan with overlap fits.
        step: the chosen plan, simulated with at least one micro-batch per stage.
        plain_seconds: predicted step of the baseline, which overlaps nothing.
        arguments: the flags of the chosen plan, without `--plan`.
        dropped: flags of the user that the run does not use.
        refinement: the refinement of prices by traces; None without traces.
        assumed: sentences on assumptions that replace missing flags.
        graphs: whether lists are replayed as CUDA graphs, with the alternative; None if there is no choice.
        problem: the run, with its refined prices.
        launching: the cost of launches from the host; None if it was not computed.
    """

    problem: Problem
    chosen: Candidate
    others: tuple[Candidate, ...]
    mix: Mix | None
    step: SimulatedStep
    plain_seconds: float
    search_seconds: float
    arguments: tuple[str, ...]
    dropped: tuple[str, ...]
    refinement: Refinement | None = None
    assumed: tuple[str, ...] = ()
    graphs: GraphsChoice | None = None
    launching: Launching | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Leeway:
    """Which advice applies to a job; the default excludes none.

    Attributes:
        data_flags: flags that hide reductions and gathers and that the job does not set yet.
        may_interleave: whether its stages may have two model chunks each.
        no_overlap: why no search can find an overlap of its all-to-alls; empty if one can.
        keeps_layout: whether a search has kept the job's layout, so that other layouts may be faster.
    """

    data_flags: tuple[str, ...] = ("--overlap-grad-reduce", "--overlap-param-gather")
    may_interleave: bool = True
    no_overlap: str = ""
    keeps_layout: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedSharding:
    """The search for a free sharding of one stage of all GPUs.

    Attributes:
        answer: None if the integer program was not run.
        refusal: why it was not run; else None.
        micro_batches: of a step in the program.
        samples: of a micro-batch over all GPUs.
    """

    answer: IntraOnly | None = None
    refusal: str | None = None
    micro_batches: int = 0
    samples: int = 0

    @property
    def lost_seconds(self) -> float:
        """Seconds per step by which the best sharding beats megatron-core's best layout; infinite if either is missing."""
        answer = self.answer
        if answer is None or answer.best is None or answer.nearest is None:
            return math.inf
        return answer.nearest.seconds - answer.best.seconds

    @property
    def is_executed(self) -> bool:
        """Whether a layout of megatron-core is as fast as the best sharding."""
        answer = self.answer
        return answer is not None and answer.best is not None and self.lost_seconds <= SHARED * answer.best.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A decision in which the plan differs from the user's flags.

    Attributes:
        name: of the decision, such as "micro-batch".
        before, after: flag -> values, in the user's flags and in the plan; a flag in only one of them is removed or added.
        prediction: the prediction of the user's flags with only this change; None if a rule refuses them.
        rule: the rule that refuses them.
    """

    name: str
    before: Mapping[str, tuple[str, ...]]
    after: Mapping[str, tuple[str, ...]]
    prediction: Prediction | None
    rule: str = ""

    @property
    def sentence(self) -> str:
        """The flags that change: `--micro-batch-size 1 -> 2`, or `remove --recompute-granularity full`."""
        parts = []
        for flag in dict.fromkeys((*self.before, *self.after)):
            old, new = self.before.get(flag), self.after.get(flag)
            if new is None:
                parts.append(" ".join(("remove", flag, *(old or ()))))
            elif old is None:
                parts.append(" ".join(("add", flag, *new)))
            else:
                parts.append(f"{flag} {' '.join(old)} -> {' '.join(new)}")
        return ", ".join(parts)

    def gain(self, baseline: Prediction) -> float:
        """Seconds of a step that the change saves by itself; 0 if it is not possible by itself."""
        return (
            0.0 if self.prediction is None else baseline.predicted.step_seconds - self.prediction.predicted.step_seconds
        )

    def effect(self, baseline: Prediction) -> str:
        """The predicted effect of only this change, as text."""
        if self.prediction is None:
            return f"not possible alone: {self.rule}"
        fits = "" if self.prediction.fits else f"; {self.prediction.memory_verdict}"
        # A change that costs time or memory by itself needs another reason.
        pays = self.gain(baseline) > 0.0 and self.prediction.fits
        return (
            f"this change alone: {self.saved(baseline)}{fits}{'' if pays else '; it pays with the other changes only'}"
        )

    def saved(self, baseline: Prediction) -> str:
        """The seconds and bytes that the change adds, such as `-0.231 s a step and +9.7 GiB on the fullest stage`."""
        assert self.prediction is not None
        seconds = self.prediction.predicted.step_seconds - baseline.predicted.step_seconds
        memory = self.prediction.fullest.needed_bytes - baseline.fullest.needed_bytes
        space = f"{memory / GIB:+.1f} GiB on the fullest stage" if abs(memory) >= VISIBLE_BYTES else "the same memory"
        return f"{difference(seconds)} a step and {space}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSearch:
    """The chosen plan, the other candidates, and how to run the plan.

    Attributes:
        arguments: the user's flags without their layout.
        tuned: the overlap of the chosen plan, for this runtime; None without overlap.
        others: the other finalists, the fastest first.
        uniform: the search over uniform plans.
        refused: plans that rules across flags refuse, with the rule.
        baseline: the prediction of the user's layout; None if the flags have none that runs on the cluster.
        baseline_refusal: why the user's layout does not run on the cluster; empty if it does, or if the flags have none.
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
    arguments: tuple[str, ...]
    chosen: Finalist
    tuned: Tuned | None
    others: tuple[Finalist, ...]
    uniform: UniformSearch
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
    baseline_refusal: str = ""

    @property
    def ended_early(self) -> bool:
        """Whether the time limit or Ctrl-C ended the search."""
        return self.is_interrupted or self.is_late or self.solution.status is Status.TIME_LIMIT

    @property
    def problem(self) -> Problem:
        """The problem that prices the chosen plan, with CUDA graphs if the answer has them."""
        return self.chosen.problem.replaying(self.graphs is not None and self.graphs.is_on)

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
        plan_file, arguments, plan_arguments = None, self.arguments, self.chosen.plan_arguments
        in_file = self.chosen.in_file
        if in_file:
            plan_file = "plan.json"
        if self.plan.transfers:
            # The plan's file has the layout; no flag expresses it.
            arguments, in_file = self.chosen.arguments, ()
        elif self.plan.has_stores and not self.is_upstream:
            # The user's dispatcher is not that of instruction lists.
            arguments = self.chosen.arguments
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

    @property
    def solution(self) -> Solution[Any]:
        """The best solution over uniform plans and plans with unlike stages.

        The bound holds for layouts with freed stages that were searched, and for uniform plans of all others.
        """
        uniform = self.uniform.solution
        if self.staged is None:
            return uniform
        staged = self.staged.solution
        best = staged if staged.objective < uniform.objective else uniform
        status = uniform.status
        if status is not Status.TIME_LIMIT and staged.status in (Status.TIME_LIMIT, Status.FEASIBLE):
            status = staged.status
        bound = min(uniform.bound, staged.bound, best.objective)
        return dataclasses.replace(best, bound=bound, status=status, seconds=uniform.seconds + staged.seconds)


def folder_of(cluster: Cluster) -> str:
    """The name of the folder of the plan for a number of GPUs."""
    return f"{cluster.gpus}-gpus"


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """The answer for one number of GPUs.

    Attributes:
        search: None if no plan was found.
        reason: why not; else empty.
    """

    cluster: Cluster
    search: PlanSearch | None
    reason: str

    @property
    def folder(self) -> str:
        """The subfolder of the plan in the folder of the answer."""
        return folder_of(self.cluster)


@dataclass(frozen=True, kw_only=True, slots=True)
class BothTargets:
    """Two plans for one job on the same machines.

    Attributes:
        upstream: the search for unmodified Megatron-LM.
        runtime: the search for this runtime; it has the baseline.
        tie: largest difference that predictions cannot resolve, as a share of a step.
    """

    upstream: PlanSearch
    runtime: PlanSearch
    tie: float

    @property
    def gain(self) -> float:
        """Speedup of this runtime's plan over Megatron-LM's."""
        upstream, runtime = (search.prediction.predicted.step_seconds for search in (self.upstream, self.runtime))
        return upstream / runtime
