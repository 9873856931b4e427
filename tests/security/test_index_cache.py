"""A cache of indices that others can write to: nothing of it runs, and no bit of it changes the order of a text in silence."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch.distributed as dist

from megatron.training.cli.config import DataConfig
from megatron.training.data.datasets import Datasets, build_datasets
from megatron.training.data.index_cache import SUMS
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import checksums
from tests.unit.training.test_data_datasets import ByteTokenizer, numbered


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def built(folder: Path, blend: bool) -> Datasets:
    """Datasets of a text, or of two that are blended, with their cache."""
    prefixes = [str(folder / f"d{value}") for value in ((1, 2) if blend else (1,))]
    for value, prefix in enumerate(prefixes, 1):
        if not Path(f"{prefix}.idx").exists():  # a text that is written again has other indices
            numbered(Path(prefix), 40, value)
    path = tuple(word for prefix in prefixes for word in (("1", prefix) if blend else (prefix,)))
    flags = DataConfig(data_path=path, split="1", data_cache_path=str(folder / "cache"))
    return build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(30, 0, 0))


def indices_of(folder: Path) -> Path:
    (indices,) = (folder / "cache" / "indices").iterdir()
    return indices


def signed(indices: Path) -> None:
    """Sums that agree with the files: whoever writes the one can write the other."""
    files = sorted(path for path in indices.iterdir() if path.name != SUMS)
    (indices / SUMS).write_text(json.dumps(checksums(files)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one: megatron-core's blends ask for the rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize("kind", ["document_index", "sample_index", "shuffle_index", "dataset_index"])
def test_a_pickle_in_place_of_an_index_does_not_run(kind: str, with_sums: bool, tmp_path: Path, one_rank: None) -> None:
    built(tmp_path, blend=True)
    indices = indices_of(tmp_path)
    for path in indices.glob(f"*{kind}.npy"):
        path.write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    if with_sums:
        signed(indices)
    rule = "is no array" if with_sums else "differs from its checksum"
    with pytest.raises(
        ConfigError, match=rf"--data-cache-path .*{kind}.npy: {rule}.*; remove the folder {indices.name}"
    ):
        built(tmp_path, blend=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["float", "object"])
def test_an_index_is_whole_numbers(kind: str, tmp_path: Path) -> None:
    built(tmp_path, blend=False)
    indices = indices_of(tmp_path)
    (path,) = indices.glob("*shuffle_index.npy")
    numpy.save(path, numpy.zeros(30) if kind == "float" else numpy.array([{}] * 30), allow_pickle=True)
    signed(indices)
    with pytest.raises(ConfigError, match="is no array"):
        built(tmp_path, blend=False)


def test_no_bit_of_an_index_flips_in_silence(tmp_path: Path) -> None:
    built(tmp_path, blend=False)
    indices = indices_of(tmp_path)
    for path in sorted(indices.iterdir()):
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(ConfigError, match="--data-cache-path"):
                built(tmp_path, blend=False)
        path.write_bytes(content)
    assert built(tmp_path, blend=False).order and [*indices.parent.iterdir()] == [indices]


@pytest.mark.parametrize("change", ["missing", "more", "link", "none"])
def test_a_folder_is_whole_or_refused(change: str, tmp_path: Path) -> None:
    built(tmp_path, blend=False)
    indices = indices_of(tmp_path)
    (path,) = indices.glob("*shuffle_index.npy")
    if change == "missing":
        path.unlink()
    elif change == "more":
        (indices / "other.npy").touch()
    elif change == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        (indices / SUMS).unlink()
    with pytest.raises(ConfigError, match=f"remove the folder {indices.name}: it is built again"):
        built(tmp_path, blend=False)
