"""The page of a plan search: the answer, the other candidates, the frontier, and the sensitivities."""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.report.answer import RunnerUp
from moe_overlap.report.html import CandidateRow, Report
from moe_overlap.report.search import answer_of
from moe_overlap.report.sensitivity import Competitor, memory_sensitivity, network_sensitivity, skew_sensitivity
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.search.layer.slots import enough_micro_batches, shortened

ON_FRONTIER = "on the frontier of seconds and memory"
DOES_NOT_FIT = "does not fit"
COMPETING = 4
"""Number of plans, the chosen one included, that compete in the sensitivities to network and routing."""


def competitors(search: PlanSearch) -> list[Competitor]:
    """The chosen plan with its overlap, and the fastest others."""
    others = search.others[: COMPETING - 1]
    chosen = Competitor(search.chosen.name, search.plan, search.problem)
    return [chosen, *(Competitor(other.name, other.plan, other.problem) for other in others)]


def search_report(search: PlanSearch, plans: Sequence[Competitor], train_tokens: float | None = None) -> Report:
    """The content of the page.

    Args:
        plans: the competitors in the sensitivities to network and routing: the chosen plan with its overlap, then a few others.
            The first is simulated.
    """
    chosen, prediction = search.chosen, search.prediction
    answer = answer_of(search, train_tokens)
    rows = [
        CandidateRow(
            name=chosen.name,
            seconds=prediction.predicted.step_seconds,
            needed_bytes=prediction.fullest.needed_bytes,
            is_chosen=True,
        ),
        *_rows(search, answer.runners_up),
    ]
    frontier = [(plan.name, plan.seconds, plan.needed_bytes) for plan in search.uniform.frontier]
    sensitivities = [
        network_sensitivity(plans),
        *([skew_sensitivity(plans)] if plans[0].problem.model.num_experts else []),
        *(
            [memory_sensitivity(frontier, prediction.available_bytes, prediction.memory.high, chosen.name)]
            if frontier
            else []
        ),
    ]
    title = f"{search.plan.model.name} on {search.cluster.gpus} × {search.cluster.group_of(0).gpu.name}"
    return Report(answer=answer, title=title, step=shown_step(plans[0]), candidates=rows, sensitivities=sensitivities)


def _rows(search: PlanSearch, runners_up: Sequence[RunnerUp]) -> list[CandidateRow]:
    """The finalists, the rest of the frontier, and the refused plans."""
    finalists = [
        CandidateRow(
            name=other.name, seconds=why.seconds, needed_bytes=other.prediction.fullest.needed_bytes, note=why.why
        )
        for other, why in zip(search.others, runners_up, strict=True)
    ]
    names = {search.chosen.name, *(other.name for other in search.others)}
    memory, available = search.prediction.memory, search.prediction.available_bytes
    frontier = [
        CandidateRow(
            name=plan.name,
            seconds=plan.seconds,
            needed_bytes=plan.needed_bytes,
            note=ON_FRONTIER if plan.needed_bytes * memory.high <= available else DOES_NOT_FIT,
        )
        for plan in search.uniform.frontier
        if plan.name not in names
    ]
    refused = [CandidateRow(name=name, seconds=None, needed_bytes=None, note=rule) for name, rule in search.refused]
    return [*finalists, *frontier, *refused]


def shown_step(plan: Competitor) -> SimulatedStep:
    """The simulated step of a plan with just enough micro-batches to show the fill and drain of the pipeline."""
    few = shortened(plan.plan, enough_micro_batches(len(plan.plan.stages)))
    return simulate_step(few, plan.problem)
