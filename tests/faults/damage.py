"""Damaged checkpoints: every file of one in every way, then what only somebody else would write, then runs that do not fit.

The checkpoint is the golden one of version 1, signed anew as one of today. It is read as a load reads it on every rank, up to
the point where tensors are asked for (`checkpointing.Checkpointer._load`).
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.training.checkpoint import folder as checkpoint_folder
from megatron.training.checkpoint.folder import Stored
from megatron.training.checkpoint.mark import CHECKSUM, MARK, mark_text
from megatron.training.cli.config import CheckpointConfig
from megatron.training.cli.rules import checkpoint as rules
from moe_overlap.describe.errors import ConfigError
from tests.faults.fault import Fault, refusal

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_format_1.tar.gz"
DATA = (".metadata", "metadata.json", "common.pt", "__0_0.distcp")
STEP = "step-000002"
OTHER_OR_DELETE = f"delete {STEP}, or choose another checkpoint by --ckpt-step"
NONE_LEFT = f"there is no complete checkpoint: delete {STEP} to start afresh"
OTHER = "choose another checkpoint by --ckpt-step"


@functools.cache
def _unpacked() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    return folder / "saved" / STEP


def checkpoint(folder: Path, version: int = 2, step: int = 2) -> Path:
    """A whole checkpoint of a version and step in `folder`; a later step has other weights."""
    path = folder / f"step-{step:06d}"
    shutil.copytree(_unpacked(), path)
    if step != 2:
        data = path / "__0_0.distcp"
        data.write_bytes(data.read_bytes() + b"more")
    if version == 2:
        sign(path, step=step, order=step, progress={**content_of(path)["progress"], "iteration": step})
    return path


def content_of(path: Path) -> dict[str, Any]:
    """The entries of a completion mark."""
    content: dict[str, Any] = json.loads((path / MARK).read_text())
    return content


def sign(path: Path, **changed: Any) -> None:
    """Write a completion mark for the files as they are now, as whoever changes a file can do."""
    kept = {key: value for key, value in content_of(path).items() if key not in ("format", CHECKSUM)}
    files = checkpoint_folder.checksums(file for file in path.iterdir() if file.name != MARK and file.is_file())
    (path / MARK).write_text(mark_text({**kept, "files": files, **changed}))


def load(folder: Path, **flags: Any) -> str:
    """The answer of a load, before tensors are asked for."""
    from megatron.training.checkpoint.loader import NEEDED_FILES, CommonLoad, index_of

    words = {"load": str(folder), "exit_on_missing_checkpoint": True, **flags}

    def read() -> Stored:
        start = rules.start_of(CheckpointConfig(**words))
        assert start is not None
        checkpoint_folder.require_whole(start.stored, NEEDED_FILES)
        checkpoint_folder.verify(start.stored, sorted(start.stored.mark["files"]))
        index_of(start.stored)
        CommonLoad().load_common(start.stored.path)
        return start.stored

    try:
        return f"step {read().step} loads"
    except ConfigError as error:
        return f"error: {error}"


def _removed(path: Path) -> None:
    path.unlink()


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def flipped(path: Path) -> None:
    """Flip a bit of the byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _swapped(path: Path) -> None:
    other = path.with_name("metadata.json" if path.name != "metadata.json" else "common.pt")
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


WAYS: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": _removed,
    "flipped": flipped,
    "swapped": _swapped,
    "a folder": _replaced(Path.mkdir),
    "a pipe": _replaced(os.mkfifo),
    "endless": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a loop": _replaced(lambda path: path.symlink_to(path.name)),
}


def _expected(name: str, way: str) -> str:
    if name == MARK:
        rule = {
            "flipped": f"step 2 is damaged: its {MARK} …",
            "swapped": f"step 2 is damaged: its {MARK} lacks entries that every save writes",
        }.get(way, "step 2 is incomplete (no completion mark)")
        return f"error: --load F: {rule}; {NONE_LEFT}"
    rule = {
        "cut": "is corrupt: … bytes instead of …",
        "emptied": "is corrupt: 0 bytes instead of …",
        "removed": "cannot be read: No such file or directory",
        "flipped": "is corrupt: its content is not what was written",
        "swapped": "is corrupt: … bytes instead of …",
        "a loop": "cannot be read: Too many levels of symbolic links",
    }.get(way, "is no regular file")
    # The file that takes its place in a swap may be the first to be looked at.
    shown = "…" if way == "swapped" else name
    return f"error: --load F/{STEP}/{shown}: {rule}; {OTHER_OR_DELETE}"


def _damaged(name: str, way: str, version: int) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        WAYS[way](checkpoint(folder, version) / name)
        return load(folder)

    return call


