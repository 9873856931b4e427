"""Sizes of a graph as functions of the parallel layout, derived from captures of a few layouts. Standard library and numpy.

A size is a polynomial in b and s; each of its coefficients is a short sum of products of powers of the layout's *degrees*
(`Degrees`): ranks of TP, CP, EP and ETP, rows of the vocabulary on a rank, and copies that a dispatch library sends. A weight of
the experts shrinks with 1/ep · 1/etp, the rows they compute grow with etp, an all-gather moves A + B/tp.

`Samples.scaling` finds the sums: the shortest of all that fit every captured value exactly, in rational arithmetic. Each must
fit one value more than it has terms, so a size that is no such sum is noticed. If several equally short sums fit all values, a
layout is answered only if they agree there: nothing is guessed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.model import ModelDescription, expected_places
from moe_overlap.tuner.capture.expression import Expression, Monomial, monomial_text
from moe_overlap.tuner.capture.graph import COPIES_PER, Layout

Floats = NDArray[np.float64]
Powers = tuple[int, int, int, int, int, int, int]
"""Exponents of the degrees, in the order of `Degrees.values`."""
Sum = tuple[tuple[Powers, Fraction], ...]
"""Products of powers with their coefficients."""
TERMS = 2
"""Largest number of products in a sum."""


class UndeterminedError(LookupError):
    """The captured layouts do not determine a size: too few of them have the operator, or it is no short sum of products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The numbers on which sizes depend, besides the batch.

    Attributes:
        vocabulary: rows of the embedding on a rank.
        copies: number of ranks to which a library sends a token, once to each, in sixteenths (`sent_rows` of the library's
            stand-in in fused_functions.py).
        groups: number of TP ranks over which key/value heads are split: at most one per head.
    """

    tensor: int
    context: int
    expert: int
    expert_tensor: int
    vocabulary: int
    copies: int
    groups: int

    @staticmethod
    def of(layout: Layout, model: ModelDescription) -> Degrees:
        """Degrees of a layout.

        Args:
            model: the model, with its vocabulary padded for this layout.
        """
        vocabulary, topk = model.vocab_size, model.router_topk
        # Every shard of an expert counts as a choice: a token goes to all ranks that hold one.
        choices, ranks = topk * layout.expert_tensor, layout.expert * layout.expert_tensor
        return Degrees(
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            vocabulary=vocabulary // layout.tensor,
            copies=round(COPIES_PER * expected_places(choices, ranks)) if topk else 1,
            groups=layout.tensor if model.latent_attention is not None else min(layout.tensor, model.num_query_groups),
        )

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers in the order of `Powers`."""
        return (self.tensor, self.context, self.expert, self.expert_tensor, self.vocabulary, self.copies, self.groups)


def product(powers: Powers, values: Sequence[int]) -> Fraction:
    """The value of a product of powers."""
    above = math.prod(value**power for value, power in zip(values, powers, strict=True) if power > 0)
    below = math.prod(value**-power for value, power in zip(values, powers, strict=True) if power < 0)
    return Fraction(above, below)


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """The products that sizes of a block may contain, simplest first; the two functions below create each set once.

    Attributes:
        fixed: for coefficients without tokens, such as weights.
        of_tokens: for the others.
    """

    fixed: tuple[Powers, ...]
    of_tokens: tuple[Powers, ...]


@cache
def dense_products(of_vocabulary: bool, of_heads: bool = False) -> Products:
    """Widths are constant or shrink with TP. Tokens are constant or shrink with CP, under sequence parallelism also with TP.

    Args:
        of_vocabulary: whether a width may be that of the vocabulary.
        of_heads: whether a width may be that of key/value heads.
    """
    constant, per_rank = (0, 0, 0, 0, 0, 0, 0), (-1, 0, 0, 0, 0, 0, 0)
    vocabulary, heads = (0, 0, 0, 0, 1, 0, 0), (0, 0, 0, 0, 0, 0, -1)
    fixed = (constant, per_rank, *((vocabulary,) if of_vocabulary else ()), *((heads,) if of_heads else ()))
    return Products(fixed, (*fixed, *((t, c - 1, *others) for t, c, *others in fixed)))


