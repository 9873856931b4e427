"""Lines of a searched answer on stages that differ: plans in a sentence, and how their search ended in words."""

from __future__ import annotations

import dataclasses

import pytest

from moe_overlap.report.answer import plan_sentence
from moe_overlap.report.search import ENDED, answer_of, searched_lines
from moe_overlap.tuner.search.solution import Status
from tests.unit.plan_search.test_plan_search import searched


def test_a_runner_up_of_unlike_stages_is_told_in_a_sentence() -> None:
    """Its name lists every stage, which fills several rows of a terminal."""
    search = searched("megatron-lm")
    first, second = search.others[:2]
    unlike = dataclasses.replace(first, is_staged=True, name="; ".join(["4 layers on 1×1: DP only, micro-batch 1"] * 8))
    told = answer_of(dataclasses.replace(search, others=(unlike, second))).runners_up
    assert [other.name for other in told] == [plan_sentence(first.plan), second.name]


@pytest.mark.parametrize("status", list(Status))
def test_how_the_search_of_stages_ended_is_told_in_words(status: Status) -> None:
    """`feasible` and `infeasible` are words of solvers."""
    search = searched("megatron-lm")
    assert search.staged is not None
    solution = dataclasses.replace(search.staged.solution, status=status)
    staged = dataclasses.replace(search.staged, solution=solution, programs=3, mesh_stages=40, layouts=2, candidates=5)
    lines = searched_lines(dataclasses.replace(search, staged=staged))
    assert len(lines) == 3 and lines[0].startswith("searched    ")
    assert all(line.endswith(f"; {ENDED[status]}") and "feasible" not in line for line in lines[1:])
