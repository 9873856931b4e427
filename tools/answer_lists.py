"""Record how a dry run answers to argument lists of real jobs: `python tools/answer_lists.py [LISTS.json] [--write RECORD.md]`.

A list is a JSON object with `name`, `moe` and `arguments`. A list does not start on the CPU if it needs a GPU or a flag
that is not executed yet; the record names the first reason. Files of the lists' users need not exist.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Only the folder of a script is on its path: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench.real_lists import LISTS, ROOT, ListAnswer, answer

RECORD = ROOT / "examples/records/argument_lists.md"


def record(answers: Sequence[ListAnswer]) -> str:
    """The record's text."""
    accepted = sum(row.refused is None for row in answers)
    runnable = sum(row.refused is None and not row.stops for row in answers)
    lines = [
        "# Argument lists of real Megatron-LM jobs",
        "",
        "Written by `python tools/answer_lists.py --write examples/records/argument_lists.md`; a test keeps it equal. The",
        "lists are those that upstream's tests start, with paths as `${...}` (`tests/golden/argument_lists.json`).",
        "",
        f"Of {len(answers)} lists a dry run accepts {accepted}; {runnable} of them pass the checks of a start on a machine",
        "without a GPU, the others stop there with the line on the right.",
        "",
        "| list | MoE | dry run | refused, or stops a start on the CPU, because |",
        "|---|---|---|---|",
    ]
    for row in sorted(answers, key=lambda row: (not row.moe, row.name)):
        verdict = "accepted" if row.refused is None else "refused"
        reason = row.refused or (row.stops[0] if row.stops else "-")
        others = f" (and {len(row.stops) - 1} more)" if len(row.stops) > 1 else ""
        cells = (row.name, "yes" if row.moe else "no", verdict, (reason + others).replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command; exit status 0."""
    parser = argparse.ArgumentParser(description="What a dry run answers to argument lists of real jobs.")
    parser.add_argument("lists", type=Path, nargs="?", default=LISTS, help="the JSON file")
    parser.add_argument("--write", type=Path, help="write the record here instead of printing it")
    arguments = parser.parse_args()
    text = record([answer(entry) for entry in json.loads(arguments.lists.read_text(encoding="utf-8"))])
    if arguments.write is None:
        print(text, end="")
    else:
        arguments.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
