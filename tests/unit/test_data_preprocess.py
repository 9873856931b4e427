"""tools/preprocess_data.py: text files to indexed datasets, and one line for each mistake."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.tokenizers import ByteTokenizer
from tools import preprocess_data

ROOT = Path(__file__).parents[2]


def texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    return [ByteTokenizer().detokenize(ids) for ids in dataset[0 : len(dataset)]]  # type: ignore[union-attr]


def test_json_lines_by_workers_in_a_process_of_its_own(tmp_path: Path) -> None:
    records = [
        {"text": f"Größe {i}", "title": f"t{i}" if i else ""} for i in range(12_000)
    ]  # more portions than wait at a time
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress("\n\n".join(json.dumps(r) for r in records).encode()))
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(source), "--append-eod", "--workers", "2"]
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
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], [], "a.jsonl.gz: cannot be read"),
        ("a.csv", b"x", [], "a.csv: has an unknown ending"),
        ("a.txt", b"x", ["--json-keys", "body"], "--json-keys body: "),
        ("a.txt", b"1 2 x", ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], "the text holds 'x'"),
        ("a.txt", b"x", ["--workers", "0"], "--workers 0: must be at least 1"),
        ("a.txt", b"x", ["--split-sentences"], "--split-sentences: not supported"),
        ("a.txt", b"x", ["--append-eot"], "--append-eot: unknown flag; did you mean --append-eod?"),
        ("a.txt", b"x", ["--tokenizer-type", "Foo"], "--tokenizer-type Foo: is not supported"),
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


def test_a_mistake_found_by_a_worker_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [preprocess_data.Document(f"f:{i}", b"{}" if i == 7 else b'{"text": "x"}', True) for i in range(9)]
    encoding = preprocess_data.Encoding(None, None, None, ("text",), False)
    (result,) = preprocess_data.encode_all(encoding, iter(documents), 1)
    assert result.mistake is not None and result.mistake[1] == "f:7"
