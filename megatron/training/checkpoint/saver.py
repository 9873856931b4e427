"""One save at a time, complete on every rank or not at all: synchronous, or during training (--async-save).

Steps of a save during training:
    1. the loop waits for the previous save, and every rank copies the tensors that it will write;
    2. a thread of each rank writes the copies, in a process group that only the threads use;
    3. when all have written, rank 0's thread completes the checkpoint by its rename (`checkpoint_folder.publish`);
    4. after each of its next steps the loop asks whether all threads are done, and raises their error if there is one.
A run killed before 3 leaves the previous checkpoint as the last complete one.

Checksums are computed from the bytes in memory on their way to a file; the file's writer reads it back from the device and
compares.

Data files are megatron.core.dist_checkpointing's: tensors under keys by layer, never by rank or stage. `parallel_state` is not
read: groups are arguments, and state that megatron-core would build from it is built here. megatron-core's own asynchronous
callers fork a process with the training process's memory, and wait for ever if it dies.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron.training.checkpoint import folder as checkpoint_folder
from megatron.training.checkpoint.loader import NEEDED_FILES
from megatron.training.cli.config import CheckpointConfig
from megatron.training.cli.rules.checkpoint import Differences
from megatron.training.initialize import device_of_this_process, on_every_rank, on_first_rank
from megatron.training.messages import of_all
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Checksums, SummedFile, checksums

EMBEDDING, OUTPUT, OUTPUT_BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"


class _Summing(FileSystem):
    """torch's file system, which syncs new files and computes a checksum of the bytes written to each."""

    def __init__(self) -> None:
        self.sums: Checksums = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A stream to a new file."""
        assert mode == "wb", mode
        with SummedFile(Path(path)) as stream:
            yield stream
        self.sums[Path(path).name] = stream.sums

    def rename(self, path: Any, new_path: Any) -> None:
        """Give a written file its final name."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class DirectSave(AsyncSaveShardedStrategy):
    """The files of megatron-core's `torch_dist` format, written and synced by a thread of this process.

    The stock strategy passes the data to forked writers through a manager process that imports everything again (seconds per
    save), and waits for ever if a writer dies.

    Args:
        copies: whether to write copies of the tensors, so that training can continue meanwhile.
        group: the ranks that save, in a group for the writing thread only if there is one; None: the default group.

    Attributes:
        sums: checksums of the files that this rank has written last, from their bytes in memory.
    """

    def __init__(self, copies: bool, group: Any = None) -> None:
        super().__init__("torch_dist", 1)
        self._copies, self._group = copies, group
        self.sums: Checksums = {}

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects go to the same files."""
        return True

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> AsyncRequest:
        """A request that writes the present state of every shard whose main replica is on this rank.

        The request's function is collective. It raises CheckpointException on every rank if one rank could not write.
        """
        by_key: dict[str, list[Any]] = {}
        for shard in nested_values(sharded_state_dict):
            if not is_main_replica(shard.replica_id):
                continue
            if self._copies and isinstance(shard, ShardedTensor):
                # Main replicas only, and before the loop continues: the next step changes weights and moments in place.
                shard.data = shard.data.detach().to("cpu", copy=True)
            by_key.setdefault(shard.unique_key if isinstance(shard, ShardedObject) else shard.key, []).append(shard)
        return AsyncRequest(self._write, (by_key, checkpoint_dir), [])

    def _write(self, by_key: dict[str, list[Any]], folder: str | Path) -> None:
        writer: Any = torch_checkpoint.FileSystemWriter(folder, sync_files=False)
        writer.fs = files = _Summing()
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
        self.sums = files.sums


def first_reason(error: CheckpointException) -> str:
    """The error of the first rank that failed, in one line."""
    failure = next(iter(error.failures.values()))[0]
    return str(getattr(failure, "strerror", None) or failure).splitlines()[0]


def model_state(model: Any, groups: ProcessGroupCollection, tied_blocks: int = 1) -> dict[str, Any]:
    """The sharded state of one GPTModel chunk; tensors are the parameters and buffers themselves.

    It equals GPTModel.sharded_state_dict, which reads a global group for tied embeddings on several stages.

    Args:
        tied_blocks: number of blocks into which a tied embedding of this rank is cut.
    """
    metadata = {"dp_cp_group": groups.dp_cp, "non_homogeneous_layers": True}
    state: dict[str, Any] = MegatronModule.sharded_state_dict(model, "", (), metadata)
    state.pop("output_layer._extra_state", None)
    is_copied = model.share_embeddings_and_output_weights or model.mtp_process
    if model.post_process and is_copied and not model.pre_process:
        # The last stage's copy of the embedding: a replica of the first
        # stage's tensor. Prediction layers read it under its own name.
        state[EMBEDDING if model.mtp_process else OUTPUT] = make_tp_sharded_tensor_for_checkpoint(
            model.shared_embedding_or_output_weight(),
            EMBEDDING,
            replica_id=(1, 0, groups.dp_cp.rank()),
            allow_shape_mismatch=True,
            tp_group=groups.tp,
            dp_cp_group=groups.dp_cp,
        )
    for key in (OUTPUT, OUTPUT_BIAS) if model.post_process else ():
        if key in state:
            # The vocabulary is padded to a multiple of the tensor-parallel size: the number of rows may differ from the file's.
            state[key].allow_shape_mismatch = True
    if tied_blocks > 1 and model.share_embeddings_and_output_weights:
        tied = {key: value for key, value in state.items() if getattr(value, "key", None) == EMBEDDING}
        state |= {key: _in_blocks(value, tied_blocks) for key, value in tied.items()}
    return state


def _in_blocks(shard: ShardedTensor, blocks: int) -> ShardedTensorFactory:
    """Cut a shard of rows into blocks: shards of a tensor need one shape, but ends with different TP have unequal shares."""
    place, shares = shard.global_offset[0] // shard.local_shape[0], shard.axis_fragmentations[0]

    def build(key: str, rows: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key, part, (0, place * blocks + n, shares * blocks), replica_id=replica_id, allow_shape_mismatch=True
            )
            for n, part in enumerate(rows.chunk(blocks))
        ]

    return ShardedTensorFactory(shard.key, shard.data, build, torch.cat, shard.replica_id)


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    """Every tensor shard of a state, with gated projections split into their two parts."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors(value.build())
        elif isinstance(value, ShardedTensor):
            yield value


