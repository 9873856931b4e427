"""Conditions and sums of a shell script whose variables are filled in. Standard library only.

A condition is `[ ... ]`, `[[ ... ]]` or `test`; a sum is `$(( ... ))` or `(( ... ))`. Values that are not known stand in them as
marks between NUL characters; what depends on one is None.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Final

MOST_DIGITS = 18
"""Most digits of a number; a shell has 64 bits."""
_MOST_WORDS = 200
"""Most words of a condition that is decided."""
_MOST_TERMS = 200
"""Characters of the longest sum that is worked out."""
_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_COMPARED: Final[dict[type[ast.cmpop], Callable[[int, int], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def compared(words: Sequence[str]) -> bool | None:
    """Whether the words of a condition hold, without its brackets; None where files decide, or a value is not known."""
    if len(words) > _MOST_WORDS:
        return None
    if "(" in words:
        # Inner brackets would decide what `&&` and `||` join.
        is_whole = words[0] == "(" and words[-1] == ")" and "(" not in words[1:] and ")" not in words[1:-1]
        return compared(words[1:-1]) if is_whole else None
    for sign, choose in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if sign in words:
            place = words.index(sign)
            parts = compared(words[:place]), compared(words[place + 1 :])
            # One decided side may be enough; but a shell may have to evaluate the other, which nothing depends on.
            if choose is any and True in parts:
                return True
            if choose is all and False in parts:
                return False
            return None if None in parts else choose(bool(part) for part in parts)
    if words[:1] == ["!"]:
        holds = compared(words[1:])
        return None if holds is None else not holds
    if any("\0" in word for word in words):
        return None
    return _compared(list(words))


def _compared(words: list[str]) -> bool | None:
    """Decide one comparison; a variable that was empty and not quoted leaves a word out."""
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return fnmatchcase(words[0], words[2]) == (words[1] != "!=")
    if len(words) == 3 and words[1] in _NUMBERS:
        first, second = (evaluated(word) for word in (words[0], words[2]))
        return None if first is None or second is None else _NUMBERS[words[1]](first, second)
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2 and words[0] in ("=", "==", "!="):
        return False
    return None


def evaluated(text: str) -> int | None:
    """The value of a sum of whole numbers; a comparison is 0 or 1. None where it has other parts, or grows too large."""
    text = text.strip()
    if len(text) > _MOST_TERMS or not re.fullmatch(r"[\d\s()+*/%<>=!&|-]+", text):
        return None
    if re.search(r"\b0\d", text):
        return None  # Octal digits.
    text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    try:
        return _number(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    """Work out a tree of integers.

    Raises:
        ValueError: it has other parts, or a number has more than `MOST_DIGITS` digits.
    """
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_number(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            result = _number(left) + _number(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            result = _number(left) - _number(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            result = _number(left) * _number(right)
        case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Mod() as sign, right=right):
            # A shell cuts towards zero, Python downwards.
            above, below = _number(left), _number(right)
            quotient = abs(above) // abs(below) * (1 if (above < 0) == (below < 0) else -1)
            result = quotient if isinstance(sign, ast.FloorDiv) else above - below * quotient
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARED:
            result = int(_COMPARED[type(sign)](_number(left), _number(right)))
        case ast.BoolOp(op=sign, values=values):
            result = int((all if isinstance(sign, ast.And) else any)(_number(value) for value in values))
        case _:
            raise ValueError("no sum of whole numbers")
    if abs(result) >= 10**MOST_DIGITS:
        raise ValueError("a number is too large")
    return result
