"""Another mechanism for each class of layers: mixes of what the uniform plans of a run decide
(tuner/search/layer/mechanisms.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from moe_overlap.describe.errors import ConfigError
from moe_overlap.overlap_candidates import Candidate, Candidates
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.capture.request import layer_kinds
from moe_overlap.tuner.search.layer.mechanisms import Mix, layer_classes, mix_mechanisms

MIXED = "mixed by class of layers"
MOST_PREDICTIONS = 24
"""Of mixes: seconds for a model of 61 layers on 16 stages."""


def mixed(search: Candidates, uniform: Sequence[Candidate]) -> tuple[Mix | None, list[Candidate]]:
    """What a mechanism for each class makes of the best uniform plan.

    Args:
        uniform: predicted ones, with and without weight gradients deferred; those without are what classes are given.
    Returns:
        None and nothing where no uniform plan fits. Else what was decided by class, and, where that is another plan than the best
        uniform one, it by itself and with weight gradients deferred.
    """
    plans = [one for one in uniform if one.prediction is not None and one.schedule is None]
    fitting = [one for one in uniform if one.prediction is not None and one.prediction.fits]
    if not fitting:
        return None, []
    best = min(fitting, key=lambda one: one.seconds)
    start = next(one for one in plans if one.mechanism is best.mechanism)
    others = [one.decided for one in plans if one is not start]
    found = _mix(search, start, others)
    return found, list(_candidates(search, found, plans)) if found.changed else []


def _mix(search: Candidates, start: Candidate, others: Sequence[Plan]) -> Mix:
    model, plan = search.task.job.model, start.decided

    def refuse(made: Plan) -> None:
        validate_plan(made, model, "plan")
        refuse_unsupported(made, "plan")

    def judge(made: Plan) -> float:
        prediction = search.predicted(made)
        if not prediction.fits:
            raise ConfigError("step", made.model.name, f"does not fit: {prediction.overflow[0]}", "cut less")
        return prediction.predicted.step_seconds

    classes = layer_classes(plan, model, layer_kinds(model))
    return mix_mechanisms(plan, start.seconds, others, classes, refuse, judge, MOST_PREDICTIONS)


def _candidates(search: Candidates, found: Mix, plans: Sequence[Candidate]) -> Iterator[Candidate]:
    cut = next((one.decided for one in plans if one.ranges is not None), None)
    stages = []
    for index, stage in enumerate(found.plan.stages):
        limits = None if cut is None or not _cuts(stage.overlap) else cut.stages[index].overlap.search_limits
        stages.append(dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, search_limits=limits)))
    first = search.one(MIXED, dataclasses.replace(found.plan, stages=tuple(stages)))
    first = dataclasses.replace(first, mix=found)
    yield first
    yield from search.deferred(first)


def _cuts(overlap: StageOverlap) -> bool:
    return any(layer.mechanism == "partitioned" for layer in overlap.layers)
