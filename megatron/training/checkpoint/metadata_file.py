"""Reading `.metadata`, the index of a checkpoint's tensors, without executing its content.

torch.distributed.checkpoint writes the index as a pickle, and a pickle may call any function of any module while it is read.
`read_metadata` therefore works in two steps:

    1. `_IndexUnpickler` executes only the opcodes that the writer uses, finds only the classes of `_ALLOWED`, and hashes only
       short keys. It is Python's own unpickler in Python, not the faster one in C, which allocates as much as a file tells it
       to.
    2. `_checked` builds a new index from the result, field by field, after checking each: types, sizes, and that every piece of
       data lies inside a data file that the completion mark lists.

Only numbers, names and torch's data types survive from the pickle.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_overlap.describe.files import Unreadable, bounded_bytes, printable

METADATA = ".metadata"
_MOST_BYTES = 1 << 28
_MOST_DIMENSIONS = 16
_MOST_TENSOR_BYTES = 1 << 50


class Refused(Exception):
    """Refused content; the message is a phrase that follows the file's name. It is sent between ranks as a pickle."""


def _strided_layout(name: str) -> torch.layout:
    """Replaces `torch.serialization._get_layout`: a save writes dense tensors only."""
    if name != "torch.strided":
        raise Refused("describes a tensor that is not dense")
    return torch.strided


def _dropped(*parts: Any) -> None:
    """Replaces a path: the folder of the save, which nothing reads."""


_CHECKPOINT_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CHECKPOINT_CLASSES},
    **{("torch", str(value)[6:]): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _strided_layout,
    **{(module, name): _dropped for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}
"""(module, name) in the pickle -> its replacement."""

_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS APPEND APPENDS MEMOIZE BINPUT "
    "LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD"
).split()
"""Opcodes of the pickle protocols 2 to 5 that an index needs: none for sets, persistent ids or the extension registry."""


_InPython: Any = pickle._Unpickler  # type: ignore[attr-defined]
"""The standard library's unpickler in Python, which typeshed does not declare."""


class _IndexUnpickler(_InPython):  # type: ignore[misc]
    """Python's unpickler for one kind of file: content that no index holds raises Refused."""

    dispatch = {getattr(pickle, name)[0]: _InPython.dispatch[getattr(pickle, name)[0]] for name in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        """The class of an allowed name."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise Refused(f"names {printable(f'{module}.{name}')}, which no index of tensors holds") from None

    def load_build(self) -> None:
        """Set an object's fields; setting fields of a class would change it for the whole process."""
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):
            raise Refused("sets fields of a class")
        super().load_build()

    def load_setitem(self) -> None:
        """Add one entry to a dictionary."""
        self._check_entries(self.stack[-3], [self.stack[-2]])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Add entries to a dictionary."""
        self._check_entries(self.metastack[-1][-1], self.stack[::2])
        super().load_setitems()

    def _check_entries(self, target: Any, keys: list[Any]) -> None:
        # Hashing a nested tuple can take for ever, and such a key needs only a few bytes.
        if type(target) is not dict or not all(type(key) is str or _is_index(key) for key in keys):
            raise Refused("has keys that are no names")

    dispatch |= {pickle.BUILD[0]: load_build, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}


def read_metadata(folder: Path, file_bytes: Mapping[str, int]) -> Metadata:
    """The index of a checkpoint's tensors and objects.

    Args:
        file_bytes: size of every file of the checkpoint by name, as the completion mark lists them.
    Raises:
        Refused: the file is damaged, or holds anything but an index into these files.
    """
    try:
        content = bounded_bytes(folder / METADATA, _MOST_BYTES)
    except Unreadable as error:
        raise Refused(str(error)) from None
    try:
        return _checked(_IndexUnpickler(io.BytesIO(content)).load(), file_bytes)
    except Refused:
        raise
    except Exception as error:  # A damaged pickle fails in any operation of the unpickler, by any exception.
        raise Refused(f"is no index of a checkpoint's tensors ({type(error).__name__})") from None


def _checked(raw: Any, file_bytes: Mapping[str, int]) -> Metadata:
    _require(type(raw) is Metadata and type(raw.state_dict_metadata) is dict and type(raw.storage_data) is dict)
    entries = {key: _entry(key, value) for key, value in raw.state_dict_metadata.items()}
    stored = {}
    for index, info in raw.storage_data.items():
        _require(_is_index(index) and index.fqn in entries)
        stored[MetadataIndex(index.fqn, index.offset)] = _place(info, file_bytes)
    for key, entry in entries.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
        for chunk in chunks:
            if MetadataIndex(key, None if chunk is None else chunk.offsets) not in stored:
                raise Refused(f"says nowhere in which file a part of {printable(key)} is")
    return Metadata(state_dict_metadata=entries, storage_data=stored, storage_meta=StorageMeta(), version=None)


def _entry(key: Any, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    _require(type(key) is str)
    if type(value) is BytesStorageMetadata:
        return BytesStorageMetadata()
    _require(type(value) is TensorStorageMetadata and type(value.properties) is TensorProperties)
    dtype, size = value.properties.dtype, _extent(value.size)
    _require(isinstance(dtype, torch.dtype) and type(value.chunks) is list)
    _require(math.prod(size) * dtype.itemsize <= _MOST_TENSOR_BYTES)
    chunks = []
    for chunk in value.chunks:
        _require(type(chunk) is ChunkStorageMetadata)
        offsets, sizes = _extent(chunk.offsets), _extent(chunk.sizes)
        _require(len(offsets) == len(sizes) == len(size))
        _require(all(begin + length <= end for begin, length, end in zip(offsets, sizes, size, strict=True)))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _place(info: Any, file_bytes: Mapping[str, int]) -> _StorageInfo:
    """The range of a data file of this checkpoint that holds a piece of data, neither compressed nor elsewhere."""
    _require(type(info) is _StorageInfo and type(info.relative_path) is str)
    if not info.relative_path.endswith(".distcp") or info.relative_path not in file_bytes:
        raise Refused(f"points to {printable(info.relative_path)}, which is no data file of this checkpoint")
    offset, length = info.offset, info.length
    _require(_is_count(offset) and _is_count(length) and offset + length <= file_bytes[info.relative_path])
    _require(not getattr(info, "transform_descriptors", None))
    return _StorageInfo(info.relative_path, offset, length, None)


def _is_index(key: Any) -> bool:
    if type(key) is not MetadataIndex or type(key.fqn) is not str:
        return False
    return key.offset is None or _is_extent(key.offset)


def _is_extent(value: Any) -> bool:
    return (
        type(value) in (tuple, torch.Size) and len(value) <= _MOST_DIMENSIONS and all(_is_count(item) for item in value)
    )


def _extent(value: Any) -> torch.Size:
    _require(_is_extent(value))
    return torch.Size(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _require(holds: bool) -> None:
    if not holds:
        raise Refused("is no index of a checkpoint's tensors (a field has another type or range)")
