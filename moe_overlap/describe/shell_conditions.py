"""Conditions of a shell script, decided from the values of its variables, without running anything. Standard library only."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase

_AND_OR = re.compile(r"\s*(&&|\|\|)\s*")
_NUMBERS = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_SIGNS = {"==": "-eq", "!=": "-ne", "<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge"}


def decided(condition: str) -> bool | None:
    """Whether a condition holds; None where files, commands or other forms of test decide.

    Args:
        condition: what stands after `if` or `elif`, variables filled in.
    """
    if re.search(r"\$\(|`|\$\{", condition):
        return None
    parts = _AND_OR.split(condition.strip())
    holds = _test(parts[0])
    for sign, part in zip(parts[1::2], parts[2::2], strict=True):
        other = _test(part)
        if holds is None or other is None:
            return None
        holds = (holds and other) if sign == "&&" else (holds or other)
    return holds


def _test(text: str) -> bool | None:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("((") and text.endswith("))"):
        found = re.fullmatch(r"\s*(-?\d+)\s*(==|!=|<=|>=|<|>)\s*(-?\d+)\s*", text[2:-2])
        return _NUMBERS[_SIGNS[found[2]]](int(found[1]), int(found[3])) if found else None
    inner = re.fullmatch(r"\[\[\s(.*)\s\]\]|\[\s(.*)\s\]", text, re.DOTALL)
    if inner is None:
        return None
    try:
        words = shlex.split(inner[1] if inner[1] is not None else inner[2])
    except ValueError:
        return None
    if words[:1] == ["!"]:
        holds = _compared(words[1:])
        return None if holds is None else not holds
    return _compared(words)


def _compared(words: list[str]) -> bool | None:
    """One comparison; a variable that was empty and not quoted leaves a word out."""
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return fnmatchcase(words[0], words[2]) == (words[1] != "!=")
    if len(words) == 3 and words[1] in _NUMBERS and all(re.fullmatch(r"-?\d+", word) for word in (words[0], words[2])):
        return _NUMBERS[words[1]](int(words[0]), int(words[2]))
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 1:
        return words[0] != "" and words[0] != "-n"
    if len(words) == 2 and words[0] in ("=", "==", "!="):
        return False
    return None
