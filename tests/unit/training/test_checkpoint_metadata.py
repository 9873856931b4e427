"""The index of a checkpoint's tensors is read, and nothing else that a pickle may hold."""

from __future__ import annotations

import datetime
import io
import json
import os
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.checkpoint.checkpointing import random_states
from megatron.training.checkpoint.loader import decoded_states, encoded_states, plain_object, without_extra_states
from megatron.training.checkpoint.metadata_file import METADATA, Refused, read_metadata

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint_format_1.tar.gz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    step = folder / "saved/step-000002"
    return step, {name: size for name, (size, _) in json.loads((step / "complete.json").read_text())["files"].items()}


def reason(tmp_path: Path, content: bytes, sizes: dict[str, int]) -> str:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(Refused) as caught:
        read_metadata(tmp_path, sizes)
    return str(caught.value)


class Attack:
    """Executes a command where it is unpickled by Python's own loader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_the_index_is_the_one_that_was_written(saved: tuple[Path, dict[str, int]]) -> None:
    folder, sizes = saved
    written = pickle.loads((folder / METADATA).read_bytes())
    index = read_metadata(folder, sizes)
    assert index.state_dict_metadata == written.state_dict_metadata and index.storage_data == written.storage_data
    assert len(index.state_dict_metadata) > 30


def test_no_code(tmp_path: Path, saved: tuple[Path, dict[str, int]]) -> None:
    mark = tmp_path / "executed"
    for protocol in range(6):
        assert reason(tmp_path, pickle.dumps(Attack(mark), protocol), saved[1]).startswith("names posix.mkdir, which")
    assert "names builtins.eval" in reason(tmp_path, b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", saved[1])
    # Fields of a class, by the second half of a state.
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    state = b"N}\x8c\x06__eq__Ns\x86b."
    assert reason(tmp_path, b"\x80\x04" + name + state, saved[1]) == "sets fields of a class"
    assert not mark.exists()


def nested_key() -> bytes:
    """A dictionary whose only key is 2⁶⁰ tuples in 300 bytes."""
    tuples = b"".join(b"h%ch%c\x86\x94" % (index, index) for index in range(60))
    return b"\x80\x04})\x94" + tuples + b"h\x3cK\x01s."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no index"),
        (nested_key(), "has keys that are no names"),
        (pickle.dumps({1, 2}), "is no index of a checkpoint's tensors (KeyError)"),
        (pickle.dumps(datetime.date(2026, 1, 1)), "names datetime.date"),
        (pickle.dumps({"state_dict_metadata": {}}), "is no index of a checkpoint's tensors (a field"),
        (b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b".", "is no index"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "is no index"),
        (b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b".", "is no index"),
    ],
    ids=["empty", "hash", "set", "date", "dict", "memo", "bytes", "deep"],
)
def test_hostile_pickles(tmp_path: Path, saved: tuple[Path, dict[str, int]], content: bytes, words: str) -> None:
    assert reason(tmp_path, content, saved[1]).startswith(words)


def first_place(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


def first_tensor(index: Any) -> Any:
    return next(value for value in index.state_dict_metadata.values() if hasattr(value, "size"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: setattr(first_place(i), "relative_path", "../x.distcp"), "points to ../x.distcp, which is no data"),
        (lambda i: setattr(first_place(i), "relative_path", "common.pt"), "points to common.pt, which is no data"),
        (lambda i: setattr(first_place(i), "offset", -1), "is no index"),
        (lambda i: setattr(first_place(i), "length", 1 << 40), "is no index"),
        (lambda i: setattr(first_place(i), "transform_descriptors", ["zstd"]), "is no index"),
        (lambda i: setattr(first_tensor(i), "size", torch.Size([1 << 50])), "is no index"),
        (lambda i: setattr(first_tensor(i), "size", "wide"), "is no index"),
        (lambda i: setattr(first_tensor(i).chunks[0], "offsets", torch.Size([1])), "is no index"),
        (lambda i: i.storage_data.pop(next(iter(i.storage_data))), "says nowhere in which file a part of "),
        (lambda i: setattr(i, "storage_data", None), "is no index"),
    ],
)
def test_an_index_that_points_elsewhere(
    tmp_path: Path, saved: tuple[Path, dict[str, int]], change: Callable[[Any], Any], words: str
) -> None:
    index = pickle.loads((saved[0] / METADATA).read_bytes())
    change(index)
    assert reason(tmp_path, pickle.dumps(index), saved[1]).startswith(words)


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path, saved: tuple[Path, dict[str, int]]) -> None:
    content, draw = (saved[0] / METADATA).read_bytes(), random.Random(3)
    for _ in range(150):
        flipped = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            flipped[draw.randrange(len(content))] = draw.randrange(256)
        (tmp_path / METADATA).write_bytes(flipped)
        try:
            read_metadata(tmp_path, saved[1])
        except Refused as error:
            assert "\n" not in str(error)


def blob(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_objects_are_plain(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with pytest.raises(Refused, match=r"^holds an object, key, that names posix\.mkdir, no number, text or tensor$"):
        plain_object(blob([Attack(mark)]), "key")
    with pytest.raises(Refused, match="^holds an object, key, that is damaged$"):
        plain_object(io.BytesIO(b"PK\x03\x04"), "key")
    assert not mark.exists()


def test_random_states_are_the_same_in_both_formats() -> None:
    states = random_states()
    for stored in ([states], [encoded_states(states)]):  # format 1 keeps NumPy's array, format 2 numbers and tensors
        loaded = decoded_states(plain_object(blob(stored), "random_states")[0])
        assert loaded["python"] == states["python"] and torch.equal(loaded["torch"], states["torch"])
        assert (loaded["numpy"][1] == states["numpy"][1]).all() and loaded["numpy"][2:] == states["numpy"][2:]
    file = blob([encoded_states(states)])
    assert torch.load(file, weights_only=True)


def test_extra_states_are_not_taken_over() -> None:
    state = {"a.weight": torch.ones(1), "a._extra_state": None, "b._extra_state": torch.ones(3, dtype=torch.uint8)}
    kept, dropped = without_extra_states(state)
    assert kept == {"a.weight": state["a.weight"], "a._extra_state": None, "b._extra_state": None} and dropped == 1