@cache
def routed_products(of_copies: bool) -> Products:
    """Experts of a rank shrink with EP, their widths with ETP; gathered rows and counts grow with the ranks they come from.

    Args:
        of_copies: whether a library sends each token once to every rank.
    """
    grown = sorted(itertools.product((-1, 0, 1), (-1, 0, 1)), key=lambda powers: (sum(map(abs, powers)), powers))
    copies = (0, 1) if of_copies else (0,)
    tokens = ((-1, -1), (0, -1))
    # A map of the tokens of all ranks has a column for every shard of every expert.
    maps = tuple((*cut, 1, 2, 0, 0, 0) for cut in tokens) if of_copies else ()
    return Products(
        tuple((0, 0, *powers, 0, 0, 0) for powers in grown),
        (*((*cut, *powers, 0, q, 0) for q in copies for cut in tokens for powers in grown), *maps),
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """A size as a function of the layout.

    Attributes:
        terms: for every product of powers of b and s, the equally short candidate sums of its coefficient.
    """

    terms: tuple[tuple[Monomial, tuple[Sum, ...]], ...]

    @property
    def is_unique(self) -> bool:
        """Whether every coefficient has only one candidate sum."""
        return all(len(sums) == 1 for _, sums in self.terms)

    def at(self, degrees: Degrees) -> Expression:
        """The size of a layout, an expression in b and s.

        Raises:
            UndeterminedError: candidate sums that captured values do not distinguish differ there.
        """
        values, total = degrees.values, []
        for monomial, sums in self.terms:
            number = _total(sums[0], values)
            if any(_total(terms, values) != number for terms in sums[1:]):
                raise UndeterminedError("several values are possible")
            if number:
                total.append((monomial, number))
        return Expression(tuple(total))


def total(scalings: Sequence[Scaling]) -> Scaling:
    """The sum of some sizes as one scaling.

    Every combination of the candidates is a candidate of the total: they agree if each size is determined.
    """
    if len(scalings) == 1:
        return scalings[0]
    sizes = [dict(scaling.terms) for scaling in scalings]
    terms: list[tuple[Monomial, tuple[Sum, ...]]] = []
    for monomial in _sorted(monomial for size in sizes for monomial in size):
        choices = [size[monomial] for size in sizes if monomial in size]
        first = [sums[0] for sums in choices]
        totals = [_added(first)]
        for place, sums in enumerate(choices):
            totals += [_added([*first[:place], other, *first[place + 1 :]]) for other in sums[1:]]
        terms.append((monomial, tuple(dict.fromkeys(totals))))
    return Scaling(tuple(terms))


def _sorted(monomials: Iterable[Monomial]) -> list[Monomial]:
    """Each monomial once, in the order of an expression's terms."""
    return sorted(set(monomials), key=monomial_text)


def _added(sums: Sequence[Sum]) -> Sum:
    factors: dict[Powers, Fraction] = {}
    for powers, factor in itertools.chain(*sums):
        factors[powers] = factors.get(powers, Fraction(0)) + factor
    return tuple(factors.items())


def _total(terms: Sum, values: Sequence[int]) -> Fraction:
    """The value of a sum; reduced once at its end, since reducing every product costs more than the rest."""
    above, below = 0, 1
    for powers, factor in terms:
        numerator, denominator = factor.as_integer_ratio()
        for value, power in zip(values, powers, strict=True):
            if power > 0:
                numerator *= value**power
            elif power < 0:
                denominator *= value**-power
        above, below = above * denominator + numerator * below, below * denominator
    return Fraction(above, below)


class Samples:
    """Captured layouts with their degrees; caches the scalings, as graphs repeat few sizes.

    Args:
        degrees: degrees of every captured layout.
    """

    def __init__(self, degrees: Sequence[Degrees]) -> None:
        self._degrees = tuple(degrees)
        self._scalings: dict[object, Scaling] = {}
        self._sums: dict[object, tuple[Sum, ...]] = {}
        self._systems: dict[object, _System] = {}

    def scaling(self, sizes: Mapping[int, Expression], products: Products) -> Scaling:
        """The scaling of a size.

        Args:
            sizes: index of a captured layout -> the size there.
            products: the products that it may contain.
        Raises:
            UndeterminedError: no short sum fits all values, or there are too few.
        """
        places = tuple(sizes)
        if len(places) < 2:
            raise UndeterminedError(f"{len(places)} captured layouts have it")
        key = (products, tuple(sizes.items()))
        if key not in self._scalings:
            coefficients = [dict(size.terms) for size in sizes.values()]
            monomials = _sorted(monomial for of_one in coefficients for monomial in of_one)
            self._scalings[key] = Scaling(
                tuple(
                    (
                        m,
                        self._through(
                            places,
                            tuple(c.get(m, Fraction(0)) for c in coefficients),
                            products.of_tokens if any(symbol == "s" for symbol, _ in m) else products.fixed,
                        ),
                    )
                    for m in monomials
                )
            )
        return self._scalings[key]

    def _through(
        self, places: tuple[int, ...], numbers: tuple[Fraction, ...], products: tuple[Powers, ...]
    ) -> tuple[Sum, ...]:
        key = (places, numbers, products)
        if key not in self._sums:
            of_system = (places, products)
            if of_system not in self._systems:
                self._systems[of_system] = _System([self._degrees[place] for place in places], products)
            self._sums[key] = tuple(self._systems[of_system].solutions(numbers))
        if not self._sums[key]:
            raise UndeterminedError(f"no sum of {TERMS} products passes through {len(numbers)} values")
        return self._sums[key]


_Solution = tuple[tuple[int, ...], tuple[Fraction, ...]]
"""Products of a sum, and their coefficients."""


class _System:
    """Products at some captured layouts: the columns of linear systems of one and two unknowns."""

    def __init__(self, degrees: Sequence[Degrees], products: tuple[Powers, ...]) -> None:
        self._products = products
        self._exact = [[product(powers, of_layout.values) for powers in products] for of_layout in degrees]
        self._columns: Floats = np.array(self._exact, dtype=np.float64).reshape(len(degrees), len(products))

    def solutions(self, numbers: Sequence[Fraction]) -> list[Sum]:
        """The shortest sums through all numbers; none if no number remains for a check."""
        values: Floats = np.array(numbers, dtype=np.float64)
        if not any(numbers):
            return [()]
        factors = values[0] / self._columns[0]
        close = np.isclose(self._columns * factors, values[:, None], rtol=1e-9, atol=0.0).all(axis=0)
        single: list[_Solution] = [
            ((int(column),), (numbers[0] / self._exact[0][column],)) for column in np.flatnonzero(close)
        ]
        sums = [solution for solution in single if self._passes(*solution, numbers)]
        if not sums and len(numbers) > TERMS:
            sums = [solution for solution in self._pairs(numbers, values) if self._passes(*solution, numbers)]
        return [
            tuple((self._products[column], factor) for column, factor in zip(columns, factors, strict=True))
            for columns, factors in sums
        ]

    def _passes(self, columns: tuple[int, ...], factors: tuple[Fraction, ...], numbers: Sequence[Fraction]) -> bool:
        rows = {tuple(row[column] for column in columns) for row in self._exact}
        # Sizes are sums without negative terms; and layouts that the products do not distinguish check nothing.
        if len(columns) > 1 and (min(factors) <= 0 or len(rows) <= len(columns)):
            return False
        return all(
            sum((row[column] * factor for column, factor in zip(columns, factors, strict=True)), Fraction(0)) == number
            for row, number in zip(self._exact, numbers, strict=True)
        )

    @cached_property
    def _pair_places(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], Floats]:
        """Every pair of products, with the two layouts that distinguish them best, and the determinant there."""
        first, second = np.triu_indices(len(self._products), 1)
        rows, others = np.triu_indices(len(self._columns), 1)
        c = self._columns
        # Columns of one length: products of large numbers would win every comparison otherwise.
        scaled = c / np.abs(c).max(axis=0)
        determinants = (
            scaled[rows][:, first] * scaled[others][:, second] - scaled[rows][:, second] * scaled[others][:, first]
        )
        best = np.abs(determinants).argmax(axis=0)
        distinct = np.abs(determinants[best, np.arange(len(first))]) > 1e-12
        first, second, best = first[distinct], second[distinct], best[distinct]
        row, other = rows[best], others[best]
        return first, second, row, other, c[row, first] * c[other, second] - c[row, second] * c[other, first]

    def _pairs(self, numbers: Sequence[Fraction], values: Floats) -> list[_Solution]:
        column, other_column, row, other, determinant = self._pair_places
        c = self._columns
        first = (values[row] * c[other, other_column] - values[other] * c[row, other_column]) / determinant
        second = (c[row, column] * values[other] - c[other, column] * values[row]) / determinant
        through = c[:, column] * first + c[:, other_column] * second
        close = np.isclose(through, values[:, None], rtol=1e-7, atol=0.0).all(axis=0)
        solutions: list[_Solution] = []
        for index in np.flatnonzero(close):
            i, j, m, n = int(column[index]), int(other_column[index]), int(row[index]), int(other[index])
            e = self._exact
            exact = e[m][i] * e[n][j] - e[m][j] * e[n][i]
            solutions.append(
                (
                    (i, j),
                    (
                        (numbers[m] * e[n][j] - numbers[n] * e[m][j]) / exact,
                        (e[m][i] * numbers[n] - e[n][i] * numbers[m]) / exact,
                    ),
                )
            )
        return solutions


