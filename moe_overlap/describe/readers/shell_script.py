"""The flags that a shell script hands to a training program, without running it. Standard library only.

1. Comments go, continued lines are joined, brackets of arrays are kept together.
2. Assignments are read from top to bottom. A condition is decided where the values of its variables decide it, an unset variable
   being empty. Where files or commands decide it, and inside loops, the variables that are set become unknown: an unknown
   variable in the flags is an error. A `case` is decided by its value, in the same way.
3. The command is the last one that starts a training program, `*.py`; the arguments after it are the flags.
Single quotes are read like double ones. A variable without a value stays as `${NAME}`, and is reported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable

# Conditions

_AND_OR = re.compile(r"(&&|\|\|)")
_NUMBERS = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_SIGNS = {"==": "-eq", "!=": "-ne", "<": "-lt", "<=": "-le", ">": "-gt", ">=": "-ge"}


def decided(condition: str) -> bool | None:
    """Whether a condition holds; None where files, commands or other forms of test decide.

    Args:
        condition: the text after `if` or `elif`, variables filled in.
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
        compared = re.fullmatch(r"\s*(-?\d{1,18})\s*(==|!=|<=|>=|<|>)\s*(-?\d{1,18})\s*", text[2:-2])
        return _NUMBERS[_SIGNS[compared[2]]](int(compared[1]), int(compared[3])) if compared else None
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
    """Decide one comparison; a variable that was empty and not quoted leaves a word out."""
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return fnmatchcase(words[0], words[2]) == (words[1] != "!=")
    if (
        len(words) == 3
        and words[1] in _NUMBERS
        and all(re.fullmatch(r"-?\d{1,18}", word) for word in (words[0], words[2]))
    ):
        return _NUMBERS[words[1]](int(words[0]), int(words[2]))
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 1:
        return words[0] != "" and words[0] != "-n"
    if len(words) == 2 and words[0] in ("=", "==", "!="):
        return False
    return None


# Statements

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
MOST_SCRIPT_BYTES = 1 << 18
"""Bytes of the longest script that is read; those of large jobs have some ten thousand."""
_MOST_STATEMENT = 1 << 15
_MOST_FILLED = 1 << 22
"""Characters that filling in all variables of a script may make: `A=$A$A` in 40 lines would make 2⁴⁰."""
_MOST_DIGITS = 18


class _TooLong(Exception):
    """A script whose text grows without end while its variables are filled in."""


class _Values(dict[str, str]):
    """The values of variables, and how many characters filling them in has made so far."""

    made = 0

    def spend(self, characters: int) -> None:
        """Count characters.

        Raises:
            _TooLong: they are too many.
        """
        self.made += characters
        if self.made > _MOST_FILLED:
            raise _TooLong


@dataclass(frozen=True, slots=True)
class ScriptFlags:
    """The flags of a script's training command.

    Attributes:
        arguments: the flags and their values.
        unresolved: variables in them that the script gives no value.
    """

    arguments: tuple[str, ...]
    unresolved: tuple[str, ...]


def script_flags(text: str, environment: Mapping[str, str], source: str) -> ScriptFlags:
    """Read the flags of a script.

    Args:
        environment: values of variables that the script expects from outside; they win over its own.
        source: the script's name, for the error.
    Raises:
        ConfigError: no command with a Python program, or several; a variable in it that cannot be known; a script that is
            too long, or becomes so with its variables filled in.
    """
    if len(text) > MOST_SCRIPT_BYTES:
        raise ConfigError(source, "", f"has more than {MOST_SCRIPT_BYTES >> 10} KiB", "give the script of a job")
    reader = _Reader(environment, source)
    line = 0
    try:
        for line, statement in _simple(_statements(text)):
            reader.read(line, statement)
    except _TooLong:
        place = f"{source} line {line}" if line else source
        rule = "grows without end: a variable holds itself more than once, or a line is longer than 32 KiB"
        raise ConfigError(place, "", rule, "write the flags out") from None
    command = reader.command()
    try:
        words = shlex.split(command)
    except ValueError as error:
        rule = f"its command cannot be split into words: {error}"
        raise ConfigError(source, "", rule, "close the quotation") from None
    program = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if program is None:
        raise ConfigError(source, "", f"starts no Python program in {printable(command)}", "call it by its name")
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
    names = [match[1] or match[4] for word in flags for match in _VARIABLE.finditer(word)]
    for name in names:
        reader.require_known(name)
    return ScriptFlags(tuple(flags), tuple(dict.fromkeys(names)))


