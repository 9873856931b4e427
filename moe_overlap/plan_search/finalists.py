"""The end of a search: simulated steps of the finalists, their order, and the error where no plan fits.

Simulated steps order the plans; of equally fast ones the one with the least memory leads. Plans whose closed form is only an
estimate (`Finalist.lacks_lists`) are predicted again by their instruction lists, and dropped where those do not fit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from itertools import islice

from moe_overlap.describe.cluster import GIB
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.processes import in_processes
from moe_overlap.plan_search.results import TIE, Finalist
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.machine import Machine
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import listed_seconds
from moe_overlap.tuner.search.dispatchers import LIBRARIES
from moe_overlap.tuner.search.shares import LayoutShare
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import SearchSpace
from moe_overlap.tuner.search.uniform import UniformSearch

SIMULATED = 0.1
"""Plans that are predicted to be slower than the fastest by more than this share of a step are not simulated: no simulated step
of a plan whose states stay on the device was found to differ from its prediction by a tenth
(tests/unit/plan_search/test_search_simulated.py)."""
UNLIKE = 3
"""Most plans on unlike meshes that are simulated: the lists of all their ranks are."""
LONG_LISTS = 6
"""Most plans that are simulated where states may wait on the host: their lists are long."""
MOVED = 0.03
"""Share of a step by which the closed form of a plan that moves states may be too long for it to be simulated nevertheless."""


def simulated_finalists(finalists: Sequence[Finalist], deadline: float = math.inf, jobs: int = 1) -> list[Finalist]:
    """The finalists with the simulated steps of those that are near the fastest.

    Args:
        deadline: of `time.monotonic`, behind which nothing more is simulated.
        jobs: processes of this host that share them.
    Raises:
        ConfigError: none fits, as its lists say.
    """
    remaining = [*finalists]
    while remaining:
        fastest = min(finalist.seconds for finalist in remaining)
        near = [index for index, finalist in enumerate(remaining) if finalist.seconds <= fastest * (1.0 + SIMULATED)]
        result = _simulated_at(remaining, near, deadline, min(jobs, len(near)))
        if any(result[index] is not None for index in near):
            return [finalist for finalist in result if finalist is not None]
        remaining = [finalist for finalist in result if finalist is not None]
    raise _none_is_left()


def _simulated_at(
    finalists: Sequence[Finalist], places: Sequence[int], deadline: float, jobs: int
) -> list[Finalist | None]:
    """The finalists, those at some places simulated; None where one then does not fit."""

    def simulated(share: LayoutShare) -> list[tuple[float | None, Prediction] | None]:
        tried = (_simulated(finalists[index], deadline) for index in places[share.index :: share.count])
        return [None if finalist is None else (finalist.simulated, finalist.prediction) for finalist in tried]

    result: list[Finalist | None] = [*finalists]
    for index, outcomes in enumerate(in_processes(simulated, jobs)):
        for place, outcome in zip(places[index::jobs], outcomes, strict=True):
            if outcome is None:
                result[place] = None
                continue
            ratio, prediction = outcome
            lacks = finalists[place].lacks_lists and ratio is None
            result[place] = dataclasses.replace(
                finalists[place], simulated=ratio, prediction=prediction, lacks_lists=lacks
            )
    return result


def simulated_until_ahead(
    finalists: Sequence[Finalist], deadline: float = math.inf, most: int = LONG_LISTS
) -> list[Finalist]:
    """The finalists with simulated steps, the fastest by prediction first, until no other is predicted to be faster.

    For plans whose lists are long, and whose steps may differ from their predictions by more than `SIMULATED`: states that wait
    on the host move while they are used. A plan on unlike meshes is answered with its simulated lists or not at all, and one
    whose states move with them while there is time.

    Args:
        deadline: of `time.monotonic`, behind which nothing more is simulated.
        most: to simulate, once one of them fits.
    Raises:
        ConfigError: all plans are on unlike meshes, and of those that were simulated none fits.
    """
    known: list[Finalist | None] = [*finalists]
    by_prediction = sorted(range(len(known)), key=lambda index: finalists[index].seconds)
    fastest, simulations, unlike = math.inf, 0, 0
    for index in by_prediction:
        finalist = finalists[index]
        if math.isfinite(fastest) and simulations >= most:
            break
        is_rough = finalist.lacks_lists and not _is_unlike(finalist)
        if finalist.seconds > fastest * (1.0 + (MOVED if is_rough else TIE)):
            continue
        if _is_unlike(finalist) and (unlike == UNLIKE or time.monotonic() >= deadline):
            continue
        simulations, unlike = simulations + 1, unlike + _is_unlike(finalist)
        simulated = known[index] = _simulated(finalist, deadline)
        fastest = min(fastest, math.inf if simulated is None else simulated.simulated_seconds)
    fitting = [finalist for finalist in known if finalist is not None and not _is_unlike(finalist)]
    if not fitting:
        # One is needed even after the deadline.
        untried = (finalists[index] for index in by_prediction if known[index] is not None)
        fitting = [*islice(filter(None, map(_with_lists, untried)), 1)]
    if not fitting:
        raise _none_is_left()
    return fitting


def listed_alone(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The finalists that an interrupt leaves: the analytic cost of unlike meshes is no answer, unless there is no other."""
    return [finalist for finalist in finalists if not _is_unlike(finalist)] or [*finalists]


