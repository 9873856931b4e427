"""One save at a time, complete on every rank or not at all: at once, or beside training (--async-save).

Beside training a save goes:
    1. the loop waits for the former save, and has every rank copy what it will write;
    2. a thread of each rank writes the copies, in a process group that the threads have to themselves;
    3. when all have written, rank 0's thread completes the checkpoint by its rename (`checkpoint_folder.publish`);
    4. after its next steps the loop asks whether all threads are done, and hears their error if there is one.
Killed before 3, the save is absent and the one before it is the last complete one.

megatron-core's own asynchronous callers fork a process with the training process's memory, and wait for ever when it dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training.checkpoints import folder as checkpoint_folder
from megatron.training.checkpoints.tensors import DirectSave, first_reason
from megatron.training.config import CheckpointConfig
from megatron.training.first_rank import on_every_rank, on_first_rank
from moe_overlap.describe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints of a folder stay: all, or the last ones and those at multiples of an interval."""

    last: int | None
    multiples_of: int | None = None


class Saver:
    """Writes checkpoints; every method is collective over all ranks.

    Args:
        groups: this rank's process groups; replicas of a weight share the writing (--ckpt-fully-parallel-save).
    """

    def __init__(self, flags: CheckpointConfig, groups: ProcessGroupCollection) -> None:
        self._flags, self._has_saved = flags, False
        self._under_way: tuple[Path, Future[None] | None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None
        if flags.async_save and flags.save is not None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._group = dist.new_group(backend="gloo")
        self._strategy: Any = DirectSave(copies=self._thread is not None, group=self._group)
        if flags.ckpt_fully_parallel_save and groups.dp_cp.size() > 1:
            keep = flags.ckpt_assume_constant_structure
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, groups.dp_cp, keep)

    def open(self, folder: Path, step: int) -> Path:
        """A fresh place for a save's files, seen by every rank. The former save must be completed."""
        assert self._under_way is None
        temporary = on_first_rank(lambda: checkpoint_folder.open_temporary(folder, step))
        on_every_rank(lambda: _require_shared(folder, temporary))
        return temporary

    def save(self, state: dict[str, Any], temporary: Path, step: int, content: Mapping[str, Any], keep: Keep) -> None:
        """Write a state, or start to; `completed` tells when it is done.

        Args:
            state: sharded; with --async-save it may change as soon as this returns.
            temporary: what `open` returned.
            content: of the completion mark.
            keep: which of the folder's checkpoints stay.
        Raises:
            ConfigError: on every rank, when the folder cannot be written.
        """
        folder = temporary.parent
        with checkpoint_folder.writing(folder):
            request = dist_checkpointing.save(
                state,
                str(temporary),
                sharded_strategy=self._strategy,
                validate_access_integrity=not (self._has_saved and self._flags.ckpt_assume_constant_structure),
                async_sharded_save=True,
            )
        assert request is not None
        self._has_saved = True
        final, work = folder / checkpoint_folder.step_name(step), (request, temporary, step, content, keep)
        if self._thread is None:
            self._finish(*work)
            self._under_way = (final, None)
        else:
            self._under_way = (final, self._thread.submit(self._finish, *work))

    def completed(self, wait: bool) -> Path | None:
        """The checkpoint that has become complete since the last call.

        Args:
            wait: until the save under way is complete, if there is one.
        Raises:
            ConfigError: on every rank, when it could not be written.
        """
        if self._under_way is None:
            return None
        final, writing = self._under_way
        if writing is not None:
            if not (wait or _true_on_every_rank(writing.done())):
                return None
            self._under_way = None
            writing.result()
        self._under_way = None
        return final

    def _finish(
        self, request: AsyncRequest, temporary: Path, step: int, content: Mapping[str, Any], keep: Keep
    ) -> None:
        folder, rank = temporary.parent, dist.get_rank()
        assert request.async_fn is not None
        try:
            with checkpoint_folder.writing(folder):
                request.async_fn(*request.async_fn_args)
        except CheckpointException as error:
            with checkpoint_folder.writing(folder):
                raise OSError(first_reason(error)) from error

        def read_again() -> checkpoint_folder.Checksums:
            with checkpoint_folder.writing(folder):
                return checkpoint_folder.checksums(temporary.glob(f"__{rank}_*.distcp"))

        mine = on_every_rank(read_again, self._group)
        sums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sums, mine, group=self._group)

        def complete() -> None:
            with checkpoint_folder.writing(folder):
                save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(temporary))
            files = {name: sizes for part in sums for name, sizes in part.items()}
            files |= checkpoint_folder.checksums(path for path in temporary.iterdir() if path.name not in files)
            checkpoint_folder.publish(temporary, folder, step, {**content, "files": files})
            checkpoint_folder.prune(folder, step, keep.last, keep.multiples_of)

        on_first_rank(complete, self._group)


def _require_shared(folder: Path, temporary: Path) -> None:
    if not temporary.is_dir():
        raise ConfigError("--save", folder, "is not the same folder on every node", "choose a shared file system")


def _true_on_every_rank(fact: bool) -> bool:
    flag = torch.tensor([fact], dtype=torch.int, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag[0])
