"""The flags that a shell script hands to a training program, without running it. Standard library only.

1. Comments go, continued lines are joined, brackets of arrays are kept together.
2. Assignments are read from top to bottom. A condition is decided where its variables do, an unset one being empty; of one
   that files or commands decide, of `case` and of loops, the variables set inside are unknown, and an error in the flags.
3. The command is the last one that starts a training program, `*.py`; the words after it are the flags.
Single quotes are read like double ones. A variable without a value stays as `${NAME}`, and is reported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moe_overlap.describe.errors import ConfigError

# Conditions of a shell script, decided from the values of its variables, without running anything. Standard library only.

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


_ASSIGNMENT = re.compile(
    r"^(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?=)(.*)$", re.DOTALL
)
_ENVIRONMENT = re.compile(r"^(?:[A-Za-z_]\w*=(?:\"[^\"]*\"|'[^']*'|[^\s\"'(])*\s+)+(?=\S)")
_COMMENT = re.compile(r"(^|\s)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?::?([-=])([^{}]*))?\}|\$([A-Za-z_]\w*|\d+|@)")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_SUM_PARTS = re.compile(r"\d+|[-+*/%]")
_PATTERN = re.compile(r"\(?([^()=]*)\)\s*")
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
    reader = _Reader(environment, source)
    for line, statement in _simple(_statements(text)):
        reader.read(line, statement)
    command = reader.command()
    words = shlex.split(command)
    program = next(index for index, word in enumerate(words) if word.endswith(".py"))
    # A flag and its value may share the quotes of an element, as in ARGS+=("--split '99,1,0'").
    flags = [
        part for word in words[program + 1 :] for part in (shlex.split(word) if re.match(r"--\S+\s", word) else [word])
    ]
    ends = [
        index
        for index, word in enumerate(flags)
        if word in ("|", "&", "&&", "||", ";") or word.startswith((">", "2>", "&>"))
    ]
    flags = flags[: ends[0]] if ends else flags
    names = [found for word in flags for found in _VARIABLE.finditer(word)]
    for name in (found[1] or found[4] for found in names):
        reader.require_known(name)
    return ScriptFlags(tuple(flags), tuple(dict.fromkeys(found[1] or found[4] for found in names)))


class _Reader:
    """Follows a script's assignments and branches.

    Args:
        environment: values that win over the script's own.
        source: the script's name, for errors.
    """

    def __init__(self, environment: Mapping[str, str], source: str) -> None:
        self._environment, self._source = environment, source
        self._values = dict(environment)
        self._unknown: dict[str, int] = {}
        self._blocks: list[_Block] = []
        self._commands: list[tuple[int, str]] = []

    def read(self, line: int, statement: str) -> None:
        """One statement, without `;`."""
        word, _, rest = statement.partition(" ")
        if word in ("if", "case", "for", "while", "until", "select"):
            holds = self._decided(rest) if word == "if" else None
            value = self._value(rest.rpartition(" in")[0]) if word == "case" else None
            self._blocks.append(_Block(line, holds, before=False, is_case=word == "case", value=value))
        elif word in ("elif", "else") and self._blocks:
            block = self._blocks[-1]
            block.before = None if block.holds is None or block.before is None else block.before or block.holds
            block.holds = not block.before if block.before is not None else None
            if word == "elif" and block.holds:
                block.holds = self._decided(rest)
        elif word in ("fi", "esac", "done") and self._blocks:
            self._blocks.pop()
        else:
            pattern = _PATTERN.match(statement)
            if self._blocks and self._blocks[-1].is_case and pattern:
                self._blocks[-1].choose(pattern[1])
                statement = statement[pattern.end() :]
            skipped = any(block.holds is False for block in self._blocks)
            assigned = _ASSIGNMENT.match(statement)
            if statement and not skipped:
                self._run(line, statement)
            elif assigned and assigned[1] not in self._unknown:
                self._values.setdefault(assigned[1], "")

    def _value(self, text: str) -> str | None:
        """A text filled in, an unset variable being empty; None where one is unknown."""
        names = [found[1] or found[4] for found in _VARIABLE.finditer(text)]
        if any(name in self._unknown for name in names):
            return None
        value = _VARIABLE.sub(lambda found: found[3] or "", _filled(text, self._values))
        return None if "$(" in value or "`" in value else value

    def _decided(self, condition: str) -> bool | None:
        if condition.strip().startswith("(("):
            condition = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", r"${\1:-0}", condition)
        value = self._value(condition)
        return None if value is None else decided(value)

    def _run(self, line: int, statement: str) -> None:
        guarded = re.match(r"^(\[.*\]|\(\(.*\)\))\s*(&&|\|\|)\s*(\w+\+?=.*)$", statement, re.DOTALL)
        if guarded:
            holds = self._decided(guarded[1])
            if holds is None or holds == (guarded[2] == "&&"):
                self._assign(line, guarded[3], known=holds is not None)
        elif _is_command(statement, _filled(statement, self._values)):
            self._commands.append((line, _filled(statement, self._values)))
        else:
            self._assign(line, statement, known=all(block.holds for block in self._blocks))

    def _assign(self, line: int, statement: str, *, known: bool) -> None:
        assigned = _ASSIGNMENT.match(statement)
        if assigned is None or assigned[1] in self._environment:
            return
        name, sign, value = assigned.groups()
        if not known or (sign == "+=" and name in self._unknown):
            self._values.pop(name, None)
            self._unknown[name] = line if not self._blocks else self._blocks[-1].line
            return
        self._unknown.pop(name, None)
        _assign(self._values, name, sign, value)

    def require_known(self, name: str) -> None:
        """Raises ConfigError for a variable that a condition or loop sets which cannot be followed."""
        if name in self._unknown:
            where, rule = (
                f"{self._source} line {self._unknown[name]}",
                f"decides ${{{name}}}, and cannot be read without running it",
            )
            fix = f"give its value by tools/import_flags.py --set {name}=VALUE, or write the flags out"
            raise ConfigError(where, "", rule, fix)

    def command(self) -> str:
        """The command that trains.

        Raises:
            ConfigError: there is none, or there are several.
        """
        trains = [one for one in self._commands if re.search(r"train|finetune|run_\w+\.py", one[1])] or self._commands
        if not trains:
            fix = "give the script that calls torchrun"
            raise ConfigError(self._source, "", "holds no command that starts a Python program", fix)
        if len({command for _, command in trains}) > 1:
            lines = " and ".join(str(line) for line, _ in trains)
            fix = "leave one of them in a copy of the script"
            raise ConfigError(self._source, "", f"starts training in lines {lines}: which is meant is not known", fix)
        return trains[-1][1]


@dataclass(slots=True)
class _Block:
    """An open `if`, `case` or loop.

    Attributes:
        line: where it begins.
        holds: whether the branch being read is taken; None if that is not known.
        before: whether an earlier branch was taken; None if that is not known.
        value: what `case` compares; None if that is not known.
    """

    line: int
    holds: bool | None
    before: bool | None
    is_case: bool = False
    value: str | None = None

    def choose(self, patterns: str) -> None:
        """Go on to a branch of `case`: is it the first that fits the value?"""
        if self.value is not None:
            value = self.value.strip("\"' ")
            fits = any(fnmatchcase(value, pattern.strip("\"' ")) for pattern in patterns.split("|"))
            self.holds, self.before = fits and not self.before, self.before or fits


def _simple(statements: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Statements cut at `;`, without the words `then` and `do`."""
    for line, text in statements:
        for part in _cut(text):
            while True:
                word, _, rest = part.strip().partition(" ")
                if word == "else" and rest.strip():
                    yield line, word
                elif word not in ("then", "do"):
                    break
                part = rest
            if part.strip():
                yield line, part.strip()


