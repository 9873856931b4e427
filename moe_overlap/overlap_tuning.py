"""Decide the overlap of a run from its Megatron flags: what `tools/autotune.py --overlap-only` writes, as a function.

Every mechanism becomes a plan of its own, whose step is predicted: Tutel's chunks of capacity, ranges in partitions (found by
`search/layer/plan_ranges.py`), two micro-batches at a time; each as it is, and with weight gradients under backward exchanges
(`search/layer/weight_gradients.py`). The plan with the shortest step that fits is chosen, and the plain one where none is
shorter by `WORTH`. Traces of earlier runs refine all prices (`refining.py`); then what was measured stays, unless another is
shorter by `WORTH`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Unpack

from megatron.training.arguments import expand_files
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lower import lower
from moe_overlap.plan.overlap import TUTEL_DEGREES, SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.predicting import Options, Task, predicted_of, read_job, task_of
from moe_overlap.refining import Refinement, refine
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.predict import Prediction
from moe_overlap.tuner.cost.simulate_step import SimulatedStep, price_stages, simulate_step
from moe_overlap.tuner.search.layer.plan_ranges import PartitionedPlan, check_limits, partition_ranges
from moe_overlap.tuner.search.layer.plan_slots import shortened, with_slots
from moe_overlap.tuner.search.layer.weight_gradients import DeferralLimits, Schedule, schedule_weight_gradients

WORTH = 0.01
"""Share of the plain step by which another must be shorter: predictions are no better."""
PLAIN, WHOLE = "plain megatron-core", "whole micro-batches"
LEFT_OUT = ("--overlap-param-gather",)
"""Flags that only place communication, which a list places itself."""
DEFERRED = "weight gradients under exchanges"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to overlap.

    Attributes:
        name: mechanism, and whether weight gradients are deferred.
        words: the flags it runs with, without `--plan`.
        refused: why it cannot run; then nothing is predicted.
        ranges, schedule: what the searches found.
        measured_seconds: of its step, where a trace is of its plan.
    """

    name: str
    words: tuple[str, ...]
    plan: Plan | None = None
    prediction: Prediction | None = None
    refused: str = ""
    ranges: PartitionedPlan | None = None
    schedule: Schedule | None = None
    measured_seconds: float | None = None

    @property
    def decided(self) -> Plan:
        """Of one that is not refused."""
        assert self.plan is not None, self.refused
        return self.plan

    @property
    def seconds(self) -> float:
        """Of the predicted step."""
        assert self.prediction is not None, self.refused
        return self.prediction.predicted.step_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen.

    Attributes:
        others: what else was looked at: the predicted ones from the fastest on, then the refused ones.
        step: of the chosen plan, simulated with a micro-batch or more for every stage.
        refinement: what traces changed; None without.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    step: SimulatedStep
    plain_seconds: float
    search_seconds: float
    refinement: Refinement | None = None


def tune_overlap(
    words: Sequence[str],
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float = 5.0,
    traces: Sequence[str | Path] = (),
    **options: Unpack[Options],
) -> Tuned:
    """Choose the overlap of a run.

    Args:
        words: Megatron flags, or `@FILE`, without a plan and without overlap decided by hand.
        cluster: the machines; all of their GPUs run.
        solver_seconds: of the weight-gradient schedules, each.
        traces: of runs of this job, which refine its prices.
    Raises:
        ConfigError: as `predict` and `refine`; or the flags decide an overlap themselves, or the run exchanges no tokens.
    """
    begun = time.perf_counter()
    check_limits(limits)
    if not solver_seconds > 0:
        raise ConfigError("--time-limit", solver_seconds, "must be greater than 0 seconds", "use 5")
    task = task_of(words, cluster, options)
    _require_open(task)
    refinement = None
    if traces:
        task, refinement = refine(task, traces)
    plain = Candidate(name=PLAIN, words=tuple(words), plan=task.job.plan, prediction=predicted_of(task, task.job.plan))
    search = _Search(task, tuple(words), cluster, limits, solver_seconds)
    found = [plain, *search.candidates()]
    if refinement is not None:
        found = search.with_measured(found, refinement)
    predicted = sorted((one for one in found if one.prediction is not None), key=lambda one: one.seconds)
    chosen = keep_measured(found[0], predicted)
    others = [one for one in predicted if one is not chosen] + [one for one in found if one.refused]
    step = simulate_step(_shortened(chosen.decided), task.job.model, task.graphs, task.machine, task.features)
    return Tuned(chosen, tuple(others), step, plain.seconds, time.perf_counter() - begun, refinement)


