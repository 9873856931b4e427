"""Trainings that follow one another in one process share their groups: each holds threads and sockets until the process ends."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

_MADE: dict[tuple[Any, ...], Any] = {}
"""World, ranks, options, and how many of the kind a training had made before -> the group."""


@contextlib.contextmanager
def reused_groups() -> Iterator[None]:
    """Groups that are asked for inside are those that an earlier training of the same world asked for, where there is one."""
    import torch.distributed as dist

    world, new_group = dist.group.WORLD, dist.new_group
    asked: Counter[tuple[Any, ...]] = Counter()

    def reused(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        described = {name: option for name, option in options.items() if name != "group_desc"}
        kind = (world, tuple(ranks) if ranks is not None else None, tuple(sorted(described.items())))
        key = (*kind, asked[kind])
        asked[kind] += 1
        if key not in _MADE:
            _MADE[key] = new_group(ranks, **options)
        return _MADE[key]

    with mock.patch("torch.distributed.new_group", reused):
        yield