def _cut(text: str) -> list[str]:
    """Text cut at each `;` that stands outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in "\"'":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in "({") - (letter in ")}")
        if letter == ";" and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _statements(text: str) -> list[tuple[int, str]]:
    """Line numbers, and lines without comments, joined while a line is continued or a bracket or quotation is open."""
    statements: list[tuple[int, str]] = []
    open_text, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if open_text else number
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
            statements += [(first, joined)] if joined else []
            open_text = ""
    return [*statements, (first, open_text.strip())] if open_text.strip() else statements


def _quoted(text: str) -> bool:
    return text.count('"') % 2 == 1


def _bracketed(text: str) -> bool:
    return bool(re.match(r"^\s*(?:\w+\s+)?\w+\+?=\(", text)) and text.count("(") > text.count(")")


def _is_command(statement: str, filled: str) -> bool:
    """Whether a statement starts a Python program, variables of its environment before it or not."""
    bare = _ENVIRONMENT.sub("", statement)
    if _ASSIGNMENT.match(bare) or re.match(r"(echo|printf|mkdir|cd|cp|rm|ls|source|export|test|\[)\b", bare):
        return False
    return bool(re.search(r"\S+\.py[\"']?(\s|$)", filled)) and bool(re.search(r"torchrun|python|srun|\$", statement))


def _assign(values: dict[str, str], name: str, sign: str, value: str) -> None:
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
        if name == "@":
            return ""
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
