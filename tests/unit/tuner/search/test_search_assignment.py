"""The assignment of weight gradients to slots against brute force, and the ways in which a greedy goes wrong."""

from __future__ import annotations

import random
from itertools import product

import pytest

from moe_overlap.tuner.search.layer.assignment import (
    Assignment,
    AssignmentProblem,
    Gradient,
    LayerSpan,
    OperatorRun,
    best_fit,
    held_shortly,
    longest_run,
    one_period,
    repeat,
    without_idlers,
)
from moe_overlap.tuner.search.layer.solve_assignment import flow_bound, solve, solve_exactly

US = 1e-6
INSTANCES = 120


def problem(
    slots: list[int], gradients: list[tuple[int, int, int]], max_bytes: int = 10**9, cyclic: bool = False
) -> AssignmentProblem:
    """Microseconds of slots; microseconds, bytes and first slot of weight gradients, which run in any slot from there on."""
    n = len(slots)
    made = [Gradient(t * US, size, first, tuple(range(0 if cyclic else first, n))) for t, size, first in gradients]
    return AssignmentProblem(tuple(made), tuple(t * US for t in slots), max_bytes, cyclic)


def random_problem(draw: random.Random) -> AssignmentProblem:
    """Five weight gradients at most, four slots at most; with and without a limit, periods, and forbidden slots."""
    slots = [draw.choice([0, 5, 100, draw.randint(1, 300)]) for _ in range(draw.randint(1, 4))]
    cyclic = draw.random() < 0.3
    gradients = [
        (draw.choice([0, 7, 100, draw.randint(1, 400)]), draw.randint(1, 10), draw.randrange(len(slots) + cyclic))
        for _ in range(draw.randint(0, 5))
    ]
    made = problem(slots, gradients, draw.choice([0, 8, 15, 1000]), cyclic)
    allowed = (
        Gradient(one.seconds, one.bytes, one.first, tuple(j for j in one.under if draw.random() < 0.8))
        for one in made.gradients
    )
    return AssignmentProblem(tuple(allowed), made.slots, made.max_bytes, cyclic)


def by_brute_force(given: AssignmentProblem) -> float:
    """The best value of all assignments; what is held is counted slot by slot, over three periods where there are several."""
    n = len(given.slots)
    best = 0.0
    for chosen in product(*[(None, *one.under) for one in given.gradients]):
        held = [0] * (5 * n)
        hidden = [0.0] * n
        for one, slot in zip(given.gradients, chosen, strict=True):
            if slot is None:
                continue
            hidden[slot] += one.seconds
            for period in range(4 if given.cyclic else 1):
                end = slot if slot >= one.first else slot + n
                for at in range(one.first, end + 1):
                    held[period * n + at] += one.bytes
        if max(held[2 * n : 3 * n] if given.cyclic else held) <= given.max_bytes:
            best = max(best, sum(map(min, given.slots, hidden)))
    return best


def by_algorithm_1(given: AssignmentProblem) -> float:
    """Best fit as the paper has it: whatever is nearest is taken while anything is left of a slot."""
    hidden, used = 0.0, set[int]()
    for slot, seconds in enumerate(given.slots):
        left = seconds
        while left > 0:
            free = [i for i, one in enumerate(given.gradients) if i not in used and slot in one.under]
            if not free:
                break
            nearest = min(free, key=lambda i: abs(left - given.gradients[i].seconds))
            used.add(nearest)
            left -= given.gradients[nearest].seconds
        hidden += seconds - max(0.0, left)
    return hidden


def test_equals_brute_force() -> None:
    draw = random.Random(0)
    proven = greedy_is_best = 0
    for _ in range(INSTANCES):
        given = random_problem(draw)
        optimum = by_brute_force(given)
        empty: Assignment = (None,) * len(given.gradients)
        exact = solve_exactly(given, empty, 10.0, 0.0)
        assert exact.assignment is not None and given.is_feasible(exact.assignment)
        assert given.hidden_seconds(exact.assignment) == pytest.approx(optimum, abs=1e-12)
        assert exact.bound == pytest.approx(optimum, abs=1e-12)
        assert flow_bound(given) >= optimum - 1e-12
        found = solve(given, (), 10.0)
        assert given.is_feasible(found.assignment) and found.value == given.hidden_seconds(found.assignment)
        assert found.greedy_value <= found.value <= found.bound
        assert found.value == pytest.approx(optimum, abs=1e-12)
        proven += found.gap < 1e-9
        greedy_is_best += found.method == "greedy"
    assert proven == INSTANCES
    assert INSTANCES / 2 < greedy_is_best < INSTANCES


def test_what_overshoots_is_left_to_a_later_slot() -> None:
    """The paper's greedy puts both under the first all-to-all."""
    given = problem([100, 1000], [(95, 1, 0), (1000, 1, 0)])
    assert by_algorithm_1(given) == pytest.approx(100 * US)
    found = solve(given, (), 5.0)
    assert found.greedy_value == found.value == found.bound == pytest.approx(1095 * US)
    assert found.assignment == (0, 1)


def test_what_overshoots_runs_where_no_later_slot_hides_more() -> None:
    given = problem([100, 100], [(300, 1, 0), (300, 1, 1)])
    assert best_fit(given) == (0, 1)
    assert given.hidden_seconds((0, 1)) == pytest.approx(200 * US)


