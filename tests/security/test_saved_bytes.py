"""What is published is what was in memory, on the device, whole: whatever happens to the folder while it is written."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.program import SMALL_ARGS, alone
from tests.security import saving_runs
from tests.security.saving_runs import order_of_a_save, said_of
from tests.spawn import run

OTHER = "reads back other bytes than were written"
GONE = "has vanished while the checkpoint was written"
CHANGES = {
    "bits_flip_on_the_device": (False, f"__0_0.distcp {OTHER}"),
    "bits_of_the_index_flip": (False, f".metadata {OTHER}"),
    "a_file_is_cut": (False, f"__0_0.distcp {OTHER}"),
    "a_file_vanishes": (False, f"common.pt {GONE}"),
    "a_folder_is_emptied": (True, f"common.pt {GONE}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_published_that_was_not_in_memory(change: str, tmp_path: Path) -> None:
    before, expected = CHANGES[change]
    ((said, left),) = run(1, said_of, str(tmp_path), getattr(saving_runs, change), before)
    assert said == (
        f"--save {tmp_path / 'saved'}: cannot be written: {expected}; "
        "free space, correct permissions, or choose another folder"
    )
    assert left == []


def test_every_byte_is_on_the_device_before_a_name_says_so(tmp_path: Path) -> None:
    """Data by their writer, then all files, the mark, the folder; its name; and the folder that holds the name."""
    (seen,) = run(1, order_of_a_save, str(tmp_path))
    temporary = next(name for name in seen if re.fullmatch(r"\.tmp-step-000004-[0-9a-f]+", name))
    place = {name: [n for n, each in enumerate(seen) if each == name] for name in seen}
    published = f"{temporary} > step-000004"
    data = {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    for name in data:
        assert place[name][-1] < place["complete.json"][0], name
    # By the writer, too: rank 0 syncs every file once more, which does nothing for those of other machines.
    assert len(place["__0_0.distcp"]) == 2 and len(place[".metadata.tmp"]) == 1 and len(place[".metadata"]) == 1
    assert place["__0_0.distcp"][0] < place[".metadata.tmp"][0] < place[".metadata"][0]
    # Read back from the device: behind the writer's sync, before anything else.
    for name, written in (("__0_0.distcp", "__0_0.distcp"), (".metadata", ".metadata.tmp")):
        assert place[written][0] < place[f"{name} dropped"][0] < place[name][-1]
    assert place["complete.json"] < place[temporary] < place[published] < place["saved"]
    assert seen[-1] == "saved" and all(
        len(place[name]) == 1 for name in ("complete.json", temporary, published, "saved")
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Space for the weights and moments, by which a start is refused, and not for the whole checkpoint."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user mounts nothing")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_as_such_and_stays_as_it_was(small_disk: Path) -> None:
    saved = small_disk / "saved"
    words = [SMALL_ARGS, "--expert-model-parallel-size", "1", "--train-iters", "2", "--save", str(saved)]
    ended = alone([*words, "--save-interval", "1"])
    reason = "cannot be written: No space left on device; free space, correct permissions, or choose another folder"
    assert (ended.status, ended.err) == (2, f"error: --save {saved}: {reason}\n")
    assert "step 1/2" in re.sub(" +", " ", ended.out) and [*saved.iterdir()] == []


def test_a_disk_without_space_for_a_checkpoint_is_told_before_the_first_step(tmp_path: Path) -> None:
    words = [SMALL_ARGS, "--expert-model-parallel-size", "1", "--train-iters", "2", "--save", str(tmp_path / "saved")]
    ended = alone([*words, "--hidden-size", str(1 << 20)])
    assert ended.status == 2 and "step" not in ended.out
    line = rf"error: --save {tmp_path}/saved: has [\d.e+]+ GB free, and a checkpoint takes at least [\d.e+]+; make space, .*\n"
    assert re.fullmatch(line, ended.err), ended.err


def moved(folder: Path, step: str, elsewhere: Path) -> None:
    """A checkpoint moved to another disk, and linked back."""
    elsewhere.mkdir(exist_ok=True)
    (folder / step).rename(elsewhere / step)
    (folder / step).symlink_to(elsewhere / step)


@pytest.mark.parametrize("left", ["nothing", "link", "dangling link", "file"])
def test_a_checkpoint_that_was_moved_and_linked_back_is_pruned_as_a_link(left: str, tmp_path: Path) -> None:
    from megatron.training.checkpoint import folder as checkpoints
    from tests.unit.training.test_checkpoint_folder import load, save

    folder, elsewhere = tmp_path / "saved", tmp_path / "big"
    for step in (4, 8):
        save(folder, step)
        moved(folder, f"step-{step:06d}", elsewhere)
    assert load(folder) == 8
    leftover: Any = folder / ".tmp-step-000004-0123456789abcdef"
    if left == "file":
        leftover.touch()
    elif left != "nothing":
        leftover.symlink_to(elsewhere / "step-000004" if left == "link" else elsewhere / "none")
    save(folder, 12)
    assert not leftover.is_symlink() and not leftover.exists()
    checkpoints.prune(folder, 12, 1, None)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000012"]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["step-000004", "step-000008"]
    # A step that is saved again takes the link's place, and not what it points to; nor does it matter whether that is there.
    for is_there in (True, False):
        moved(folder, "step-000012", elsewhere / str(is_there))
        if not is_there:
            shutil.rmtree(elsewhere / str(is_there))
        save(folder, 12)
        assert not (folder / "step-000012").is_symlink() and load(folder) == 12
    assert (elsewhere / "True" / "step-000012" / "complete.json").is_file()


def test_what_cannot_be_removed_stands_in_no_saves_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.checkpoint import folder as checkpoints

    (tmp_path / ".tmp-step-000004-0123456789abcdef").mkdir()

    def refused(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(checkpoints, "_remove", refused)
    assert checkpoints.open_temporary(tmp_path, 8).is_dir()
