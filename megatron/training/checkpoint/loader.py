"""Reading a checkpoint's tensors and objects without executing any of its content.

megatron-core's own loader unpickles the index of tensors and every object. `RestrictedLoad` reads the same files in two other
ways: the index by `metadata_file.read_metadata`, objects and tensors by torch's loader for weights, which makes numbers, text,
containers and tensors only.

A save of this project holds one kind of object: random-number states (`encoded_states`), in numbers and tensors. Format 1 wrote
NumPy's arrays, whose constructors are therefore allowed. Extra states of single layers are not restored
(`without_extra_states`): Transformer Engine stores pickles in them, and its layers unpickle them.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.training.checkpoint.folder import Stored
from megatron.training.checkpoint.metadata_file import METADATA, Refused, read_metadata
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json, printable

COMMON = "common.pt"
NEEDED_FILES = (METADATA, COMMON, CONFIG_FNAME)
"""Files besides the ranks' data files."""
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of megatron-core's `metadata.json`."""
_FIX = "choose another checkpoint by --ckpt-step"
_OF_FORMAT_1 = [
    numpy._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    numpy.ndarray,
    numpy.dtype,
    type(numpy.dtype(numpy.uint32)),
]
"""Constructors of the arrays in random-number states that format 1 wrote."""


def plain_object(file: Any, name: str) -> Any:
    """An object of numbers, text, containers and tensors.

    Args:
        name: name of the object, for the error.
    Raises:
        Refused: it holds anything else, or is damaged.
    """
    try:
        with torch.serialization.safe_globals(_OF_FORMAT_1):
            # Explicit: TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD changes only the default.
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged file fails in any operation of the loader, by any exception.
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        rule = f"names {printable(refused[1])}, no number, text or tensor" if refused else "is damaged"
        raise Refused(f"holds an object, {name}, that {rule}") from None


class _Reader(torch_checkpoint.FileSystemReader):
    """torch's reader of data files, with an index that was read and checked before."""

    def __init__(self, path: str | Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        """The index."""
        return self._metadata


class _Planner(MCoreLoadPlanner):
    """megatron-core's planner, which makes plain objects only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Store an object under its key in the state dict."""
        name = read_item.dest_index.fqn
        loaded = plain_object(value, name)
        if not isinstance(loaded, list):
            raise Refused(f"holds {name} in another form than a save writes")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class RestrictedLoad(LoadShardedStrategy):
    """megatron-core's `torch_dist` format, read without executing its content.

    Args:
        metadata: the checkpoint's index, from `index_of`.
    """

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are in the same files."""
        return True

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """`index_of` has compared it."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """`index_of` has compared it."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Load the entries of a sharded state, as megatron-core's strategy does. Collective."""
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, True)
        planner = _Planner(
            shapes_validation_sharded_tensors=[value for value in tensors if not value.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={v.key: v for v in tensors if v.allow_shape_mismatch},
        )
        with warnings.catch_warnings():
            # Its successor `load` first gathers the keys of all ranks, which differ; here each rank knows its keys already.
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
            torch_checkpoint.load_state_dict(state, _Reader(checkpoint_dir, self._metadata), planner=planner)
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat_mapping, rename_mapping)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Never called: `tensor_shapes` answers from the index."""
        raise NotImplementedError


class CommonLoad(LoadCommonStrategy):
    """`common.pt`, in which a save of this project writes no entry."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are in the data files."""
        return False

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """`index_of` has compared it."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """`index_of` has compared it."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """The entries besides tensors."""
        path = Path(checkpoint_dir) / COMMON
        try:
            loaded = plain_object(path, "common")
        except Refused as error:
            raise ConfigError("--load", path, str(error), _FIX) from None
        if loaded != {}:
            raise ConfigError("--load", path, "has entries, and a save writes none there", _FIX)
        return loaded

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Never called: objects are in the data files."""
        raise NotImplementedError


def index_of(stored: Stored) -> Metadata:
    """The checked index of a checkpoint whose files have been verified.

    Raises:
        ConfigError: `.metadata` or `metadata.json` holds anything that a save does not write.
    """
    path = stored.path / CONFIG_FNAME
    try:
        backend = bounded_json(path)
    except Unreadable:
        backend = None
    if backend != _BACKEND:
        raise ConfigError("--load", path, "is not what a save writes there", _FIX)
    try:
        return read_metadata(stored.path, {name: size for name, (size, _) in stored.mark["files"].items()})
    except Refused as error:
        raise ConfigError("--load", stored.path / METADATA, str(error), _FIX) from None


def tensor_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every tensor of a checkpoint."""
    entries = metadata.state_dict_metadata.items()
    return {key: tuple(entry.size) for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


def without_extra_states(state: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """A loaded model state whose layers get no extra state, and the number of non-empty extra states."""
    weights, dropped = {}, 0
    for name, value in state.items():
        extra = name.endswith("_extra_state")
        has_content = extra and value is not None and not (isinstance(value, torch.Tensor) and value.numel() == 0)
        weights[name] = None if extra else value
        dropped += has_content
    return weights, dropped


def encoded_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Random-number states of `random_states`, in numbers, text and tensors only."""
    version, state_words, gauss = states["python"]
    kind, key, position, has_gauss, cached = states["numpy"]
    return {
        **states,
        "python": [version, torch.tensor(state_words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(key.astype(numpy.int64)), int(position), int(has_gauss), float(cached)],
    }


def decoded_states(states: Any) -> dict[str, Any]:
    """The inverse of `encoded_states`; states of format 1 stay as they are.

    Raises:
        KeyError, TypeError, ValueError: they have another form.
    """
    decoded = dict(states)
    version, state_words, gauss = states["python"]
    if isinstance(state_words, torch.Tensor):
        decoded["python"] = (version, tuple(state_words.tolist()), gauss)
    kind, key, position, has_gauss, cached = states["numpy"]
    if isinstance(key, torch.Tensor):
        decoded["numpy"] = (kind, key.numpy().astype(numpy.uint32), position, has_gauss, cached)
    return decoded
