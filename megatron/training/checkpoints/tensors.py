"""What a checkpoint's data files hold, by megatron.core.dist_checkpointing: tensors under keys by layer, never by rank or stage.

`parallel_state` is not read: the groups are handed over, and where megatron-core would fetch them the same state is built here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training.rules.checkpoint import Differences

EMBEDDING, OUTPUT, OUTPUT_BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"


class DirectSave(AsyncSaveShardedStrategy):
    """The files of megatron-core's `torch_dist` format, written and synced by a thread of this process.

    The stock strategy hands the data to forked writers through a manager process that imports everything anew (seconds per
    save), and waits for ever when a writer dies.

    Args:
        copies: write copies of the tensors, so that training may go on meanwhile.
        group: the ranks that save, for the writing thread alone where there is one; the default group unless given.
    """

    def __init__(self, copies: bool, group: Any = None) -> None:
        super().__init__("torch_dist", 1)
        self._copies, self._group = copies, group

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects go to the same files."""
        return True

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> AsyncRequest:
        """What writes every shard of which this rank holds the main replica, as they are now.

        The request's function is collective. It raises CheckpointException on every rank when a rank could not write.
        """
        by_key: dict[str, list[Any]] = {}
        for shard in nested_values(sharded_state_dict):
            if not is_main_replica(shard.replica_id):
                continue
            if self._copies and isinstance(shard, ShardedTensor):
                shard.data = shard.data.detach().to("cpu", copy=True)
            by_key.setdefault(shard.unique_key if isinstance(shard, ShardedObject) else shard.key, []).append(shard)
        return AsyncRequest(self._write, (by_key, checkpoint_dir), [])

    def _write(self, by_key: dict[str, list[Any]], folder: str | Path) -> None:
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )


def first_reason(error: CheckpointException) -> str:
    """What the first rank that failed says, in a line."""
    failure = next(iter(error.failures.values()))[0]
    return str(getattr(failure, "strerror", None) or failure).splitlines()[0]


def model_state(model: Any, groups: ProcessGroupCollection) -> dict[str, Any]:
    """The sharded state of one GPTModel chunk; tensors are the parameters and buffers themselves.

    As GPTModel.sharded_state_dict, which for tied embeddings on several stages reads a global group.
    """
    metadata = {"dp_cp_group": groups.dp_cp, "non_homogeneous_layers": True}
    state: dict[str, Any] = MegatronModule.sharded_state_dict(model, "", (), metadata)
    state.pop("output_layer._extra_state", None)
    if not model.post_process:
        return state
    if (model.share_embeddings_and_output_weights or model.mtp_process) and not model.pre_process:
        # The last stage's copy of the embedding: a replica of the first stage's tensor. Prediction layers read it under its
        # own name.
        state[EMBEDDING if model.mtp_process else OUTPUT] = make_tp_sharded_tensor_for_checkpoint(
            model.shared_embedding_or_output_weight(),
            EMBEDDING,
            replica_id=(1, 0, groups.dp_cp.rank()),
            allow_shape_mismatch=True,
            tp_group=groups.tp,
            dp_cp_group=groups.dp_cp,
        )
    for key in (OUTPUT, OUTPUT_BIAS):
        if key in state:
            # The vocabulary is padded to a multiple of the tensor-parallel size: its rows may differ from the file's.
            state[key].allow_shape_mismatch = True
    return state


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    """Every tensor shard of a state, with gated projections split into their two parts."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors(value.build())
        elif isinstance(value, ShardedTensor):
            yield value


def differences(state: Any, path: Path, ignored: Sequence[str]) -> Differences:
    """Compare a checkpoint with the state a run asks for. Collective.

    Args:
        ignored: beginnings of keys that the checkpoint may hold without being asked for.
    """
    there = {
        key: tuple(tensor.global_shape) for key, tensor in dist_checkpointing.load_tensors_metadata(str(path)).items()
    }
    here = {shard.key: (tuple(shard.global_shape), shard.allow_shape_mismatch) for shard in sharded_tensors(state)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    wanted = {key: value for rank in everywhere for key, value in rank.items()}
    shapes = []
    for key in sorted(wanted.keys() & there.keys()):
        shape, padded = wanted[key]
        if there[key] != shape and not (padded and there[key][1:] == shape[1:]):
            shapes.append(f"{key} is {list(there[key])} in the checkpoint, {list(shape)} here")
    absent = sorted(wanted.keys() - there.keys())
    extra = sorted(key for key in there.keys() - wanted.keys() if not key.startswith(tuple(ignored)))
    return Differences(
        tuple(shapes),
        tuple(f"{key} {list(wanted[key][0])} is not in the checkpoint" for key in absent),
        tuple(f"{key} {list(there[key])} is only in the checkpoint" for key in extra),
        frozenset(absent),
    )


def without_keys(state: Any, keys: Collection[str]) -> Any:
    """A state to load without the tensors of some keys."""
    if not isinstance(state, dict):
        return state
    kept = {}
    for name, value in state.items():
        if not (isinstance(value, ShardedTensor | ShardedTensorFactory) and value.key in keys):
            kept[name] = without_keys(value, keys)
    return kept
