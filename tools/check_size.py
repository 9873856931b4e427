"""Fail when a file or function is over the size budget: files 600 lines, functions 100.

Too small is as bad as too large, as a reader who must jump loses the thread. That has no limit: the number of source files and of
those under SHORT_LINES lines is printed, and never fails. Tests and the empty `__init__.py` of packages are not counted there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 100
SHORT_LINES = 60


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


def count_sources(paths: Sequence[Path]) -> str:
    """One line that says how many source files there are, and how many of them are short."""
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
    print("\n".join(complaints) or "sizes: every file and function is within the budget")
    print(count_sources(paths))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
