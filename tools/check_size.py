"""Fail when a file or function is over the size budget: files 600 lines, functions 100."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 100


def oversized(path: Path) -> list[str]:
    """Complaints about one Python file."""
    text = path.read_text()
    found = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{path}: {lines} lines, at most {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION_LINES}")
    return found


def main() -> int:
    """Check every Python file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    complaints = [line for name in listed.stdout.split() if Path(name).is_file() for line in oversized(Path(name))]
    print("\n".join(complaints) or "sizes: every file and function is within the budget")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
