"""Candidates of the overlap search: one plan per mechanism, with the prediction of its step.

Terms. The baseline is the problem's plan, which overlaps nothing. A candidate is a plan with the baseline's parallel layout and
another overlap. It is *undeferred* while it defers no weight gradients.

1. Each mechanism is tried by itself on all layers: Tutel's capacity chunks, the ranges in partitions of `partition_ranges`, two
   micro-batches in flight, and equal partitions of the best range word.
2. Candidates with the same prediction as an earlier one are dropped.
3. The candidates that fit, fastest first, are tried with weight gradients deferred under their backward all-to-alls, unless a
   lower bound shows that deferral cannot make them the best.

A candidate that a rule refuses stays in the answer with its reason. Mechanisms that the runtime does not execute are not tried. A
new mechanism is another line of `_mechanisms`; mixes by class of layers (overlap.py) then include it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import GRAPHS_FLAG
from moe_overlap.plan.lowering.lower import lower_rank
from moe_overlap.plan.operators import WEIGHT_GRADIENT
from moe_overlap.plan.overlap import TUTEL_DEGREES, RangeWord, SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.uniform_overlap import OverlapWords, with_uniform_overlap
from moe_overlap.tuner.cost.analytic import Prediction, prepare, price_family
from moe_overlap.tuner.cost.feasibility import needed_bytes
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.layer import operator_seconds
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import price_stages
from moe_overlap.tuner.limits import LIMIT_FLAGS
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.hidden import Way
from moe_overlap.tuner.search.layer.mechanisms import Mix, entries_of, with_entries
from moe_overlap.tuner.search.layer.partition_ranges import PartitionedPlan, partition_ranges
from moe_overlap.tuner.search.layer.slots import enough_micro_batches, shortened, with_slots
from moe_overlap.tuner.search.layer.weight_gradients import DeferralLimits, Schedule, schedule_weight_gradients

PLAIN, WHOLE = "plain megatron-core", "whole micro-batches"
DEFERRED = "deferred weight gradients"
NOT_REPLAYED = f"{GRAPHS_FLAG}: Transformer Engine's modules put weight gradients aside, which no replay repeats"
"""Why no candidate defers weight gradients if lists are replayed: the runtime refuses it."""
PARTITIONED_SLOWDOWN = 1.25
"""Upper bound of seconds(weight gradients inside partitioned operators) / seconds(uncut weight gradients)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to overlap.

    Attributes:
        name: mechanism, and whether weight gradients are deferred.
        refused: why it cannot run; then there is no plan and no prediction.
        mechanism: the plan before weight gradients are deferred; None for the baseline.
        ranges, mix, schedule: answers of the searches that it came from.
        measured_seconds: seconds of its step in a trace of its plan; None without such a trace.
    """

    name: str
    plan: Plan | None = None
    prediction: Prediction | None = None
    refused: str = ""
    mechanism: Plan | None = None
    ranges: PartitionedPlan | None = None
    mix: Mix | None = None
    schedule: Schedule | None = None
    measured_seconds: float | None = None

    @property
    def decided(self) -> Plan:
        """The plan of a candidate that is not refused."""
        assert self.plan is not None, self.refused
        return self.plan

    @property
    def seconds(self) -> float:
        """Seconds of the predicted step of a candidate that is not refused."""
        assert self.prediction is not None, self.refused
        return self.prediction.predicted.step_seconds

    @property
    def fits(self) -> bool:
        """True if it is not refused and every stage fits the memory of its devices."""
        return self.prediction is not None and self.prediction.fits


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of one problem.

    Attributes:
        limits: limits of the search for ranges in partitions.
        solver_seconds: time limit of each weight-gradient schedule.
        predictions: (plan, prediction) so far; several mechanisms may end at the same plan.
    """

    problem: Problem
    limits: SearchLimits
    solver_seconds: float
    predictions: list[tuple[Plan, Prediction]] = dataclasses.field(default_factory=list)

    def uniform(self) -> Iterator[Candidate]:
        """Every mechanism on all layers: first undeferred, then with weight gradients deferred where that may be the fastest."""
        # Steps 1 and 2. Searches that end at one plan have predictions that are equal to the last bit.
        undeferred: list[Candidate] = []
        for candidate in self._mechanisms():
            if candidate.prediction is None or all(not _same_prediction(candidate, other) for other in undeferred):
                undeferred.append(candidate)
        yield from undeferred
        # Step 3. Fastest first, so that the incumbent is good early and the bound prunes most of the slow candidates.
        fitting = [candidate for candidate in undeferred if candidate.fits]
        best_seconds = min((candidate.seconds for candidate in fitting), default=0.0)
        for candidate in sorted(fitting, key=lambda candidate: candidate.seconds):
            least_seconds = self._least_seconds(candidate)
            if least_seconds > best_seconds:
                reason = f"at least {least_seconds:.4f} s a step, whatever the schedule"
                yield Candidate(name=f"{candidate.name}, {DEFERRED}", refused=reason)
                continue
            for deferring in self.deferred(candidate):
                if not deferring.refused:
                    best_seconds = min(best_seconds, deferring.seconds)
                yield deferring

    def _mechanisms(self) -> Iterator[Candidate]:
        """Every mechanism undeferred, or why it cannot run."""
        yield self._candidate(WHOLE, self._unpartitioned)
        for degree in TUTEL_DEGREES[1:]:
            make = functools.partial(self._uniform_plan, capacity_chunks=degree)
            yield self._candidate(f"{degree} capacity chunks", make)
        yield (partitioned := self._try("partitions", self._partitioned))
        yield (pairs := self.simplest(Way.PAIRS))
        # The search for ranges prices one micro-batch after the other (`_check` of partition_ranges.py). For pairs it is not
        # repeated: the same ranges are simulated in pairs.
        if partitioned.ranges is not None and not pairs.refused:
            both = _in_pairs(partitioned.ranges.plan), partitioned.ranges
            yield self._try(f"{Way.PAIRS} in partitions", lambda: both)
        for count in self._partition_counts():
            make = functools.partial(self._best_range_word, count, 1)
            yield self._candidate(f"{count} equal partitions", make)
            if not pairs.refused:
                make = functools.partial(self._best_range_word, count, 2)
                yield self._candidate(f"{Way.PAIRS} in {count} equal partitions", make)

    def simplest(self, way: Way) -> Candidate:
        """The plan of a way to overlap that needs no search: two micro-batches in flight, or the fewest equal partitions."""
        if way is Way.PAIRS:
            return self._candidate(str(way), functools.partial(self._uniform_plan, micro_batches=2))
        fewest = next(iter(self._partition_counts()), 2)
        return self._candidate(f"{fewest} equal partitions", functools.partial(self._best_range_word, fewest, 1))

    def of_plan(self, name: str, plan: Plan) -> Candidate:
        """The candidate of a plan that defers no weight gradients."""
        return Candidate(name=name, plan=plan, prediction=self.predicted(plan), mechanism=plan)

    def deferred(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with weight gradients deferred, if it fits and deferral shortens the step; or why it cannot run."""
        if candidate.prediction is None or not candidate.prediction.fits:
            return
        name = f"{candidate.name}, {DEFERRED}"
        if self.problem.features.listed_graphs and self.problem.listed.library_defers:
            yield Candidate(name=name, refused=NOT_REPLAYED)
            return
        try:
            schedule = self._schedule(candidate.decided, candidate.prediction)
            if schedule.chosen != "without":
                plan, prediction = self._sends_at_best(schedule.plan)
                yield dataclasses.replace(candidate, name=name, plan=plan, prediction=prediction, schedule=schedule)
        except ConfigError as error:
            yield Candidate(name=name, refused=str(error))

    def _sends_at_best(self, plan: Plan) -> tuple[Plan, Prediction]:
        """The faster of two plans: as given, or with the other value of `sends_late` for the forward passes of pairs.

        `with_uniform_overlap` chose the value by the links, and slots were filled for it.
        """
        prediction = self.predicted(plan)
        if not plan.has_pairs or len(plan.stages) == 1:
            return plan, prediction
        overlaps = [dataclasses.replace(s.overlap, sends_late=not s.overlap.sends_late) for s in plan.stages]
        stages = tuple(dataclasses.replace(s, overlap=o) for s, o in zip(plan.stages, overlaps, strict=True))
        other = dataclasses.replace(plan, stages=stages)
        of_other = self.predicted(other)
        faster = of_other.fits and of_other.predicted.step_seconds < prediction.predicted.step_seconds
        return (other, of_other) if faster else (plan, prediction)

    def predicted(self, plan: Plan) -> Prediction:
        """The prediction of a plan of this problem."""
        # Plans hold dictionaries and cannot be hashed; a linear scan suffices for about twenty predictions.
        prediction = next((prediction for other, prediction in self.predictions if other == plan), None)
        if prediction is None:
            prediction = predict_plan(plan, self.problem)
            self.predictions.append((plan, prediction))
        return prediction

    def _least_seconds(self, candidate: Candidate) -> float:
        """Lower bound of a step with weight gradients deferred: they save at most min(their own time, idle time)."""
        assert candidate.prediction is not None
        breakdown, plan = candidate.prediction.breakdown, candidate.decided
        # Everything but computation and update: no schedule can hide weight gradients in more time than that.
        idle = candidate.seconds - breakdown["compute_seconds"] - breakdown["optimizer_seconds"]
        # With M micro-batches and P stages a step lasts about M + P - 1 passes, each of which saves the deferred seconds.
        passes = plan.stages[0].gradient_accumulation_steps + len(plan.stages) - 1
        # Weight gradients that leave a partitioned operator also save the overhead of their cut products; the bound includes it.
        deferrable = PARTITIONED_SLOWDOWN * passes * weight_gradient_seconds(self.problem, plan)
        return candidate.seconds - min(idle, deferrable)

    def _candidate(self, name: str, make: Callable[[], Plan]) -> Candidate:
        """The candidate of a mechanism that needs no search for ranges."""
        return self._try(name, lambda: (make(), None))

    def _try(self, name: str, make: Callable[[], tuple[Plan, PartitionedPlan | None]]) -> Candidate:
        """The undeferred candidate of a mechanism; refused if building or predicting its plan raises ConfigError."""
        try:
            plan, ranges = make()
            return dataclasses.replace(self.of_plan(name, plan), ranges=ranges)
        except ConfigError as error:
            return Candidate(name=name, refused=str(error))

    def _uniform_plan(self, **fields: Any) -> Plan:
        """The baseline with a uniform overlap.

        Args:
            fields: fields of `OverlapWords` other than gate and dispatcher.
        """
        problem = self.problem
        overlap = OverlapWords(gate=problem.listed.gate, dispatcher="irregular", **fields)
        return with_uniform_overlap(problem.plan, problem.model, overlap, problem.listed)

    def _partition_counts(self) -> list[int]:
        """Numbers of partitions, from 2 to the limit, that divide the samples of a micro-batch."""
        samples = self.problem.plan.stages[0].micro_batch_size
        return [count for count in range(2, min(samples, self.limits.max_partitions) + 1) if samples % count == 0]

    def _best_range_word(self, partitions: int, micro_batches: int) -> Plan:
        """The plan with the shortest step over all range words.

        Raises:
            ConfigError: rules refuse every range word.
        """
        plans, refusals = [], []
        for word in get_args(RangeWord):
            try:
                plan = self._uniform_plan(partitions=partitions, range_word=word, micro_batches=micro_batches)
                plans.append((self.predicted(plan).predicted.step_seconds, plan))
            except ConfigError as error:
                refusals.append(error)
        if not plans:
            raise refusals[0]
        return min(plans, key=lambda timed: timed[0])[1]

    def _unpartitioned(self) -> Plan:
        """This fork's gates and dispatchers, without partitions and without deferral.

        Built from the flags that only defer weight gradients, with their slots emptied, so that the rules for those flags are
        checked.
        """
        deferring = self._uniform_plan(defer=True, max_deferred_bytes=1)
        return with_slots(deferring, [{} for _ in deferring.stages], 0)

    def _partitioned(self) -> tuple[Plan, PartitionedPlan]:
        """The answer of the search for ranges in partitions.

        Raises:
            ConfigError: no range may be partitioned, or none is shorter in partitions.
        """
        samples = self.problem.plan.stages[0].micro_batch_size
        fewest = next((count for count in range(2, samples + 1) if samples % count == 0), 2)
        # The plan is discarded: building it checks the rules for partitions before the search spends any time.
        self._uniform_plan(partitions=fewest, range_word="experts")
        uncut = self._unpartitioned()
        free = free_bytes(self.predicted(uncut))
        answer = partition_ranges(uncut, self.problem.model, self._prices(uncut), self.limits, free)
        if not any(stage.ranges for stage in answer.stages):
            reasons = {reason for stage in answer.stages for _, reason in stage.excluded}
            rule = "; ".join(sorted(reasons)) or "no range is shorter in parts"
            raise ConfigError(LIMIT_FLAGS["max_partitions"], self.limits.max_partitions, rule, "nothing to do")
        return answer.plan, answer

    def _schedule(self, plan: Plan, prediction: Prediction) -> Schedule:
        """The weight-gradient schedule whose byte limit is the free memory of the fullest device."""
        # A plan has one limit for all stages, so the fullest decides. At least one byte, because 0 in a plan means no limit.
        held = max(1, int(min(free_bytes(prediction))))
        limits = DeferralLimits(max_deferred_bytes=held, solver_seconds=self.solver_seconds)
        return schedule_weight_gradients(
            plan, self.problem, limits, lambda plan: self.predicted(plan).predicted.step_seconds
        )

    def _prices(self, plan: Plan) -> dict[int, StagePrices]:
        """First rank of every stage -> its prices, with a list of a few micro-batches read in."""
        prices = {}
        # Prices belong to operators, and every operator occurs in a list of a few micro-batches.
        few = shortened(plan, enough_micro_batches(len(plan.stages)))
        for stage, of_stage in zip(few.stages, price_stages(few, self.problem), strict=True):
            of_stage.read(lower_rank(few, self.problem.model, stage.devices.ranks[0]))
            prices[stage.devices.ranks[0]] = of_stage
        return prices


def _in_pairs(plan: Plan) -> Plan:
    """The plan with two micro-batches in flight; its partitioned layers stay partitioned."""
    crossing = {
        layer: dataclasses.replace(entry, mechanism="cross_micro_batch") if entry.mechanism == "none" else entry
        for layer, entry in entries_of(plan).items()
    }
    stages = []
    for stage in plan.stages:
        overlap = dataclasses.replace(stage.overlap, micro_batches_in_flight=2)
        stages.append(dataclasses.replace(stage, overlap=overlap))
    return with_entries(dataclasses.replace(plan, stages=tuple(stages)), crossing)


def weight_gradient_seconds(problem: Problem, plan: Plan) -> float:
    """Weight-gradient seconds per micro-batch on the stage with the most, without overlap or partitioning."""
    longest, model, machine = 0.0, problem.model, problem.machine
    for family in prepare(plan, model, problem.graphs, problem.features, machine.load):
        priced = price_family(plan, model, family, machine, problem.features)
        seconds_K = [
            sum(
                seconds
                for (_, _, suffix), seconds in operator_seconds(
                    table, priced.setting, cost, hides_exchanges=True
                ).items()
                if suffix == WEIGHT_GRADIENT
            )
            for table, cost in zip(family.tables, priced.parts, strict=True)
        ]
        longest = max(longest, float((np.array(seconds_K) @ family.counts).max()))
    return longest


def _same_prediction(candidate: Candidate, other: Candidate) -> bool:
    prediction, other_prediction = candidate.prediction, other.prediction
    return (
        prediction is not None and other_prediction is not None and prediction.predicted == other_prediction.predicted
    )


def free_bytes(prediction: Prediction) -> list[float]:
    """[stages] bytes that each stage may need in addition and still fit."""
    most = prediction.available_bytes / prediction.memory.high
    return [max(0.0, most - needed_bytes(stage)) for stage in prediction.predicted.stages]
