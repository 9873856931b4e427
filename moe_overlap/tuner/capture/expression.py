"""Numbers of a captured graph as expressions in the micro-batch and the sequence length. Standard library and numpy.

Symbols: `b`, samples of a micro-batch on a rank; `s`, tokens of a whole sample, before context or sequence parallelism splits
it. An expression is a sum of products with rational coefficients; a factor may be `ceil`, `floor`, `max` or `min` of
expressions. Text: `3/2*b*s^2 + 4096*s + max(b*s, 128)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

SYMBOLS = ("b", "s")
FUNCTIONS = {"ceil": 1, "floor": 1, "max": 2, "min": 2}
"""Name -> number of arguments."""

Values = NDArray[np.floating[Any]]
_TOKEN = re.compile(r"\s*(\d+|[a-z]+|[-+*/^(),])")


@dataclass(frozen=True, slots=True)
class Call:
    """A function of expressions, as one factor of a product."""

    function: str
    arguments: tuple[Expression, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


Factor = str | Call
Monomial = tuple[tuple[Factor, int], ...]
"""Factors with their powers, sorted by text; empty for a constant."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A sum of monomials, each with its coefficient; immutable, equal when their text is equal.

    Attributes:
        terms: monomials sorted by text, without zero coefficients.
    """

    terms: tuple[tuple[Monomial, Fraction], ...] = field(default=())

    @staticmethod
    def of(value: Expression | Fraction | int) -> Expression:
        """The expression itself, or a number as a constant."""
        if isinstance(value, Expression):
            return value
        return Expression((((), Fraction(value)),) if value else ())

    @staticmethod
    def parse(text: str) -> Expression:
        """Parse the output of `str`.

        Raises:
            ValueError: not the text of an expression.
        """
        return _Parser(text).parsed()

    def value(self, b: Any, s: Any) -> Values:
        """The number at samples b and tokens s; arrays broadcast."""
        values: Values = evaluate((self,), b, s)[0]
        return values

    def __add__(self, other: Expression | Fraction | int) -> Expression:
        total = dict(self.terms)
        for monomial, coefficient in Expression.of(other).terms:
            total[monomial] = total.get(monomial, Fraction(0)) + coefficient
        return _canonical(total)

    __radd__ = __add__

    def __mul__(self, other: Expression | Fraction | int) -> Expression:
        total: dict[Monomial, Fraction] = {}
        for first, c in self.terms:
            for second, d in Expression.of(other).terms:
                product = _product(first, second)
                total[product] = total.get(product, Fraction(0)) + c * d
        return _canonical(total)

    __rmul__ = __mul__

    def __neg__(self) -> Expression:
        return self * -1

    def __sub__(self, other: Expression | Fraction | int) -> Expression:
        return self + -Expression.of(other)

    def __rsub__(self, other: Expression | Fraction | int) -> Expression:
        return -self + other

    def __truediv__(self, divisor: Fraction | int) -> Expression:
        return self * (1 / Fraction(divisor))

    def __str__(self) -> str:
        text = " + ".join(_term_text(monomial, coefficient) for monomial, coefficient in self.terms)
        return text or "0"


def ceil(value: Expression) -> Expression:
    """Rounded up: `ceil(b * s / 8)` is the ceiling division."""
    return _call("ceil", value)


def floor(value: Expression) -> Expression:
    """Rounded down."""
    return _call("floor", value)


def largest(first: Expression | int, second: Expression | int) -> Expression:
    """The larger of two."""
    return _call("max", first, second)


def smallest(first: Expression | int, second: Expression | int) -> Expression:
    """The smaller of two."""
    return _call("min", first, second)


def evaluate(expressions: Sequence[Expression], b: Any, s: Any) -> Values:
    """Many expressions at many points at once.

    Args:
        b, s: numbers or arrays that broadcast to one shape.
    Returns:
        [expressions, *shape] in double precision: whole numbers are exact below 2^53.
    """
    symbols = {"b": np.asarray(b, dtype=np.float64), "s": np.asarray(s, dtype=np.float64)}
    shape = np.broadcast_shapes(symbols["b"].shape, symbols["s"].shape)
    # Thousands of expressions share few monomials: each is evaluated once, and the rest is one matrix product.
    columns = {monomial: index for index, monomial in enumerate(dict.fromkeys(_monomials(expressions)))}
    basis = np.ones((len(columns), *shape))
    for monomial, index in columns.items():
        for factor, power in monomial:
            basis[index] *= _factor_value(factor, symbols) ** power
    coefficients = np.zeros((len(expressions), len(columns)))
    for row, expression in enumerate(expressions):
        for monomial, coefficient in expression.terms:
            coefficients[row, columns[monomial]] = float(coefficient)
    values: Values = np.tensordot(coefficients, basis, axes=1)
    return values


def _monomials(expressions: Sequence[Expression]) -> list[Monomial]:
    return [monomial for expression in expressions for monomial, _ in expression.terms]


def _factor_value(factor: Factor, symbols: Mapping[str, Values]) -> Values:
    if isinstance(factor, str):
        return symbols[factor]
    arguments = evaluate(factor.arguments, symbols["b"], symbols["s"])
    # Thirds and the like are not exact in binary: 3 must not be rounded up to 4.
    rounding = 1e-9
    values: Values
    if factor.function == "ceil":
        values = np.ceil(arguments[0] - rounding)
    elif factor.function == "floor":
        values = np.floor(arguments[0] + rounding)
    else:
        values = np.maximum(*arguments) if factor.function == "max" else np.minimum(*arguments)
    return values


def _call(function: str, *arguments: Expression | int) -> Expression:
    nodes = tuple(Expression.of(argument) for argument in arguments)
    # A function of constants is a constant, so that its text is that of the number.
    if all(not monomial for argument in nodes for monomial, _ in argument.terms):
        numbers = [argument.terms[0][1] if argument.terms else Fraction(0) for argument in nodes]
        functions: dict[str, Callable[..., Fraction]] = {"ceil": _ceiling, "floor": _floor, "max": max, "min": min}
        return Expression.of(functions[function](*numbers))
    return Expression(((((Call(function, nodes), 1),), Fraction(1)),))


def _ceiling(number: Fraction) -> Fraction:
    return Fraction(math.ceil(number))


def _floor(number: Fraction) -> Fraction:
    return Fraction(math.floor(number))


def _canonical(terms: Mapping[Monomial, Fraction]) -> Expression:
    # Without zero terms and in one order: equality of values is then equality of tuples, and of text.
    nonzero = ((monomial, coefficient) for monomial, coefficient in terms.items() if coefficient)
    return Expression(tuple(sorted(nonzero, key=lambda term: monomial_text(term[0]))))


def _product(first: Monomial, second: Monomial) -> Monomial:
    powers = dict(first)
    for factor, power in second:
        powers[factor] = powers.get(factor, 0) + power
    # Sorted, so that equal products are equal whatever the order of their factors was.
    return tuple(sorted(powers.items(), key=lambda item: str(item[0])))


def monomial_text(monomial: Monomial) -> str:
    """The text of a monomial, by which the terms of an expression are sorted."""
    return "*".join(f"{factor}^{power}" if power > 1 else str(factor) for factor, power in monomial)


def _term_text(monomial: Monomial, coefficient: Fraction) -> str:
    if not monomial:
        return str(coefficient)
    return monomial_text(monomial) if coefficient == 1 else f"{coefficient}*{monomial_text(monomial)}"


class _Parser:
    """Recursive descent over sum := term {(+|-) term}; term := factor {(*|/) factor}; factor := atom [^ number]."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, position = text, list[str](), 0
        while position < len(text.rstrip()):
            token = _TOKEN.match(text, position)
            if token is None:
                raise ValueError(f"expression {text!r}: unknown character {text[position]!r}")
            self.tokens.append(token[1])
            position = token.end()
        self.tokens.append("")

    def parsed(self) -> Expression:
        """The expression, which must end the text."""
        value = self.sum()
        if self.tokens[0]:
            self.fail()
        return value

    def sum(self) -> Expression:
        """Terms with their signs."""
        value = self.term()
        while self.tokens[0] in ("+", "-"):
            value = value + self.term() if self.tokens.pop(0) == "+" else value - self.term()
        return value

    def term(self) -> Expression:
        """Factors; a divisor is a number."""
        value = self.factor()
        while self.tokens[0] in ("*", "/"):
            value = value * self.factor() if self.tokens.pop(0) == "*" else value / self.number()
        return value

    def factor(self) -> Expression:
        """A number, symbol, call, or sum in parentheses, perhaps raised to a power."""
        token = self.tokens[0]
        if not (token in ("-", "(") or token.isdigit() or token in FUNCTIONS or token in SYMBOLS):
            self.fail()
        self.tokens.pop(0)
        if token == "-":
            return -self.factor()
        if token.isdigit():
            return Expression.of(int(token))
        if token == "(":
            base = self.sum()
            self.take(")")
        elif token in FUNCTIONS:
            self.take("(")
            arguments = [self.sum()]
            while len(arguments) < FUNCTIONS[token]:
                self.take(",")
                arguments.append(self.sum())
            self.take(")")
            base = _call(token, *arguments)
        else:
            base = Expression(((((token, 1),), Fraction(1)),))
        if self.tokens[0] != "^":
            return base
        self.tokens.pop(0)
        value = base
        for _ in range(self.number() - 1):
            value = value * base
        return value

    def number(self) -> int:
        """A whole number above 0."""
        if not self.tokens[0].isdigit() or not int(self.tokens[0]):
            self.fail()
        return int(self.tokens.pop(0))

    def take(self, expected: str) -> None:
        """Skip one required character."""
        if self.tokens[0] != expected:
            self.fail()
        self.tokens.pop(0)

    def fail(self) -> Any:
        """Raise an error for the next token."""
        raise ValueError(f"expression {self.text!r}: unexpected {self.tokens[0] or 'end'!r}")


B = Expression((((("b", 1),), Fraction(1)),))
"""Samples of a micro-batch on a rank."""
S = Expression((((("s", 1),), Fraction(1)),))
"""Tokens of a whole sample."""
