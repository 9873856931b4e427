"""Record how a dry run answers to argument lists of real jobs: `python tools/answer_lists.py [LISTS.json] [--write RECORD.md]`.

A list is a JSON object with `name`, `moe` and `arguments`. What stops a start on the CPU is what the CPU lacks, or what is not
executed yet; the record names the first reason. Files that the lists' users have are not asked for.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.start import VARIABLE, Machine, obstacles
from moe_overlap.describe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests/golden/argument_lists.json"
RECORD = ROOT / "examples/records/argument_lists.md"
CPU = Machine(cuda=False, packages=frozenset())


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a dry run to one list.

    Attributes:
        refused: the error's line, or None where it is accepted.
        stops: lines of what stops a start on the CPU.
    """

    name: str
    moe: bool
    refused: str | None
    stops: tuple[str, ...]


def answer(entry: dict[str, Any]) -> Answer:
    """Execute a dry run of one list; errors other than the user's pass through."""
    try:
        # Places of data and checkpoints are variables that the job's environment gives; any value will do.
        parsed = parse([VARIABLE.sub("given", word) for word in entry["arguments"]])
        dry_run(parsed, None, io.StringIO())
    except ConfigError as error:
        return Answer(entry["name"], entry["moe"], str(error), ())
    return Answer(entry["name"], entry["moe"], None, tuple(str(obstacle) for obstacle in obstacles(parsed, CPU)))


def record(answers: Sequence[Answer]) -> str:
    """The record's text."""
    accepted = sum(answer.refused is None for answer in answers)
    runnable = sum(answer.refused is None and not answer.stops for answer in answers)
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
    for answer in sorted(answers, key=lambda answer: (not answer.moe, answer.name)):
        verdict = "accepted" if answer.refused is None else "refused"
        reason = answer.refused or (answer.stops[0] if answer.stops else "-")
        others = f" (and {len(answer.stops) - 1} more)" if len(answer.stops) > 1 else ""
        cells = (answer.name, "yes" if answer.moe else "no", verdict, (reason + others).replace("|", "\\|"))
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
