"""`--help [TOPIC]` of a tool: the most needed flags and the topics, the flags of one topic, or with `all` every flag.

A topic is an argument group of the parser: `topic(parser, name, about)` returns it, and creates it if necessary.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.files import names_file, printable

ALL = "all"


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line with a fix, and refuses abbreviated flags, as a run does.

    Control characters of arguments are removed from the line.

    Args:
        training_flags: names of the flags that are kept in `training_flags` of the namespace, with their values, in order.
    """

    def __init__(self, training_flags: frozenset[str] = frozenset(), **named: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **named})
        self._training_flags = training_flags
        self.add_argument(
            "--print-completion",
            metavar="SHELL",
            action=_PrintCompletion,
            training_flags=training_flags,
            help="print a completion script for bash, zsh or tcsh and stop; needs the package shtab",
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; flags that the parser does not know must be flags of the training."""
        parsed, others = self.parse_known_args(args, namespace)
        # As in a run, a word with a single dash may be a value: --window-size -1,0.
        names = [word.partition("=")[0] for word in others if word.startswith("--")]
        unknown = [name for name in names if name not in self._training_flags]
        stray = [word for word in others[:1] if not word.startswith("--")]
        if unknown or stray:
            self.error(f"unrecognized arguments: {' '.join(unknown or stray)}")
        if self._training_flags:
            parsed.training_flags = others
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the line; status 2."""
        line = self._mistake(message)
        self.exit(2, f"error: {printable(line, len(line))}\n")

    def _mistake(self, message: str) -> str:
        """The flag, the rule and the fix, parsed from argparse's message; other messages are unchanged."""
        options = [option for action in self._actions for option in action.option_strings]
        if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            arguments = unknown[1].split()
            names = [word.partition("=")[0] for word in arguments if word.startswith("-")]
            if not names:
                file = arguments[0].removeprefix("@")
                is_file = "--megatron-args" in options and (names_file(file) or file != arguments[0])
                fix = f"write --megatron-args {file} for the flags in it" if is_file else "quote values with spaces"
                return f"{arguments[0]}: a word that belongs to no flag; {fix}"
            near = {
                name: (
                    *get_close_matches(name, options, 1, 0.8),
                    *get_close_matches(name, self._training_flags, 1, 0.8),
                )
                for name in names
            }
            nearest = [
                f"{choices[0]} for {name}" if len(names) > 1 else choices[0]
                for name, choices in near.items()
                if choices
            ]
            of = "this tool or of the training" if self._training_flags else "this tool"
            rule = f"is no flag of {of}" if len(names) == 1 else f"are no flags of {of}"
            return f"{', '.join(names)}: {rule}; {f'did you mean {one_of(tuple(nearest))}?' if nearest else 'see --help all'}"
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            name = missing[1].split(", ")[0]
            action = next(
                action for action in self._actions if name in (*action.option_strings, action.metavar, action.dest)
            )
            fix = f"add {name} {action.metavar or ''}".rstrip() if action.option_strings else f"give {action.help}"
            return f"{name}: is missing; {fix}"
        if wrong := re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL):
            return f"{wrong[1]}: {wrong[2]}; see --help"
        return message


def topic(parser: argparse.ArgumentParser, name: str, about: str = "") -> argparse._ArgumentGroup:
    """The group of a parser's flags with this name."""
    for group in parser._action_groups:
        if group.title == name:
            return group
    return parser.add_argument_group(name, about)


def parser_with_topics(
    description: str | None, needed: Sequence[str], training_flags: frozenset[str] = frozenset()
) -> argparse.ArgumentParser:
    """A parser with no flags except `--help [TOPIC]`.

    Args:
        needed: flags that `--help` without a topic shows.
        training_flags: as for `Parser`.
    """
    parser = Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        training_flags=training_flags,
    )
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        needed=tuple(needed),
        help="show the topics and what most calls need; the flags of a topic; or, with all, every flag",
    )
    return parser


class Removed(argparse.Action):
    """A flag that was removed: one line with its replacement, status 2.

    Args:
        rule: why it was removed.
        fix: the replacement.
    """

    def __init__(self, option_strings: list[str], dest: str, rule: str, fix: str, **named: Any) -> None:
        super().__init__(option_strings, dest, help=argparse.SUPPRESS, **named)
        self._rule, self._fix = rule, fix

    def __call__(self, parser: argparse.ArgumentParser, _: argparse.Namespace, value: Any, *__: Any) -> None:
        """Print the line."""
        error = ConfigError(self.option_strings[0], value, f"was removed: {self._rule}", self._fix)
        parser.exit(2, f"error: {error}\n")


class _PrintCompletion(argparse.Action):
    """Prints the completion script of a shell and ends the program, without checking other arguments."""

    def __init__(self, option_strings: list[str], dest: str, training_flags: frozenset[str], **named: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **named)
        self._training_flags = training_flags

    def __call__(self, parser: argparse.ArgumentParser, _: argparse.Namespace, shell: Any, *__: Any) -> None:
        """Print the script; status 0, or 2 for an unknown shell or without shtab."""
        try:
            import shtab
        except ModuleNotFoundError:
            error = ConfigError(self.option_strings[0], shell, "needs the package shtab", "pip install shtab")
            parser.exit(2, f"error: {error}\n")
        if shell not in shtab.SUPPORTED_SHELLS:
            rule = f"use {one_of(tuple(shtab.SUPPORTED_SHELLS))}"
            parser.exit(
                2, f"error: {ConfigError(self.option_strings[0], shell, 'is no shell that shtab knows', rule)}\n"
            )
        for name in sorted(self._training_flags.difference(parser._option_string_actions)):
            parser.add_argument(name, help="flag of the training")
        print(shtab.complete(parser, shell), end="")
        parser.exit()


class _Help(argparse.Action):
    """Prints the help and ends the program, without checking other arguments."""

    def __init__(self, option_strings: list[str], dest: str, needed: tuple[str, ...], help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="TOPIC", help=help)
        self._needed = needed

    def __call__(self, parser: argparse.ArgumentParser, _: argparse.Namespace, name: Any, *__: Any) -> None:
        """Print the help; status 0, or 2 for an unknown topic."""
        topics = {
            str(group.title): group for group in parser._action_groups if group._group_actions and group.description
        }
        if name == ALL:
            print(parser.format_help(), end="")  # argparse's own printing hides a full disk
            parser.exit()
        if name is not None and name not in topics:
            error = ConfigError("--help", name, "is no topic", f"use {', '.join(topics)} or {ALL}")
            parser.exit(2, f"error: {error}\n")
        formatter = parser._get_formatter()
        if name is not None:
            shown = topics[name]
            formatter.start_section(f"{name}: {shown.description}")
            formatter.add_arguments(shown._group_actions)
        else:
            formatter.add_text(parser.description)
            formatter.start_section("most needed")
            formatter.add_arguments(
                [action for action in parser._actions if {"-h", *self._needed} & set(action.option_strings)]
            )
        formatter.end_section()
        text = formatter.format_help()
        if name is None:
            lines = [f"  {title:<12}{group.description}" for title, group in topics.items()]
            text += "\n".join(["", f"topics of --help TOPIC (--help {ALL}: every flag):", *lines, ""])
        print(text, end="")
        parser.exit()
