"""The flags that a shell script hands to a training program, without running it. Standard library only.

1. shell_syntax.py reads the script as a tree of commands.
2. `_Follower` goes through it from top to bottom and keeps the values of variables, arrays and functions. A condition is decided
   where the values in it decide it. Where files or commands decide, and inside loops, the variables that are set become unknown.
3. shell_program.py takes the training command, `torchrun ... pretrain_gpt.py`, `python -m NAME` or either inside
   `bash -c "..."`; the words after the program are the flags.

An unknown value is kept as a mark inside the text, and is an error with its line only if it reaches a flag: `$(hostname)` in a
path of logs hurts nobody. A variable that the script never sets comes from outside; without a value it stays as `${NAME}`, and is
reported. Flags and their values that share the quotes of an array's element, as in `ARGS+=("--split '99,1,0'")`, are split.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable
from moe_overlap.describe.readers.shell_conditions import compared, evaluated
from moe_overlap.describe.readers.shell_program import UNKNOWN, Command, inner_script, started, training_command
from moe_overlap.describe.readers.shell_syntax import DECLARING, SyntaxProblem, parse_script
from moe_overlap.describe.readers.shell_tree import (
    AndOr,
    Arithmetic,
    Assignment,
    Case,
    Condition,
    Function,
    Group,
    If,
    Loop,
    Node,
    Parameter,
    Pipeline,
    Simple,
    Substitution,
    Sum,
    Text,
    Word,
)

MOST_SCRIPT_BYTES = 1 << 18
"""Bytes of the longest script that is read; those of large jobs have some ten thousand."""
_MOST_FILLED = 1 << 22
"""Characters that all expansions of a script may make: `A=$A$A` in 40 lines would make 2⁴⁰."""
_MOST_CALLS = 8
"""Functions, `eval` and `bash -c` inside each other."""
_MOST_CUT = 4096
"""Characters of a value from whose ends a pattern is cut."""
_HEADER = re.compile(r"^#SBATCH\s+(--nodes|-N|--ntasks-per-node)(?:=|\s+)(\d{1,9})\s*(?:#.*)?$", re.MULTILINE)

Values = tuple[str, ...]
"""Of an array the elements; of a plain variable one."""


class _TooLong(Exception):
    """A script whose text grows without end while its variables are filled in."""


@dataclass(frozen=True, slots=True)
class ScriptFlags:
    """The flags of a script's training command.

    Attributes:
        arguments: the flags and their values.
        unresolved: variables in them that the script gives no value.
        num_gpus: nodes times processes per node; None where the command does not say them.
    """

    arguments: tuple[str, ...]
    unresolved: tuple[str, ...]
    num_gpus: int | None = None


def script_flags(text: str, environment: Mapping[str, str], source: str) -> ScriptFlags:
    """Read the flags of a script.

    Args:
        environment: values of variables that the script expects from outside; they win over its own.
        source: the script's name, for the error.
    Raises:
        ConfigError: the text is no script; no command with a Python program, or several; a value in it that cannot be known; a
            script that is too long, or becomes so with its variables filled in.
    """
    if len(text) > MOST_SCRIPT_BYTES:
        raise ConfigError(source, "", f"has more than {MOST_SCRIPT_BYTES >> 10} KiB", "give the script of a job")
    follower = _Follower(environment, source, _of_slurm(text))
    try:
        nodes = parse_script(text)
        follower.assigned |= set(_assigned(nodes))
        follower.follow(nodes)
    except SyntaxProblem as problem:
        raise ConfigError(f"{source} line {problem.line}", "", problem.rule, "correct the script") from None
    except _TooLong:
        rule = "grows without end: a variable holds itself more than once"
        raise ConfigError(f"{source} line {follower.line}", "", rule, "write the flags out") from None
    command = training_command(follower.commands, source)
    flags = [part for word in command.flags for part in _parts(word)]
    unresolved = []
    for word in flags:
        for mark in UNKNOWN.finditer(word):
            unknown = follower.unknowns[int(mark[1])]
            if unknown.rule:
                fix = f"write the flags out, or give the value by tools/import_flags.py --set {unknown.name}=VALUE"
                fix = fix if re.fullmatch(r"\w+", unknown.name) else "write the value in its place"
                raise ConfigError(f"{source} line {unknown.line}", "", unknown.rule, fix)
            unresolved.append(unknown.name)
    shown = tuple(UNKNOWN.sub(lambda mark: f"${{{follower.unknowns[int(mark[1])].name}}}", word) for word in flags)
    return ScriptFlags(shown, tuple(dict.fromkeys(unresolved)), command.num_gpus)


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A value that is not known.

    Attributes:
        name: of the variable, or the text of a command.
        rule: why it cannot be known; "" for a variable from outside.
    """

    line: int
    name: str
    rule: str


