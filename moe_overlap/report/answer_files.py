"""The files of an answer in a folder that may hold those of an earlier one: none of two answers stand side by side.

A script of one answer beside the plan of another would start what nobody predicted. The files of the new answer replace those of
the earlier one; what the new one has not goes by another name. A file that only bears the name of one is not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text
from moe_overlap.plan.serialize import load_plan
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, WRITTEN_BY

PLAN = "plan.json"
FILES = (ARGUMENTS, SCRIPT, PLAN, "report.html", "trace.json")
"""Names under which answers are written."""
OLD = ".old"
"""Behind the name of a file that stood in the folder and is not of the answer."""
MOST_SCRIPT_BYTES = 1 << 20
Tell = Callable[[str], None]


def on_standard_error(text: str) -> None:
    """Say a line beside the answer."""
    print(text, file=sys.stderr, flush=True)


def require_no_other_files(folder: Path, has_script: bool = True) -> None:
    """Refuse a folder whose plan or script no answer has written: the answer would take its place.

    Args:
        has_script: whether the answer has one.
    Raises:
        ConfigError: it names the file.
    """
    for name in (PLAN, *([SCRIPT] if has_script else [])):
        path = folder / name
        if path.is_file() and not _is_of_an_answer(path):
            rule = f"{path} is not of an answer, and would be replaced"
            raise ConfigError("--output", str(folder), rule, "give another folder, or move the file")


def _is_of_an_answer(path: Path) -> bool:
    """Whether an answer may have written a file: of scripts and plans that is seen."""
    try:
        if path.name == SCRIPT:
            return WRITTEN_BY in bounded_text(path, MOST_SCRIPT_BYTES)
        if path.name == PLAN:
            load_plan(path)
    except (ConfigError, Unreadable):
        return False
    return True


@contextmanager
def replacing_answer(folder: Path, tell: Tell = on_standard_error) -> Iterator[list[str]]:
    """The names of an answer's files, to which the block adds what it writes to a folder.

    Args:
        tell: is told which files of an earlier answer have other names now.
    Raises:
        ConfigError: the folder cannot be written.
    """
    written: list[str] = []
    yield written
    _put_away(folder, [name for name in FILES if name not in written], tell)


def withdraw_answer(folder: Path, tell: Tell = on_standard_error) -> None:
    """Put away the earlier answer of a folder for which there is none today.

    Raises:
        ConfigError: the folder cannot be written.
    """
    _put_away(folder, FILES, tell)


def _put_away(folder: Path, names: Sequence[str], tell: Tell) -> None:
    paths = [folder / name for name in names]
    stale = [path.name for path in paths if path.is_file() and _is_of_an_answer(path)]
    try:
        for name in stale:
            # Two shards may find that all answers are there, and one of them has done it.
            with suppress(FileNotFoundError):
                (folder / name).replace(folder / f"{name}{OLD}")
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None
    if stale:
        them = "it is" if len(stale) == 1 else "they are"
        tell(
            f"not of this answer: {', '.join(stale)} in {folder}; {them} now {', '.join(f'{name}{OLD}' for name in stale)}"
        )
