"""Decide the overlap of a problem whose parallel layout is given.

1. Every mechanism becomes a candidate, uniformly on all layers, without and with deferred weight gradients (candidates.py).
2. Starting from the best uniform plan, coordinate descent picks a mechanism for every class of layers (mechanisms.py).
3. Among the candidates that fit, the one with the shortest step is chosen; it replaces the baseline only if it is shorter by
   `WORTH`. If steps of the problem were measured, the fastest measured plan is chosen, unless a candidate is predicted to be
   shorter by `WORTH`.
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
"""Share of the baseline's step that a candidate must save: smaller differences are within the error of predictions."""
MIXED = "mixed by class of layers"
MOST_PREDICTIONS = 24
"""Most predictions spent on mixes; for a model of 61 layers on 16 stages they take a few seconds."""


REPLAYED = 3
"""Number of candidates, the fastest ones, that are also predicted with their lists replayed as CUDA graphs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraphsChoice:
    """The prediction with CUDA graphs switched the other way: without them if the flags ask for them, with them if not.

    Attributes:
        is_on: whether the flags ask for CUDA graphs, so that the chosen plan is priced and executed with them.
        name: the candidate that is predicted with the switch the other way.
        other: its prediction; None if a rule refuses the switch.
        refused: the rule that refuses it.
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
        others: the candidates that were not chosen: the predicted ones, fastest first, then the refused ones.
        mix: the mechanism of every class of layers, without deferred weight gradients; None if no plan with overlap fits.
        step: the chosen plan, simulated with at least one micro-batch per stage.
        graphs: CUDA graphs on or off, and the prediction for the other setting; None if no plan has lists to replay.
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
        problem: its plan, the baseline, overlaps nothing, and its layout has several expert ranks.
        solver_seconds: time limit of each weight-gradient schedule.
        measured: measured steps of plans of this problem; the problem's prices are already refined by their traces. None
            without traces.
    """
    baseline = Candidate(name=PLAIN, plan=problem.plan)
    search = Candidates(problem, limits, solver_seconds)
    baseline = dataclasses.replace(baseline, prediction=search.predicted(problem.plan))
    # Steps 1 and 2. Uncut micro-batches without deferral hide nothing: as an answer they are only of use where their lists can
    # be replayed. They stay in `uniform` in any case, because descent may start from them.
    uniform = list(search.uniform())
    mix, mixes = mixed(search, uniform)
    uncut = [candidate for candidate in uniform if candidate.name == WHOLE and not candidate.refused]
    left_out = [] if problem.features.listed_graphs else uncut
    worthwhile = (candidate for candidate in uniform if candidate not in left_out)
    candidates = [baseline, *worthwhile, *mixes]
    if measured is not None:
        candidates = with_measured(search, candidates, measured)
    # Step 3. `keep_measured` expects the fastest first.
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
        graphs=graphs_choice(chosen, sorted([*predicted, *left_out], key=lambda candidate: candidate.seconds), problem),
    )


def graphs_choice(chosen: Candidate, predicted: Sequence[Candidate], problem: Problem) -> GraphsChoice | None:
    """Predict the other setting of CUDA graphs: the chosen plan without them, or the fastest of a few candidates with them.

    Args:
        predicted: the candidates, fastest first.
    Returns:
        None if no candidate has lists that may be replayed.
    """
    if problem.features.listed_graphs:
        if not chosen.decided.is_listed:
            return None
        return GraphsChoice(is_on=True, name=chosen.name, other=predict_plan(chosen.decided, problem.replaying(False)))
    # A weight gradient that a library defers by itself is not replayed, so plans that defer any are left out.
    undeferred = problem.listed.library_defers
    listed = [candidate for candidate in predicted if candidate.decided.is_listed]
    others = [candidate for candidate in listed if not undeferred or candidate.schedule is None]
    if not others:
        return None
    if problem.listed.graphs_refusal is not None:
        return GraphsChoice(is_on=False, refused=str(problem.listed.graphs_refusal))
    # Order by seconds first, because a complete prediction, with its bytes, costs more; the first one that fits is the answer.
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
    """The fastest candidate that fits. The baseline, if no candidate saves WORTH of its step, or if no candidate fits.

    Args:
        predicted: the candidates, fastest first, the baseline among them.
    """
    fitting = [candidate for candidate in predicted if candidate.fits]
    if not fitting or (baseline in fitting and fitting[0].seconds > baseline.seconds * (1.0 - WORTH)):
        return baseline
    return fitting[0]


def keep_measured(baseline: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest measured plan, unless other candidates that fit are predicted to be faster by WORTH: then `choose` among those.

    A candidate must beat the measured and the predicted seconds of the measured plan. Comparing prediction with prediction
    cancels an error that both share.
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
    """The candidates, with measured seconds where a trace has the same plan. A measured plan that matches none is added."""
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
    """Whether two plans of one layout execute the same instructions: the limits of the search in a plan are ignored."""
    # Both have the problem's layout: `refine` accepts no trace of another one.
    overlaps, other_overlaps = (
        [dataclasses.replace(s.overlap, search_limits=None) for s in p.stages] for p in (plan, other)
    )
    return overlaps == other_overlaps


def mixed(search: Candidates, uniform: Sequence[Candidate]) -> tuple[Mix | None, list[Candidate]]:
    """Starting from the best uniform plan, pick a mechanism for every class of layers.

    Args:
        uniform: the candidates with and without deferred weight gradients. A class of layers gets its mechanism from those
            without.
    Returns:
        The decision by class, and the new candidates: the mixed plan without and with deferred weight gradients, or none if
        the mix is the best uniform plan. None and no candidates if no uniform plan fits.
    """
    undeferred = [candidate for candidate in uniform if candidate.prediction is not None and candidate.schedule is None]
    fitting = [candidate for candidate in uniform if candidate.fits]
    if not fitting:
        return None, []
    # The best candidate may defer weight gradients. Descent starts from the same mechanism without deferral, because the slots
    # of one plan do not fit the entries of another; `_mixes` fills the slots of the mix.
    best = min(fitting, key=lambda candidate: candidate.seconds)
    start = next(candidate for candidate in undeferred if candidate.mechanism is best.mechanism)
    others = [candidate.decided for candidate in undeferred if candidate is not start]
    mix = _mix(search, start, others)
    return mix, list(_mixes(search, mix, undeferred)) if mix.changed else []


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


def _mixes(search: Candidates, mix: Mix, undeferred: Sequence[Candidate]) -> Iterator[Candidate]:
    """A mix without and with deferred weight gradients; stages that partition record the limits of the search for ranges."""
    partitioned = next((candidate.decided for candidate in undeferred if candidate.ranges is not None), None)
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
