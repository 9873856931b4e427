"""Ways to overlap a run: every mechanism as a plan of its own, predicted; each by itself, and with weight gradients under
backward exchanges. Where flags can cut all layers alike, the best range of each number of parts is a mechanism, too.

A mechanism that the runtime does not execute is not among them: one that joins (fused kernels) is another line of `uniform`, and
mixes by class of layers (overlap_mixes.py) take it from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from megatron.training.cli.arguments import expand_files
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.operators import WEIGHT_GRADIENT
from moe_overlap.plan.overlap import TUTEL_DEGREES, RangeWord, SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.predicting import Task, predicted_of, read_job
from moe_overlap.tuner.cost.analytic import Prediction, prepare, price_family
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.layer import operator_seconds
from moe_overlap.tuner.cost.simulate.step import price_stages
from moe_overlap.tuner.search.layer.mechanisms import Mix, entries_of, with_entries
from moe_overlap.tuner.search.layer.partition_ranges import PartitionedPlan, partition_ranges
from moe_overlap.tuner.search.layer.slots import shortened, with_slots
from moe_overlap.tuner.search.layer.weight_gradients import DeferralLimits, Schedule, schedule_weight_gradients

PLAIN, WHOLE = "plain megatron-core", "whole micro-batches"
LEFT_OUT = ("--overlap-param-gather",)
"""Flags that only place communication, which a list places itself."""
DEFERRED = "deferred weight gradients"
IN_PIECES = 1.25
"""At most so many times as long take weight gradients that stay in operators that run in parts."""


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
        measured_seconds: of its step, where a trace is of its plan.
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
class Candidates:
    """The ways of one run: the arguments of `tune_overlap`, understood."""

    task: Task
    words: tuple[str, ...]
    cluster: Cluster
    limits: SearchLimits
    solver_seconds: float

    def uniform(self) -> Iterator[Candidate]:
        """One mechanism on all layers: each by itself, then with weight gradients deferred where that may be the fastest."""
        alone: list[Candidate] = []
        for one in self._alone():
            # Searches may end at one plan: to the last bit it takes as long and holds as much.
            if one.prediction is None or all(not _predicted_alike(one.prediction, other.prediction) for other in alone):
                alone.append(one)
        yield from alone
        fitting = [one for one in alone if one.prediction is not None and one.prediction.fits]
        best = min((one.seconds for one in fitting), default=0.0)
        for first in sorted(fitting, key=lambda one: one.seconds):
            least = self._least_seconds(first)
            if least > best:
                reason = f"at least {least:.4f} s a step, whatever the schedule"
                yield Candidate(name=f"{first.name}, {DEFERRED}", words=self.own, refused=reason)
                continue
            for one in self.deferred(first):
                best = min(best, one.seconds)
                yield one

    def _alone(self) -> Iterator[Candidate]:
        """Every mechanism, or why it cannot run."""
        yield self._made(WHOLE, self._whole)
        for degree in TUTEL_DEGREES[1:]:
            flags = ("--moe-overlap-capacity-chunks", str(degree))
            yield self._made(f"Tutel-style, {degree} chunks", functools.partial(self._by_flags, flags))
        yield (cut := self._made("partitions", self._cut))
        flags = ("--moe-overlap-micro-batches", "2")
        yield (pairs := self._made("two micro-batches", functools.partial(self._by_flags, flags)))
        if cut.ranges is not None and not pairs.refused:
            both = _in_pairs(cut.ranges.plan), cut.ranges
            yield self._made("two micro-batches in partitions", lambda: both)
        for parts in self._numbers_of_parts():
            yield self._made(f"{parts} equal partitions", functools.partial(self._cut_alike, parts, ()))
            if not pairs.refused:
                name = f"two micro-batches in {parts} equal partitions"
                yield self._made(name, functools.partial(self._cut_alike, parts, flags))

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
        """The same with weight gradients deferred, where it fits and that is shorter; or why it cannot run."""
        if first.prediction is None or not first.prediction.fits:
            return
        name = f"{first.name}, {DEFERRED}"
        try:
            schedule = self._schedule(first.decided, first.prediction)
            if schedule.chosen != "without":
                filled = schedule.plan
                prediction = self.predicted(filled)
                yield dataclasses.replace(first, name=name, plan=filled, prediction=prediction, schedule=schedule)
        except ConfigError as error:
            yield Candidate(name=name, words=self.own, refused=str(error))

    def _least_seconds(self, first: Candidate) -> float:
        """What a step takes at least with weight gradients deferred: they save their own time, and no more than is idle."""
        assert first.prediction is not None
        parts, plan = first.prediction.breakdown, first.decided
        idle = first.seconds - parts["compute_seconds"] - parts["optimizer_seconds"]
        passes = plan.stages[0].gradient_accumulation_steps + len(plan.stages) - 1
        own = IN_PIECES * passes * weight_gradient_seconds(self.task, plan)
        return first.seconds - min(idle, own)

    def _made(self, name: str, make: Callable[[], tuple[Plan, PartitionedPlan | None]]) -> Candidate:
        """A mechanism by itself."""
        try:
            plan, ranges = make()
            return dataclasses.replace(self.one(name, plan), ranges=ranges)
        except ConfigError as error:
            return Candidate(name=name, words=self.own, refused=str(error))

    def predicted(self, plan: Plan) -> Prediction:
        """Of a plan of this run."""
        return predicted_of(self.task, plan)

    def _by_flags(self, flags: tuple[str, ...]) -> tuple[Plan, None]:
        """What flags say by hand; their rules hold."""
        return read_job([*self.own, *flags], self.cluster.gpus).plan, None

    def _numbers_of_parts(self) -> list[int]:
        """Those that divide the samples of a micro-batch."""
        samples = self.task.job.plan.stages[0].micro_batch_size
        return [parts for parts in range(2, min(samples, self.limits.max_partitions) + 1) if samples % parts == 0]

    def _cut_alike(self, parts: int, more: tuple[str, ...]) -> tuple[Plan, None]:
        """Of the ranges that flags say, each with `more`, the one with the shortest step.

        Raises:
            ConfigError: none of them may run.
        """
        found, refused = [], []
        for word in get_args(RangeWord):
            try:
                cut = ("--moe-overlap-partitions", str(parts), "--moe-overlap-range", word)
                plan, _ = self._by_flags((*cut, *more))
                found.append((self.predicted(plan).predicted.step_seconds, plan))
            except ConfigError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        return min(found, key=lambda one: one[0])[1], None

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


def _in_pairs(plan: Plan) -> Plan:
    """Two micro-batches at a time; layers that are not cut run whole among them."""
    crossing = {
        layer: dataclasses.replace(one, mechanism="cross_micro_batch") if one.mechanism == "none" else one
        for layer, one in entries_of(plan).items()
    }
    stages = []
    for stage in plan.stages:
        overlap = dataclasses.replace(stage.overlap, micro_batches_in_flight=2)
        stages.append(dataclasses.replace(stage, overlap=overlap))
    return with_entries(dataclasses.replace(plan, stages=tuple(stages)), crossing)


def weight_gradient_seconds(task: Task, plan: Plan) -> float:
    """Of one micro-batch on the stage where they take longest, alone and whole."""
    longest, model, machine = 0.0, task.job.model, task.machine
    for family in prepare(plan, model, task.graphs, task.features, machine.load):
        priced = price_family(plan, model, family, machine, task.features)
        of_parts = [
            sum(
                seconds
                for (_, _, suffix), seconds in operator_seconds(table, priced.setting, cost).items()
                if suffix == WEIGHT_GRADIENT
            )
            for table, cost in zip(family.tables, priced.parts, strict=True)
        ]
        longest = max(longest, float((np.array(of_parts) @ family.counts).max()))
    return longest


def _predicted_alike(one: Prediction, other: Prediction | None) -> bool:
    return other is not None and one.predicted == other.predicted


def run_alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a layout run alike: limits of a search only describe."""
    mine, theirs = ([dataclasses.replace(s.overlap, search_limits=None) for s in p.stages] for p in (plan, other))
    return mine == theirs


def free_bytes(prediction: Prediction) -> list[float]:
    """By stage, what its peak leaves of a device."""
    return [max(0.0, prediction.capacity_bytes - stage.peak_bytes) for stage in prediction.predicted.stages]


def few_micro_batches(plan: Plan) -> Plan:
    """With a micro-batch or more for every stage."""
    return shortened(plan, len(plan.stages) * -(-4 // len(plan.stages)))
