"""One fault: what is broken, how it is tried, and the line that the user must read. `table.py` lists all of them.

Faults cost one of three prices. `call`s inside this process answer in milliseconds and are tried in every test run; those that
start ranks take seconds and are tried in slow runs; those that wait for a timeout, start a launcher, or are tried by another
slow test are left to the hand (`python -m tests.faults`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from moe_overlap.describe.errors import ConfigError
from tests.end_to_end.program import environment

Price = Literal["fast", "slow", "hand"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its answer.

    Attributes:
        name: unique.
        broken: what is broken, for the reader of the table.
        call: breaks it below an empty folder, and returns what the user reads, lines joined by ` | `.
        line: the expected answer; `F` stands for the folder, `…` for anything.
    """

    name: str
    broken: str
    call: Callable[[Path], str]
    line: str
    price: Price = "fast"

    def answer(self, folder: Path) -> str:
        """The text that the user reads, with `F` for the folder."""
        return self.call(folder).replace(str(folder), "F")

    def agrees(self, answer: str) -> bool:
        """Whether an answer is the expected one."""
        return re.fullmatch(re.escape(self.line).replace("…", ".*"), answer) is not None


def refusal(work: Callable[[], Any]) -> str:
    """The user's error of some work; `accepted` where it has none."""
    try:
        work()
    except ConfigError as error:
        return f"error: {error}"
    return "accepted"


def command(words: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """The training program's answer to a command line that it refuses, before any rank is started."""
    from moe_overlap.commands.train import main

    error, out = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(variables), clear=True),
        mock.patch("moe_overlap.commands.train.train", side_effect=AssertionError("the command was accepted")),
        mock.patch("moe_overlap.commands.launcher.start_ranks", side_effect=AssertionError("the ranks were started")),
        mock.patch("moe_overlap.commands.exits.time.sleep"),
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(out),
    ):
        status = main(list(words))
    return " | ".join([*error.getvalue().splitlines(), *([] if status == 2 else [f"status {status}"])])


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let this process write files of so many bytes only: what a full disk does, on any disk and for any user."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