def files() -> Iterator[Fault]:
    """Every file of a checkpoint, in every way; those of version 1 cut and flipped."""
    for name in (MARK, *DATA):
        for way in WAYS:
            yield Fault(f"{name} {way}", f"`{name}` is {way}", _damaged(name, way, 2), _expected(name, way))
    for name in DATA:
        broken = f"`{name}` of a save of version 1 is flipped"
        yield Fault(f"version 1: {name} flipped", broken, _damaged(name, "flipped", 1), _expected(name, "flipped"))


class Attack:
    """Makes a folder where Python's own loader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def _index(path: Path, change: Callable[[Any], object]) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _first_place(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


def _saved(path: Path, value: Any) -> None:
    import torch

    torch.save(value, path / "common.pt")


def _huge(index: Any) -> None:
    import torch

    entry = next(value for value in index.state_dict_metadata.values() if hasattr(value, "chunks"))
    entry.size = torch.Size([2**40, 2**20])


SIGNED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "index with code": (
        "the index calls `os.mkdir` when it is unpickled",
        lambda path: (path / ".metadata").write_bytes(pickle.dumps(Attack(path.parent / "executed"))),
        f"/.metadata: names posix.mkdir, which no index of tensors holds; {OTHER}",
    ),
    "index cut": (
        "the index breaks off",
        lambda path: os.truncate(path / ".metadata", 200),
        f"/.metadata: is no index of a checkpoint's tensors (…); {OTHER}",
    ),
    "index leads elsewhere": (
        "the index names a file outside of the folder",
        lambda path: _index(path, lambda index: setattr(_first_place(index), "relative_path", "../../x.distcp")),
        f"/.metadata: points to ../../x.distcp, which is no data file of this checkpoint; {OTHER}",
    ),
    "index beyond the file": (
        "the index places data behind the end of their file",
        lambda path: _index(path, lambda index: setattr(_first_place(index), "offset", 2**40)),
        f"/.metadata: …; {OTHER}",
    ),
    "index of a huge tensor": (
        "the index describes a tensor of an exabyte",
        lambda path: _index(path, _huge),
        f"/.metadata: …; {OTHER}",
    ),
    "common with code": (
        "`common.pt` calls `os.mkdir` when it is unpickled",
        lambda path: _saved(path, Attack(path.parent / "executed")),
        f"/common.pt: holds an object, common, that names posix.mkdir, no number, text or tensor; {OTHER}",
    ),
    "common with entries": (
        "`common.pt` holds a model",
        lambda path: _saved(path, {"model": 1}),
        f"/common.pt: has entries, and a save writes none there; {OTHER}",
    ),
    "common as text": (
        "`common.pt` is a text",
        lambda path: (path / "common.pt").write_text("once upon a time"),
        f"/common.pt: holds an object, common, that is damaged; {OTHER}",
    ),
    "another backend": (
        "`metadata.json` names another format of data",
        lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        f"/metadata.json: is not what a save writes there; {OTHER}",
    ),
}
"""Faults written by somebody who signs them, too: name -> what is broken, how, and the line behind the step's folder."""


def _signed(change: Callable[[Path], object]) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        path = checkpoint(folder)
        change(path)
        sign(path)
        line = load(folder)
        assert not (folder / "executed").exists(), "the checkpoint was executed"
        return line

    return call


def _mark(**changed: Any) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        sign(checkpoint(folder), **changed)
        return load(folder)

    return call


def _text(text: str) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        (checkpoint(folder) / MARK).write_text(text)
        return load(folder)

    return call


def forged() -> Iterator[Fault]:
    """Checkpoints that somebody else wrote, and marks that no save writes."""
    for name, (broken, change, line) in SIGNED.items():
        yield Fault(name, f"{broken}, with checksums that agree", _signed(change), f"error: --load F/{STEP}{line}")
    marks = {
        "an unknown entry": (_mark(colour=1), "holds colour, which no save writes"),
        "a negative number": (_mark(order=-1), "holds a value of order that no save writes"),
        "a file elsewhere": (_mark(files={"../x": [1, 2]}), "holds a value of files that no save writes"),
        "another step": (_mark(step=3), "is of step 3 and of step 2"),
        "NaN": (_text('{"format": 2, "step": NaN}'), "holds NaN, which is no number"),
        "thousands of digits": (_text('{"step": ' + "9" * 5000 + "}"), "holds a number of thousands of digits"),
        "depth": (_text('{"a": ' * 100_000 + "1" + "}" * 100_000), "is no JSON: it nests too deep"),
        "a key twice": (_text('{"step": 1, "step": 2}'), "holds the key step twice"),
        "megabytes": (_text(" " * (65 << 20) + "}"), "is too large: … bytes, at most … are read"),
    }
    for name, (call, rule) in marks.items():
        line = f"error: --load F: step 2 is damaged: its {MARK} {rule}; {NONE_LEFT}"
        yield Fault(f"mark: {name}", f"`{MARK}` holds {name}", call, line)


def _file_more(folder: Path) -> str:
    (checkpoint(folder) / "more.distcp").write_text("")
    return load(folder)