class _Follower:
    """Goes through a script's commands and keeps what they assign.

    Args:
        environment: values that win over the script's own.
        source: the script's name, for errors.
        given: values that hold until the script assigns others.
    """

    def __init__(self, environment: Mapping[str, str], source: str, given: Mapping[str, str]) -> None:
        self.line = 1
        self.commands: list[Command] = []
        self.unknowns: list[_Unknown] = []
        self.assigned: set[str] = set()
        """Variables that the script assigns somewhere: before that they are empty, not from outside."""
        self._environment, self._source = environment, source
        self._values: dict[str, Values] = {name: (value,) for name, value in {**given, **environment}.items()}
        self._functions: dict[str, tuple[Node, ...]] = {}
        self._arguments: Values | None = None
        """Those of the function that is followed; None outside of functions."""
        self._undecided: int | None = None
        """The line of the condition or loop, around what is followed, that cannot be decided."""
        self._calls = 0
        self._filled = 0

    # Commands

    def follow(self, nodes: Iterable[Node]) -> None:
        """Follow commands in their order."""
        for node in nodes:
            self._follow(node)

    def _follow(self, node: Node) -> None:
        match node:
            case Simple():
                self._simple(node)
            case Pipeline():
                self.follow(node.commands)
            case AndOr():
                self._and_or(node)
            case If():
                self._if(node)
            case Case():
                self._case(node)
            case Loop():
                self._without_knowing(node.line, node.body)
                if node.name is not None:
                    self._set(node.name, (self._unknown(node.line, node.name),))
            case Function():
                self._functions[node.name] = node.body
            case Group():
                values = dict(self._values)
                self.follow(node.body)
                self._values = values if node.is_subshell else self._values
            case Condition() | Arithmetic():
                pass

    def _without_knowing(self, line: int, nodes: Iterable[Node]) -> None:
        """Follow commands that may be executed or not."""
        outer, self._undecided = self._undecided, line if self._undecided is None else self._undecided
        self.follow(nodes)
        self._undecided = outer

    def _and_or(self, node: AndOr) -> None:
        holds = self._holds(node.first)
        self._follow(node.first)
        for operator, other in node.rest:
            if holds is None:
                # What follows a command, as in `cd src && torchrun ...`, is executed unless the command fails.
                expected = (
                    operator == "&&" and not isinstance(node.first, Condition | Arithmetic) and not _is_test(node.first)
                )
                if expected:
                    self._follow(other)
                else:
                    self._without_knowing(_line_of(other) or self.line, (other,))
            elif holds == (operator == "&&"):
                self._follow(other)
                holds = self._holds(other)

    def _if(self, node: If) -> None:
        decided: bool | None = False
        for condition, body in node.branches:
            if decided:
                return
            if condition is None:
                holds: bool | None = True
            else:
                self.follow(condition[:-1])
                holds = self._holds(condition[-1]) if condition else None
            if decided is None or holds is None:
                self._without_knowing(node.line, body)
                decided = None
            elif holds:
                self.follow(body)
                decided = True

    def _case(self, node: Case) -> None:
        value, decided = self._known(node.value), False
        for patterns, body in node.branches:
            if value is None:
                self._without_knowing(node.line, body)
            elif not decided and any(
                pattern is not None and fnmatchcase(value, pattern) for pattern in map(self._known, patterns)
            ):
                decided = True
                self.follow(body)

    def _simple(self, node: Simple) -> None:
        self.line = node.line
        words = self._fields(node.words)
        name = words[0] if words else ""
        if not words or name in DECLARING:
            for assignment in node.assignments:
                self._assign(assignment)
        elif name in self._functions:
            outer, self._arguments = self._arguments, tuple(words[1:])
            self._call(self._functions[name])
            self._arguments = outer
        elif name == "eval":
            self._call(parse_script(" ".join(words[1:])))
        elif (inner := inner_script(words, self._text(node.document))) is not None:
            self._call(parse_script(inner))
        else:
            command = started(node.line, words)
            self.commands += [] if command is None else [command]

    def _call(self, nodes: tuple[Node, ...]) -> None:
        if self._calls == _MOST_CALLS:
            raise _TooLong
        self._calls += 1
        line = self.line
        self.assigned |= set(_assigned(nodes))
        self.follow(nodes)
        self.line = line
        self._calls -= 1

    def _assign(self, assignment: Assignment) -> None:
        name = assignment.name
        if assignment.is_array:
            values = tuple(self._fields(assignment.values))
        else:
            values = (self._text(assignment.values[0]),)
        before = self._values.get(name, ())
        if assignment.is_element:
            values = (self._unknown(assignment.line, name),)
        elif assignment.appends and assignment.is_array:
            values = (*before, *values)
        elif assignment.appends:
            values = ((before[0] if before else "") + values[0], *before[1:])
        # `A+=x` copies A at each of its lines.
        self._spend(sum(map(len, values)))
        self._set(name, values)

    def _set(self, name: str, values: Values) -> None:
        if name in self._environment:
            return
        if self._undecided is not None:
            values = (self._unknown(self._undecided, name),)
        self._values[name] = values

    # Conditions

    def _holds(self, node: Node) -> bool | None:
        """Whether a condition holds; None where files, commands or other forms of test decide."""
        match node:
            case Simple() if not node.assignments and node.words:
                words = self._fields(node.words, is_condition=True)
                if words in (["true"], ["false"]):
                    return words == ["true"]
                closed = words[:1] == ["["] and words[-1:] == ["]"]
                if not closed and words[:1] != ["test"]:
                    return None
                return compared(words[1 : -1 if closed else None])
            case Condition():
                items = [item if isinstance(item, str) else self._text(item, is_condition=True) for item in node.items]
                return compared(items)
            case Arithmetic():
                number = self._sum(node.text, is_condition=True)
                return None if number is None else number != 0
            case Pipeline() if len(node.commands) == 1:
                holds = self._holds(node.commands[0])
                return holds if holds is None else holds != node.is_negated
            case AndOr():
                holds = self._holds(node.first)
                for operator, other in node.rest:
                    second = self._holds(other)
                    if holds is None or second is None:
                        return None
                    holds = (holds and second) if operator == "&&" else (holds or second)
                return holds
        return None

    def _known(self, word: Word) -> str | None:
        text = self._text(word, is_condition=True)
        return None if UNKNOWN.search(text) else text

    # Words

    def _fields(self, words: Iterable[Word], is_condition: bool = False) -> list[str]:
        """The words of a command with everything filled in and split."""
        return [field for word in words for field in self._split(word, is_condition)]

    def _split(self, word: Word, is_condition: bool) -> list[str]:
        """The fields of one word: values that stand outside quotes are split at blanks, elements of quoted arrays apart."""
        fields = list[str]()
        open_field: str | None = "" if word.has_quotes and not _is_all_elements(word) else None
        for piece in word.pieces:
            if isinstance(piece, Parameter) and (piece.subscript == "@" or piece.name == "@") and piece.is_quoted:
                parts = list(self._parameter(piece, is_condition))
            elif isinstance(piece, Parameter) and not piece.is_quoted:
                parts = [part for value in self._parameter(piece, is_condition) for part in _blank_split(value)]
            else:
                parts = [self._piece(piece, is_condition)]
            for number, part in enumerate(parts):
                if number and open_field is not None:
                    fields.append(open_field)
                    open_field = None
                open_field = (open_field or "") + part
        return fields if open_field is None else [*fields, open_field]

    def _text(self, word: Word | None, is_condition: bool = False) -> str:
        """A word with everything filled in, not split, as in an assignment."""
        return "" if word is None else "".join(self._piece(piece, is_condition) for piece in word.pieces)

    def _piece(self, piece: Text | Parameter | Substitution | Sum, is_condition: bool) -> str:
        match piece:
            case Text():
                return piece.text
            case Parameter():
                return " ".join(self._parameter(piece, is_condition))
            case Sum():
                number = self._sum(piece.text, is_condition)
                return self._no_value(f"$(({piece.text}))") if number is None else str(number)
            case Substitution():
                return self._no_value(f"$({piece.text})")

    def _parameter(self, piece: Parameter, is_condition: bool) -> Values:
        """The values of `${...}`."""
        name = piece.name
        shown = f"{name}[{piece.subscript}]" if piece.subscript else name
        values = self._value_of(name, is_condition)
        if piece.subscript not in (None, "@", "*"):
            return (self._no_value(f"${{{shown}}}"),)
        if piece.subscript is None and name not in "@*" and values is not None:
            values = values[:1]  # Without [@] an array is its first element.
        operator, argument = piece.operator.removeprefix(":"), piece.argument
        is_empty = values is None or (piece.operator.startswith(":") and not any(values))
        if operator == "":
            found = values
        elif operator in "-=":
            found = (self._text(argument, is_condition),) if is_empty else values
        elif operator == "+":
            found = () if is_empty else (self._text(argument, is_condition),)
        elif operator == "?":
            found = values
        elif operator == "length" and values is not None and not UNKNOWN.search("".join(values)):
            found = (str(len(values) if piece.subscript else len("".join(values))),)
        elif operator in ("#", "##", "%", "%%") and values is not None:
            cut = tuple(_cut(value, operator, self._text(argument, is_condition)) for value in values)
            found = tuple(value if value is not None else self._no_value(f"${{{shown}{operator}...}}") for value in cut)
        else:
            return (self._no_value(f"${{{shown}{'' if operator == 'not followed' else operator}...}}"),)
        if found is None:
            found = () if is_condition or name in self.assigned else (self._mark(_Unknown(self.line, name, "")),)
        self._spend(sum(map(len, found)))
        return found

    def _value_of(self, name: str, is_condition: bool) -> Values | None:
        """The values of a variable; None for one that has none yet."""
        if name in ("@", "*"):
            return self._arguments or ()
        if name.isdigit() and name != "0" and self._arguments is not None:
            return self._arguments[int(name) - 1 : int(name)]
        if not name.isdigit() and not name.isidentifier():
            return (self._no_value(f"${name}"),)
        return self._values.get(name)

    def _sum(self, text: str, is_condition: bool = False) -> int | None:
        """The value of an expression in whole numbers; None where it is not known."""

        def number(match: re.Match[str]) -> str:
            values = self._value_of(match[1], is_condition)
            if values is None and (is_condition or match[1] in self.assigned):
                return "0"
            self._spend(len(values[0]) if values else 0)
            return values[0] or "0" if values else "\0"

        return evaluated(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number, text.replace("${1}", "\0")))

    # Unknown values

    def _unknown(self, line: int, name: str) -> str:
        """The mark of a variable that a condition or loop sets."""
        return self._mark(_Unknown(line, name, f"decides ${{{name}}}, and cannot be read without running it"))

    def _no_value(self, shown: str) -> str:
        """The mark of an expansion that nothing but a shell can make."""
        shown = printable(UNKNOWN.sub("…", shown), 60)
        return self._mark(_Unknown(self.line, shown, f"has {shown}, which cannot be read without running it"))

    def _mark(self, unknown: _Unknown) -> str:
        self.unknowns.append(unknown)
        return f"\0{len(self.unknowns) - 1}\0"

    def _spend(self, characters: int) -> None:
        """Count the characters that expansions make.

        Raises:
            _TooLong: they are too many.
        """
        self._filled += characters
        if self._filled > _MOST_FILLED:
            raise _TooLong


