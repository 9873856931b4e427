"""The cache of a text's indices: its samples and their order. Complete or absent, and read as numbers only.

    <cache>/indices/<name>/              indices of one text, order and length, as megatron-core writes them
    <cache>/indices/<name>/sums.json     size and CRC-32 of each of them
    <cache>/indices/<name>.building-*    indices that a job is writing, or had not finished when it was killed

Users of a cluster may share the folder. megatron-core takes any existing file for a complete one, and unpickles a file that is
no array: it would run the code of anyone who can write there. So
1. a job writes new indices to a temporary folder, and renames it once every rank has read them;
2. rank 0 compares a folder with its sums before any rank reads it: a flipped bit would change the order of the text;
3. megatron-core's loads accept arrays of integers only (`_integer_arrays_only`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist
from megatron.core.datasets import blended_dataset, gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron.training.data.indexed import cannot_write
from megatron.training.initialize import on_every_rank, on_first_rank
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, checksums

CACHE_VERSION = 2
"""Version of the folder's content, part of its name: folders of other versions are not read."""
SUMS = "sums.json"
SECONDS_UNTIL_ABANDONED = 24 * 3600
FLAG = "--data-cache-path"


def build_with_cache(builder: BlendedMegatronDatasetBuilder, folder: Path) -> tuple[Any, ...]:
    """Datasets with the indices of `folder`, or with new ones, which are then stored there. Collective.

    Raises:
        ConfigError: the cache cannot be written, its files are damaged, or machines see different folders.
    """

    def choose() -> str:
        try:
            if folder.is_dir():
                _require_whole(folder)
                return str(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            for abandoned in folder.parent.glob("*.building-*"):
                if time.time() - abandoned.stat().st_mtime > SECONDS_UNTIL_ABANDONED:
                    shutil.rmtree(abandoned, ignore_errors=True)
            building = tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent)
            Path(building).chmod(0o755)
            return building
        except OSError as error:
            raise cannot_write(folder.parent, error) from error

    def finish() -> bool:
        try:
            (Path(chosen) / SUMS).write_text(json.dumps(checksums(sorted(Path(chosen).iterdir()))), encoding="utf-8")
            Path(chosen).rename(folder)
        except OSError as error:
            if not folder.is_dir():
                raise cannot_write(folder.parent, error) from error
            _require_whole(folder)
            return False
        return True

    chosen = on_first_rank(choose)
    on_every_rank(partial(_check_visible, Path(chosen)))
    try:
        datasets = _built(builder, chosen)
    except Exception as error:  # megatron-core turns the error of a full disk into a bare Exception, on rank 0.
        if not isinstance(error.__cause__ or error.__context__, OSError):
            raise
        reason = error.__cause__ or error.__context__
        if chosen != str(folder):
            shutil.rmtree(chosen, ignore_errors=True)
        assert isinstance(reason, OSError)
        raise cannot_write(folder.parent, reason) from error
    if chosen != str(folder):
        if dist.is_initialized():
            dist.barrier()
        if not on_first_rank(finish):
            # Another job was faster. Other machines may have mapped this one's files: NFS removes them when they are deleted.
            datasets = _built(builder, str(folder))
            if dist.is_initialized():
                dist.barrier()
            on_first_rank(partial(shutil.rmtree, chosen, ignore_errors=True))
    return datasets


def _built(builder: BlendedMegatronDatasetBuilder, folder: str) -> tuple[Any, ...]:
    builder.config.path_to_cache = folder
    with _integer_arrays_only():
        return tuple(builder.build())


@contextlib.contextmanager
def _integer_arrays_only() -> Iterator[None]:
    """Give megatron-core's modules, whose `numpy.load` allows pickles, a numpy whose `load` does not."""
    modules: tuple[Any, ...] = (gpt_dataset, blended_dataset)
    for module in modules:
        module.numpy = _Numpy()
    try:
        yield
    finally:
        for module in modules:
            module.numpy = numpy


class _Numpy:
    """numpy with a `load` that maps integer arrays and refuses everything else."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)

    @staticmethod
    def load(path: str, **_: Any) -> Any:
        """The array of a file; ConfigError if it holds none."""
        try:
            array = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise _damaged(Path(path), f"is no array ({str(error).splitlines()[0]})") from error
        if not isinstance(array, numpy.ndarray) or array.dtype.kind not in "iu":
            raise _damaged(Path(path), "is no array of whole numbers")
        return array


def _require_whole(folder: Path) -> None:
    """Compare the files of a folder with their checksums."""
    try:
        sums = bounded_json(folder / SUMS)
    except Unreadable as error:
        raise _damaged(folder / SUMS, str(error)) from error
    files = {path.name: path for path in folder.iterdir() if path.name != SUMS}
    if not isinstance(sums, dict) or sums.keys() != files.keys():
        raise _damaged(folder / SUMS, "does not name the files beside it")
    for name, path in files.items():
        if not path.is_file() or path.is_symlink():
            raise _damaged(path, "is no regular file")
        if sums[name] != list(checksums([path])[name]):
            raise _damaged(path, f"differs from its checksum in {SUMS}")


def _damaged(path: Path, rule: str) -> ConfigError:
    return ConfigError(FLAG, path, rule, f"remove the folder {path.parent.name}: it is built again")


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            FLAG, folder.parent, "is not the same folder on every node", "give a folder on a shared file system"
        )