def choose(plain: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest that fits, the plain one where it fits and is not slower by WORTH, or where nothing fits.

    Args:
        predicted: from the fastest on, the plain one among them.
    """
    fitting = [one for one in predicted if one.prediction is not None and one.prediction.fits]
    if not fitting or (plain in fitting and fitting[0].seconds > plain.seconds * (1.0 - WORTH)):
        return plain
    return fitting[0]


def keep_measured(plain: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest that was measured, unless others that fit are predicted to be faster by WORTH: then what `choose` says of them.

    Faster than what was measured and than what the same prices predict of that: they may miss something of both.
    """
    measured = [one for one in predicted if one.measured_seconds is not None]
    if not measured:
        return choose(plain, predicted)
    best = min(measured, key=lambda one: one.measured_seconds or 0.0)
    bar = (1.0 - WORTH) * min(best.measured_seconds or 0.0, best.seconds)
    fitting = [one for one in predicted if one.prediction is not None and one.prediction.fits]
    faster = [one for one in fitting if one.measured_seconds is None and one.seconds < bar]
    return choose(plain, faster) if faster else best


def _require_open(task: Task) -> None:
    if any(stage.overlap.is_listed for stage in task.job.plan.stages):
        raise ConfigError(
            "--overlap-only", "", "the flags decide an overlap by hand", "drop --moe-overlap-* and --plan"
        )
    if all(stage.expert * stage.expert_tensor == 1 for stage in task.job.plan.stages):
        rule = "nothing to hide: one expert rank exchanges no tokens"
        raise ConfigError("--overlap-only", "", rule, "use --expert-model-parallel-size 2 or more")


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """The arguments of `tune_overlap`, understood."""

    task: Task
    words: tuple[str, ...]
    cluster: Cluster
    limits: SearchLimits
    solver_seconds: float

    def candidates(self) -> Iterator[Candidate]:
        """All but the plain run."""
        yield from self._both(WHOLE, self._whole)
        for degree in TUTEL_DEGREES[1:]:
            flags = ("--moe-overlap-capacity-chunks", str(degree))
            yield from self._both(f"Tutel-style, {degree} chunks", functools.partial(self._by_flags, flags))
        yield from self._both("partitions", self._cut)
        flags = ("--moe-overlap-micro-batches", "2")
        yield from self._both("two micro-batches", functools.partial(self._by_flags, flags))

    def with_measured(self, found: Sequence[Candidate], refinement: Refinement) -> list[Candidate]:
        """The candidates with the measured steps of those that ran, and what ran beside them."""
        result = list(found)
        for step in refinement.steps:
            same = next((n for n, one in enumerate(result) if one.plan and _is_same(one.plan, step.plan)), None)
            if same is None:
                prediction = self._predicted(step.plan)
                name = f"the plan of {step.path}"
                words = self.own if any(stage.overlap.is_listed for stage in step.plan.stages) else self.words
                result.append(Candidate(name=name, words=words, plan=step.plan, prediction=prediction))
            one = result[-1 if same is None else same]
            fastest = min(step.seconds, one.measured_seconds or step.seconds)
            result[-1 if same is None else same] = dataclasses.replace(one, measured_seconds=fastest)
        return result

    @property
    def own(self) -> tuple[str, ...]:
        """The flags with the gate and the dispatcher that the executor needs, without what it does not go with."""
        kept = [word for word in expand_files(self.words) if word not in LEFT_OUT]
        gate = ("--moe-gate", "topk") if self.task.job.config.overlap.moe_gate is None else ()
        return (*kept, *gate, "--moe-token-dispatcher-type", "irregular")

    def _both(self, name: str, make: Callable[[], tuple[Plan, PartitionedPlan | None]]) -> Iterator[Candidate]:
        """A mechanism by itself, and with weight gradients deferred."""
        try:
            plan, ranges = make()
            first = Candidate(name=name, words=self.own, plan=plan, prediction=self._predicted(plan), ranges=ranges)
            if name != WHOLE:
                yield first
            if first.prediction is None or not first.prediction.fits:
                return
            schedule = self._schedule(plan, first.prediction)
            if schedule.chosen != "without":
                filled = schedule.plan
                prediction = self._predicted(filled)
                yield dataclasses.replace(
                    first, name=f"{name}, {DEFERRED}", plan=filled, prediction=prediction, schedule=schedule
                )
        except ConfigError as error:
            yield Candidate(name=name, words=self.own, refused=str(error))

    def _predicted(self, plan: Plan) -> Prediction:
        return predicted_of(self.task, plan)

    def _by_flags(self, flags: tuple[str, ...]) -> tuple[Plan, None]:
        """What flags say by hand; their rules hold."""
        return read_job([*self.own, *flags], self.cluster.gpus).plan, None

    def _whole(self) -> tuple[Plan, None]:
        """Gates and dispatchers of our own, nothing cut and nothing deferred."""
        deferred, _ = self._by_flags(("--defer-weight-gradients", "--max-deferred-bytes", "1"))
        return with_slots(deferred, [{} for _ in deferred.stages], 0), None

    def _cut(self) -> tuple[Plan, PartitionedPlan]:
        """Ranges in partitions, as the search finds them."""
        samples = self.task.job.plan.stages[0].micro_batch_size
        fewest = next((parts for parts in range(2, samples + 1) if samples % parts == 0), 2)
        # The flags' own rules say what a run with partitions needs beside the plan.
        self._by_flags(("--moe-overlap-partitions", str(fewest), "--moe-overlap-range", "experts"))
        whole, _ = self._whole()
        free = free_bytes(self._predicted(whole))
        found = partition_ranges(whole, self.task.job.model, self._prices(whole), self.limits, free)
        if not any(stage.ranges for stage in found.stages):
            reasons = {reason for stage in found.stages for _, reason in stage.excluded}
            rule = "; ".join(sorted(reasons)) or "no range is shorter in parts"
            raise ConfigError("--overlap-max-partitions", self.limits.max_partitions, rule, "nothing to do")
        return found.plan, found

    def _schedule(self, plan: Plan, prediction: Prediction) -> Schedule:
        held = max(1, int(min(free_bytes(prediction))))
        limits = DeferralLimits(max_deferred_bytes=held, solver_seconds=self.solver_seconds)
        job, task = self.task.job, self.task
        return schedule_weight_gradients(plan, job.model, task.graphs, task.machine, task.features, limits)

    def _prices(self, plan: Plan) -> dict[int, StagePrices]:
        task, prices = self.task, {}
        few = _shortened(plan)
        for stage, here in zip(
            few.stages, price_stages(few, task.job.model, task.graphs, task.machine, task.features), strict=True
        ):
            here.read(lower(few, task.job.model, stage.devices.ranks[0]))
            prices[stage.devices.ranks[0]] = here
        return prices


def _is_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a layout run alike: limits of a search only describe."""
    mine, theirs = ([dataclasses.replace(s.overlap, search_limits=None) for s in p.stages] for p in (plan, other))
    return mine == theirs


def free_bytes(prediction: Prediction) -> list[float]:
    """By stage, what its peak leaves of a device."""
    return [max(0.0, prediction.capacity_bytes - stage.peak_bytes) for stage in prediction.predicted.stages]


def _shortened(plan: Plan) -> Plan:
    """With a micro-batch or more for every stage."""
    return shortened(plan, len(plan.stages) * -(-4 // len(plan.stages)))
