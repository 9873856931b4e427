"""Ways to overlap a run: every mechanism as a plan of its own, predicted; each by itself, and with weight gradients under
backward exchanges.

A mechanism that the runtime does not execute is not among them: one that joins (fused kernels) is another line of `uniform`, and
mixes by class of layers (overlap_mixes.py) take it from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from megatron.training.arguments import expand_files
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lower import lower
from moe_overlap.plan.overlap import TUTEL_DEGREES, SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.ranges import RangeWord
from moe_overlap.predicting import Task, predicted_of, read_job
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.predict import Prediction
from moe_overlap.tuner.cost.simulate_step import price_stages
from moe_overlap.tuner.search.layer.mix_mechanisms import Mix
from moe_overlap.tuner.search.layer.plan_ranges import PartitionedPlan, partition_ranges
from moe_overlap.tuner.search.layer.plan_slots import shortened, with_slots
from moe_overlap.tuner.search.layer.weight_gradients import DeferralLimits, Schedule, schedule_weight_gradients

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
        dropped: flags of the user that it runs without.
        mechanism: the plan before weight gradients are deferred; None for the plain run.
        ranges, mix, schedule: what the searches found.
    """

    name: str
    words: tuple[str, ...]
    plan: Plan | None = None
    prediction: Prediction | None = None
    refused: str = ""
    dropped: tuple[str, ...] = ()
    mechanism: Plan | None = None
    ranges: PartitionedPlan | None = None
    mix: Mix | None = None
    schedule: Schedule | None = None

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
class Candidates:
    """The ways of one run: the arguments of `tune_overlap`, understood."""

    task: Task
    words: tuple[str, ...]
    cluster: Cluster
    limits: SearchLimits
    solver_seconds: float

    def uniform(self) -> Iterator[Candidate]:
        """One mechanism on all layers."""
        yield from self._both(WHOLE, self._whole)
        for degree in TUTEL_DEGREES[1:]:
            flags = ("--moe-overlap-capacity-chunks", str(degree))
            yield from self._both(f"Tutel-style, {degree} chunks", functools.partial(self._by_flags, flags))
        yield from self._both("partitions", self._cut)
        together = ("--moe-overlap-micro-batches", "2")
        yield from self._both("two micro-batches", functools.partial(self._by_flags, together))
        if cuts := self._equal_cuts():
            yield from self._both("equal partitions", functools.partial(self._best_of, cuts, ()))
            yield from self._both("two micro-batches in partitions", functools.partial(self._best_of, cuts, together))

    @property
    def own(self) -> tuple[str, ...]:
        """The flags with the gate and the dispatcher that the executor needs, without what it does not go with."""
        kept = (word for word in expand_files(self.words) if word not in LEFT_OUT)
        gate = ("--moe-gate", "topk") if self.task.job.config.overlap.moe_gate is None else ()
        return (*kept, *gate, "--moe-token-dispatcher-type", "irregular")

    def one(self, name: str, plan: Plan, prediction: Prediction | None = None) -> Candidate:
        """A plan that defers no weight gradients, predicted."""
        dropped = tuple(dict.fromkeys(word for word in expand_files(self.words) if word in LEFT_OUT))
        prediction = prediction or self.predicted(plan)
        return Candidate(name=name, words=self.own, plan=plan, prediction=prediction, mechanism=plan, dropped=dropped)

    def deferred(self, first: Candidate) -> Iterator[Candidate]:
        """The same with weight gradients deferred, where it fits and that is shorter."""
        if first.prediction is None or not first.prediction.fits:
            return
        schedule = self._schedule(first.decided, first.prediction)
        if schedule.chosen != "without":
            filled, name = schedule.plan, f"{first.name}, {DEFERRED}"
            prediction = self.predicted(filled)
            yield dataclasses.replace(first, name=name, plan=filled, prediction=prediction, schedule=schedule)

    def _both(self, name: str, make: Callable[[], tuple[Plan, PartitionedPlan | None]]) -> Iterator[Candidate]:
        """A mechanism by itself, and with weight gradients deferred."""
        try:
            plan, ranges = make()
            first = dataclasses.replace(self.one(name, plan), ranges=ranges)
            yield first
            yield from self.deferred(first)
        except ConfigError as error:
            yield Candidate(name=name, words=self.own, refused=str(error))

    def predicted(self, plan: Plan) -> Prediction:
        """Of a plan of this run."""
        return predicted_of(self.task, plan)

    def _by_flags(self, flags: tuple[str, ...]) -> tuple[Plan, None]:
        """What flags say by hand; their rules hold."""
        return read_job([*self.own, *flags], self.cluster.gpus).plan, None

    def _equal_cuts(self) -> list[tuple[str, ...]]:
        """Flags that cut every layer alike."""
        samples, most = self.task.job.plan.stages[0].micro_batch_size, self.limits.max_partitions
        return [
            ("--moe-overlap-partitions", str(parts), "--moe-overlap-range", word)
            for parts in range(2, min(samples, most) + 1)
            if samples % parts == 0
            for word in get_args(RangeWord)
        ]

    def _best_of(self, several: Sequence[tuple[str, ...]], more: tuple[str, ...]) -> tuple[Plan, None]:
        """Of what these flags say, each with `more`, the plan with the shortest step; one that fits where any does.

        Raises:
            ConfigError: none of them may run.
        """
        found, refused = [], []
        for flags in several:
            try:
                plan, _ = self._by_flags((*flags, *more))
                prediction = self.predicted(plan)
                found.append((not prediction.fits, prediction.predicted.step_seconds, plan))
            except ConfigError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        return min(found, key=lambda one: one[:2])[2], None

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
        free = free_bytes(self.predicted(whole))
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
        few = few_micro_batches(plan)
        for stage, here in zip(
            few.stages, price_stages(few, task.job.model, task.graphs, task.machine, task.features), strict=True
        ):
            here.read(lower(few, task.job.model, stage.devices.ranks[0]))
            prices[stage.devices.ranks[0]] = here
        return prices


def free_bytes(prediction: Prediction) -> list[float]:
    """By stage, what its peak leaves of a device."""
    return [max(0.0, prediction.capacity_bytes - stage.peak_bytes) for stage in prediction.predicted.stages]


def few_micro_batches(plan: Plan) -> Plan:
    """With a micro-batch or more for every stage."""
    return shortened(plan, len(plan.stages) * -(-4 // len(plan.stages)))