def differences(state: Any, stored: Mapping[str, tuple[int, ...]], ignored: Sequence[str]) -> Differences:
    """Compare a checkpoint with the state that a run loads. Collective.

    Args:
        stored: key -> shape of every tensor of the checkpoint.
        ignored: prefixes of keys that the checkpoint may hold although the run does not load them.
    """
    of_rank = {shard.key: (tuple(shard.global_shape), shard.allow_shape_mismatch) for shard in sharded_tensors(state)}
    requested = {
        key: (tuple(shape), padded) for of_one_rank in of_all(of_rank) for key, (shape, padded) in of_one_rank.items()
    }
    shapes, rows = [], None
    for key in sorted(requested.keys() & stored.keys()):
        shape, padded = requested[key]
        if stored[key] != shape and padded and stored[key][1:] == shape[1:]:
            rows = stored[key][0], shape[0]
        elif stored[key] != shape:
            shapes.append(f"{key} is {list(stored[key])} in the checkpoint, {list(shape)} here")
    absent = sorted(requested.keys() - stored.keys())
    extra = sorted(key for key in stored.keys() - requested.keys() if not key.startswith(tuple(ignored)))
    return Differences(
        tuple(shapes),
        tuple(f"{key} {list(requested[key][0])} is not in the checkpoint" for key in absent),
        tuple(f"{key} {list(stored[key])} is only in the checkpoint" for key in extra),
        frozenset(absent),
        rows,
    )


def without_keys(state: Any, keys: Collection[str]) -> Any:
    """A state to load without the tensors of some keys."""
    if not isinstance(state, dict):
        return state
    remaining = {}
    for name, value in state.items():
        if not (isinstance(value, ShardedTensor | ShardedTensorFactory) and value.key in keys):
            remaining[name] = without_keys(value, keys)
    return remaining


@dataclass(frozen=True, slots=True)
class Keep:
    """The checkpoints of a folder that stay: all, or the last ones and those at multiples of an interval."""

    last: int | None
    multiples_of: int | None = None


def _on_device(device: torch.device) -> Callable[[], None]:
    """Work of a new thread: it starts with GPU 0 as its current device, where torch's writer would open a context."""
    return partial(torch.cuda.set_device, device) if device.type == "cuda" else lambda: None


