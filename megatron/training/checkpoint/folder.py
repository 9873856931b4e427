"""Checkpoints on disk: complete or absent, whenever the writer is killed. No torch.

    <folder>/step-000300/              a checkpoint; `complete.json` inside is its completion mark
    <folder>/.lock                     the job that saves here (lock.py)
    <folder>/.tmp-step-000300-<hex>/   a checkpoint being written or deleted: never loaded, swept by the next save
    <folder>/.replaced-step-000300-<hex>/   a checkpoint that a save of the same step displaced; loaded only if step-000300 is
                                       missing

Steps of a save:
    1. a fresh temporary folder (`open_temporary`);
    2. the data files, by every rank;
    3. the completion mark (mark.py), with their sizes and checksums; every file and folder synced; one rename (`publish`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.checkpoint.mark import MARK, READABLE, RESUMABLE, Damaged, mark_text, read_mark
from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.files import checksums, printable

_FINISHED = re.compile(r"step-(\d{6,})")
_TEMPORARY = re.compile(r"\.tmp-(?:replaced-)?step-(\d{6,})-.*")
_REPLACED = re.compile(r"\.replaced-step-(\d{6,})-[0-9a-f]+")
_UPSTREAM_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete checkpoint.

    Attributes:
        order: 1 for the first save into its folder, larger for every later one; after a return to an earlier step, the newest
            checkpoint need not have the highest step.
        mark: content of its completion mark.
    """

    path: Path
    step: int
    order: int
    mark: Mapping[str, Any]


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[Stored]:
    """Every complete checkpoint of a folder, oldest save first."""
    paths = {int(match[1]): path for path, match in _matches(folder, _REPLACED)}
    # A complete checkpoint of a step hides the one that it displaced.
    paths |= {int(match[1]): path for path, match in _matches(folder, _FINISHED)}
    stored = []
    for step, path in paths.items():
        mark = _read_mark(path)
        if mark is not None:
            stored.append(Stored(path, step, mark["order"], mark))
    return sorted(stored, key=lambda checkpoint: checkpoint.order)


def non_persistent_folder(parent: str, named_folder: str | None) -> Path:
    """The folder of non-persistent checkpoints, of which only the last is kept.

    Args:
        parent: folder of the other saves.
        named_folder: value of --non-persistent-global-ckpt-dir.
    """
    return Path(named_folder) if named_folder is not None else Path(parent) / "non_persistent"


def choose(
    load: str, step: int | None, exit_on_missing: bool, passed_over: Collection[Path] | None = None
) -> Stored | None:
    """The checkpoint to load.

    Args:
        load: the folder, value of --load.
        step: --ckpt-step; None takes the newest.
        exit_on_missing: whether it is an error if there is nothing to load.
        passed_over: damaged checkpoints to skip; incomplete ones are skipped, too. None: an incomplete newest one is an error.
    Returns:
        None when the folder is absent or empty.
    Raises:
        ConfigError: no complete checkpoint of that step, or an incomplete one newer than the last complete one.
    """
    folder = Path(load)
    _refuse_other_folders(folder)
    damaged = passed_over or ()
    stored = [checkpoint for checkpoint in complete_checkpoints(folder) if checkpoint.path not in damaged]
    by_step = {checkpoint.step: checkpoint for checkpoint in stored}
    steps = [int(match[1]) for path, match in _matches(folder, _FINISHED) if path not in damaged]
    incomplete = sorted(number for number in steps if number not in by_step)
    newest = stored[-1] if stored else None
    if step is not None and step in by_step:
        return _of_our_format(by_step[step])
    if step is not None and step not in incomplete:
        raise ConfigError("--ckpt-step", step, f"{load} holds no such step", f"it holds {_steps(by_step)}")
    # A newer incomplete step stops the run: continuing from the previous one would silently repeat steps.
    is_newer = incomplete and (newest is None or incomplete[-1] > newest.step)
    if step is not None or (is_newer and (newest is None or passed_over is None)):
        raise _incomplete(load, step if step is not None else incomplete[-1], newest)
    if newest is None and exit_on_missing:
        raise ConfigError(
            "--load", load, "holds no checkpoint", "correct the path or drop --exit-on-missing-checkpoint"
        )
    return newest and _of_our_format(newest)