def test_a_gap_is_a_slot_like_an_exchange() -> None:
    """A bubble behind the all-to-alls of a pass takes what they have left."""
    exchanges_only = problem([50, 50], [(50, 1, 0), (50, 1, 0), (400, 1, 1)])
    with_gap = problem([50, 50, 500], [(50, 1, 0), (50, 1, 0), (400, 1, 1)])
    assert solve(exchanges_only, (), 5.0).value == pytest.approx(100 * US)
    assert solve(with_gap, (), 5.0).value == pytest.approx(500 * US)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (problem([], []), ()),
        (problem([], [(5, 1, 0)]), (None,)),
        (problem([5, 5], []), ()),
        (problem([0, 0], [(5, 1, 0)]), (None,)),
        (problem([5], [(0, 1, 0)]), (None,)),
        (problem([5, 5], [(5, 9, 0)], max_bytes=8), (None,)),
        (problem([5], [(5, 0, 0)], max_bytes=0), (0,)),
        (problem([9], [(5, 1, 0), (5, 1, 0), (9, 1, 0)]), (None, None, 0)),
        (problem([5, 5], [(5, 1, 0), (5, 1, 0)]), (0, 1)),
    ],
    ids=["nothing", "no slot", "no candidate", "no time", "no work", "no room", "no bytes", "one fits", "ties"],
)
def test_degenerate(given: AssignmentProblem, expected: Assignment) -> None:
    found = solve(given, (), 5.0)
    assert found.assignment == expected
    assert found.value == pytest.approx(found.bound)
    assert 0 <= found.gap < 1e-9


def test_the_bound_hides_nothing_that_is_alone_too_large() -> None:
    assert flow_bound(problem([5, 5], [(5, 9, 0)], max_bytes=8)) == 0.0
    assert flow_bound(problem([5, 5], [(5, 8, 0)], max_bytes=8)) == pytest.approx(5 * US)


def test_without_time_the_greedy_stands_with_a_bound() -> None:
    given = problem([100, 90], [(60, 1, 0), (90, 1, 0), (40, 1, 0)])
    hurried, whole = solve(given, (), 0.0), solve(given, (), 5.0)
    assert (hurried.method, whole.method) == ("greedy", "exact")
    assert hurried.value == pytest.approx(180 * US)
    late = solve_exactly(given, hurried.assignment, -1.0, 0.0)
    assert late.bound >= whole.value and (late.assignment is None or given.is_feasible(late.assignment))
    assert whole.value == pytest.approx(190 * US)
    assert whole.bound == hurried.bound == pytest.approx(190 * US)
    assert hurried.gap == pytest.approx(1 - hurried.value / (190 * US))


def test_only_what_hides_something_is_kept() -> None:
    given = problem([100], [(60, 5, 0), (60, 9, 0), (60, 7, 0)])
    assert without_idlers(given, (0, 0, 0)) == (0, None, 0)


def test_of_equal_weight_gradients_the_latest_run() -> None:
    given = problem([10, 10, 10], [(10, 4, 0), (10, 4, 1), (10, 4, 2), (10, 4, 2)])
    assert held_shortly(given, (1, 2, None, 2)) == (None, 1, 2, 2)
    heavy = problem([10, 10], [(10, 4, 0), (10, 400, 1)])
    assert held_shortly(heavy, (1, None)) == (1, None)


PERIOD = [(60, 3, 0), (40, 2, 1), (70, 2, 1), (30, 1, 2)]
"""Weight gradients of one layer: microseconds, bytes, and how many of the layer's slots stand in front of each."""


def repeated(layers: int, slots: tuple[int, int] = (100, 100)) -> tuple[AssignmentProblem, list[LayerSpan]]:
    """Equivalent layers, with a head of another kind in front."""
    gradients = [(500, 9, 0)] + [(t, size, 2 * n + first) for n in range(layers) for t, size, first in PERIOD]
    gradients = [one for one in gradients if one[2] < 2 * layers]
    spans = [LayerSpan((0, 1), (0, 0))]
    for n in range(layers):
        end = min(len(gradients), 5 + 4 * n)
        spans.append(LayerSpan((1 + 4 * n, end), (2 * n, 2 * n + 2)))
    return problem([*slots] * layers, gradients), spans


def test_identical_layers_are_solved_once() -> None:
    given, spans = repeated(12)
    run = longest_run(given, spans)
    assert run == OperatorRun(first=1, length=1, periods=11)  # the last layer leaves something behind its last slot
    period = one_period(given, spans, run)
    assert (len(period.gradients), len(period.slots), period.cyclic) == (4, 2, True)
    whole = repeat(given, spans, run, (1, 1, 0, 0))
    assert whole[1:9] == (1, 1, 2, 2, 3, 3, 4, 4)
    assert given.is_feasible(whole)
    # What the last period would leave to one behind it stays free.
    assert whole[41:45] == (21, 21, None, None)
    found = solve(given, spans, 5.0)
    assert (found.method, found.repeated) == ("repeated", run)
    assert found.value == pytest.approx(24 * 100 * US)
    assert found.gap < 1e-9


def test_repetition_finds_what_greedy_misses_where_the_whole_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_overlap.tuner.search.layer.solve_assignment.MOST_PAIRS", 100)
    given, spans = repeated(12, (100, 99))
    found = solve(given, spans, 5.0)
    assert found.method == "repeated" and found.repeated is not None
    assert found.greedy_value < found.value <= found.bound


def test_layers_that_differ_are_no_run() -> None:
    given, spans = repeated(8)
    changed = AssignmentProblem(given.gradients, tuple(t + n * US for n, t in enumerate(given.slots)), given.max_bytes)
    assert longest_run(changed, spans) is None
    every_second = [t + (n // 2 % 2) * US for n, t in enumerate(given.slots)]
    run = longest_run(AssignmentProblem(given.gradients, tuple(every_second), given.max_bytes), spans)
    assert run == OperatorRun(first=1, length=2, periods=3)
    assert longest_run(problem([], [(5, 1, 0)] * 6), [LayerSpan((n, n + 1), (0, 0)) for n in range(6)]) is None
