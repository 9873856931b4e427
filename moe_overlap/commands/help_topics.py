"""`--help [TOPIC]` of a tool: the flags that most calls need and the topics, the flags of one topic, or with `all` every flag.

A topic is an argument group of the parser: `topic(parser, name, about)` makes it, or gives the one that is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable

ALL = "all"


def topic(parser: argparse.ArgumentParser, name: str, about: str = "") -> argparse._ArgumentGroup:
    """The group of a parser's flags with this name."""
    for group in parser._action_groups:
        if group.title == name:
            return group
    return parser.add_argument_group(name, about)


def parser_with_topics(description: str | None, needed: Sequence[str]) -> argparse.ArgumentParser:
    """A parser without flags but `--help [TOPIC]`.

    Args:
        needed: flags that `--help` alone shows.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False)
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        needed=tuple(needed),
        help="show the topics and what most calls need; the flags of a topic; or, with all, every flag",
    )
    return parser


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes, which repeat words of the command line, move no cursor."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and end the program with status 2."""
        super().error(printable(message, len(message)))


class _Help(argparse.Action):
    """Prints the help and ends the program, before anything else of the command line is asked for."""

    def __init__(self, option_strings: list[str], dest: str, needed: tuple[str, ...], help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="TOPIC", help=help)
        self._needed = needed

    def __call__(self, parser: argparse.ArgumentParser, _: argparse.Namespace, name: Any, *__: Any) -> None:
        """Print it; status 0, or 2 for a topic that there is not."""
        topics = {
            str(group.title): group for group in parser._action_groups if group._group_actions and group.description
        }
        if name == ALL:
            parser.print_help()
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
