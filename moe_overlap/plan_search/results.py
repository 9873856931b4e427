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
"""Share of a step below which two shardings count as equally fast."""
APART = 0.01
"""Share of a predicted step by which its simulation may differ without being told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A plan that was written as flags, read again and predicted.

    Attributes:
        problem: the run under its plan, as read from the flags.
        arguments: the flags of the whole run; `said` are those that say the plan, but for those that its file says in their place
            (`in_file`): flags cannot say what single stages recompute.
        is_staged: whether its stages decided for themselves about layers and recomputation.
        refusal: why pretrain_moe.py refuses the plan; None where it, or the target, executes it.
        simulated: simulated seconds of the step over the predicted ones; None where the plan was not simulated.
        lacks_lists: whether it is predicted by a closed form as yet, though lists know more: on unlike meshes, in whose closed
            form nothing waits for tiles, and where states move (tuner/cost/prediction.py).
    """

    name: str
    problem: Problem
    prediction: Prediction
    arguments: tuple[str, ...]
    said: tuple[str, ...]
    in_file: tuple[str, ...] = ()
    is_staged: bool = False
    refusal: str | None = None
    simulated: float | None = None
    lacks_lists: bool = False

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


def is_paired(finalist: Finalist) -> bool:
    """Whether its layers overlap as Megatron-LM overlaps them; only Megatron-LM runs it then."""
    return finalist.problem.features.overlap_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Screened:
    """A layout that was looked at for the all-to-alls that it may hide.

    Attributes:
        way: to overlap.
        least_seconds: of its step, if all that can be hidden were.
        seconds: simulated, of the simplest plan of that way; None where it does not fit or a rule refuses it.
        refused: why there is none.
    """

    name: str
    way: str
    least_seconds: float
    seconds: float | None
    refused: str = ""

    @property
    def order(self) -> tuple[float, float]:
        """The fastest first; those without a plan behind them."""
        return math.inf if self.seconds is None else self.seconds, self.least_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The chosen overlap, what else was looked at, and how to execute it.

    Attributes:
        others: the candidates that were not chosen: the predicted ones from the fastest on, then the refused ones.
        mix: the mechanism of every class of layers, without deferred weight gradients; None where no plan with overlap fits.
        step: of the chosen plan, simulated with a micro-batch or more for every stage.
        plain_seconds: of the baseline's predicted step.
        arguments: the flags that execute the chosen plan, without `--plan`.
        dropped: flags of the user that it runs without.
        refinement: the change that traces made to prices; None without traces.
        assumed: sentences on what was taken for what the flags do not say.
        graphs: whether lists are replayed as CUDA graphs, and the other way; None where there is none.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Leeway:
    """The advice that a job leaves room for; the default rules none out.

    Attributes:
        data_flags: flags that hide reductions and gathers, and that the job has not.
        may_interleave: whether its stages may have two model chunks each.
        no_overlap: why no search finds an overlap of its all-to-alls; empty where one may.
    """

    data_flags: tuple[str, ...] = ("--overlap-grad-reduce", "--overlap-param-gather")
    may_interleave: bool = True
    no_overlap: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedSharding:
    """The search for a free sharding of one stage of all GPUs.

    Attributes:
        answer: None where the integer program was not run.
        refusal: why it was not; else None.
        micro_batches: of a step, as the program has them.
        samples: of a micro-batch over all GPUs.
    """

    answer: IntraOnly | None = None
    refusal: str | None = None
    micro_batches: int = 0
    samples: int = 0

    @property
    def lost_seconds(self) -> float:
        """Seconds per step by which the best sharding beats megatron-core's best layout; infinite where either is missing."""
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
    """A decision that the plan makes otherwise than the user's flags.

    Attributes:
        name: of the decision, such as "micro-batch".
        before, after: flags with their values; what stands in one of them only is removed or added.
        alone: the user's flags with this change and no other; None where rules refuse them.
        rule: why they do.
    """

    name: str
    before: Mapping[str, tuple[str, ...]]
    after: Mapping[str, tuple[str, ...]]
    alone: Prediction | None
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
        """Seconds of a step that the change saves alone; 0 where it cannot be made alone."""
        return 0.0 if self.alone is None else baseline.predicted.step_seconds - self.alone.predicted.step_seconds

    def effect(self, baseline: Prediction) -> str:
        """The predicted effect of the change alone, as text."""
        if self.alone is None:
            return f"only together with others: {self.rule}"
        seconds = self.alone.predicted.step_seconds - baseline.predicted.step_seconds
        memory = self.alone.fullest.needed_bytes - baseline.fullest.needed_bytes
        fits = "" if self.alone.fits else f"; {self.alone.memory_verdict}"
        space = f"{memory / GIB:+.1f} GiB on the fullest stage" if abs(memory) >= VISIBLE_BYTES else "as much memory"
        # What costs something alone is no reason for itself.
        others = "" if seconds < 0 and self.alone.fits else "; chosen for what it gives together with the others"
        return f"alone {difference(seconds)} a step and {space}{fits}{others}"


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
        return self.is_interrupted or self.is_late or self.solution.status is Status.TIME_LIMIT

    @property
    def problem(self) -> Problem:
        """The problem that prices the chosen plan: with lists replayed as CUDA graphs where those of the answer are."""
        return self.chosen.problem.replaying(self.graphs is not None and self.graphs.is_on)

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

    @property
    def solution(self) -> Solution[Any]:
        """The best over uniform plans and plans of unlike stages.

        With unlike stages the bound is proven for the layouts whose stages were freed, and for uniform plans of the others.
        """
        uniform = self.found.solution
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
        search: None where no plan was found; `reason` then says why.
    """

    cluster: Cluster
    search: PlanSearch | None
    reason: str

    @property
    def folder(self) -> str:
        """The folder of the plan, inside the folder of the answer."""
        return folder_of(self.cluster)


@dataclass(frozen=True, kw_only=True, slots=True)
class BothTargets:
    """Two plans for one job on the same machines.

    Attributes:
        upstream: the search for unmodified Megatron-LM.
        here: the search for this runtime; it has the baseline.
        tie: share of a step below which predictions tell no plan from another.
    """

    upstream: PlanSearch
    here: PlanSearch
    tie: float

    @property
    def gain(self) -> float:
        """How many times as fast this runtime's plan is."""
        upstream, here = (search.prediction.predicted.step_seconds for search in (self.upstream, self.here))
        return upstream / here
