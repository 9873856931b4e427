"""The newest checkpoint is damaged: where ranks are started again by themselves the one before is taken, else a user chooses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.security.saving_runs import flip, four_saves, resumed
from tests.spawn import run

NEWEST, BEFORE = "step-000004", "step-000003"


def flipped(step: Path) -> None:
    flip(step / "__0_0.distcp")


def lost(step: Path) -> None:
    (step / "common.pt").unlink()


def unmarked(step: Path) -> None:
    (step / "complete.json").unlink()


def marked_wrongly(step: Path) -> None:
    flip(step / "complete.json")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    run(1, four_saves, str(folder))
    return folder


DAMAGES: dict[Callable[[Path], None], str] = {
    flipped: "__0_0.distcp is corrupt",
    lost: "common.pt cannot be read: No such file or directory",
    unmarked: f"{NEWEST} is incomplete or damaged",
    marked_wrongly: f"{NEWEST} is incomplete or damaged",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_run_that_is_started_again_takes_the_one_before(
    damage: Callable[[Path], None], saves: Path, tmp_path: Path
) -> None:
    shutil.copytree(saves / "saved", tmp_path / "saved")
    damage(tmp_path / "saved" / NEWEST)
    ((said, steps, printed),) = run(1, resumed, str(tmp_path), True)
    assert (said, steps) == ("", [4])
    assert f"{DAMAGES[damage]}" in printed and "; the checkpoint before is taken" in printed
    assert f"{tmp_path}/saved/{BEFORE}" in printed
    ((said, steps, _),) = run(1, resumed, str(tmp_path), False)
    assert said.startswith(f"--load {tmp_path}/saved") and "--ckpt-step" in said and steps == []


def test_where_all_are_damaged_nothing_begins_anew(saves: Path, tmp_path: Path) -> None:
    shutil.copytree(saves / "saved", tmp_path / "saved")
    for step in (tmp_path / "saved").glob("step-*"):
        flipped(step)
    ((said, steps, _),) = run(1, resumed, str(tmp_path), True)
    assert f"{NEWEST}/__0_0.distcp: is corrupt" in said and steps == []
