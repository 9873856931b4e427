"""The built-in corpus: the Python standard library's own sources, real text that is on every machine. No torch.

One document per file, as text. Folders of installed packages are left out; test folders are kept (where a distribution
ships them they are about two thirds of the text). Documents come in the order of a hash of their path: a dataset is
split by position, and in alphabetical order validation would see nothing but xml, zipfile and zoneinfo.
"""

from __future__ import annotations

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """What the corpus holds; `digest` names the content."""

    files: int
    text_bytes: int
    digest: str


def standard_library_folder() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def builtin_corpus_documents(folder: Path | None = None) -> Iterator[str]:
    """Sources of the standard library, one text per file, in an order that does not depend on the file system.

    Args:
        folder: the tree to read; default the running interpreter's standard library.
    Yields:
        Texts. Empty files, and files that do not decode as their coding line says (test inputs), are left out.
    """
    root = folder or standard_library_folder()
    paths = [p for p in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts)]
    for path in sorted(paths, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest()):
        try:
            with tokenize.open(path) as source:
                text = source.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if text.strip():
            yield text


def summarize_corpus(folder: Path | None = None) -> CorpusSummary:
    """Read the corpus once: number of files, bytes of UTF-8 text, and a digest of content and order."""
    files, text_bytes, digest = 0, 0, hashlib.sha256()
    for text in builtin_corpus_documents(folder):
        data = text.encode("utf-8", "surrogatepass")
        files, text_bytes = files + 1, text_bytes + len(data)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return CorpusSummary(files, text_bytes, digest.hexdigest())
