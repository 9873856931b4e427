"""Files that somebody else may have written are read within bounds, or answered by a phrase."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron.training.cli.arguments import expand_files
from moe_overlap.describe.cluster import load_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import read_expert_loads
from moe_overlap.describe.files import (
    Unreadable,
    bounded_bytes,
    bounded_json,
    names_file,
    new_file,
    plain_json,
    printable,
)
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.describe.readers.shell_script import MOST_SCRIPT_BYTES, script_flags
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.trace import read_traces

HANGS_SECONDS = 60.0
"""Far more than a busy machine needs; what must not be read has no end, or takes hours."""
READERS = (load_plan, load_cluster, read_expert_loads, read_model, read_traces)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_one_line(tmp_path: Path, reader: object) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text('{"a":' * 100_000)
    (tmp_path / "digits").write_text('{"a": ' + "9" * 100_000 + "}")
    (tmp_path / "large").write_bytes(b" ")
    os.truncate(tmp_path / "large", 1 << 40)
    begin = time.monotonic()
    for path in ("/dev/zero", *(tmp_path / name for name in ("pipe", "binary", "deep", "digits", "large"))):
        with pytest.raises(ConfigError) as caught:
            reader(Path(path) if reader is read_traces else str(path))  # type: ignore[operator]
        assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < HANGS_SECONDS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "holds NaN, which is no number"),
        ("[1e999]", "holds 1e999, which no number can be"),
        ("[-Infinity]", "holds -Infinity"),
        ('{"a": 1, "a": 2}', "holds the key a twice"),
        ("[" * 300 + "]" * 300, "nests deeper than 200 levels"),
        ("9" * 10_000, "holds a number of thousands of digits"),
        (b"\xff", "cannot be read: not UTF-8 text"),
        ("", "is no JSON: line 1"),
    ],
)
def test_json_that_is_not_plain(text: str | bytes, words: str) -> None:
    with pytest.raises(Unreadable) as caught:
        plain_json(text)
    assert str(caught.value).startswith(words)


def test_bounds(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1]")
    assert bounded_json(path) == [1] and bounded_bytes(path, 3) == b"[1]"
    with pytest.raises(Unreadable, match="^is too large: 3 bytes, at most 2 are read$"):
        bounded_bytes(path, 2)
    assert printable("a\x1b[2J\n" + "b" * 100, 10) == "a?[2J?bbb…"


def test_a_new_file_follows_no_link_and_has_a_name_that_nobody_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, other = tmp_path / "plan.json", tmp_path / "other"
    other.write_text("kept")
    with new_file(target) as first, new_file(target) as second:
        assert first != second and min(len(path.name) for path in (first, second)) >= len(".plan.json.") + 16
        first.write_text("first")
        second.write_text("second")
    monkeypatch.setattr("moe_overlap.describe.files.secrets.token_hex", lambda length: "guessed")
    with new_file(target) as guessed:
        guessed.write_text("third")
    guessed.symlink_to(other)
    with pytest.raises(FileExistsError), new_file(target) as written:
        written.write_text("through the link")
    assert (target.read_text(), other.read_text()) == ("third", "kept")


COMMAND = "\npython pretrain.py $A --x 1\n"
SCRIPTS = {
    "doubling": "A=x\n" + "A=$A$A\n" * 60,
    "doubling by +=": f"A={'x' * 1000}\n" + "A+=$A\n" * 60,
    "mutual": "A='$B$B'\nB='$A$A'\n",
    "appended": f"A={'x' * 30000}\n" + "A+=y\n" * 20_000,
    "open quotation": 'A="' + "x\n" * 100_000,
    "white space": f"if [ 1{' ' * 20_000}]; then\nA=1\nfi",
    "digits": f"A=$(({'9' * 5000} + 1))",
    "powers": "A=9\n" + "A=$((A*99999999))\n" * 2000,
    "stars": f'A="{"a" * 5000}"\ncase $A in\n{"*a" * 2000}b) B=1;;\nesac',
    "calls": "".join(f"f{n}() {{ {f'f{n + 1}; ' * 100} }}\n" for n in range(7)) + "f7() { A=1; }\nf0",
    "digits of a name": f"f() {{ A=${{{'1' * 5000}}}; }}\nf",
    "not not": f"if [[ {'! ' * 3000} a == b ]]; then A=1; fi",
    "large": " " * (MOST_SCRIPT_BYTES + 1),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_that_grow_end(name: str) -> None:
    begin = time.monotonic()
    try:
        flags = script_flags(SCRIPTS[name] + COMMAND, {}, "job.sh")
    except ConfigError as error:
        assert str(error).startswith("job.sh")
        assert name not in ("white space", "stars"), error
    else:
        assert flags.arguments[-2:] == ("--x", "1")
    assert time.monotonic() - begin < HANGS_SECONDS


def test_argument_files_that_name_each_other(tmp_path: Path) -> None:
    for level in range(40):
        (tmp_path / f"{level}.args").write_text(f"@{level + 1}.args @{level + 1}.args\n")
    (tmp_path / "40.args").write_text("--lr 1\n")
    with pytest.raises(
        ConfigError, match="is one of more than 1000 files, or 50 files deep; write the flags into fewer"
    ):
        list(expand_files(["@0.args"], tmp_path))
    os.mkfifo(tmp_path / "pipe.args")
    with pytest.raises(
        ConfigError, match=r"^@pipe.args: cannot read .*pipe.args: is no regular file; correct the path"
    ):
        list(expand_files(["@pipe.args"], tmp_path))
    with pytest.raises(ConfigError, match=r"^@/dev/zero: cannot read /dev/zero: is no regular file;"):
        list(expand_files(["@/dev/zero"], tmp_path))


def test_what_no_path_can_be_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "job.args").write_text("--bf16")
    assert names_file(str(tmp_path / "job.args"))
    assert not any(names_file(word) for word in (str(tmp_path), "x" * 5000, "a\0b", ""))
