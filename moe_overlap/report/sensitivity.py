"""Sensitivity of an answer to the network, the skew of routing and the memory of the GPUs, for `report.html`.

For every value of a property the step is that of the fastest among a few plans that fits. A point is labelled if its plan is not
the one chosen at the actual value, so a reader sees where the choice flips. Only the given plans compete: a search at that value
could find a better one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.describe.cluster import GIB
from moe_overlap.plan.plan import Plan
from moe_overlap.report.html import Sensitivity
from moe_overlap.tuner.cost.machine import Machine
from moe_overlap.tuner.cost.prediction import estimate_plan
from moe_overlap.tuner.problem import Problem

NETWORK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors on the rate of the links between nodes."""
LOADS = (1.0, 1.25, 1.5, 2.0)
"""Rows of the busiest rank of an expert group over the mean."""
MEMORY_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Factors on the capacity of a GPU."""
NOTHING_FITS = "none of these plans fits"


@dataclass(frozen=True, slots=True)
class Competitor:
    """A plan, and the problem that prices it."""

    name: str
    plan: Plan
    problem: Problem


def network_sensitivity(plans: Sequence[Competitor]) -> Sensitivity:
    """The step as a function of the rate of the links between nodes.

    Args:
        plans: the chosen plan first.
    """
    actual = plans[0].problem.cluster.groups[0].network_gb_per_s
    points = [
        (factor * actual, _best([_with_network(competitor, factor) for competitor in plans]))
        for factor in NETWORK_FACTORS
    ]
    return _sensitivity("network between the nodes", "GB/s", points, actual, plans[0].name)


def skew_sensitivity(plans: Sequence[Competitor]) -> Sensitivity:
    """The step as a function of the rows on the busiest expert rank.

    Args:
        plans: the chosen plan first.
    """
    actual = plans[0].problem.machine.load
    loads = sorted({*LOADS, actual})
    points = [(load, _best([_with_load(competitor, load) for competitor in plans])) for load in loads]
    return _sensitivity("skew of routing", "busiest over mean", points, actual, plans[0].name)


def memory_sensitivity(
    rows: Sequence[tuple[str, float, float]], capacity_bytes: float, high: float, chosen: str
) -> Sensitivity:
    """The step of the fastest plan that fits as a function of the memory of a GPU.

    Args:
        rows: name, seconds and needed bytes of plans, such as a search's frontier.
        high: factor on needed bytes, a quantile of measured over predicted bytes.
        chosen: name of the plan chosen at the actual capacity.
    """
    points = []
    for factor in MEMORY_FACTORS:
        fitting = [(seconds, name) for name, seconds, needed in rows if needed * high <= factor * capacity_bytes]
        points.append((factor * capacity_bytes / GIB, min(fitting, default=None)))
    return _sensitivity("memory of a GPU", "GiB", points, capacity_bytes / GIB, chosen)


def _sensitivity(
    name: str, unit: str, points: Sequence[tuple[float, tuple[float, str] | None]], actual: float, chosen: str
) -> Sensitivity:
    """The sensitivity with the best plan at each value; values at which nothing fits have no point."""
    shown = tuple((value, best[0], best[1] if best[1] != chosen else "") for value, best in points if best is not None)
    missing = [f"{value:g}" for value, best in points if best is None]
    heading = f"{name} (at {', '.join(missing)} {unit} {NOTHING_FITS})" if missing else name
    return Sensitivity(name=heading, unit=unit, points=shown, actual=actual)


def _best(plans: Sequence[Competitor]) -> tuple[float, str] | None:
    """Seconds and name of the fastest plan that fits; None if none fits."""
    predictions = [(estimate_plan(competitor.plan, competitor.problem), competitor.name) for competitor in plans]
    return min(
        ((prediction.predicted.step_seconds, name) for prediction, name in predictions if prediction.fits), default=None
    )


def _with_network(competitor: Competitor, factor: float) -> Competitor:
    machine = competitor.problem.machine
    groups = tuple(
        dataclasses.replace(group, network_gb_per_s=factor * group.network_gb_per_s) for group in machine.cluster.groups
    )
    cluster = dataclasses.replace(machine.cluster, groups=groups)
    return _priced_on(competitor, dataclasses.replace(machine, cluster=cluster))


def _with_load(competitor: Competitor, load: float) -> Competitor:
    return _priced_on(competitor, dataclasses.replace(competitor.problem.machine, load=load))


def _priced_on(competitor: Competitor, machine: Machine) -> Competitor:
    return dataclasses.replace(competitor, problem=dataclasses.replace(competitor.problem, machine=machine))