def replica_range(groups: ProcessGroupCollection) -> tuple[int, int]:
    """Smallest and largest number of replicas of any stage, over the world. Collective."""
    replicas = groups.dp_cp.size()
    extremes = torch.tensor([-replicas, replicas], device=device_of_this_process())
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    fewest, most = extremes.tolist()
    return -fewest, most


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
            begin = _on_device(device_of_this_process())
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=begin)
            # Every rank makes the group, at the same point. Threads communicate whenever their disk is done: in a training group
            # their calls would meet those of a step. The data is on the host, hence gloo.
            self._group = dist.new_group(backend="gloo")
        self._direct = DirectSave(copies=self._thread is not None, group=self._group)
        self._strategy: Any = self._direct
        fewest, most = replica_range(groups) if flags.ckpt_fully_parallel_save else (1, 1)
        if most > 1:
            # Stages without replicas store no distribution, and would compute it again at every save.
            keep = flags.ckpt_assume_constant_structure and fewest > 1
            self._strategy = FullyParallelSaveStrategyWrapper(self._direct, groups.dp_cp, keep)

    def open(self, folder: Path, step: int) -> Path:
        """A new folder for a save's files, seen by every rank. The previous save must be complete."""
        assert self._under_way is None
        temporary = Path(on_first_rank(lambda: str(checkpoint_folder.open_temporary(folder, step))))
        on_every_rank(lambda: _require_shared(folder, temporary))
        return temporary

    def save(self, state: dict[str, Any], temporary: Path, step: int, content: Mapping[str, Any], keep: Keep) -> None:
        """Write a state, or start to; `completed` reports when it is done.

        Args:
            state: sharded; with --async-save it may change as soon as this returns.
            temporary: result of `open`.
            content: entries of the completion mark.
            keep: the folder's checkpoints that stay.
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
                # With and without a thread, `_finish` executes the request:
                # only it completes a checkpoint.
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
            wait: whether to wait until a save in flight is complete.
        Raises:
            ConfigError: on every rank, when it could not be written.
        """
        if self._under_way is None:
            return None
        final, writing = self._under_way
        if writing is not None:
            # Threads end at different times. All ranks must get one answer, since they save, log and stop together.
            if not (wait or _true_on_every_rank(writing.done())):
                return None
            # First, so that an error is raised once and does not block the next save.
            self._under_way = None
            writing.result()
        self._under_way = None
        return final

    def _finish(
        self, request: AsyncRequest, temporary: Path, step: int, content: Mapping[str, Any], keep: Keep
    ) -> None:
        try:
            self._write(request, temporary, step, content, keep)
        except Exception:
            # Every rank has failed by now. On a full disk the next save needs the space.
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _write(self, request: AsyncRequest, temporary: Path, step: int, content: Mapping[str, Any], keep: Keep) -> None:
        folder = temporary.parent
        assert request.async_fn is not None
        try:
            with checkpoint_folder.writing(folder):
                request.async_fn(*request.async_fn_args)
        except CheckpointException as error:
            with checkpoint_folder.writing(folder):
                raise OSError(first_reason(error)) from error

        def read_again() -> Checksums:
            with checkpoint_folder.writing(folder):
                return _read_again(temporary, self._direct.sums)

        # Each writer reads its own files. One failure or difference fails every rank, and nothing is published.
        own_sums = on_every_rank(read_again, self._group)
        sums = of_all(own_sums, self._group)

        def complete() -> None:
            with checkpoint_folder.writing(folder):
                save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(temporary))
            files = {name: (size, crc) for of_rank in sums for name, (size, crc) in of_rank.items()}
            # No rank has checksums of megatron-core's own files: common.pt and the configuration just written.
            files |= checksums(path for path in temporary.iterdir() if path.name not in files)
            with checkpoint_folder.writing(folder):
                _require_files(temporary, [*NEEDED_FILES, *files])
            checkpoint_folder.publish(temporary, folder, step, {**content, "files": files})
            checkpoint_folder.prune(folder, step, keep.last, keep.multiples_of)

        on_first_rank(complete, self._group)


def _read_again(temporary: Path, written: Checksums) -> Checksums:
    """The checksums of written files, after comparing them with what the device returns."""
    for name, checksum in checksums((temporary / name for name in written), from_device=True).items():
        if checksum != written[name]:
            raise OSError(f"{name} reads back other bytes than were written")
    return written


def _require_files(temporary: Path, names: Sequence[str]) -> None:
    """Refuse to publish a folder from which another process has removed files during the save."""
    for name in names:
        if not (temporary / name).is_file():
            raise OSError(f"{name} has vanished while the checkpoint was written")


def _require_shared(folder: Path, temporary: Path) -> None:
    if not temporary.is_dir():
        raise ConfigError("--save", folder, "is not the same folder on every node", "choose a shared file system")


def _true_on_every_rank(fact: bool) -> bool:
    flag = torch.tensor([fact], dtype=torch.int, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag[0])
