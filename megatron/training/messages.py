"""Collectives of JSON values, sent as tensors. torch's collectives of objects unpickle received bytes, which may execute them.

Tuples arrive as lists. Every function is collective over its group, by default the world.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def from_first(value: Any, group: Any = None) -> Any:
    """The value of rank 0, on every rank."""
    sent = _encoded(value if dist.get_rank() == 0 else None, group)
    size = torch.tensor([sent.numel()], device=sent.device)
    dist.broadcast(size, 0, group=group)
    content = sent if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=sent.device)
    dist.broadcast(content, 0, group=group)
    return _decoded(content)


def of_all(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks, on every rank."""
    padded, sizes = _padded(value, group)
    contents = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(contents, padded, group=group)
    return [_decoded(content[:size]) for content, size in zip(contents, sizes, strict=True)]


def of_all_on_first(value: Any, group: Any = None) -> list[Any] | None:
    """The values of all ranks, on rank 0; None on the others."""
    padded, sizes = _padded(value, group)
    contents = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, contents, 0, group=group)
    return contents and [_decoded(content[:size]) for content, size in zip(contents, sizes, strict=True)]


def _padded(value: Any, group: Any) -> tuple[Tensor, list[int]]:
    """A value padded to the longest of all ranks, and the length of each rank's value."""
    sent = _encoded(value, group)
    size = torch.tensor([sent.numel()], device=sent.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in sizes]
    return torch.nn.functional.pad(sent, (0, max(lengths) - sent.numel())), lengths


def _encoded(value: Any, group: Any) -> Tensor:
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return content.cuda() if dist.get_backend(group) == "nccl" else content


def _decoded(content: Tensor) -> Any:
    return json.loads(content.cpu().numpy().tobytes())
