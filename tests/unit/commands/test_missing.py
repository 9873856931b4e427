"""A command that a Python without the packages starts: one line, status 2, and where the right one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.missing import says_what_is_missing


def ended(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end, says_what_is_missing(root):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_the_fix_is_the_environment_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "setup.py").touch()
    line = ended("ortools", tmp_path, capsys)
    assert line.startswith("error: python ") and line.count("\n") == 1
    assert "lacks the package ortools; `make train` makes .venv" in line
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    assert f"use the project's environment: `. {tmp_path}/.venv/bin/activate`" in ended("megatron", tmp_path, capsys)


def test_in_the_environment_it_is_installed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setup.py").touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    assert "install again: `pip install --editable '.[train]'`" in ended("torch.nn", tmp_path, capsys)


@pytest.mark.parametrize("name", ["moe_overlap.lost", "megatron.training", "tools.bench"])
def test_a_missing_module_of_ours_is_a_defect(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError), says_what_is_missing(tmp_path):
        raise ModuleNotFoundError(name, name=name)


@pytest.mark.parametrize(("rank", "said"), [(None, "error: interrupted\n"), ("0", "error: interrupted\n"), ("1", "")])
def test_ctrl_c_while_packages_are_loaded_is_one_line(
    rank: str | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end, says_what_is_missing():
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr().err == said


def test_ctrl_c_of_training_is_left_to_its_own_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), says_what_is_missing(answers_ctrl_c=False):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_an_installation_names_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("torch.nn", "megatron.core"):
        assert "`pip install 'megatron-moe-overlap[train]'`" in ended(package, tmp_path, capsys)
    assert "lacks the package pandas; `pip install pandas`" in ended("pandas", tmp_path, capsys)

    @interruptible
    def command() -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    assert command() == 2 and "lacks the package torch; " in capsys.readouterr().err
