"""Take the flags of a Megatron-LM shell script: `python tools/import_flags.py train.sh --output train.args [--set NAME=VALUE]`.

The reader supports assignments (`A=1`, `A="--b 1"`, `ARGS=( --a b )`, `ARGS+=( ... )`), `${A}`, `${A[@]}`, `${A:-4}`, `$((A*8))`,
continued lines and comments. Nothing is executed. The flags are those of the command that starts a Python program
(`torchrun ... pretrain_gpt.py FLAGS`), in the form of an argument file (`@train.args`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text
from moe_overlap.describe.readers.shell_script import MOST_SCRIPT_BYTES, script_flags, script_variables
from moe_overlap.describe.version import VERSION_LINE


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake."""
    parser = Parser(description="Flags of a Megatron-LM shell script as an argument file.")
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("script", type=Path, help="the shell script")
    parser.add_argument("--output", type=Path, help="the argument file; default standard output")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the environment"
    )
    options = parser.parse_args(argv)
    try:
        text = bounded_text(options.script, MOST_SCRIPT_BYTES)
        flags = script_flags(text, script_variables(options.set), str(options.script))
        for word in flags.arguments:
            if not word.isprintable():
                rule = "holds control characters, which an argument file may not bring to a terminal"
                raise ConfigError(str(options.script), repr(word), rule, "correct the script")
    except Unreadable as error:
        print(f"error: {ConfigError(str(options.script), '', str(error), 'correct the path')}", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [f"# the flags of {options.script.name}, taken by tools/import_flags.py"]
    for name in flags.unresolved:
        lines.append(f"# ${{{name}}} has no value in the script: give it by --set {name}=VALUE, or write it below")
    lines += [f"# {sentence}: write the value below" for sentence in flags.unread]
    lines += argument_lines(flags.arguments)
    # Flushed, so that lines on stderr follow, and are not printed if the reader has closed the pipe.
    if options.output is None:
        print("\n".join(lines), flush=True)
    else:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{options.output}: {sum(line.startswith('-') for line in lines)} flags", flush=True)
    for name in flags.unresolved:
        print(f"unresolved: ${{{name}}}", file=sys.stderr)
    for sentence in flags.unread:
        print(f"unresolved: {options.script} {sentence}", file=sys.stderr)
    return 0


def argument_lines(arguments: tuple[str, ...]) -> list[str]:
    """One flag with its values per line, quoted for a shell."""
    lines: list[str] = []
    for word in arguments:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines
