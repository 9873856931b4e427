"""A data file that is cut while the run reads it is one line, before the page that is gone is touched."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.training.data.datasets import BatchSampler, batches
from megatron.training.data.watch import FILES_AT_ONCE, WatchedFiles
from moe_overlap.describe.errors import ConfigError

TOKENS = 1 << 16
READ_AHEAD = 2
"""Batches that a worker has read before they are asked for, as torch has it."""


class Mapped(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of a mapped file, as megatron-core reads them."""

    def __init__(self, path: Path) -> None:
        self._ids = np.memmap(path, np.uint16, "r")
        self.read = multiprocessing.Value("i", 0)
        """Samples read, in whatever process."""

    def __len__(self) -> int:
        return 4 + READ_AHEAD

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part = torch.from_numpy(self._ids[index % 4 * TOKENS // 4 :][:8].astype(np.int64))
        with self.read:
            self.read.value += 1
        return {"tokens": part, "labels": part}


def sampler(samples: int) -> BatchSampler:
    return BatchSampler(
        total_samples=samples,
        consumed_samples=0,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        order="single",
        seed=0,
    )


def read_some(tmp_path: Path, workers: int) -> tuple[Iterator[Any], Path]:
    """A feed whose first two batches are taken and whose worker has read all that it may, and the file it reads."""
    text = tmp_path / "text.bin"
    np.zeros(TOKENS, np.uint16).tofile(text)
    text.with_suffix(".idx").write_bytes(b"sizes")
    files = WatchedFiles([str(tmp_path / "text")])
    mapped = Mapped(text)
    feed = batches(mapped, sampler(READ_AHEAD + 4), num_workers=workers, seed=0, vocab_size=8, files=files)
    assert next(feed)["tokens"].sum() == 0
    # Growing is no harm: what was mapped is there.
    with text.open("ab") as more:
        more.write(b"more")
    next(feed)
    deadline = time.monotonic() + 30
    while mapped.read.value < 2 + workers * READ_AHEAD:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return feed, text


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_cut_under_a_run_is_one_line(tmp_path: Path, workers: int) -> None:
    feed, text = read_some(tmp_path, workers)
    os.truncate(text, 100)
    with pytest.raises(ConfigError, match=r"text\.bin: has 100 bytes, and had 131,072 when the run began; start again"):
        for _ in range(READ_AHEAD + 1):  # A worker has read some batches before.
            next(feed)


def test_a_worker_that_is_killed_ends_no_line_but_that_of_the_next_batch(tmp_path: Path) -> None:
    others = multiprocessing.active_children()
    feed, text = read_some(tmp_path, workers=1)
    (worker,) = set(multiprocessing.active_children()).difference(others)
    assert worker.pid is not None
    os.truncate(text, 100)
    os.kill(worker.pid, signal.SIGBUS)  # As reading behind the end of the file does.
    # Not `join`, after which torch's handler sees no dead worker.
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.01)  # Where that handler would raise.
    with pytest.raises(ConfigError, match=r"text\.bin: has 100 bytes"):
        for _ in range(READ_AHEAD + 1):
            next(feed)


def test_many_files_take_turns(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / str(number)) for number in range(FILES_AT_ONCE // 2 + 1)]
    for prefix in prefixes:
        Path(f"{prefix}.bin").write_bytes(b"12")
        Path(f"{prefix}.idx").write_bytes(b"12")
    files = WatchedFiles(prefixes)
    Path(f"{prefixes[-1]}.bin").unlink()
    files.check()
    with pytest.raises(ConfigError, match="can no longer be read: No such file"):
        files.check()
    WatchedFiles([]).check()