class _Reader:
    """Follows a script's assignments and branches.

    Args:
        environment: values that win over the script's own.
        source: the script's name, for errors.
    """

    def __init__(self, environment: Mapping[str, str], source: str) -> None:
        self._environment, self._source = environment, source
        self._values = _Values(environment)
        self._unknown: dict[str, int] = {}
        self._blocks: list[_Block] = []
        self._commands: list[tuple[int, str]] = []

    def read(self, line: int, statement: str) -> None:
        """Follow one statement, without `;`."""
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
        """The text with its variables filled in, an unset one being empty; None where one is unknown."""
        names = [match[1] or match[4] for match in _VARIABLE.finditer(text)]
        if any(name in self._unknown for name in names):
            return None
        value = _VARIABLE.sub(lambda match: match[3] or "", _filled(text, self._values))
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
        """Raise ConfigError for a variable that is set inside a condition or loop which cannot be followed."""
        if name in self._unknown:
            place = f"{self._source} line {self._unknown[name]}"
            rule = f"decides ${{{name}}}, and cannot be read without running it"
            fix = f"give its value by tools/import_flags.py --set {name}=VALUE, or write the flags out"
            raise ConfigError(place, "", rule, fix)

    def command(self) -> str:
        """The command that trains.

        Raises:
            ConfigError: there is none, or there are several.
        """
        programs = re.compile(r"train|finetune|run_\w+\.py")
        trains = [(line, command) for line, command in self._commands if programs.search(command)] or self._commands
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
        line: the line that it begins in.
        holds: whether the branch being read is taken; None if that is not known.
        before: whether an earlier branch was taken; None if that is not known.
        value: the value that `case` compares; None if that is not known.
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
    """Number and text of each line without its comment, joined while a line is continued or a bracket or quotation is open."""
    statements: list[tuple[int, str]] = []
    open_text, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if open_text else number
        if not open_text or not _quoted(open_text):
            line = _COMMENT.sub(r"\1", line)
        joined = open_text + line.strip() if open_text else line.strip()
        # A comment inside a continued command ends nothing: the next line goes on.
        if len(joined) > _MOST_STATEMENT:
            raise _TooLong
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


def _assign(values: _Values, name: str, sign: str, value: str) -> None:
    value = value.strip().rstrip(";").strip()
    quotes = ("(", ")") if value.startswith("(") else ('"', '"') if value.startswith('"') else ("'", "'")
    if len(value) > 1 and value.startswith(quotes[0]) and value.endswith(quotes[1]):
        value = value[1:-1]
    value = _filled(value, values).strip()
    values[name] = f"{values.get(name, '')} {value}".strip() if sign == "+=" else value
    # `A+=x` copies A at each of its lines.
    values.spend(len(values[name]))


def _filled(text: str, values: _Values) -> str:
    """The text with variables, defaults and sums filled in, from the inside out; a variable without a value stays as it is."""

    def value(match: re.Match[str]) -> str:
        filled = replaced(match)
        values.spend(len(filled))
        return filled

    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if name == "@":
            return ""
        if values.get(name) is not None and (values[name] or match[2] is None):
            return values[name]
        if match[2] is not None:
            return match[3].strip("\"'")
        return f"${{{name}}}"

    for _ in range(_DEPTH):
        filled = _SUM.sub(lambda match: _summed(match, values), _VARIABLE.sub(value, text))
        if filled == text:
            break
        text = filled
    return text


def _summed(match: re.Match[str], values: Mapping[str, str]) -> str:
    """The value of a sum of whole numbers, products first; anything else stays as it is."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: values.get(name[0], name[0])[: _MOST_DIGITS + 1], match[1])
    if len(text) > _MOST_STATEMENT or re.search(rf"\d{{{_MOST_DIGITS + 1}}}", text):
        return match[0]
    parts = _SUM_PARTS.findall(text)
    if "".join(parts) != text.replace(" ", "") or not parts or not parts[0].isdigit():
        return match[0]
    terms = [int(parts[0])]
    for sign, number in zip(parts[1::2], parts[2::2], strict=False):
        if not number.isdigit() or (sign in "/%" and number == "0"):
            return match[0]
        last = terms[-1]
        if sign in "*/%":
            terms[-1] = (
                last * int(number) if sign == "*" else last // int(number) if sign == "/" else last % int(number)
            )
        else:
            terms.append(int(number) if sign == "+" else -int(number))
        if abs(terms[-1]) >= 10**_MOST_DIGITS:
            return match[0]
    return str(sum(terms))
