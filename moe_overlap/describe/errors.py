"""The error that a user sees for a mistake, a line that names subject, value, rule and fix; and the checks that raise it.

Rules across flags are written in these checks: `require`, its frequent forms, and how a fix names choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_overlap.describe.files import printable

_MOST_SHOWN = 400
"""Characters of a value that are printed."""
_LISTED = 10**9
"""Divisors of larger numbers are not searched for."""


class ConfigError(Exception):
    """A user's mistake in a flag, a plan field or a file.

    Args:
        subject: the flag, field or file, as the user wrote it (`--num-experts`, `plan.json stages[1].data`).
        value: its value; the empty string when the subject alone is the mistake.
        rule: what must hold and does not.
        fix: what to do next.
    """

    def __init__(self, subject: str, value: object, rule: str, fix: str) -> None:
        self.subject, self.value, self.rule, self.fix = subject, value, rule, fix
        shown = printable(" ".join(str(value).split()), _MOST_SHOWN)
        head = f"{subject} {shown}" if value != "" else subject
        line = " ".join(f"{head}: {rule}; {fix}".split())
        # A file's content may stand anywhere in it, and must not reach the terminal as a command.
        super().__init__(printable(line, len(line)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        # Processes of a search hand it on: an exception is otherwise made again from its message alone.
        return type(self), (self.subject, self.value, self.rule, self.fix)


def system_refusal(error: OSError) -> ConfigError:
    """The user's error for a path at which the system allows no look, no read or no write.

    Commands end with it where no reader has said more: even the question whether a file exists fails below a folder that this
    user may not enter, or for a name that is too long.

    Raises:
        OSError: the error itself, which names no path, and is therefore no mistake in one.
    """
    if error.filename is None:
        raise error
    reason = error.strerror or type(error).__name__
    return ConfigError(str(error.filename), "", f"cannot be used: {reason}", "correct the path or its permissions")


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


def one_of(choices: tuple[str, ...]) -> str:
    """Join choices as `a`, `a or b`, `a, b or c`."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
