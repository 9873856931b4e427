"""The flags that a shell script hands to a training program, without running it. Standard library only.

1. Comments go, continued lines are joined, brackets of arrays are kept together.
2. Assignments are read from top to bottom; conditions are taken as true, functions and loops are passed over.
3. The command is the last one that holds a `*.py` word; the words after it are the flags, with variables filled in.
Single quotes are read like double ones. A variable without a value stays as `${NAME}`, and is reported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError

_ASSIGNMENT = re.compile(
    r"^(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?=)(.*)$", re.DOTALL
)
_COMMENT = re.compile(r"(^|\s)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?::?([-=])([^{}]*))?\}|\$([A-Za-z_]\w*|\d+|@)")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_SUM_PARTS = re.compile(r"\d+|[-+*/%]")
_DEPTH = 20


@dataclass(frozen=True, slots=True)
class ScriptFlags:
    """What was found.

    Attributes:
        words: the flags and their values.
        unresolved: variables in them that the script gives no value.
    """

    words: tuple[str, ...]
    unresolved: tuple[str, ...]


def script_flags(text: str, environment: Mapping[str, str], source: str) -> ScriptFlags:
    """The flags of a script.

    Args:
        environment: values of variables that the script expects from outside; they win over its own.
        source: the script's name, for the error.
    Raises:
        ConfigError: no command with a Python program.
    """
    values = dict(environment)
    command: str | None = None
    for statement in _statements(text):
        assigned = _ASSIGNMENT.match(statement)
        if assigned and not _is_command(statement):
            _assign(values, assigned[1], assigned[2], assigned[3], environment)
        elif _is_command(statement):
            command = _filled(statement, values)
    if command is None:
        raise ConfigError(
            source, "", "holds no command that starts a Python program", "give the script that calls torchrun"
        )
    words = shlex.split(command)
    program = next(index for index, word in enumerate(words) if word.endswith(".py"))
    flags = words[program + 1 :]
    ends = [
        index
        for index, word in enumerate(flags)
        if word in ("|", "&", "&&", "||", ";") or word.startswith((">", "2>", "&>"))
    ]
    flags = flags[: ends[0]] if ends else flags
    names = (found for word in flags for found in _VARIABLE.finditer(word))
    return ScriptFlags(tuple(flags), tuple(dict.fromkeys(found[1] or found[4] for found in names)))


def _statements(text: str) -> list[str]:
    """Lines without comments, joined while a line is continued or a bracket or quotation is open."""
    statements, open_text = [], ""
    for line in text.splitlines():
        if not open_text or not _quoted(open_text):
            line = _COMMENT.sub(r"\1", line)
        joined = open_text + line.strip() if open_text else line.strip()
        # A comment inside a continued command ends nothing: the next line goes on.
        if line.rstrip().endswith("\\"):
            open_text = joined[:-1].rstrip() + " "
        elif open_text and not line.strip() and not _quoted(open_text) and not _bracketed(open_text):
            continue
        elif _quoted(joined) or _bracketed(joined):
            open_text = joined + " "
        else:
            statements += [joined] if joined else []
            open_text = ""
    return [*statements, open_text.strip()] if open_text.strip() else statements


def _quoted(text: str) -> bool:
    return text.count('"') % 2 == 1


def _bracketed(text: str) -> bool:
    return bool(re.match(r"^\s*(?:\w+\s+)?\w+\+?=\(", text)) and text.count("(") > text.count(")")


def _is_command(statement: str) -> bool:
    first = _ASSIGNMENT.match(statement)
    if first and re.match(r"^[\"'(]", first[3].strip()):
        return False
    return bool(re.search(r"\S+\.py(\s|\"|$)", statement)) and bool(re.search(r"torchrun|python|srun|\$", statement))


def _assign(values: dict[str, str], name: str, sign: str, value: str, environment: Mapping[str, str]) -> None:
    if name in environment:
        return
    value = value.strip().rstrip(";").strip()
    quotes = ("(", ")") if value.startswith("(") else ('"', '"') if value.startswith('"') else ("'", "'")
    if len(value) > 1 and value.startswith(quotes[0]) and value.endswith(quotes[1]):
        value = value[1:-1]
    value = _filled(value, values).strip()
    values[name] = f"{values.get(name, '')} {value}".strip() if sign == "+=" else value


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Variables, defaults and sums filled in, from the inside out; what has no value stays as it is."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[4]
        if values.get(name) is not None and (values[name] or found[2] is None):
            return values[name]
        if found[2] is not None:
            return found[3].strip("\"'")
        return f"${{{name}}}"

    for _ in range(_DEPTH):
        filled = _SUM.sub(lambda found: _summed(found, values), _VARIABLE.sub(value, text))
        if filled == text:
            break
        text = filled
    return text


def _summed(found: re.Match[str], values: Mapping[str, str]) -> str:
    """A sum of whole numbers, products first; anything else stays."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: values.get(name[0], name[0]), found[1])
    parts = _SUM_PARTS.findall(text)
    if "".join(parts) != text.replace(" ", "") or not parts or not parts[0].isdigit():
        return found[0]
    terms = [int(parts[0])]
    for sign, number in zip(parts[1::2], parts[2::2], strict=False):
        if not number.isdigit() or (sign in "/%" and number == "0"):
            return found[0]
        last = terms[-1]
        if sign in "*/%":
            terms[-1] = (
                last * int(number) if sign == "*" else last // int(number) if sign == "/" else last % int(number)
            )
        else:
            terms.append(int(number) if sign == "+" else -int(number))
    return str(sum(terms))
