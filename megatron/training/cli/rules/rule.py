"""The vocabulary that the rules of `validation.py` are written in: `require` and its frequent forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import one_of
from moe_overlap.describe.errors import ConfigError

Rule = Callable[[Config], None]
_LISTED = 10**9
"""Divisors of larger numbers are not searched for."""


def require(holds: object, flag: str, value: object, rule: str, fix: str) -> None:
    """Raise the error a user reads, unless the rule holds."""
    if not holds:
        raise ConfigError(flag, value, rule, fix)


def at_least(minimum: float, flags: Sequence[tuple[str, float | None]]) -> None:
    """Require every value that is given to be at least `minimum`."""
    for flag, value in flags:
        require(
            value is None or value >= minimum, flag, value, f"must be at least {minimum:g}", f"use {minimum:g} or more"
        )


def fraction(flags: Sequence[tuple[str, float | None]], *, includes_one: bool) -> None:
    """Require every value that is given to lie in [0, 1) or [0, 1]."""
    for flag, value in flags:
        inside = value is None or 0 <= value < 1 or (includes_one and value == 1)
        require(inside, flag, value, f"must lie in [0, 1{']' if includes_one else ')'}", "correct the value")


def divisors(number: int) -> str:
    """The divisors of a number, as `1, 2, 4 or 8`."""
    if number > _LISTED:
        return f"a divisor of {number}"
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return one_of(tuple(str(d) for d in sorted({*small, *(number // d for d in small)})))
