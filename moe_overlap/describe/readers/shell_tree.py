"""The commands of a shell script as a tree, as shell_syntax.py reads them: words with their quotation, and no values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$NAME`, `${NAME}`, `${NAME[@]}` or `${NAME operator argument}`.

    Attributes:
        subscript: what stands in `[ ]`; None without it.
        operator: one of `OPERATORS`; "" for the plain value, "?" for one that is not followed.
        is_quoted: whether it stands in double quotes, where its value is not split into words.
    """

    name: str
    subscript: str | None
    operator: str
    argument: Word | None
    is_quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(...)`, a pair of backquotes or `<(...)`: the output of a command."""

    text: str


@dataclass(frozen=True, slots=True)
class Sum:
    """`$((...))`; the variables in it stand with or without `$`."""

    text: str


Piece = Text | Parameter | Substitution | Sum


@dataclass(frozen=True, slots=True)
class Word:
    """Text that becomes one or several words of a command.

    Attributes:
        has_quotes: whether a part of it is quoted, so that it is a word even where it is empty.
    """

    line: int
    pieces: tuple[Piece, ...]
    has_quotes: bool = False

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and variables, such as a keyword; None of another word."""
        if self.has_quotes or any(not isinstance(piece, Text) for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Text))


@dataclass(frozen=True, slots=True)
class Assignment:
    """`NAME=value`, `NAME+=value` or `NAME=(value ...)`.

    Attributes:
        values: the one word of a plain variable, or the words of an array.
        is_element: whether it sets one element, `NAME[3]=value`.
    """

    line: int
    name: str
    appends: bool
    values: tuple[Word, ...]
    is_array: bool
    is_element: bool = False


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words, without redirections.

    Attributes:
        document: the here-document that it reads; None where it reads none.
    """

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    document: Word | None


@dataclass(frozen=True, slots=True)
class Condition:
    """`[[ ... ]]`: words, and the operators `&&`, `||`, `!`, `(`, `)`, `<`, `>` as text."""

    line: int
    items: tuple[Word | str, ...]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`(( ... ))`."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`; `!` in front turns the status over."""

    commands: tuple[Node, ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines joined by `&&` and `||`.

    Attributes:
        rest: the operator in front of each further pipeline, and the pipeline.
    """

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class If:
    """Branches with their conditions; the condition of `else` is None."""

    line: int
    branches: tuple[tuple[tuple[Node, ...] | None, tuple[Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Branches with the patterns of each."""

    line: int
    value: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """`for`, `while`, `until` or `select`; `name` is the variable of `for` and `select`."""

    line: int
    name: str | None
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is defined, not called."""

    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }`, or `( ... )`, whose assignments end with it."""

    body: tuple[Node, ...]
    is_subshell: bool


Node = Simple | Condition | Arithmetic | Pipeline | AndOr | If | Case | Loop | Function | Group
