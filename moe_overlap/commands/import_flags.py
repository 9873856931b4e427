"""Take the flags of a Megatron-LM shell script: `python tools/import_flags.py train.sh --output train.args [--set NAME=VALUE]`.

Read are assignments (`A=1`, `A="--b 1"`, `ARGS=( --a b )`, `ARGS+=( ... )`), `${A}`, `${A[@]}`, `${A:-4}`, `$((A*8))`, continued
lines and comments. Nothing is executed. The flags are those of the command that starts a Python program
(`torchrun ... pretrain_gpt.py FLAGS`), as `@train.args` takes them.
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
from moe_overlap.describe.readers.shell_script import MOST_SCRIPT_BYTES, script_flags
from moe_overlap.describe.version import VERSION_LINE


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 for a script that holds no flags."""
    parser = Parser(description="Flags of a Megatron-LM shell script as an argument file.")
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("script", type=Path, help="the shell script")
    parser.add_argument("--output", type=Path, help="the argument file; default standard output")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the environment"
    )
    words = parser.parse_args(argv)
    try:
        text = bounded_text(words.script, MOST_SCRIPT_BYTES)
        flags = script_flags(text, dict(map(_variable, words.set)), str(words.script))
        for word in flags.arguments:
            if not word.isprintable():
                rule = "holds control characters, which an argument file may not bring to a terminal"
                raise ConfigError(str(words.script), repr(word), rule, "correct the script")
    except Unreadable as error:
        print(f"error: {ConfigError(str(words.script), '', str(error), 'correct the path')}", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [f"# the flags of {words.script.name}, taken by tools/import_flags.py"]
    for name in flags.unresolved:
        lines.append(f"# ${{{name}}} has no value in the script: give it by --set {name}=VALUE, or write it below")
    lines += argument_lines(flags.arguments)
    # At once: what is told on the other stream stands behind it, and nobody is told about flags that nobody read.
    if words.output is None:
        print("\n".join(lines), flush=True)
    else:
        words.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{words.output}: {sum(line.startswith('-') for line in lines)} flags", flush=True)
    for name in flags.unresolved:
        print(f"unresolved: ${{{name}}}", file=sys.stderr)
    return 0


def _variable(pair: str) -> tuple[str, str]:
    name, sign, value = pair.partition("=")
    if not (name and sign):
        raise ConfigError("--set", pair, "is no NAME=VALUE", f"write --set {name or 'NAME'}=VALUE")
    return name, value


def argument_lines(words: tuple[str, ...]) -> list[str]:
    """One flag a line, values quoted as a shell needs it."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines
