"""Evaluation of a shell script's conditions and sums after expansion. Standard library only.

A condition is `[ ... ]`, `[[ ... ]]` or `test`; a sum is `$(( ... ))` or `(( ... ))`. Unknown values appear as marks between NUL
characters; a result that depends on one is None.
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
"""Most words of a condition that is evaluated."""
_MOST_TERMS = 200
"""Most characters of a sum that is evaluated."""
_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_COMPARED: Final[dict[type[ast.cmpop], Callable[[int, int], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def compared(tokens: Sequence[str]) -> bool | None:
    """Whether a condition holds; None if it depends on files or on an unknown value.

    Args:
        tokens: its words, without the outer brackets.
    """
    if len(tokens) > _MOST_WORDS:
        return None
    if "(" in tokens:
        # Inner brackets would change the precedence of `&&` and `||`.
        is_whole = tokens[0] == "(" and tokens[-1] == ")" and "(" not in tokens[1:] and ")" not in tokens[1:-1]
        return compared(tokens[1:-1]) if is_whole else None
    for sign, choose in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if sign in tokens:
            place = tokens.index(sign)
            parts = compared(tokens[:place]), compared(tokens[place + 1 :])
            # One known side may decide. The shell may also evaluate the other side, but the result does not depend on it.
            if choose is any and True in parts:
                return True
            if choose is all and False in parts:
                return False
            return None if None in parts else choose(bool(part) for part in parts)
    if tokens[:1] == ["!"]:
        holds = compared(tokens[1:])
        return None if holds is None else not holds
    if any("\0" in word for word in tokens):
        return None
    return _compared(list(tokens))


def _compared(tokens: list[str]) -> bool | None:
    """Evaluate one comparison; an empty variable without quotes contributes no word."""
    if len(tokens) == 3 and tokens[1] in ("=", "==", "!="):
        return fnmatchcase(tokens[0], tokens[2]) == (tokens[1] != "!=")
    if len(tokens) == 3 and tokens[1] in _NUMBERS:
        first, second = (evaluated(word) for word in (tokens[0], tokens[2]))
        return None if first is None or second is None else _NUMBERS[tokens[1]](first, second)
    if len(tokens) == 2 and tokens[0] in ("-z", "-n"):
        return (tokens[1] == "") == (tokens[0] == "-z")
    if len(tokens) == 1:
        return tokens[0] != ""
    if len(tokens) == 2 and tokens[0] in ("=", "==", "!="):
        return False
    return None


def evaluated(text: str) -> int | None:
    """The value of an expression in whole numbers; a comparison is 0 or 1. None if it has other parts, or is too large."""
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
    """Evaluate a syntax tree over integers.

    Raises:
        ValueError: the tree has other parts, or a number has more than `MOST_DIGITS` digits.
    """
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_number(operand)
        case ast.BinOp(left=first, op=ast.Add(), right=second):
            result = _number(first) + _number(second)
        case ast.BinOp(left=first, op=ast.Sub(), right=second):
            result = _number(first) - _number(second)
        case ast.BinOp(left=first, op=ast.Mult(), right=second):
            result = _number(first) * _number(second)
        case ast.BinOp(left=first, op=ast.FloorDiv() | ast.Mod() as sign, right=second):
            # A shell rounds towards zero, Python downwards.
            above, below = _number(first), _number(second)
            quotient = abs(above) // abs(below) * (1 if (above < 0) == (below < 0) else -1)
            result = quotient if isinstance(sign, ast.FloorDiv) else above - below * quotient
        case ast.Compare(left=first, ops=[sign], comparators=[second]) if type(sign) in _COMPARED:
            result = int(_COMPARED[type(sign)](_number(first), _number(second)))
        case ast.BoolOp(op=sign, values=values):
            result = int((all if isinstance(sign, ast.And) else any)(_number(value) for value in values))
        case _:
            raise ValueError("no sum of whole numbers")
    if abs(result) >= 10**MOST_DIGITS:
        raise ValueError("a number is too large")
    return result
