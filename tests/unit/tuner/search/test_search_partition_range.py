"""The search of ranges against every composition, with random rules and memory, and how operators are grouped."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from moe_overlap.plan.lowering.layers import LayerOperator
from moe_overlap.plan.operators import GATE, MERGE, MOE_PARTS
from moe_overlap.tuner.search.layer.partition_pipeline import Step, pipeline_seconds
from moe_overlap.tuner.search.layer.partition_ranges import Lowered, RangeProblem, Ranges, Span, group, solve

CASES = range(150)


def drawn(case: int) -> RangeProblem:
    """Operators in a chain, seconds that shrink less than the parts, a random mask, bytes and limit."""
    draw = random.Random(case)
    count = draw.randint(1, 6)
    exchanges = [draw.random() < 0.4 for _ in range(count)]
    work = [draw.choice([0.0, draw.uniform(0.1, 3.0)]) for _ in range(count)]
    overhead = draw.choice([0.0, 0.05, 0.5])
    spans = [(first, last) for last in range(count + 1) for first in range(last)]
    allowed = {span: any(exchanges[slice(*span)]) and draw.random() < 0.8 for span in spans}
    held = {(span, parts): draw.uniform(0, 10) for span in spans for parts in range(1, 5)}

    def seconds(span: Span, parts: int) -> float:
        steps = [Step(exchanges[place], (place - span[0] - 1,) if place > span[0] else ()) for place in range(*span)]
        each = [work[place] / parts + overhead * (parts > 1) for place in range(*span)]
        return pipeline_seconds(steps, each, parts)

    return RangeProblem(
        groups=count,
        range_limit=draw.randint(1, count),
        candidates=draw.choice([(), (2,), (2, 4), (2, 3, 4)]),
        may_be_cut=lambda span: allowed[span],
        seconds=seconds,
        bytes=lambda span, parts: held[span, parts],
        free_bytes=draw.choice([math.inf, 5.0, 8.0]),
    )


def compositions(problem: RangeProblem) -> Iterator[list[tuple[Span, int]]]:
    """The twin: everything that is allowed."""
    for borders in itertools.product((False, True), repeat=problem.groups - 1):
        places = [0, *(place + 1 for place, border in enumerate(borders) if border), problem.groups]
        spans = list(itertools.pairwise(places))
        if any(last - first > problem.range_limit for first, last in spans):
            continue
        choices = [
            [
                1,
                *(
                    k
                    for k in problem.candidates
                    if problem.may_be_cut(one) and problem.bytes(one, k) <= problem.free_bytes
                ),
            ]
            for one in spans
        ]
        for parts in itertools.product(*choices):
            yield list(zip(spans, parts, strict=True))


def check(problem: RangeProblem, answer: Ranges) -> None:
    """The answer is allowed, adds up, and says where memory was short."""
    chosen = [(cut.span, cut.partitions) for cut in answer.cuts]
    assert chosen in list(compositions(problem))
    assert answer.seconds == pytest.approx(sum(problem.seconds(*one) for one in chosen))
    for cut in answer.cuts:
        over = [k for k in problem.candidates if problem.bytes(cut.span, k) > problem.free_bytes]
        said = [one for one in answer.lowered if one.span == cut.span]
        assert bool(said) == (problem.may_be_cut(cut.span) and bool(over))
        if said:
            assert said[0].most < over[0] and said[0].needed_bytes == problem.bytes(cut.span, over[0])


@pytest.mark.parametrize("case", CASES)
def test_the_best_of_all_compositions(case: int) -> None:
    problem = drawn(case)
    answer = solve(problem)
    best = min(sum(problem.seconds(*one) for one in chosen) for chosen in compositions(problem))
    assert answer.seconds == pytest.approx(best)
    check(problem, answer)


def test_instances_are_not_trivial() -> None:
    """Something is cut, over several groups, into different numbers; memory bites."""
    answers = [solve(drawn(case)) for case in CASES]
    cuts = [cut for answer in answers for cut in answer.cuts if cut.partitions > 1]
    assert {cut.partitions for cut in cuts} == {2, 3, 4}
    assert sum(cut.span[1] - cut.span[0] > 1 for cut in cuts) > 15
    assert sum(bool(answer.lowered) for answer in answers) > 20


def chain(groups: int, **changes: object) -> RangeProblem:
    """Compute 1, all-to-all 2, and so on; partitions cost nothing."""

    def seconds(span: Span, parts: int) -> float:
        steps = [Step(place % 2 == 1, (place - span[0] - 1,) if place > span[0] else ()) for place in range(*span)]
        return pipeline_seconds(steps, [(1.0 + step.exchange) / parts for step in steps], parts)

    values: dict[str, object] = {
        "groups": groups,
        "range_limit": 3,
        "candidates": (2, 4),
        "may_be_cut": lambda span: span[1] - span[0] > 1,
        "seconds": seconds,
        "bytes": lambda span, parts: parts,
        "free_bytes": math.inf,
    }
    return RangeProblem(**{**values, **changes})  # type: ignore[arg-type]


def test_one_group_none_and_no_seconds() -> None:
    assert solve(chain(0)) == Ranges((), 0.0, (), 0)
    (only,) = solve(chain(1)).cuts
    assert only.partitions == 1 and only.seconds == 1.0
    nothing = solve(chain(4, seconds=lambda span, parts: 0.0))
    assert [cut.span for cut in nothing.cuts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert {cut.partitions for cut in nothing.cuts} == {1}


def test_memory_lowers_partitions_and_says_so() -> None:
    """Three groups c-m-c take 1/k + 2 + 1/k in k parts."""
    plenty = solve(chain(3))
    assert [(cut.span, cut.partitions) for cut in plenty.cuts] == [((0, 3), 4)]
    assert plenty.seconds == pytest.approx(2.5) and plenty.lowered == ()
    short = solve(chain(3, free_bytes=3.0))
    assert [(cut.span, cut.partitions) for cut in short.cuts] == [((0, 3), 2)]
    assert short.seconds == pytest.approx(3.0) and short.lowered == (Lowered((0, 3), 2, 4),)
    none = solve(chain(3, free_bytes=0.0))
    assert none.seconds == pytest.approx(4.0) and {cut.partitions for cut in none.cuts} == {1}


def test_prices_are_asked_for_at_most_once_per_range_and_number() -> None:
    asked = []
    problem = chain(20)
    counted = chain(20, seconds=lambda span, parts: asked.append((span, parts)) or problem.seconds(span, parts))
    assert solve(counted).evaluations == len(asked) == len(set(asked)) <= 20 * 3 * 3


MOE_LAYER = [LayerOperator(1, part) for part in MOE_PARTS]
CHUNK = [LayerOperator(0, "attention"), LayerOperator(0, "mlp"), *MOE_LAYER, LayerOperator(2, "attention")]


@pytest.mark.parametrize(
    ("least", "before"), [(0.0, [(0, 1), (1, 2), (2, 3)]), (2.0, [(0, 2), (2, 3)]), (9.0, [(0, 3)])]
)
def test_operators_are_grouped_by_seconds_and_experts_stay_together(least: float, before: list[Span]) -> None:
    groups = group(CHUNK, lambda one: 1.0, least)
    assert groups == [*before, (3, 10), (10, 11)]
    assert (CHUNK[3].part, CHUNK[9].part) == (GATE, MERGE)
    assert group([], lambda one: 1.0, least) == []
