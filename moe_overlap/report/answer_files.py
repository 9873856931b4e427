"""The files of an answer in a folder that may hold those of an earlier one: files of two answers never stand side by side.

A script of one answer beside the plan of another would start what nobody predicted. A new answer replaces the files of the
earlier one by name, and an earlier file that it lacks gets another name (`NAME.old`). A plan or a script that no answer has
written is neither replaced nor renamed; of the other files nobody can tell who has written them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text
from moe_overlap.plan.serialize import load_plan
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, WRITTEN_BY

PLAN = "plan.json"
FILES = (ARGUMENTS, SCRIPT, PLAN, "report.html", "trace.json")
"""Names under which answers are written."""
OLD = ".old"
"""Suffix of a file that stood in the folder and is no part of the answer."""
MOST_SCRIPT_BYTES = 1 << 20


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


def put_away_others(folder: Path, written: Sequence[str], tell: Callable[[str], None]) -> None:
    """Rename the files of an earlier answer that the answer in a folder lacks.

    Args:
        written: names of the answer's files; none where there is no answer.
        tell: is told which files have another name now.
    Raises:
        ConfigError: the folder cannot be written.
    """
    paths = [folder / name for name in FILES if name not in written]
    stale = [path.name for path in paths if path.is_file() and _is_of_an_answer(path)]
    try:
        for name in stale:
            # Two shards may find that all answers are there, and one of them has done it.
            with suppress(FileNotFoundError):
                (folder / name).replace(folder / f"{name}{OLD}")
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None
    if stale:
        renamed = ", ".join(f"{name}{OLD}" for name in stale)
        them = "it is" if len(stale) == 1 else "they are"
        tell(f"not of this answer: {', '.join(stale)} in {folder}; {them} now {renamed}")


def _is_of_an_answer(path: Path) -> bool:
    """Whether an answer may have written a file: of plans and scripts their content tells."""
    try:
        if path.name == SCRIPT:
            return WRITTEN_BY in bounded_text(path, MOST_SCRIPT_BYTES)
        if path.name == PLAN:
            load_plan(path)
    except (ConfigError, Unreadable):
        return False
    return True
