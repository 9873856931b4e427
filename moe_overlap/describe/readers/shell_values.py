"""The values of a script's variables, and the expansion of words as a shell does it. Standard library only.

A value that only running the script could reveal becomes a mark inside the text (`UNKNOWN`), with line and reason; it is an error
only in a flag. A variable without a value, which the script expects from its environment, becomes a mark as well.

Source: POSIX.1-2017, Shell Command Language, section 2.6, word expansions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moe_overlap.describe.files import printable
from moe_overlap.describe.readers.shell_conditions import evaluated
from moe_overlap.describe.readers.shell_program import UNKNOWN
from moe_overlap.describe.readers.shell_tree import Parameter, Substitution, Sum, Text, Word

_MOST_FILLED = 1 << 22
"""Most characters of all expansions of a script: `A=$A$A` in 40 lines would produce 2⁴⁰."""
_MOST_CUT = 4096
"""Most characters of a value in `${value%pattern}` and similar."""
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")

Values = tuple[str, ...]
"""The elements of an array, or the single value of a variable."""


class TooLong(Exception):
    """A script whose expansions exceed a limit."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown value.

    Attributes:
        name: the variable, or the text of a command.
        rule: why it is unknown; "" for a variable from the environment.
    """

    line: int
    name: str
    rule: str

    @property
    def as_variable(self) -> str:
        """The value as a variable of the shell: `${hostname}` for `$(hostname)`."""
        return (
            f"${{{re.sub(r'[^A-Za-z0-9_]+', '_', self.name).strip('_') or 'UNKNOWN'}}}"
            if self.rule
            else f"${{{self.name}}}"
        )


class Expansion:
    """The variables of a script, and the expansion of its words.

    Args:
        environment: values that override assignments in the script.
        defaults: initial values, which the script may reassign.
    """

    def __init__(self, environment: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.line = 1
        self.unknowns: list[Unknown] = []
        self.assigned: set[str] = set()
        """Variables that the script assigns somewhere; before the assignment they are empty, not from the environment."""
        self._environment = environment
        self._values: dict[str, Values] = {name: (value,) for name, value in {**defaults, **environment}.items()}
        self._arguments: Values | None = None
        """Arguments of the current function; None outside of functions."""
        self._undecided: int | None = None
        """Line of the outermost condition or loop around the current command whose outcome is unknown."""
        self._filled = 0
        self.empty: dict[str, None] = {}
        """Variables without a value that conditions have read, in order; the values are None."""

    def assign(self, name: str, values: Values) -> None:
        """Set a variable; to an unknown value if it is unknown whether the assignment is executed."""
        if name in self._environment:
            return
        if self._undecided is not None:
            values = (self.unknown(self._undecided, name),)
        self._values[name] = values

    # Words

    def fields(self, tokens: Iterable[Word], is_condition: bool = False, is_read_again: bool = False) -> list[str]:
        """The words of a command after expansion and splitting.

        Args:
            is_condition: whether they are a condition, in which a variable without a value is empty.
            is_read_again: whether `eval` parses the result again, so that quotes inside values are kept.
        """
        split = str.split if is_read_again else blank_split
        return [field for word in tokens for field in self._split(word, is_condition, split)]

    def _split(self, word: Word, is_condition: bool, split: Callable[[str], list[str]]) -> list[str]:
        """The fields of one word: unquoted values are split at blanks, quoted arrays into their elements."""
        if not word.has_quotes and any(isinstance(piece, Text) and _BRACES.search(piece.text) for piece in word.pieces):
            return [self.no_value("".join(piece.text for piece in word.pieces if isinstance(piece, Text)))]
        fields = list[str]()
        open_field: str | None = "" if word.has_quotes and not _is_all_elements(word) else None
        for piece in word.pieces:
            if isinstance(piece, Parameter) and (piece.subscript == "@" or piece.name == "@") and piece.is_quoted:
                parts = list(self._parameter(piece, is_condition))
            elif isinstance(piece, Parameter) and not piece.is_quoted:
                parts = [part for value in self._parameter(piece, is_condition) for part in split(value)]
            else:
                parts = [self._piece(piece, is_condition)]
            for number, part in enumerate(parts):
                if number and open_field is not None:
                    fields.append(open_field)
                    open_field = None
                open_field = (open_field or "") + part
        return fields if open_field is None else [*fields, open_field]

    def text(self, word: Word | None, is_condition: bool = False) -> str:
        """A word after expansion, without splitting, as in an assignment."""
        return "" if word is None else "".join(self._piece(piece, is_condition) for piece in word.pieces)

    def _piece(self, piece: Text | Parameter | Substitution | Sum, is_condition: bool) -> str:
        match piece:
            case Text():
                return piece.text
            case Parameter():
                return " ".join(self._parameter(piece, is_condition))
            case Sum():
                number = self.sum(piece.text, is_condition)
                return self.no_value(f"$(({piece.text}))") if number is None else str(number)
            case Substitution():
                return self.no_value(f"$({piece.text})")

    def _parameter(self, piece: Parameter, is_condition: bool) -> Values:
        """The values of `${...}`."""
        name = piece.name
        shown = f"{name}[{piece.subscript}]" if piece.subscript else name
        values = self._value_of(name, is_condition)
        if piece.subscript not in (None, "@", "*"):
            return (self.no_value(f"${{{shown}}}"),)
        if piece.subscript is None and name not in "@*" and values is not None:
            values = values[:1]  # Without [@] an array is its first element.
        operator, argument = piece.operator.removeprefix(":"), piece.argument
        is_empty = values is None or (piece.operator.startswith(":") and not any(values))
        if operator == "":
            result = values
        elif operator in "-=":
            result = (self.text(argument, is_condition),) if is_empty else values
            if operator == "=" and is_empty and result is not None:
                self.assign(name, result)
        elif operator == "+":
            result = () if is_empty else (self.text(argument, is_condition),)
        elif operator == "?":
            result = values
        elif operator == "length" and values is not None and not UNKNOWN.search("".join(values)):
            result = (str(len(values) if piece.subscript else len("".join(values))),)
        elif operator in ("#", "##", "%", "%%") and values is not None:
            cut = tuple(_cut(value, operator, self.text(argument, is_condition)) for value in values)
            result = tuple(value if value is not None else self.no_value(f"${{{shown}{operator}...}}") for value in cut)
        else:
            return (self.no_value(f"${{{shown}{'' if operator == 'not followed' else operator}...}}"),)
        if is_condition and not any(result or ()) and name not in self.assigned:
            self.empty[name] = None
        if result is None:
            result = () if is_condition or name in self.assigned else (self.mark(Unknown(self.line, name, "")),)
        self.spend(sum(map(len, result)))
        return result

    def _value_of(self, name: str, is_condition: bool) -> Values | None:
        """The values of a variable; None if it has none."""
        if name in ("@", "*"):
            return self._arguments or ()
        if name.isdigit() and name != "0" and self._arguments is not None:
            return self._arguments[int(name) - 1 : int(name)]
        if not name.isdigit() and not name.isidentifier():
            return (self.no_value(f"${name}"),)
        return self._values.get(name)

    def sum(self, text: str, is_condition: bool = False) -> int | None:
        """The value of an expression in whole numbers; None if it is unknown."""

        def number(match: re.Match[str]) -> str:
            values = self._value_of(match[1], is_condition)
            if values is None and (is_condition or match[1] in self.assigned):
                return "0"
            self.spend(len(values[0]) if values else 0)
            return values[0] or "0" if values else "\0"

        return evaluated(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number, text.replace("${1}", "\0")))

    # Unknown values

    def unknown(self, line: int, name: str) -> str:
        """The mark of a variable that is set under a condition or in a loop."""
        return self.mark(Unknown(line, name, f"decides ${{{name}}}, and cannot be read without running it"))

    def no_value(self, shown: str) -> str:
        """The mark of an expansion that only a shell can evaluate."""
        shown = printable(UNKNOWN.sub("…", shown), 60)
        return self.mark(Unknown(self.line, shown, f"has {shown}, which cannot be read without running it"))

    def mark(self, unknown: Unknown) -> str:
        self.unknowns.append(unknown)
        return f"\0{len(self.unknowns) - 1}\0"

    def spend(self, characters: int) -> None:
        """Count the characters of expansions.

        Raises:
            TooLong: there are more than _MOST_FILLED.
        """
        self._filled += characters
        if self._filled > _MOST_FILLED:
            raise TooLong


def _is_all_elements(word: Word) -> bool:
    """Whether a word is just "${A[@]}" or "$@", which gives no word if there are no elements."""
    (piece, *others) = word.pieces or (Text(""),)
    return not others and isinstance(piece, Parameter) and (piece.subscript == "@" or piece.name == "@")


def blank_split(value: str) -> list[str]:
    """A value split at blanks. Quotes inside it group words, as in `eval` and `bash -c`, which launch scripts often use."""
    if "'" in value or '"' in value:
        try:
            return shlex.split(value)
        except ValueError:
            pass
    return value.split()


def _cut(value: str, operator: str, pattern: str) -> str | None:
    """`${value%pattern}` and similar: the value without the shortest or longest match at one end; None if that is unknown."""
    if UNKNOWN.search(value + pattern) or len(value) > _MOST_CUT:
        return None
    ends = range(len(value) + 1)
    if operator.startswith("#"):
        remainders = [value[end:] for end in ends if fnmatchcase(value[:end], pattern)]
    else:
        remainders = [value[:end] for end in reversed(ends) if fnmatchcase(value[end:], pattern)]
    return value if not remainders else remainders[-1] if len(operator) == 2 else remainders[0]
