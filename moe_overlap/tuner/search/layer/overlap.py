"""Decide the overlap of a problem whose parallel layout is given.

1. Every mechanism becomes a candidate, uniformly on all layers, alone and with deferred weight gradients (candidates.py).
2. Starting from the best uniform plan, coordinate descent picks a mechanism for every class of layers (mechanisms.py).
3. The candidate with the shortest step that fits is chosen, and the baseline where none is shorter by `WORTH`. Where steps of the
   problem were measured, the fastest measured plan stays, unless another is shorter by `WORTH`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.overlap import SearchLimits, StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.calibrate.refine import MeasuredStep
from moe_overlap.tuner.capture.request import layer_kinds
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, listed_seconds, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.search.layer.candidates import PLAIN, WHOLE, Candidate, Candidates
from moe_overlap.tuner.search.layer.mechanisms import Mix, layer_classes, mix_mechanisms
from moe_overlap.tuner.search.layer.slots import enough_micro_batches, shortened

WORTH = 0.01
"""Share of the baseline's step by which another must be shorter: predictions are no better."""
MIXED = "mixed by class of layers"
MOST_PREDICTIONS = 24
"""Most predictions spent on mixes: seconds for a model of 61 layers on 16 stages."""


REPLAYED = 3
"""So many of the fastest candidates are predicted with their lists replayed as CUDA graphs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraphsChoice:
    """An answer, and what it would be with its lists replayed as CUDA graphs, or without. The flags decide which it is.

    Attributes:
        is_on: whether the chosen plan is priced, and run, with them.
        name: the overlap that is predicted the other way.
        other: that prediction; None where rules refuse it.
        refused: why they do.
    """

    is_on: bool
    name: str = ""
    other: Prediction | None = None
    refused: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """Choices that fit first, then the shortest step."""
        if self.other is None:
            return True, math.inf
        return not self.other.fits, self.other.predicted.step_seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The answer of the search.

    Attributes:
        others: the candidates that were not chosen: the predicted ones from the fastest on, then the refused ones.
        mix: the mechanism of every class of layers, without deferred weight gradients; None where no plan with overlap fits.
        step: of the chosen plan, simulated with a micro-batch or more for every stage.
        graphs: whether lists are replayed as CUDA graphs, and what the other way is predicted to take; None where there is none.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    mix: Mix | None
    step: SimulatedStep
    baseline_seconds: float
    graphs: GraphsChoice | None = None


def decide_overlap(
    problem: Problem, limits: SearchLimits, solver_seconds: float, measured: Sequence[MeasuredStep] | None = None
) -> Decision:
    """Choose the overlap of a problem.

    Args:
        problem: its plan overlaps nothing, and its layout has several expert ranks.
        solver_seconds: for each weight-gradient schedule.
        measured: steps of plans of this problem, at whose refined prices it stands; None where there are no traces.
    """
    baseline = Candidate(name=PLAIN, plan=problem.plan)
    search = Candidates(problem, limits, solver_seconds)
    baseline = dataclasses.replace(baseline, prediction=search.predicted(problem.plan))
    # Steps 1 and 2. Whole micro-batches hide nothing alone, but they may be replayed: else they are what others begin with.
    uniform = list(search.uniform())
    mix, mixes = mixed(search, uniform)
    whole = [candidate for candidate in uniform if candidate.name == WHOLE and not candidate.refused]
    left_out = [] if problem.features.listed_graphs else whole
    worthwhile = (candidate for candidate in uniform if candidate not in left_out)
    candidates = [baseline, *worthwhile, *mixes]
    if measured is not None:
        candidates = with_measured(search, candidates, measured)
    # Step 3.
    predicted = [candidate for candidate in candidates if candidate.prediction is not None]
    predicted.sort(key=lambda candidate: candidate.seconds)
    chosen = keep_measured(candidates[0], predicted)
    others = [candidate for candidate in predicted if candidate is not chosen]
    others += [candidate for candidate in candidates if candidate.refused]
    return Decision(
        chosen=chosen,
        others=tuple(others),
        mix=mix,
        step=simulate_step(shortened(chosen.decided, enough_micro_batches(len(chosen.decided.stages))), problem),
        baseline_seconds=baseline.seconds,
        graphs=graphs_choice(chosen, sorted([*predicted, *left_out], key=lambda each: each.seconds), problem),
    )


def graphs_choice(chosen: Candidate, predicted: Sequence[Candidate], problem: Problem) -> GraphsChoice | None:
    """Predict the other way: the chosen plan without its graphs, or the fastest of a few candidates with them.

    Args:
        predicted: the candidates from the fastest on.
    Returns:
        None where there is no other way: no candidate has lists that may be replayed.
    """
    if problem.features.listed_graphs:
        if not chosen.decided.is_listed:
            return None
        return GraphsChoice(is_on=True, name=chosen.name, other=predict_plan(chosen.decided, problem.replaying(False)))
    # What a library puts aside itself is not replayed, so neither is a plan that needs it.
    undeferred = problem.listed.library_defers
    others = [each for each in predicted if each.decided.is_listed and not (undeferred and each.schedule is not None)]
    if not others:
        return None
    if problem.listed.graphs_refusal is not None:
        return GraphsChoice(is_on=False, refused=str(problem.listed.graphs_refusal))
    # The fastest that fits. Seconds alone order the candidates: a whole prediction, with its bytes, costs more.
    replaying = problem.replaying(True)
    by_seconds = sorted(others[:REPLAYED], key=lambda candidate: listed_seconds(candidate.decided, replaying))
    fastest: GraphsChoice | None = None
    for candidate in by_seconds:
        prediction = predict_plan(candidate.decided, replaying)
        choice = GraphsChoice(is_on=False, name=candidate.name, other=prediction)
        if prediction.fits:
            return choice
        fastest = fastest or choice
    return fastest


def choose(baseline: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest that fits; the baseline where it fits and is not slower by WORTH, or where nothing fits.

    Args:
        predicted: from the fastest on, the baseline among them.
    """
    fitting = [candidate for candidate in predicted if candidate.fits]
    if not fitting or (baseline in fitting and fitting[0].seconds > baseline.seconds * (1.0 - WORTH)):
        return baseline
    return fitting[0]


