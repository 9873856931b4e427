"""Write `examples/NAME.args` from `examples/models/NAME.json`: the same facts, in the form pretrain_moe.py reads."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from moe_overlap.describe.readers.model_file import flags_with_values

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def argument_file(description: dict[str, Any]) -> str:
    """The text of an argument file.

    Args:
        description: name, source, and flags by name without dashes: a value, a list of values, or true for a switch.
    """
    lines = [f"# {description['name']}: {description['source']}", "# written by tools/write_model_args.py"]
    for flag, values in flags_with_values(description["flags"]):
        lines.append(" ".join([flag, *map(shlex.quote, values)]))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write every file, or with --check say which ones are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for path in sorted((EXAMPLES / "models").glob("*.json")):
        text = argument_file(json.loads(path.read_text(encoding="utf-8")))
        target = EXAMPLES / f"{path.stem}.args"
        if check and (not target.exists() or target.read_text(encoding="utf-8") != text):
            stale.append(target.name)
        if not check:
            target.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run tools/write_model_args.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