def newer_incomplete(checkpoint: Stored) -> list[str]:
    """Paths of the newer steps in a checkpoint's folder that are not complete."""
    folder = checkpoint.path.parent
    complete = {stored.step for stored in complete_checkpoints(folder)}
    steps = (int(match[1]) for _, match in _matches(folder, _FINISHED))
    return [str(folder / step_name(step)) for step in sorted(steps) if step > checkpoint.step and step not in complete]


def _of_our_format(checkpoint: Stored) -> Stored:
    written = checkpoint.mark["format"]
    if written not in READABLE:
        rule = f"has format {written}, this version reads {one_of(tuple(map(str, READABLE)))}"
        raise ConfigError("--load", checkpoint.path, rule, "load it with the version that wrote it")
    return checkpoint


def _refuse_other_folders(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError("--load", folder, "is not a folder", "give the folder that holds the step-N folders")
    mark = _read_mark(folder)
    if mark is not None:
        rule = "is one checkpoint, not the folder of checkpoints"
        raise ConfigError("--load", folder, rule, f"give {folder.parent} and --ckpt-step {mark['step']}")
    if (folder / _UPSTREAM_TRACKER).is_file():
        raise ConfigError(
            "--load", folder, "was written by upstream Megatron-LM, in another layout", "give a folder of ours"
        )


def _incomplete(load: str, step: int, newest: Stored | None) -> ConfigError:
    rule = f"step {step} is incomplete (no completion mark)"
    try:
        read_mark(Path(load) / step_name(step))
    except Damaged as error:
        rule = f"step {step} is damaged: its {MARK} {error}"
    delete = f"delete {step_name(step)}"
    if newest is None:
        return ConfigError("--load", load, rule, f"there is no complete checkpoint: {delete} to start afresh")
    last = f"the last complete checkpoint is step {newest.step}"
    return ConfigError("--load", load, rule, f"{last}: add --ckpt-step {newest.step} or {delete}")


def _steps(steps: Iterable[int]) -> str:
    listed = [str(step) for step in sorted(steps)]
    if not listed:
        return "none"
    shown = listed if len(listed) <= 6 else [*listed[:3], "…", *listed[-2:]]
    return ("step " if len(listed) == 1 else "steps ") + ", ".join(shown)


def _matches(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            yield path, match


def _read_mark(path: Path) -> dict[str, Any] | None:
    """The completion mark of a folder; None if it is missing or damaged.

    A damaged old checkpoint must not stop a run that does not need it: an unreadable mark is no error here.
    """
    try:
        return read_mark(path)
    except Damaged:
        return None


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn failures of the file system into the user's error."""
    try:
        yield
    except OSError as error:
        fix = "free space, correct permissions, or choose another folder"
        raise ConfigError("--save", folder, f"cannot be written: {error.strerror or error}", fix) from error


def leftovers(folder: Path) -> list[Path]:
    """Entries of a folder left by killed saves and deletions."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


def open_temporary(folder: Path, step: int) -> Path:
    """Sweep the remains of killed saves and make a fresh folder for this save."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The folder is locked and a run has one save at a time, so every temporary entry belongs to a dead run. One that cannot
        # be removed blocks no save: every save has a name of its own.
        for path in leftovers(folder):
            with contextlib.suppress(OSError):
                _remove(path)
        temporary = folder / f".tmp-{step_name(step)}-{secrets.token_hex(8)}"
        temporary.mkdir()
    return temporary


def require_whole(checkpoint: Stored, needed: Iterable[str]) -> None:
    """Require every entry that a resume reads, every file that a load needs, and no file that is missing from the mark.

    Raises:
        ConfigError: something is missing, or was added to the folder.
    """
    fix = f"delete {checkpoint.path.name}, or choose another checkpoint by --ckpt-step"
    listed = checkpoint.mark["files"]
    missing = [entry for entry in RESUMABLE if entry not in checkpoint.mark]
    missing += [name for name in needed if name not in listed]
    if missing:
        raise ConfigError("--load", checkpoint.path / MARK, f"is damaged: it lacks {missing[0]}", fix)
    for path in sorted(checkpoint.path.iterdir()):
        if path.name != MARK and path.name not in listed:
            shown = path.parent / printable(path.name)
            raise ConfigError("--load", shown, f"was not written by the save: {MARK} does not list it", "delete it")


def verify(checkpoint: Stored, names: Sequence[str]) -> None:
    """Check some of a checkpoint's files against its completion mark.

    Raises:
        ConfigError: a file is missing, cannot be read, or differs from what was written.
    """
    for name in names:
        path = checkpoint.path / name
        fix = f"delete {checkpoint.path.name}, or choose another checkpoint by --ckpt-step"
        size, crc = checkpoint.mark["files"][name]
        try:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError("--load", path, "is no regular file", fix)
            # Before reading: a link to a device has no end.
            if about.st_size != size:
                raise ConfigError("--load", path, f"is corrupt: {about.st_size} bytes instead of {size}", fix)
            read_size, read_crc = checksums([path])[name]
        except OSError as error:
            raise ConfigError("--load", path, f"cannot be read: {error.strerror}", fix) from None
        if read_size != size:
            raise ConfigError("--load", path, f"is corrupt: {read_size} bytes instead of {size}", fix)
        if read_crc != crc:
            raise ConfigError("--load", path, "is corrupt: its content is not what was written", fix)


def publish(temporary: Path, folder: Path, step: int, content: Mapping[str, Any]) -> Path:
    """Complete a checkpoint whose data files are all written, and give it its name.

    Returns:
        The checkpoint's folder.
    """
    final = folder / step_name(step)
    with writing(folder):
        # Not the step: a run that returned to step 200 saves 300 again, and an old 400 must not count as the newest.
        order = 1 + max((checkpoint.order for checkpoint in complete_checkpoints(folder)), default=0)
        # Data before mark, mark before name: whatever a crash leaves under the final name has its data on the device.
        for path in temporary.iterdir():
            _sync(path)
        mark = mark_text({"step": step, "order": order, **content})
        (temporary / MARK).write_text(mark, encoding="utf-8")
        _sync(temporary / MARK)
        _sync(temporary)
        if os.path.lexists(final):
            # A checkpoint is replaced by two renames; if the job is killed between them, the next run uses the displaced one.
            complete = (final / MARK).is_file()
            final.rename(folder / f".{'replaced' if complete else 'tmp'}-{final.name}-{secrets.token_hex(8)}")
        temporary.rename(final)
        # The displaced checkpoint is deleted only when the new name is on the device, too.
        _sync(folder)
        for displaced, match in list(_matches(folder, _REPLACED)):
            # A displaced checkpoint without a successor stays until `prune` deletes it: a run was killed between the two
            # renames.
            if (folder / step_name(int(match[1]))).is_dir():
                _delete(displaced)
    return final


def prune(folder: Path, written: int, keep_last: int | None, retain_interval: int | None) -> None:
    """Delete superseded checkpoints; without either option none.

    Args:
        written: the step just saved, which stays.
        keep_last: keep the newest N; a retain interval alone keeps the newest, as upstream does.
        retain_interval: keep multiples of this in any case.
    """
    if keep_last is None and retain_interval is None:
        return
    stored = complete_checkpoints(folder)
    # By order of saving, as in `choose`. The step just saved stays even if it is no multiple.
    kept_steps = {written, *(checkpoint.step for checkpoint in stored[-(keep_last or 1) :])}
    if retain_interval is not None:
        kept_steps |= {checkpoint.step for checkpoint in stored if checkpoint.step % retain_interval == 0}
    with writing(folder):
        for checkpoint in stored:
            if checkpoint.step not in kept_steps:
                _delete(checkpoint.path)


def _delete(path: Path) -> None:
    """Delete a checkpoint: a rename makes it absent at once; if the run is killed then, the next save removes the rest."""
    doomed = path.with_name(f".tmp-{path.name.lstrip('.')}-{secrets.token_hex(8)}")
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a folder with its content, but of a link (to a moved checkpoint) only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Have the file system write a file, or a folder's entries, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
