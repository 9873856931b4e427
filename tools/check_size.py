"""Fail when a file, a function or a folder is over its size budget, or a new commit has an unclear subject.

1. A file has at most 600 lines, a function at most 100.
2. A folder has at most the files and lines of BUDGET. A commit that needs more raises the number and states the reason.
3. Subjects of commits after SUBJECTS_FROM name an area and have at most 72 columns: "search: prune layouts by host launches".

Too small is as bad as too large, as a reader who must jump loses the thread. That has no limit: the number of source files and of
those under SHORT_LINES lines is printed, and never fails. Tests and the empty `__init__.py` of packages are not counted there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FILE_LINES = 600
FUNCTION_LINES = 100
SHORT_LINES = 60


class Size(NamedTuple):
    """Python files of a folder and the folders in it, and their lines."""

    files: int
    lines: int


BUDGET = {
    "megatron/training": Size(62, 13910),
    "megatron/training/checkpoint": Size(11, 2510),
    "megatron/training/cli": Size(22, 5030),
    "megatron/training/data": Size(6, 1800),
    "megatron/training/model": Size(8, 1660),
    "moe_overlap/commands": Size(20, 3760),
    "moe_overlap/describe": Size(24, 5090),
    "moe_overlap/plan": Size(29, 7520),
    "moe_overlap/plan_search": Size(13, 3140),
    "moe_overlap/report": Size(18, 3500),
    "moe_overlap/runtime": Size(42, 9180),
    "moe_overlap/tuner": Size(128, 33000),
    "moe_overlap/tuner/calibrate": Size(14, 2990),
    "moe_overlap/tuner/capture": Size(23, 6910),
    "moe_overlap/tuner/cost": Size(33, 8330),
    "moe_overlap/tuner/profile": Size(6, 1450),
    "moe_overlap/tuner/search": Size(43, 11890),
    "moe_overlap/tuner/write": Size(7, 1560),
    "tools": Size(54, 8610),
}
"""Folder -> its largest size; a folder inside another counts for both."""
SLACK_LINES = 100
"""A budget that exceeds its folder by more is lowered, so that what one commit removed is not free for another."""

SUBJECTS_FROM = "256c65f088ce"
"""The last commit whose subject is not checked."""
SUBJECT = re.compile(r"[a-z][\w./, -]*: \S.*")
SUBJECT_COLUMNS = 72


def oversized(path: Path) -> list[str]:
    """Complaints about one Python file."""
    text = path.read_text()
    complaints = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        complaints.append(f"{path}: {lines} lines, at most {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                complaints.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION_LINES}")
    return complaints


def over_budget(paths: Sequence[Path], budget: Mapping[str, Size]) -> list[str]:
    """Complaints about folders whose size differs from the budget: more than it, or so much less that it is no limit."""
    complaints = []
    for folder, limit in budget.items():
        inside = [path for path in paths if path.is_relative_to(folder) and path.name != "__init__.py"]
        size = Size(len(inside), sum(path.read_text().count("\n") for path in inside))
        if size.files > limit.files or size.lines > limit.lines:
            rule = f"at most {limit.files} and {limit.lines}: remove some, or raise BUDGET in {Path(__file__).name} and say why"
            complaints.append(f"{folder}: {size.files} files, {size.lines} lines, {rule}")
        elif size.files < limit.files or size.lines < limit.lines - SLACK_LINES:
            complaints.append(
                f"{folder}: {size.files} files, {size.lines} lines: lower BUDGET in {Path(__file__).name} to that"
            )
    return complaints


def unclear_subjects(subjects: Sequence[str]) -> list[str]:
    """Complaints about subjects of commits."""
    rule = f'write "area: what changed" in at most {SUBJECT_COLUMNS} columns'
    return [
        f"commit subject {subject!r}: {rule}"
        for subject in subjects
        if len(subject) > SUBJECT_COLUMNS or not SUBJECT.fullmatch(subject)
    ]


def new_subjects() -> list[str]:
    """Subjects of the commits after SUBJECTS_FROM, without merges; none if a shallow clone lacks it."""
    command = ["git", "log", "--no-merges", "--format=%s", f"{SUBJECTS_FROM}..HEAD"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()


def count_sources(paths: Sequence[Path]) -> str:
    """One line with the number of source files, and of short ones."""
    sources = [path for path in paths if path.parts[0] != "tests" and path.name != "__init__.py"]
    short = sum(path.read_text().count("\n") < SHORT_LINES for path in sources)
    return f"sources: {len(sources)} files, {short} of them under {SHORT_LINES} lines"


def main() -> int:
    """Check every Python file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(name) for name in listed.stdout.split() if Path(name).is_file()]
    complaints = [line for path in paths for line in oversized(path)]
    complaints += [*over_budget(paths, BUDGET), *unclear_subjects(new_subjects())]
    print("\n".join(complaints) or "sizes: every file, function and folder is within its budget")
    print(count_sources(paths))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