def _is_unlike(finalist: Finalist) -> bool:
    """Whether it is a plan on unlike meshes that was not simulated."""
    return finalist.lacks_lists and bool(finalist.plan.transfers)


def _with_lists(finalist: Finalist) -> Finalist | None:
    """A plan with the step and the bytes of its lists; None where it then does not fit."""
    prediction = predict_plan(finalist.plan, finalist.problem)
    if not prediction.fits:
        return None
    return dataclasses.replace(finalist, prediction=prediction, simulated=1.0, lacks_lists=False)


def _simulated(finalist: Finalist, deadline: float) -> Finalist | None:
    """A finalist with its simulated step; None where it does not fit, as its lists say."""
    if time.monotonic() >= deadline:
        return finalist
    if finalist.lacks_lists:
        return _with_lists(finalist)
    if finalist.plan.follows_lists:
        return finalist
    ratio = listed_seconds(finalist.plan, finalist.problem) / finalist.seconds
    return dataclasses.replace(finalist, simulated=ratio)


def _none_is_left() -> ConfigError:
    return ConfigError("the search", "", "no plan is left whose simulated lists fit", "use more GPUs")


def in_order(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The fastest first, as simulated; but of those within TIE of it the one that needs the least memory leads.

    A plan without a dispatch library comes before one with it. Unsimulated plans rank after simulated ones: among many
    candidates the most underestimated would win.
    """
    known = [finalist for finalist in finalists if finalist.plan.follows_lists or finalist.simulated is not None]
    known = sorted(known or finalists, key=lambda finalist: finalist.simulated_seconds)
    others = [finalist for finalist in finalists if all(finalist is not other for other in known)]
    ordered = [*known, *sorted(others, key=lambda finalist: finalist.seconds)]
    fastest = ordered[0].simulated_seconds
    tied = [finalist for finalist in known if finalist.simulated_seconds <= fastest * (1.0 + TIE)]
    leader = min(
        tied,
        key=lambda finalist: (
            finalist.problem.features.dispatcher in LIBRARIES,
            finalist.prediction.fullest.needed_bytes,
        ),
    )
    return [leader, *(finalist for finalist in ordered if finalist is not leader)]


def require_room(state_bytes: float, space: SearchSpace, machine: Machine) -> None:
    """Refuse GPUs that cannot hold the states of any plan, before layers are captured and spaces searched for minutes.

    Args:
        state_bytes: of all GPUs together (`Bounds.state_bytes`).
        space: says what may wait on the host.
    Raises:
        ConfigError: they are too few, with the number that the states alone fill.
    """
    gpus, usable = machine.cluster.gpus, machine.usable_bytes
    if state_bytes <= gpus * usable:
        return
    held = f"{gpus} GPUs hold {gpus * usable / GIB:,.1f} with {machine.memory.certainty} certainty"
    states = "gradients alone" if "optimizer" in space.offloads else "weights, gradients and optimizer states"
    rule = f"no plan fits: {states} take {state_bytes / GIB:,.1f} GiB, and {held}"
    fix = f"use more GPUs (the states alone fill {math.ceil(state_bytes / usable):,}), or GPUs with more memory"
    raise ConfigError("--num-gpus", f"{gpus} × {machine.cluster.group_of(0).gpu.name}", rule, fix)


def does_not_fit(
    uniform: UniformSearch,
    machine: Machine,
    refused: Sequence[tuple[str, str]],
    commonest: ConfigError | None,
) -> ConfigError:
    """The error where no plan fits: the plan that needs the least, and what it lacks.

    Args:
        refused: plans that rules refuse, with the rule.
        commonest: the rule by which the target runs the fewest layouts.
    """
    cluster = machine.cluster
    gpu = cluster.group_of(0).gpu
    if uniform.solution.status is Status.TIME_LIMIT:
        rule = f"ended before a plan that fits was found, after {uniform.counts.evaluated} layouts"
        return ConfigError("--time-limit", "", rule, "give more time")
    subject, available = f"{cluster.gpus} × {gpu.name}", gpu.memory_gib - machine.reserved_bytes / GIB
    room = f"the {available:.1f} GiB that a plan may have of {gpu.memory_gib:g}"
    if refused:
        return ConfigError(
            "the search", "", f"every plan that fits is refused, {refused[0][0]} for: {refused[0][1]}", "change it"
        )
    if uniform.smallest is None and uniform.counts.evaluated:
        rule = f"the target refuses each of the {uniform.counts.evaluated:,} layouts that may fit"
        rule += "" if commonest is None else f", most of them for: {commonest}"
        return ConfigError("--target", "", rule, "change that, or use another target")
    if uniform.smallest is None:
        rule = f"none of {uniform.counts.layouts:,} layouts fits {room}, by a lower bound of their bytes"
        return ConfigError("--num-gpus", subject, rule, "use more GPUs, or GPUs with more memory")
    least = uniform.smallest.needed_bytes * machine.memory.high / GIB
    rule = f"no plan fits {room}: the smallest ({uniform.smallest.name}) needs up to {least:.1f} "
    rule += f"with {machine.memory.certainty} certainty"
    return ConfigError("--num-gpus", subject, rule, "use more GPUs, or a shorter sequence")
