"""A path at which the system refuses even a look is one line of every command, and no word of a command line moves the cursor.

Names that are too long stand for folders that may not be entered, which tests of an administrator cannot make: the question
whether a file exists fails for both.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_overlap.commands import (
    autotune,
    check_data,
    compare,
    import_flags,
    predict,
    preprocess_data,
    profile_cluster,
    show_plan,
    train,
)
from moe_overlap.describe.errors import system_refusal
from tools import draw_overlap

ROOT = Path(__file__).resolve().parents[3]
LONG = "n" * 300
ESCAPE = "\x1b[2J"
TINY = f"@{ROOT}/examples/tiny-mixtral-8x7b.args"
PICTURE = ROOT / "examples/records/2026-11-22_overlap_picture_2cpu"
REFUSED: dict[str, tuple[Callable[..., int], list[str]]] = {
    "a plan of a dry run": (train.main, [TINY, "--plan", LONG, "--dry-run"]),
    "a model": (train.main, ["--model", LONG]),
    "a folder to load from": (train.main, [TINY, "--load", LONG, "--use-checkpoint-args"]),
    "a folder that holds the folder to load from": (train.main, [TINY, "--load", f"{LONG}/x", "--dry-run"]),
    "a dataset": (train.main, [TINY, "--data-path", LONG, "--nproc-per-node", "2"]),
    "a dataset that is checked": (check_data.main, [LONG]),
    "text": (preprocess_data.main, ["--input", f"{LONG}.txt", "--output-prefix", "out"]),
    "the flags of a script": (import_flags.main, [str(ROOT / "tests/golden/train_moe.sh"), "--output", LONG]),
    "a picture": (draw_overlap.main, [f"{PICTURE}/without.json", f"{PICTURE}/with.json", "--output", LONG]),
    "a measured cluster": (profile_cluster.main, ["--output", f"{LONG}.json"]),
    "a searched plan": (
        autotune.main,
        ["--gpu", "H100", "--num-gpus", "8", "--megatron-args", f"{ROOT}/examples/mixtral-8x7b.args", "--output", LONG],
    ),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of any job, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("what", REFUSED)
def test_a_path_that_is_refused_is_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    main, words = REFUSED[what]
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert LONG in said.err and "File name too long" in said.err


def test_an_error_that_names_no_path_stays_one() -> None:
    with pytest.raises(ConnectionError):
        system_refusal(ConnectionResetError(errno.ECONNRESET, "reset"))
    line = "/a/b: cannot be used: Permission denied; correct the path or its permissions"
    assert str(system_refusal(PermissionError(errno.EACCES, "Permission denied", "/a/b"))) == line


@pytest.mark.parametrize(
    "main",
    [
        predict.main,
        autotune.main,
        check_data.main,
        compare.compare_losses,
        compare.compare_traces,
        import_flags.main,
        profile_cluster.main,
        show_plan.main,
        draw_overlap.main,
    ],
    ids=lambda main: f"{main.__module__}.{main.__name__}",
)
def test_no_mistake_in_a_command_line_moves_the_cursor(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--output", "a.json", "b", "c", f"--{ESCAPE}"])
    said = capsys.readouterr()
    assert end.value.code == 2 and "?[2J" in said.err and "\x1b" not in said.err + said.out


def test_no_dry_run_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flags.args").write_text(f"{TINY} --wandb-exp-name a{ESCAPE} --save b\x07\n")
    assert train.main([f"@{tmp_path}/flags.args", "--dry-run", "--world-size", "2"]) == 0
    page = capsys.readouterr().out
    assert "a?[2J" in page and "b?" in page and all(line.isprintable() for line in page.split("\n"))