def _newer(folder: Path) -> str:
    path = checkpoint(folder)
    (path / MARK).write_text((path / MARK).read_text().replace('"format": 2', '"format": 3'))
    return load(folder)


def _given_itself(folder: Path) -> str:
    return load(checkpoint(folder))


def _upstream(folder: Path) -> str:
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return load(folder)


def _no_folder(folder: Path) -> str:
    (folder / "file").write_text("")
    return load(folder / "file")


def _newest(way: str) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        checkpoint(folder)
        WAYS[way](checkpoint(folder, step=4) / MARK)
        return load(folder)

    return call


def _from_another_save(folder: Path) -> str:
    path, other = checkpoint(folder), checkpoint(folder / "apart", step=4)
    shutil.copy(other / "__0_0.distcp", path)
    return load(folder)


def folders() -> Iterator[Fault]:
    """Folders that hold no checkpoint to go on from."""
    yield Fault(
        "a file more",
        "a file is put into the folder",
        _file_more,
        f"error: --load F/{STEP}/more.distcp: was not written by the save: {MARK} does not list it; delete it",
    )
    yield Fault(
        "a later version",
        "the save is of format 3",
        _newer,
        f"error: --load F/{STEP}: has format 3, this version reads 1 or 2; load it with the version that wrote it",
    )
    yield Fault(
        "the checkpoint itself",
        "`--load` names one checkpoint",
        _given_itself,
        f"error: --load F/{STEP}: is one checkpoint, not the folder of checkpoints; give F and --ckpt-step 2",
    )
    yield Fault(
        "upstream's folder",
        "`--load` names a folder of Megatron-LM",
        _upstream,
        "error: --load F: was written by upstream Megatron-LM, in another layout; give a folder of ours",
    )
    yield Fault(
        "no folder",
        "`--load` names a file",
        _no_folder,
        "error: --load F/file: is not a folder; give the folder that holds the step-N folders",
    )
    yield Fault(
        "nothing there",
        "`--load` is empty",
        lambda folder: load(folder),
        "error: --load F: holds no checkpoint; correct the path or drop --exit-on-missing-checkpoint",
    )
    yield Fault(
        "no such step",
        "`--ckpt-step 7` is not there",
        lambda folder: (checkpoint(folder), load(folder, ckpt_step=7))[1],
        "error: --ckpt-step 7: F holds no such step; it holds step 2",
    )
    yield Fault(
        "the newest has no mark",
        "step 4 has no mark, step 2 is whole",
        _newest("removed"),
        "error: --load F: step 4 is incomplete (no completion mark); the last complete checkpoint is step 2: "
        "add --ckpt-step 2 or delete step-000004",
    )
    yield Fault(
        "the newest is damaged",
        "the mark of step 4 is flipped, step 2 is whole",
        _newest("flipped"),
        "error: --load F: step 4 is damaged: its complete.json …; the last complete checkpoint is step 2: "
        "add --ckpt-step 2 or delete step-000004",
    )
    yield Fault(
        "data of another save",
        "`__0_0.distcp` is that of another step",
        _from_another_save,
        f"error: --load F/{STEP}/__0_0.distcp: is corrupt: … bytes instead of …; {OTHER_OR_DELETE}",
    )


def _other_parts(saved: dict[str, Any], wanted: dict[str, Any] | None, with_random: bool) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        mark = {"optimizer": {"name": "adam", "precision": "bf16"}, "random_states": True, **saved}
        stored = Stored(Path("F") / STEP, 2, 1, mark)
        return refusal(lambda: rules.require_parts(stored, "F", wanted, with_random))

    return call


def parts() -> Iterator[Fault]:
    """Runs that ask for what the checkpoint does not hold."""
    adam = {"name": "adam", "precision": "bf16"}
    yield Fault(
        "no optimizer state",
        "the save left out the optimizer",
        _other_parts({"optimizer": None}, adam, False),
        "error: --load F: step 2 holds no optimizer state (saved with --no-save-optim); "
        "add --no-load-optim or --finetune",
    )
    yield Fault(
        "another optimizer",
        "adam saved, sgd wanted",
        _other_parts({}, {**adam, "name": "sgd"}, False),
        "error: --load F: the optimizer state of step 2 is of adam, this run uses sgd; "
        "correct --optimizer or add --no-load-optim",
    )
    yield Fault(
        "another precision",
        "bf16 saved, fp16 wanted",
        _other_parts({}, {**adam, "precision": "fp16"}, False),
        "error: --load F: the optimizer state of step 2 is of bf16, this run uses fp16; "
        "correct --fp16 or add --no-load-optim",
    )
    yield Fault(
        "no random states",
        "the save left out random states",
        _other_parts({"random_states": False}, None, True),
        "error: --load F: step 2 holds no random-number states (saved with --no-save-rng); add --no-load-rng",
    )
