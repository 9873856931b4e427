"""Every module that opens files for reading stands in SECURITY.md, with what it opens."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    "open",
    "read_text",
    "read_bytes",
    "memmap",
    "fromfile",
    "open_memmap",
    "ParquetFile",
    "from_pretrained",
    "from_file",
}
LIBRARIES = {"numpy.load", "torch.load", "pickle.load", "pickle.loads", "gzip.open", "tarfile.open", "zipfile.ZipFile"}
OWN = {"self.open", "self.stages.open", "self._saver.open", "Database.open"}
"""Methods of ours by that name."""
HEADING = "## Where files are opened"


def calls_of(tree: ast.AST) -> Iterator[str]:
    """Calls that open or read a file: by the last word of the name, or the whole of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if whole in OWN:
                continue
            if whole in LIBRARIES or whole.rpartition(".")[2] in CALLS and not {"w", "wb", "a", "x"} & set(modes):
                yield whole


def test_the_table_has_every_module_that_opens_files() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    told = {path for path in re.findall(r"\]\(([\w/]+\.py)\)", section) if not path.startswith("tests/")}
    opening = {
        str(path.relative_to(ROOT))
        for folder in ("moe_overlap", "megatron/training")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if any(calls_of(ast.parse(path.read_text())))
    }
    assert opening - told == set(), "not in the table"
    assert told - opening == set(), "opens nothing"