def keep_measured(baseline: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest measured plan, unless others that fit are predicted to be faster by WORTH: then `choose` among those.

    A candidate must beat both the measured and the predicted time of the measured plan: a prediction error that both share
    cancels.
    """
    measured = [candidate for candidate in predicted if candidate.measured_seconds is not None]
    if not measured:
        return choose(baseline, predicted)
    best = min(measured, key=lambda candidate: candidate.measured_seconds or 0.0)
    bar = (1.0 - WORTH) * min(best.measured_seconds or 0.0, best.seconds)
    fitting = [candidate for candidate in predicted if candidate.fits]
    faster = [candidate for candidate in fitting if candidate.measured_seconds is None and candidate.seconds < bar]
    return choose(baseline, faster) if faster else best


def with_measured(
    search: Candidates, candidates: Sequence[Candidate], measured: Sequence[MeasuredStep]
) -> list[Candidate]:
    """The candidates with the measured steps of those that were executed; measured plans that are none of them join them."""
    result = list(candidates)
    for step in measured:
        places = (n for n, candidate in enumerate(result) if candidate.plan and same_overlap(candidate.plan, step.plan))
        place = next(places, None)
        if place is None:
            result.append(search.of_plan(f"the plan of {step.path}", step.plan))
            place = len(result) - 1
        fastest = min(step.seconds, result[place].measured_seconds or step.seconds)
        result[place] = dataclasses.replace(result[place], measured_seconds=fastest)
    return result


def same_overlap(plan: Plan, other: Plan) -> bool:
    """Whether two plans of one layout execute the same: limits of a search only describe."""
    # The layouts agree by `refine`, which accepts traces of this problem only.
    mine, theirs = ([dataclasses.replace(s.overlap, search_limits=None) for s in p.stages] for p in (plan, other))
    return mine == theirs


def mixed(search: Candidates, uniform: Sequence[Candidate]) -> tuple[Mix | None, list[Candidate]]:
    """Starting from the best uniform plan, pick a mechanism for every class of layers.

    Args:
        uniform: the candidates with and without deferred weight gradients; classes are given what those without decide.
    Returns:
        None and nothing where no uniform plan fits. Else the decision by class, and, where that is another plan than the best
        uniform one, the candidate alone and with weight gradients deferred.
    """
    alone = [candidate for candidate in uniform if candidate.prediction is not None and candidate.schedule is None]
    fitting = [candidate for candidate in uniform if candidate.fits]
    if not fitting:
        return None, []
    # The best may defer weight gradients, but descent starts from its mechanism alone: the slots of one plan do not fit
    # the entries of another. They are assigned anew for the mix (`_mixes`).
    best = min(fitting, key=lambda candidate: candidate.seconds)
    start = next(candidate for candidate in alone if candidate.mechanism is best.mechanism)
    others = [candidate.decided for candidate in alone if candidate is not start]
    mix = _mix(search, start, others)
    return mix, list(_mixes(search, mix, alone)) if mix.changed else []


def _mix(search: Candidates, start: Candidate, others: Sequence[Plan]) -> Mix:
    model, plan = search.problem.model, start.decided

    def refuse(candidate: Plan) -> None:
        validate_plan(candidate, model, "plan")
        refuse_unsupported(candidate, "plan")

    def judge(candidate: Plan) -> float:
        prediction = search.predicted(candidate)
        if not prediction.fits:
            # As with a plan that a rule refuses, descent notes the reason and goes on.
            raise ConfigError("step", candidate.model.name, prediction.overflow[0], "cut less")
        return prediction.predicted.step_seconds

    classes = layer_classes(plan, model, layer_kinds(model))
    return mix_mechanisms(plan, start.seconds, others, classes, refuse, judge, MOST_PREDICTIONS)


def _mixes(search: Candidates, mix: Mix, alone: Sequence[Candidate]) -> Iterator[Candidate]:
    """A mix alone and with weight gradients deferred; stages that partition say under which limits ranges were searched."""
    partitioned = next((candidate.decided for candidate in alone if candidate.ranges is not None), None)
    stages = []
    for index, stage in enumerate(mix.plan.stages):
        limits = None
        if partitioned is not None and _partitions(stage.overlap):
            limits = partitioned.stages[index].overlap.search_limits
        stages.append(dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, search_limits=limits)))
    candidate = search.of_plan(MIXED, dataclasses.replace(mix.plan, stages=tuple(stages)))
    candidate = dataclasses.replace(candidate, mix=mix)
    yield candidate
    yield from search.deferred(candidate)


def _partitions(overlap: StageOverlap) -> bool:
    return any(layer.mechanism == "partitioned" for layer in overlap.layers)