def _of_slurm(text: str) -> dict[str, str]:
    """What Slurm sets for a batch script, by its header."""
    given = {("nodes" if name == "-N" else name.lstrip("-")): value for name, value in _HEADER.findall(text)}
    nodes, tasks = given.get("nodes"), given.get("ntasks-per-node")
    values = {} if nodes is None else {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    return values if tasks is None else {**values, "SLURM_NTASKS_PER_NODE": tasks}


def _assigned(nodes: Iterable[Node]) -> Iterator[str]:
    """Variables that commands assign, in whatever branch."""
    for node in nodes:
        match node:
            case Simple():
                yield from (assignment.name for assignment in node.assignments)
            case Pipeline():
                yield from _assigned(node.commands)
            case AndOr():
                yield from _assigned((node.first, *(other for _, other in node.rest)))
            case If():
                for condition, body in node.branches:
                    yield from _assigned((*(condition or ()), *body))
            case Case():
                for _, body in node.branches:
                    yield from _assigned(body)
            case Loop() | Function() | Group():
                yield from _assigned(node.body)
            case _:
                pass


def _is_test(node: Node) -> bool:
    return isinstance(node, Simple) and bool(node.words) and node.words[0].plain in ("[", "test")


def _line_of(node: Node) -> int | None:
    return getattr(node, "line", None)


def _is_all_elements(word: Word) -> bool:
    """Whether a word is "${A[@]}" or "$@" and nothing else: of no elements it makes no word."""
    (piece, *others) = word.pieces or (Text(""),)
    return not others and isinstance(piece, Parameter) and (piece.subscript == "@" or piece.name == "@")


def _blank_split(value: str) -> list[str]:
    """A value split at blanks. Quotes in it count as in `eval` and `bash -c`, since launch scripts are written for either."""
    if "'" in value or '"' in value:
        try:
            return shlex.split(value)
        except ValueError:
            pass
    return value.split()


def _parts(word: str) -> list[str]:
    """A flag and its value that share the quotes of an array's element, apart."""
    return _blank_split(word) if re.match(r"--\S+\s", word) else [word]


def _cut(value: str, operator: str, pattern: str) -> str | None:
    """`${value%pattern}` and the like: the shortest or longest match goes from one end; None where that is not known."""
    if UNKNOWN.search(value + pattern) or len(value) > _MOST_CUT:
        return None
    ends = range(len(value) + 1)
    if operator.startswith("#"):
        kept = [value[end:] for end in ends if fnmatchcase(value[:end], pattern)]
    else:
        kept = [value[:end] for end in reversed(ends) if fnmatchcase(value[end:], pattern)]
    return value if not kept else kept[-1] if len(operator) == 2 else kept[0]
