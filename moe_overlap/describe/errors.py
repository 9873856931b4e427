"""The error for a user's mistake: one line with subject, value, rule and fix; and checks that raise it.

Rules across flags use these checks: `require`, frequent special cases of it, and helpers that list choices in a fix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_overlap.describe.files import printable

_MOST_SHOWN = 400
"""Most characters of a value that an error shows."""
_LISTED = 10**9
"""Largest number whose divisors are listed."""


class ConfigError(Exception):
    """A user's mistake in a flag, a plan field or a file.

    Args:
        subject: the flag, field or file, as the user wrote it (`--num-experts`, `plan.json stages[1].data`).
        value: its value; the empty string when the subject alone is the mistake.
        rule: the violated rule, or the error.
        fix: advice to the user.
    """

    def __init__(self, subject: str, value: object, rule: str, fix: str) -> None:
        self.subject, self.value, self.rule, self.fix = subject, value, rule, fix
        shown = printable(" ".join(str(value).split()), _MOST_SHOWN)
        head = f"{subject} {shown}" if value != "" else subject
        line = " ".join(f"{head}: {rule}; {fix}".split())
        # Any part may quote a file, whose control characters must not reach the terminal.
        super().__init__(printable(line, len(line)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        # For the processes of a search: by default pickle rebuilds an exception from its message alone.
        return type(self), (self.subject, self.value, self.rule, self.fix)


class OutOfTime(ConfigError):
    """Work that did not end within the user's time limit; a search that has a plan answers with it."""


def system_refusal(error: OSError) -> ConfigError:
    """The user's error for a path that the system refuses to look up, read or write.

    The last resort of commands, if no reader has raised a more specific error: even checking whether a file exists fails in a
    folder without permission, or for a name that is too long.

    Raises:
        OSError: `error` itself if it names no path, because then no path is wrong.
    """
    if error.filename is None:
        raise error
    reason = error.strerror or type(error).__name__
    return ConfigError(str(error.filename), "", f"cannot be used: {reason}", "correct the path or its permissions")


def require(holds: object, flag: str, value: object, rule: str, fix: str) -> None:
    """Raise ConfigError unless the rule holds."""
    if not holds:
        raise ConfigError(flag, value, rule, fix)


def at_least(minimum: float, flags: Sequence[tuple[str, float | None]]) -> None:
    """Require every value that is not None to be at least `minimum`."""
    for flag, value in flags:
        require(
            value is None or value >= minimum, flag, value, f"must be at least {minimum:g}", f"use {minimum:g} or more"
        )


def fraction(flags: Sequence[tuple[str, float | None]], *, includes_one: bool) -> None:
    """Require every value that is not None to lie in [0, 1), or in [0, 1] with `includes_one`."""
    for flag, value in flags:
        inside = value is None or 0 <= value < 1 or (includes_one and value == 1)
        require(inside, flag, value, f"must lie in [0, 1{']' if includes_one else ')'}", "correct the value")


def divisors(number: int) -> str:
    """The divisors of a number as text, such as `1, 2, 4 or 8`."""
    if number > _LISTED:
        return f"a divisor of {number}"
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return one_of(tuple(str(d) for d in sorted({*small, *(number // d for d in small)})))


def one_of(choices: tuple[str, ...]) -> str:
    """Join choices as `a`, `a or b`, `a, b or c`."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
