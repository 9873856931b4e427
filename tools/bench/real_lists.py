"""Argument lists of real jobs, and the answer of a dry run to one; a list is an object with `name`, `moe` and `arguments`."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.start import VARIABLE, StartMachine, obstacles
from moe_overlap.describe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / "tests/golden/argument_lists.json"
CPU = StartMachine(cuda=False, packages=frozenset())


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """The answer of a dry run to one list.

    Attributes:
        refused: the error's line, or None if it is accepted.
        stops: lines of what stops a start on the CPU.
    """

    name: str
    moe: bool
    refused: str | None
    stops: tuple[str, ...]


def answer(entry: dict[str, Any]) -> ListAnswer:
    """Execute a dry run of one list; errors other than the user's pass through."""
    try:
        # Places of data and checkpoints are variables that the job's environment gives; any value will do.
        parsed = parse([VARIABLE.sub("given", word) for word in entry["arguments"]])
        dry_run(parsed, None, io.StringIO())
    except ConfigError as error:
        return ListAnswer(entry["name"], entry["moe"], str(error), ())
    return ListAnswer(entry["name"], entry["moe"], None, tuple(str(obstacle) for obstacle in obstacles(parsed, CPU)))
