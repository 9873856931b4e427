"""The flags that a shell script passes to a training program, found without running the script. Standard library only.

1. shell_syntax.py parses the script into a tree of commands.
2. `_Follower` walks through the tree from top to bottom and records the values of variables, arrays and functions. It evaluates
   conditions over known values. If a condition depends on files or commands, and inside loops, assigned variables become unknown.
3. shell_program.py picks the training command: `torchrun ... pretrain_gpt.py`, `python -m NAME`, or either inside
   `bash -c "..."`; the words after the program are the flags.

An unknown value is kept as a mark inside the text and is an error, with its line, only if it reaches a flag: `$(hostname)` in the
path of a log is harmless. A variable that the script never sets comes from the environment; without a value it stays `${NAME}`
and is reported. A flag and its value inside the same quotes, as in `ARGS+=("--split '99,1,0'")`, are split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable
from moe_overlap.describe.readers.shell_conditions import compared
from moe_overlap.describe.readers.shell_program import UNKNOWN, Command, inner_script, started, training_command
from moe_overlap.describe.readers.shell_syntax import DECLARING, SyntaxProblem, parse_script
from moe_overlap.describe.readers.shell_tree import (
    AndOr,
    Arithmetic,
    Assignment,
    Case,
    Condition,
    Function,
    If,
    Loop,
    Node,
    Parameter,
    ShellGroup,
    ShellPipeline,
    Simple,
    Word,
)
from moe_overlap.describe.readers.shell_values import Expansion, TooLong, Unknown, Values, blank_split

MOST_SCRIPT_BYTES = 1 << 18
"""Longest script, in bytes; scripts of large jobs have about ten thousand."""
_MOST_CALLS = 8
"""Most nested calls of functions, `eval` and `bash -c`."""
_MOST_COMMANDS = 100_000
"""Most commands that are followed; those of a function count at every call."""
_SETTING = frozenset(("read", "mapfile", "readarray", "getopts", "let"))
"""Shell commands that set the variables in their arguments."""
_ENVIRONMENTS = re.compile(r"(?:activate|\.bashrc|profile|conda\.sh|setvars\.sh|/init/\w+)$")
"""Sourced files that set up programs and libraries, not the settings of a job."""
VARIABLE = re.compile(r"\$\{\w+\}")
"""The form of an unresolved variable from the environment in the flags."""
_PLACE = re.compile(r"--(save|load|(\w+-)*(path|dir|file|checkpoint|project|entity|exp-name|tokenizer-model)|name)")
"""Flags with a path or a name, whose value changes neither the model nor a prediction. Training refuses an unknown one."""
_HEADER = re.compile(r"^#SBATCH\s+(--nodes|-N|--ntasks-per-node)(?:=|\s+)(\d{1,9})\s*(?:#.*)?$", re.MULTILINE)


class _Return(Exception):
    """A `return` that is executed unconditionally: the function ends."""


class _Exit(Exception):
    """An `exit` that is executed unconditionally: the script or inner script ends.

    Attributes:
        line: of the `exit`.
        empty: variables without a value that earlier conditions have read.
    """

    def __init__(self, line: int, empty: Iterable[str]) -> None:
        super().__init__()
        self.line, self.empty = line, tuple(empty)


@dataclass(frozen=True, slots=True)
class ScriptFlags:
    """The flags of a script's training command.

    Attributes:
        arguments: the flags and their values.
        unresolved: variables in the flags without a value.
        num_gpus: nodes times processes per node; None if the command does not have them.
        unread: sentences on paths and names whose value is unknown, which stand as `${...}` in `arguments`.
    """

    arguments: tuple[str, ...]
    unresolved: tuple[str, ...]
    num_gpus: int | None = None
    unread: tuple[str, ...] = ()


def script_flags(text: str, environment: Mapping[str, str], source: str) -> ScriptFlags:
    """Read the flags of a script.

    Args:
        environment: values of variables from the environment; they override assignments in the script.
        source: the script's name, for errors.
    Raises:
        ConfigError: the text is no script; it has no training command, or several; a flag has an unknown value; the script is too
            long, before or after expansion.
    """
    if len(text) > MOST_SCRIPT_BYTES:
        raise ConfigError(source, "", f"has more than {MOST_SCRIPT_BYTES >> 10} KiB", "give the script of a job")
    follower = _Follower(environment, source, _of_slurm(text))
    try:
        # Marks of unknown values are delimited by NULs, so NULs in the script itself are removed first.
        nodes = parse_script(text.replace("\0", ""))
        follower.assigned |= set(_assigned(nodes))
        follower.follow(nodes)
    except _Exit as ended:
        if not follower.commands:
            why = f": {' and '.join(ended.empty[-3:])} has no value" if ended.empty else ""
            rule = f"ends the script before it starts a program{why}"
            fix = f"give it by --set {ended.empty[-1]}=VALUE" if ended.empty else "give the script that calls torchrun"
            raise ConfigError(f"{source} line {ended.line}", "", rule, fix) from None
    except SyntaxProblem as problem:
        raise ConfigError(f"{source} line {problem.line}", "", problem.rule, "correct the script") from None
    except TooLong:
        rule = "grows without end: a variable holds itself more than once"
        raise ConfigError(f"{source} line {follower.line}", "", rule, "write the flags out") from None
    command = training_command(follower.commands, source)
    flags = [part for word in command.flags for part in _parts(word)]
    unresolved, unread = [], []
    for before, word in zip(["", *flags], flags, strict=False):
        for mark in UNKNOWN.finditer(word):
            unknown = follower.unknowns[int(mark[1])]
            if not unknown.rule:
                unresolved.append(unknown.name)
            elif _PLACE.fullmatch(before):
                unread.append(f"line {unknown.line} {unknown.rule}")
            else:
                fix = f"write the flags out, or give the value by --set {unknown.name}=VALUE"
                fix = fix if re.fullmatch(r"\w+", unknown.name) else "write the value in its place"
                raise ConfigError(f"{source} line {unknown.line}", "", unknown.rule, fix)
    shown = tuple(UNKNOWN.sub(lambda mark: follower.unknowns[int(mark[1])].as_variable, word) for word in flags)
    return ScriptFlags(shown, tuple(dict.fromkeys(unresolved)), command.num_gpus, tuple(dict.fromkeys(unread)))


def script_variables(pairs: Sequence[str]) -> dict[str, str]:
    """The variables of `--set NAME=VALUE`, name to value.

    Raises:
        ConfigError: a text without a name or an equals sign.
    """
    values = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not (name and sign):
            raise ConfigError("--set", pair, "is no NAME=VALUE", f"write --set {name or 'NAME'}=VALUE")
        values[name] = value
    return values


class _Follower(Expansion):
    """Walks through a script's commands and records their assignments.

    Args:
        environment: values that override assignments in the script.
        source: the script's name, for errors.
        defaults: initial values, which the script may reassign.
    """

    def __init__(self, environment: Mapping[str, str], source: str, defaults: Mapping[str, str]) -> None:
        super().__init__(environment, defaults)
        self.commands: list[Command] = []
        self._source = source
        self._functions: dict[str, tuple[Node, ...]] = {}
        self._calls = 0
        self._followed = 0
        self._locals: dict[str, Values | None] | None = None
        """Values shadowed by local variables of the current function; None outside of functions."""

    # Commands

    def follow(self, nodes: Iterable[Node]) -> None:
        """Follow commands in order."""
        for node in nodes:
            self._follow(node)

    def _follow(self, node: Node) -> None:
        self._followed += 1
        if self._followed > _MOST_COMMANDS:
            raise TooLong
        match node:
            case Simple():
                self._simple(node)
            case ShellPipeline():
                for command in node.commands:
                    # Each command of a pipeline runs in a subshell.
                    self._inside(command, is_subshell=len(node.commands) > 1)
            case AndOr():
                self._and_or(node)
            case If():
                self._if(node)
            case Case():
                self._case(node)
            case Loop():
                self._without_knowing(node.line, node.body)
                if node.name is not None:
                    self.assign(node.name, (self.unknown(node.line, node.name),))
            case Function():
                self._functions[node.name] = node.body
            case ShellGroup() if node.is_subshell:
                self._inside(ShellGroup(node.body, is_subshell=False), is_subshell=True)
            case ShellGroup():
                self.follow(node.body)
            case Arithmetic():
                for name in _changed(node.text):
                    self.assign(name, (self.unknown(node.line, name),))
            case Condition():
                pass

    def _inside(self, node: Node, is_subshell: bool) -> None:
        """Follow a command; a subshell's assignments and `exit` do not affect the outer shell."""
        values = dict(self._values)
        try:
            self._follow(node)
        except _Exit:
            if not is_subshell:
                raise
        if is_subshell:
            self._values = values

    def _without_knowing(self, line: int, nodes: Iterable[Node]) -> None:
        """Follow commands of which it is unknown whether they are executed."""
        outer, self._undecided = self._undecided, line if self._undecided is None else self._undecided
        self.follow(nodes)
        self._undecided = outer

    def _and_or(self, node: AndOr) -> None:
        holds = self._holds(node.first)
        self._follow(node.first)
        for operator, other in node.rest:
            if holds is None:
                # In `cd src && torchrun ...` the second command is executed unless the first one fails.
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
                self.follow(condition)
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
        tokens = self.fields(node.tokens)
        name = tokens[0] if tokens else ""
        if not tokens or name in DECLARING:
            for assignment in node.assignments:
                self._declare(name, assignment.name)
                self._assign(assignment)
            for word in tokens[1:]:
                self._declare(name, word)
        elif name in self._functions:
            self._call_function(self._functions[name], tuple(tokens[1:]))
        elif name in ("return", "exit"):
            if self._undecided is None:
                raise _Return if name == "return" else _Exit(node.line, self.empty)
        elif name in ("set", "unset", "shift", "source", ".") or name in _SETTING or tokens[:2] == ["printf", "-v"]:
            self._built_in(node.line, tokens)
        elif name == "eval":
            self._call(parse_script(" ".join(self.fields(node.tokens[1:], is_read_again=True))))
        elif name.startswith("-"):
            rule = f"begins with {printable(UNKNOWN.sub('…', name), 40)}, which is no command"
            fix = "end the line before with a backslash, without a comment between them"
            raise ConfigError(f"{self._source} line {node.line}", "", rule, fix)
        elif (inner := inner_script(tokens, self.text(node.document))) is not None:
            self._call(parse_script(inner), is_shell=True)
        else:
            command = started(node.line, tokens)
            self.commands += [] if command is None else [command]

    def _built_in(self, line: int, tokens: list[str]) -> None:
        """Follow a built-in command that changes variables."""
        name, names = tokens[0], [word for word in tokens[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        if name == "unset":
            for variable in names:
                if self._undecided is None:
                    self._values.pop(variable, None)
                    self.assigned.add(variable)
                else:
                    self.assign(variable, (self.unknown(line, variable),))
        elif name == "set":
            if "--" in tokens:
                values = tuple(tokens[tokens.index("--") + 1 :])
                self._arguments = values if self._undecided is None else (self.unknown(line, "@"),)
        elif name == "shift":
            count = int(tokens[1]) if tokens[1:] and re.fullmatch(r"\d{1,4}", tokens[1]) else 1
            self._arguments = None if self._arguments is None else self._arguments[count:]
        elif name in ("source", "."):
            # A sourced file may set any variable: assigned ones and those from the environment become unknown.
            file = "".join(tokens[1:2])
            for variable in () if _ENVIRONMENTS.search(file) else self._values:
                rule = f"reads {printable(UNKNOWN.sub('…', file), 40)}, which may set ${{{variable}}}"
                self.assign(variable, (self.mark(Unknown(line, variable, rule)),))
        elif name == "printf":
            rule = f"sets ${{{tokens[2]}}} by printf, which cannot be read without running it" if tokens[2:] else ""
            for variable in names[:1]:
                self.assign(variable, (self.mark(Unknown(line, variable, rule)),))
        else:
            for variable in [*names, *(["REPLY", "MAPFILE"] if not names else []), *_changed(" ".join(tokens[1:]))]:
                self.assign(variable, (self.unknown(line, variable),))

    def _declare(self, command: str, name: str) -> None:
        """Record the value that a local variable of a function shadows."""
        if command in ("local", "declare", "typeset") and self._locals is not None:
            self._locals.setdefault(name, self._values.get(name))

    def _call_function(self, body: tuple[Node, ...], arguments: Values) -> None:
        outer = self._arguments, self._locals
        self._arguments, self._locals = arguments, {}
        with suppress(_Return):
            self._call(body)
        hidden = self._locals
        self._arguments, self._locals = outer
        for name, values in hidden.items():
            if values is None:
                self._values.pop(name, None)
            else:
                self._values[name] = values

    def _call(self, nodes: tuple[Node, ...], is_shell: bool = False) -> None:
        """Follow the commands of a function, `eval` or inner script.

        Args:
            is_shell: whether they run in a separate shell, whose `exit` does not end the outer one.
        """
        if self._calls == _MOST_CALLS:
            raise TooLong
        line = self.line
        self.assigned |= set(_assigned(nodes))
        self._calls += 1
        try:
            if is_shell:
                self._inside(ShellGroup(nodes, is_subshell=False), is_subshell=True)
            else:
                self.follow(nodes)
        finally:
            self._calls -= 1
        self.line = line

    def _assign(self, assignment: Assignment) -> None:
        name = assignment.name
        if assignment.is_array:
            values = tuple(self.fields(assignment.values))
        else:
            values = (self.text(assignment.values[0]),)
        before = self._values.get(name, ())
        if assignment.is_element:
            values = (self.unknown(assignment.line, name),)
        elif assignment.appends and assignment.is_array:
            values = (*before, *values)
        elif assignment.appends:
            values = ((before[0] if before else "") + values[0], *before[1:])
        # Each `A+=x` copies A.
        self.spend(sum(map(len, values)))
        self.assign(name, values)

    # Conditions

    def _holds(self, node: Node) -> bool | None:
        """Whether a condition holds; None if it depends on files, commands or unsupported tests."""
        match node:
            case Simple() if not node.assignments and node.tokens:
                tokens = self.fields(node.tokens, is_condition=True)
                if tokens in (["true"], ["false"]):
                    return tokens == ["true"]
                closed = tokens[:1] == ["["] and tokens[-1:] == ["]"]
                if not closed and tokens[:1] != ["test"]:
                    return None
                tokens = tokens[1 : -1 if closed else None]
                # In single brackets the right side of = is no pattern.
                patterns = [
                    escape(word) if place and tokens[place - 1] in ("=", "==", "!=") else word
                    for place, word in enumerate(tokens)
                ]
                return compared(patterns)
            case Condition():
                items = list[str]()
                for item in node.items:
                    text = item if isinstance(item, str) else self.text(item, is_condition=True)
                    # A quoted right side of == is no pattern.
                    is_plain = isinstance(item, Word) and item.has_quotes and items[-1:] in (["="], ["=="], ["!="])
                    items.append(escape(text) if is_plain else text)
                return compared(items)
            case Arithmetic():
                number = self.sum(node.text, is_condition=True)
                return None if number is None else number != 0
            case ShellPipeline() if len(node.commands) == 1:
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
        text = self.text(word, is_condition=True)
        return None if UNKNOWN.search(text) else text


def _changed(text: str) -> list[str]:
    """Variables that an expression in `(( ))` or `let` may set."""
    matches = re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)", text)
    return [first or second for first, second in matches]


def _of_slurm(text: str) -> dict[str, str]:
    """The variables that Slurm sets for a batch script with this header."""
    options = {("nodes" if name == "-N" else name.lstrip("-")): value for name, value in _HEADER.findall(text)}
    nodes, tasks = options.get("nodes"), options.get("ntasks-per-node")
    values = {} if nodes is None else {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    return values if tasks is None else {**values, "SLURM_NTASKS_PER_NODE": tasks}


def _assigned(nodes: Iterable[Node]) -> Iterator[str]:
    """Variables that commands assign, in any branch."""
    for node in nodes:
        match node:
            case Simple():
                yield from (assignment.name for assignment in node.assignments)
                defaults = (piece for word in node.tokens for piece in word.pieces if isinstance(piece, Parameter))
                yield from (piece.name for piece in defaults if piece.operator in ("=", ":="))
            case ShellPipeline():
                yield from _assigned(node.commands)
            case AndOr():
                yield from _assigned((node.first, *(other for _, other in node.rest)))
            case If():
                for condition, body in node.branches:
                    yield from _assigned((*(condition or ()), *body))
            case Case():
                for _, body in node.branches:
                    yield from _assigned(body)
            case Loop() | Function() | ShellGroup():
                yield from _assigned(node.body)
            case _:
                pass


def _is_test(node: Node) -> bool:
    return isinstance(node, Simple) and bool(node.tokens) and node.tokens[0].plain in ("[", "test")


def _line_of(node: Node) -> int | None:
    return getattr(node, "line", None)


def _parts(word: str) -> list[str]:
    """A word as flag and value if it contains both, such as "--split '99,1,0'"; else the word alone."""
    return blank_split(word) if re.match(r"--\S+\s", word) else [word]
