"""Texts that small packed files unpack to."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from moe_overlap.commands import preprocess_data
from moe_overlap.describe.errors import ConfigError


def test_a_packed_file_of_blank_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "MOST_BLANK_LINES", 3)

    def documents(text: bytes) -> int:
        path = tmp_path / "text.txt.gz"
        path.write_bytes(gzip.compress(text))
        return len(list(preprocess_data.read_documents([str(path)], "line", ("text",))))

    assert documents(b"a\n\n\n\nb\n\n \n\n") == 2
    with pytest.raises(ConfigError, match=r"text.txt.gz:5: 3 lines in a row are blank"):
        documents(b"a\n\n\n\n\nb\n")
