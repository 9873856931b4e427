"""The checkpoint that a run starts from: rank 0 finds it, and all ranks verify its files before the run uses any.

A run whose ranks restart by themselves (`--max-restarts`) has no user who could choose another checkpoint. It falls back: a
damaged checkpoint of --load becomes a note, and the previous one is verified. If all are damaged the run ends, because it had
made progress and must not begin at step 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.training.checkpoint import folder as checkpoint_folder
from megatron.training.checkpoint.folder import Stored
from megatron.training.checkpoint.loader import NEEDED_FILES
from megatron.training.cli.config import CheckpointConfig
from megatron.training.cli.rules.checkpoint import Start, falls_back, start_of, told_of
from megatron.training.initialize import on_every_rank, on_first_rank
from moe_overlap.describe.errors import ConfigError


def verified_start(flags: CheckpointConfig) -> tuple[Start | None, tuple[str, ...]]:
    """The checkpoint, with verified files, and notes on those that the run falls back from. Collective.

    Raises:
        ConfigError: it is incomplete or damaged, and the run does not fall back or has no other to fall back to.
    """
    damaged: dict[Path, ConfigError] = {}
    while True:
        start = _start_on_all_ranks(flags, [*damaged])
        if damaged and (start is None or start.flag != "--load"):
            raise next(iter(damaged.values()))
        if start is None:
            return None, ()
        may_fall_back = falls_back(flags) and start.flag == "--load"
        try:
            with told_of(start.flag):
                _verify(start.stored)
        except ConfigError as error:
            if not may_fall_back:
                raise
            damaged[start.stored.path] = error
            continue
        incomplete = on_first_rank(partial(checkpoint_folder.newer_incomplete, start.stored)) if may_fall_back else []
        reasons = [f"{error.value} {error.rule}" for error in damaged.values()]
        reasons += [f"{path} is incomplete or damaged" for path in incomplete]
        return start, tuple(f"{reason}; the checkpoint before is taken" for reason in reasons)


def _start_on_all_ranks(flags: CheckpointConfig, damaged: Sequence[Path]) -> Start | None:
    """`start_of` on rank 0, for all ranks."""

    def fields_of_start() -> list[Any] | None:
        start = start_of(flags, damaged)
        if start is None:
            return None
        stored = start.stored
        return [str(stored.path), stored.step, stored.order, stored.mark, start.flag, start.folder, start.weights_alone]

    fields = on_first_rank(fields_of_start)
    if fields is None:
        return None
    path, step, order, mark, flag, folder, weights_alone = fields
    return Start(Stored(Path(path), step, order, mark), flag, folder, weights_alone)


def _verify(stored: Stored) -> None:
    """Compare every file with the completion mark. Ranks share the files: each is read once, in the same order on all ranks."""
    on_first_rank(partial(checkpoint_folder.require_whole, stored, NEEDED_FILES))
    names = sorted(stored.mark["files"])
    on_every_rank(lambda: checkpoint_folder.verify(stored, names[dist.get_rank() :: dist.get_world_size()]))
