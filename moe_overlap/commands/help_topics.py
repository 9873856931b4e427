"""`--help [TOPIC]` of a tool: the most needed flags and the topics, the flags of one topic, or with `all` every flag.

A topic is an argument group of the parser: `topic(parser, name, about)` returns it, and creates it if necessary.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import names_file, printable

ALL = "all"


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line with a fix, and refuses abbreviated flags, as a run does.

    Control characters of arguments are removed from the line.

    Args:
        elsewhere: the fix for a flag of training that this tool lacks.
    """

    def __init__(self, elsewhere: str = "see --help", **named: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **named})
        self._elsewhere = elsewhere

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
                is_file = "--megatron-args" in options and names_file(arguments[0])
                fix = (
                    f"write --megatron-args {arguments[0]} for the flags in it"
                    if is_file
                    else "quote values with spaces"
                )
                return f"{arguments[0]}: a word that belongs to no flag; {fix}"
            near = difflib.get_close_matches(names[0], options, 1, 0.8)
            rule = "is no flag of this tool" if len(names) == 1 else "are no flags of this tool"
            return f"{', '.join(names)}: {rule}; {f'did you mean {near[0]}?' if near else self._elsewhere}"
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            name = missing[1].split(", ")[0]
            action = next((action for action in self._actions if name in action.option_strings), None)
            metavar = "" if action is None else f" {action.metavar or ''}".rstrip()
            return f"{name}: is missing; add {name}{metavar}"
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
    description: str | None, needed: Sequence[str], elsewhere: str = "see --help"
) -> argparse.ArgumentParser:
    """A parser with no flags except `--help [TOPIC]`.

    Args:
        needed: flags that `--help` without a topic shows.
        elsewhere: the fix for a flag of training that the tool lacks.
    """
    parser = Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        elsewhere=elsewhere,
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
