"""Write docs/flags.md, the reference of all flags of training, from the dataclasses that define them; or --check it."""

from __future__ import annotations

import argparse
import sys
import typing
from pathlib import Path

if __name__ == "__main__":
    # Only the folder of a script is on its path: the packages are one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import Flag, config_flags, field_docs

PAGE = Path(__file__).resolve().parents[1] / "docs/flags.md"
HEAD = """\
# Flags

Every flag of `pretrain_moe.py`, written by `tools/write_flag_reference.py` from the dataclasses of
[config.py](../megatron/training/cli/config.py) and [config_fields.py](../megatron/training/cli/config_fields.py): edit those,
not this page. Names, meanings and defaults are Megatron-LM's where it has the flag. `python pretrain_moe.py --help` prints the
same.
[Training](training.md#flags) says how flags are read, [overlap](overlap.md) how those of overlap work together.

A switch takes no value. `N` is a whole number, `X` a number. *Needs* names what a machine must have for another value than the
default; *with* names the flag without which this one has no effect.
"""
VALUES = {"int": "N", "float": "X", "str": "TEXT", "layers": "N or LIST", "pair": "N,N", "switch": ""}


def page() -> str:
    """The text of the page."""
    docs, flags = field_docs(), config_flags()
    texts = [HEAD]
    for group, cls in typing.get_type_hints(Config).items():
        title = " ".join(str(cls.__doc__).split())
        texts.append(
            f"\n## {title[0].upper()}{title[1:].rstrip('.')}\n\n| flag | value | default | meaning |\n|---|---|---|---|\n"
        )
        texts += [row(flag, docs[cls.__name__, flag.field], flags) for flag in flags if flag.group == group]
    return "".join(texts)


def row(flag: Flag, doc: str, flags: typing.Sequence[Flag]) -> str:
    """A flag as a row of its group's table."""
    names = [flag.off] if flag.off is not None else list(flag.names)
    value = f"{', '.join(f'`{choice}`' for choice in flag.choices)}" if flag.choices else VALUES[flag.kind]
    default = "on" if flag.off is not None else shown_default(flag)
    meaning = f"Turn off: {doc[0].lower()}{doc[1:]}" if flag.off is not None else doc
    meaning += f" *Needs {flag.needs}.*" if flag.needs is not None else ""
    if flag.of is not None:
        owner = next(other for other in flags if f"{other.group}.{other.field}" == flag.of)
        meaning += f" *With `{owner.off or owner.names[0]}`.*"
    cells = [", ".join(f"`{name}`" for name in names), value + (" …" if flag.many else ""), default, meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def shown_default(flag: Flag) -> str:
    """The default as one writes it; nothing if a switch is off or the value is derived."""
    if flag.kind == "switch" or flag.default is None:
        return ""
    value = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else str(flag.default)
    return f"`{value}`" if value else ""


def main() -> int:
    """Write the page, or with --check say whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    check = parser.parse_args().check
    text = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"out of date: {PAGE.name}; run tools/write_flag_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
