"""The syntax tree of a shell script, the output of shell_syntax.py: commands of words with their quotation, without values."""

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
        subscript: the text in `[ ]`; None without it.
        operator: one of `OPERATORS`, "" for the plain value, "length" for `${#NAME}`, "not followed" for an unsupported one.
        is_quoted: whether it is in double quotes, so that its value is not split into words.
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
    """`$((...))`; its variables have a `$` or not."""

    text: str


Piece = Text | Parameter | Substitution | Sum


@dataclass(frozen=True, slots=True)
class Word:
    """Text that becomes one or several words of a command.

    Attributes:
        has_quotes: whether a part of it is quoted, so that it is a word even if it is empty.
    """

    line: int
    pieces: tuple[Piece, ...]
    has_quotes: bool = False

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and variables, such as a keyword; None for other words."""
        if self.has_quotes or any(not isinstance(piece, Text) for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Text))


@dataclass(frozen=True, slots=True)
class Assignment:
    """`NAME=value`, `NAME+=value` or `NAME=(value ...)`.

    Attributes:
        values: the single word of a variable, or the words of an array.
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
    """A simple command, without its redirections.

    Attributes:
        tokens: the command's name and arguments, before expansion.
        document: its here-document, if any.
    """

    line: int
    assignments: tuple[Assignment, ...]
    tokens: tuple[Word, ...]
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
class ShellPipeline:
    """Commands joined by `|`; a leading `!` negates the status."""

    commands: tuple[Node, ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines joined by `&&` and `||`.

    Attributes:
        rest: the other pipelines, each with the operator before it.
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
    """The definition of a function."""

    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ShellGroup:
    """`{ ...; }`, or the subshell `( ... )`, whose assignments are local."""

    body: tuple[Node, ...]
    is_subshell: bool


Node = Simple | Condition | Arithmetic | ShellPipeline | AndOr | If | Case | Loop | Function | ShellGroup
