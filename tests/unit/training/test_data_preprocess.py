"""tools/preprocess_data.py: text files to indexed datasets, and one line for each mistake."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.data.tokenizers import ByteTokenizer, TokenizerFiles
from moe_overlap.commands import preprocess_data
from moe_overlap.describe.errors import ConfigError

ROOT = Path(__file__).parents[3]


def texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    return [ByteTokenizer().detokenize(ids) for ids in dataset[0 : len(dataset)]]  # type: ignore[union-attr]


def test_json_lines_by_workers_in_a_process_of_its_own(tmp_path: Path) -> None:
    records = [
        {"text": f"Größe {i}", "title": f"t{i}" if i else ""} for i in range(12_000)
    ]  # more portions than wait at a time
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress("\n\n".join(json.dumps(r) for r in records).encode()))
    command = [
        sys.executable,
        "tools/preprocess_data.py",
        "--input",
        str(source),
        "--append-eod",
        "--workers",
        "2",
    ]
    command += [
        "--json-keys",
        "text",
        "title",
        "--log-interval",
        "5000",
        "--output-prefix",
        str(tmp_path / "out" / "d"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert texts(tmp_path / "out" / "d_text_document") == [r["text"] for r in records]
    assert texts(tmp_path / "out" / "d_title_document") == [r["title"] for r in records if r["title"]]
    dataset = IndexedDataset(str(tmp_path / "out" / "d_text_document"))
    assert dataset[7][-1] == ByteTokenizer.eod
    assert "12,000 documents" in done.stdout and "left out 1 empty" in done.stdout
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["5,000", "10,000"]


@pytest.mark.parametrize(("unit", "expected"), [("file", ["a\n\nö\n", "b"]), ("line", ["a", "ö", "b"])])
def test_plain_text(tmp_path: Path, unit: str, expected: list[str]) -> None:
    (tmp_path / "1.txt").write_text("a\n\nö\n", encoding="utf-8")
    (tmp_path / "2.txt").write_text("b")
    flags = ["--input", str(tmp_path / "1.txt"), str(tmp_path / "2.txt"), "--txt-documents", unit]
    assert preprocess_data.main([*flags, "--output-prefix", str(tmp_path / "out")]) == 0
    assert texts(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": x}\n', [], "a.jsonl:2: is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n', ["--json-keys", "body"], "a.jsonl:1: has no text under the key 'body'"),
        ("a.jsonl", b'{"text": 5}\n', [], "a.jsonl:1: has no text under the key 'text'"),
        ("a.jsonl", b'{"text": "\xff"}\n', [], "a.jsonl:1: is not UTF-8"),
        ("a.jsonl", b"\n", [], "holds no text under 'text'"),
        ("a.jsonl.gz", b"no gzip", [], "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], [], "a.jsonl.gz: cannot be read"),
        ("a.csv", b"x", [], "a.csv: has an unknown ending"),
        ("a.txt", b"x", ["--json-keys", "body"], "--json-keys body: "),
        ("a.txt", b"1 2 x", ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], "the text holds 'x'"),
        ("a.parquet.gz", b"x", [], "has an unknown ending"),
        ("a.txt", b"x", ["--vocab-file", "v"], "--vocab-file v: is used by --tokenizer-type GPT2BPETokenizer only"),
        ("a.txt", b"x", ["--workers", "0"], "--workers 0: must be at least 1"),
        ("a.txt", b"x", ["--split-sentences"], "--split-sentences: not supported"),
        ("a.txt", b"x", ["--tokenizer-type", "Foo"], "--tokenizer-type Foo: is not supported"),
        (
            "a.txt",
            b"x",
            ["--tokenizer-type", "Foo", "--tokenizer-model", "."],
            "--tokenizer-type Foo: is not supported",
        ),
        ("a.txt", b"x", ["--output-prefix", "/proc/none/x"], "--output-prefix /proc/none/x: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, flags: list[str], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["--input", str(tmp_path / name), "--output-prefix", str(out / "d"), *flags]
    assert preprocess_data.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not list(out.iterdir())


def test_a_single_document_is_said_with_what_makes_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    flags = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "d")]
    assert preprocess_data.main(flags) == 0
    said = capsys.readouterr().out
    assert ": 1 document, 4 tokens" in said and "--txt-documents line makes a document of every line" in said
    assert preprocess_data.main([*flags, "--txt-documents", "line"]) == 0
    said = capsys.readouterr().out
    assert ": 2 documents, 2 tokens" in said and "--txt-documents" not in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output-prefix", "d", "--append-eot"], "--append-eot: is no flag of this tool; did you mean --append-eod?"),
        ([], "--output-prefix: is missing; add --output-prefix PREFIX"),
    ],
)
def test_flags_that_there_are_not(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        preprocess_data.main(["--input", "a.txt", *flags])
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_found_by_a_worker_arrives(workers: int) -> None:
    documents = [preprocess_data.Document(f"f:{i}", b"{}" if i == 7 else b'{"text": "x"}', True) for i in range(9)]
    encoding = preprocess_data.Encoding(None, TokenizerFiles(), None, ("text",), False)
    with pytest.raises(ConfigError) as caught:
        list(preprocess_data.encode_all(encoding, iter(documents), workers))
    assert (caught.value.subject, caught.value.value) == ("--input", "f:7")
    assert caught.value.rule == "has no text under the key 'text'"


def test_parquet_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(preprocess_data, "is_installed", lambda name: False)
    assert preprocess_data.main(["--input", str(tmp_path / "a.parquet"), "--output-prefix", str(tmp_path / "d")]) == 2
    assert capsys.readouterr().err.endswith('needs the package pyarrow; pip install -e ".[data]"\n')


def test_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"text": [f"Größe {i}" for i in range(2500)], "title": ["t"] * 2500, "n": list(range(2500))}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    flags = ["--input", str(tmp_path / "a.parquet"), "--output-prefix", str(tmp_path / "d")]
    assert preprocess_data.main([*flags, "--json-keys", "text", "title"]) == 0
    assert texts(tmp_path / "d_text_document") == rows["text"]
    assert texts(tmp_path / "d_title_document") == rows["title"]
    for key, message in (("body", "has no column 'body'"), ("n", "a.parquet:1: has no text under the key 'n'")):
        assert preprocess_data.main([*flags, "--json-keys", key]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert preprocess_data.main(flags) == 2
    assert "a.parquet: cannot be read" in capsys.readouterr().err


class FakeParquetFile:
    """The part of pyarrow.parquet.ParquetFile that is used, over rows in JSON."""

    def __init__(self, path: str) -> None:
        self.rows = json.loads(Path(path).read_text())
        self.schema_arrow = SimpleNamespace(names=list(self.rows[0]))

    def __enter__(self) -> FakeParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def iter_batches(self, batch_size: int, columns: list[str]) -> Iterator[SimpleNamespace]:
        for first in range(0, len(self.rows), 2):
            part = [{key: row[key] for key in columns} for row in self.rows[first : first + 2]]
            yield SimpleNamespace(to_pylist=lambda part=part: part)


def test_rows_of_parquet_become_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documents that we make of the package's rows; the package itself is stood in for."""
    fake = SimpleNamespace(ArrowException=ValueError, parquet=SimpleNamespace(ParquetFile=FakeParquetFile))
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    monkeypatch.setattr(preprocess_data, "is_installed", lambda name: True)
    rows = [{"text": f"ö{i}", "n": i} for i in range(5)]
    (tmp_path / "a.parquet").write_text(json.dumps(rows))
    flags = ["--input", str(tmp_path / "a.parquet"), "--output-prefix", str(tmp_path / "d")]
    assert preprocess_data.main(flags) == 0
    assert texts(tmp_path / "d_text_document") == [row["text"] for row in rows]
    for key, message in (("body", "has no column 'body'; name columns"), ("n", "a.parquet:1: has no text under")):
        assert preprocess_data.main([*flags, "--json-keys", key]) == 2
        assert message in capsys.readouterr().err
