"""The dynamic program over labels against every choice, and against the integer program."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from moe_overlap.tuner.cost.pipeline import PipelineRules
from moe_overlap.tuner.search.pipeline import chain_labels, mist_milp
from moe_overlap.tuner.search.pipeline.chain_labels import applies, choose_by_labels
from moe_overlap.tuner.search.pipeline.mist_milp import choose_stages
from moe_overlap.tuner.search.pipeline.stage_options import PipelineProblem, is_feasible, step_of_choice
from moe_overlap.tuner.search.solution import Status
from tests.unit.tuner.search.test_search_mist_milp import of_all, random_options, random_problem

INSTANCES = 150


def alike_links(draw: np.random.Generator, micro_batches: tuple[int, ...] = (1, 2, 3, 8, 64)) -> PipelineProblem:
    """A random problem without model chunks, all of whose transfers take equally long."""
    problem, sent = random_problem(draw), float(draw.choice([0.0, 0.3]))
    stages = tuple(replace(stage, sent=np.full(len(stage), sent)) for stage in problem.stages)
    rules = PipelineRules(virtual=1, transfer_slowdown=None, fixed=0.02)
    return replace(problem, stages=stages, rules=rules, micro_batches=int(draw.choice(micro_batches)))


def fitting(problem: PipelineProblem) -> list[np.ndarray]:
    return [np.flatnonzero(stage.fits) for stage in problem.stages]


def test_labels_find_the_best_of_all_choices() -> None:
    draw = np.random.default_rng(71)
    infeasible = 0
    for _ in range(INSTANCES):
        problem = alike_links(draw)
        best, _ = of_all(problem)
        found = choose_by_labels(problem, fitting(problem), math.inf, math.inf)
        assert found.is_complete
        if found.choice is None:
            infeasible += 1
            assert best == math.inf
            continue
        assert is_feasible(problem, found.choice)
        assert found.seconds == float(step_of_choice(problem, found.choice)) == pytest.approx(best, rel=1e-12)
        assert found.bound == pytest.approx(best, rel=1e-9)
        # What is not below the seconds to beat is no answer, and proven not to be there.
        none = choose_by_labels(problem, fitting(problem), best * (1.0 - 1e-6), math.inf)
        assert none.choice is None and none.is_complete and none.bound == best * (1.0 - 1e-6)
    assert 5 < infeasible < INSTANCES / 2


def larger(seed: int, micro_batches: int) -> PipelineProblem:
    """Six stages of 24 candidates each, that trade stable seconds for those at the ends of a step."""
    draw = np.random.default_rng(seed)
    stages = [random_options(draw, 24, 1.0, unlike=False, types=1) for _ in range(6)]
    return PipelineProblem(
        stages=tuple(replace(stage, sent=np.full(24, 0.1), devices=np.ones((24, 1), dtype=int)) for stage in stages),
        layers=12,
        devices=(6,),
        micro_batches=micro_batches,
        rules=PipelineRules(virtual=1, transfer_slowdown=None),
    )


@pytest.mark.parametrize("micro_batches", [4, 16, 64])
def test_labels_and_the_integer_program_agree(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = larger(73, micro_batches)
    labelled = choose_stages(problem)
    monkeypatch.setattr(mist_milp, "applies", lambda problem: False)
    programmed = choose_stages(problem)
    assert labelled.status == programmed.status == Status.OPTIMAL
    assert labelled.objective == pytest.approx(programmed.objective, rel=2e-6)


def test_too_many_labels_and_too_little_time_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = larger(74, 8)
    rows = fitting(problem)
    late = choose_by_labels(problem, rows, math.inf, time.perf_counter() - 1.0)
    assert late.choice is None and not late.is_complete and late.bound == -math.inf
    monkeypatch.setattr(chain_labels, "MOST", 3)
    monkeypatch.setattr(chain_labels, "BEAMS", (1,))
    missed = 0
    for seed in range(74, 80):
        problem = larger(seed, 8)
        few = choose_by_labels(problem, fitting(problem), math.inf, math.inf)
        assert few.choice is not None and not few.is_complete and few.bound == -math.inf
        assert few.seconds == float(step_of_choice(problem, few.choice))
        # The integer program goes on where they end.
        solution = choose_stages(problem)
        missed += solution.objective < few.seconds * (1.0 - 1e-6)
        monkeypatch.setattr(mist_milp, "applies", lambda problem: False)
        assert solution.objective == pytest.approx(choose_stages(problem).objective, rel=2e-6)
        monkeypatch.setattr(mist_milp, "applies", applies)
    assert missed


def test_labels_are_asked_where_they_hold() -> None:
    problem = alike_links(np.random.default_rng(75))
    assert applies(problem)
    assert not applies(replace(problem, rules=replace(problem.rules, virtual=2)))
    unlike = replace(problem.stages[0], sent=problem.stages[0].sent + np.arange(len(problem.stages[0])))
    assert not applies(replace(problem, stages=(unlike, *problem.stages[1:])))
