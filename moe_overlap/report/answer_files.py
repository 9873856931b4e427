"""The files of an answer in a folder that may hold an earlier answer: files of two answers are never mixed.

The script of one answer with the plan of another would start a run that was never predicted. A new answer replaces the earlier
files of the same name; an earlier file without a successor is renamed to `NAME.old`. A plan or script that does not come from an
answer is neither replaced nor renamed; the other files do not show where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text, write_whole
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import load_plan, save_plan
from moe_overlap.tuner.write.argument_file import Target, WrittenFlags
from moe_overlap.tuner.write.slurm import ARGUMENTS, SCRIPT, WRITTEN_BY, job_on, run_environment, slurm_script

PLAN = "plan.json"
FILES = (ARGUMENTS, SCRIPT, PLAN, "report.html", "trace.json")
"""Names of the files of an answer."""
OLD = ".old"
"""Suffix of a file of an earlier answer that the new answer lacks."""
MOST_SCRIPT_BYTES = 1 << 20


def require_no_other_files(folder: Path, has_script: bool = True) -> None:
    """Refuse a folder with a plan or script that does not come from an answer and that the new answer would replace.

    Args:
        has_script: whether the new answer has a script.
    Raises:
        ConfigError: there is such a file; the error names it.
    """
    for name in (PLAN, *([SCRIPT] if has_script else [])):
        path = folder / name
        if path.is_file() and not _is_of_an_answer(path):
            rule = f"{path} is not of an answer, and would be replaced"
            raise ConfigError("--output", str(folder), rule, "give another folder, or move the file")


def run_texts(written: WrittenFlags, plan: Plan, cluster: Cluster, target: Target) -> dict[str, str]:
    """File name -> text, for the flags and the script that starts them; no script for a measured machine, which may lack Slurm.

    Raises:
        ConfigError: nodes have different numbers of GPUs.
    """
    texts = {ARGUMENTS: written.text}
    if cluster.measured is None:
        environment = run_environment(plan, written.flags, cluster.group_of(0).gpu.architecture, target)
        texts[SCRIPT] = slurm_script(job_on(cluster, plan.model.name), target, written, environment)
    return texts


def write_run_files(folder: Path, texts: Mapping[str, str], plan: Plan | None) -> None:
    """Write the files that start a run.

    Raises:
        ConfigError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The plan first: otherwise, after a failure, new flags would silently run an earlier plan.
        if plan is not None:
            save_plan(plan, folder / PLAN)
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None


def put_away_others(folder: Path, written: Sequence[str], tell: Callable[[str], None]) -> None:
    """Rename the files of an earlier answer that the answer in a folder lacks.

    Args:
        written: names of the new answer's files; empty without a new answer.
        tell: receives a message about the renamed files.
    Raises:
        ConfigError: the folder cannot be written.
    """
    paths = [folder / name for name in FILES if name not in written]
    stale = [path.name for path in paths if path.is_file() and _is_of_an_answer(path)]
    try:
        for name in stale:
            # Another command may have renamed it already.
            with suppress(FileNotFoundError):
                (folder / name).replace(folder / f"{name}{OLD}")
    except OSError as error:
        raise ConfigError("--output", str(folder), f"cannot be written: {error.strerror}", "give another") from None
    if stale:
        renamed = ", ".join(f"{name}{OLD}" for name in stale)
        verb = "it is" if len(stale) == 1 else "they are"
        tell(f"not of this answer: {', '.join(stale)} in {folder}; {verb} now {renamed}")


def _is_of_an_answer(path: Path) -> bool:
    """Whether a file may come from an answer; only plans and scripts show it by their content."""
    try:
        if path.name == SCRIPT:
            return WRITTEN_BY in bounded_text(path, MOST_SCRIPT_BYTES)
        if path.name == PLAN:
            load_plan(path)
    except (ConfigError, Unreadable):
        return False
    return True