class ScalingMatrix:
    """Many scalings at many layouts at once, in double precision.

    Args:
        scalings: M scalings.
    """

    def __init__(self, scalings: Sequence[Scaling]) -> None:
        rows = [(row, monomial, sums) for row, scaling in enumerate(scalings) for monomial, sums in scaling.terms]
        terms = dict.fromkeys((m, powers) for _, m, sums in rows for terms in sums for powers, _ in terms)
        self._columns = {term: column for column, term in enumerate(terms)}
        self._coefficients: Floats = np.zeros((len(scalings), len(terms)))
        for row, monomial, sums in rows:
            self._coefficients[row] += self._row(monomial, sums[0])
        others = [self._row(m, sums[0]) - self._row(m, other) for _, m, sums in rows for other in sums[1:]]
        self._differences: Floats = np.array(others).reshape(len(others), len(terms))

    def _row(self, monomial: Monomial, terms: Sum) -> Floats:
        row: Floats = np.zeros(len(self._columns))
        for powers, factor in terms:
            row[self._columns[monomial, powers]] += float(factor)
        return row

    def values(self, degrees: Sequence[Degrees], b: float, s: float) -> Floats:
        """[M, layouts] sizes at a batch.

        Raises:
            UndeterminedError: candidate sums that captured values do not distinguish differ at one of the layouts.
        """
        of_layouts: Floats = np.array([of_layout.values for of_layout in degrees], dtype=np.float64)
        products: Floats = np.ones((len(self._columns), len(degrees)))
        symbols = {"b": b, "s": s}
        for column, (monomial, powers) in enumerate(self._columns):
            batch = math.prod(symbols[str(symbol)] ** power for symbol, power in monomial)
            products[column] = batch * np.prod(of_layouts ** np.array(powers, dtype=np.float64), axis=1)
        if len(self._differences):
            differ = np.abs(self._differences @ products) > 1e-9 * (np.abs(self._differences) @ products)
            if differ.any():
                raise UndeterminedError("several values are possible")
        values: Floats = self._coefficients @ products
        return values
