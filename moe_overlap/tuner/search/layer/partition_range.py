"""Which ranges of a sequence of operators run in partitions, and in how many: dynamic programming over groups of operators.

Terms. Groups are neighbouring operators that no range takes apart. A range (i, n] holds the groups i, …, n - 1; it runs in k
parts, k = 1 whole. P(i, n, k) are its seconds (chunk_order.py), without anything beside it.
1. Operators are grouped: a mixture of experts, from its gate to its merge, is a group; between them groups end where they reach
   γ seconds.
2. T(0) = 0, T(n) = min over i in [n - ι, n), k in {1, candidates} of T(i) + P(i, n, k). A range that may not be cut has k = 1;
   so has one without an exchange, which is not asked. k whose bytes do not fit are left out, range by range.
3. Among equals the shorter last range and the smaller k win.
T is exact for ranges one after the other; neighbours of equal k that the runtime joins to one pipeline take less.
Time: groups × ι × candidates calls of P.

Source: Lancet, section 5.1, whose recurrence begins at 1 and counts the instruction between two ranges twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe_overlap.plan.layer_sequence import LayerOperator
from moe_overlap.plan.operators import GATE, MERGE

SAME = 1e-12
"""Shorter by less than this share is not shorter."""
Span = tuple[int, int]
"""Half open: from a group or an operator to before another."""


def group(operators: Sequence[LayerOperator], seconds: Callable[[LayerOperator], float], least: float) -> list[Span]:
    """Step 1.

    Args:
        operators: forward operators in order.
        seconds: of an operator, whole.
        least: γ; 0 leaves every operator outside a mixture of experts alone.
    Returns:
        The groups, as spans of operators.
    """
    groups: list[Span] = []
    begin, inside, total = 0, False, 0.0
    for place, operator in enumerate(operators):
        if operator.part == GATE:
            if begin < place:
                groups.append((begin, place))
            begin, inside, total = place, True, 0.0
        total += seconds(operator)
        if operator.part == MERGE or (not inside and total >= least):
            groups.append((begin, place + 1))
            begin, inside, total = place + 1, False, 0.0
    if begin < len(operators):
        groups.append((begin, len(operators)))
    return groups


@dataclass(frozen=True, slots=True)
class RangeProblem:
    """What the search is asked.

    Attributes:
        groups: their number.
        range_limit: ι, most groups in a range.
        candidates: numbers of partitions beside 1, ascending.
        may_be_cut: whether a range holds an exchange and can be cut.
        seconds: P, for k = 1 of every range, for the candidates of those that may be cut.
        bytes: what a range holds beyond the whole one when it is cut.
        free_bytes: what there is for that.
    """

    groups: int
    range_limit: int
    candidates: Sequence[int]
    may_be_cut: Callable[[Span], bool]
    seconds: Callable[[Span, int], float]
    bytes: Callable[[Span, int], float]
    free_bytes: float

    def fitting(self, span: Span) -> list[int]:
        """Candidates of a range that may be cut."""
        return [parts for parts in self.candidates if self.bytes(span, parts) <= self.free_bytes]


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of the answer."""

    span: Span
    partitions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lowered:
    """A range of the answer for which memory allows fewer partitions than the limit.

    Attributes:
        most: partitions that fit; 1: none.
        needed_bytes: of the smallest number beyond.
    """

    span: Span
    most: int
    needed_bytes: float


@dataclass(frozen=True, slots=True)
class Ranges:
    """The answer: ranges from the first group to the last, and the seconds of all of them."""

    cuts: tuple[Cut, ...]
    seconds: float
    lowered: tuple[Lowered, ...]
    evaluations: int
    """Calls of P."""


def solve(problem: RangeProblem) -> Ranges:
    """Steps 2 and 3."""
    best = [0.0] + [math.inf] * problem.groups
    last: list[Cut | None] = [None] * (problem.groups + 1)
    evaluations = 0
    for end in range(1, problem.groups + 1):
        for begin in range(end - 1, max(0, end - problem.range_limit) - 1, -1):
            span = begin, end
            for parts in (1, *(problem.fitting(span) if problem.may_be_cut(span) else ())):
                seconds = problem.seconds(span, parts)
                evaluations += 1
                total = best[begin] + seconds
                if last[end] is None or total < best[end] - SAME * abs(best[end]):
                    best[end], last[end] = total, Cut(span, parts, seconds)
    cuts = tuple(_backwards(last))[::-1]
    return Ranges(cuts, best[-1], tuple(_lowered(problem, cuts)), evaluations)


def _backwards(last: Sequence[Cut | None]) -> Iterator[Cut]:
    end = len(last) - 1
    while end > 0:
        cut = last[end]
        assert cut is not None
        yield cut
        end = cut.span[0]


def _lowered(problem: RangeProblem, cuts: Sequence[Cut]) -> Iterator[Lowered]:
    for cut in cuts:
        if not problem.may_be_cut(cut.span):
            continue
        too_large = [parts for parts in problem.candidates if parts not in problem.fitting(cut.span)]
        if too_large:
            most = max((parts for parts in problem.candidates if parts < too_large[0]), default=1)
            yield Lowered(cut.span, most, problem.bytes(cut.span, too_large[0]))
