"""The checkpoint that a run starts from: found by rank 0, and read by all ranks before anything of it is used.

Where the ranks may be started again by themselves (`--max-restarts`) nobody is there to choose another checkpoint: one of --load
that is damaged is told of, and the one before is taken. Where all are damaged the run ends, as it was under way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.training.checkpoint import folder as checkpoint_folder
from megatron.training.checkpoint.folder import Stored
from megatron.training.checkpoint.loader import NEEDED_FILES
from megatron.training.cli.config import CheckpointConfig
from megatron.training.cli.rules.checkpoint import Start, start_of, told_of
from megatron.training.initialize import on_every_rank, on_first_rank
from moe_overlap.describe.errors import ConfigError

RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
"""Variable by which torch's agent tells its ranks how often they may be started again."""


def may_pass_over(flags: CheckpointConfig) -> bool:
    """Whether a run goes on from an earlier checkpoint of --load where the newest is damaged."""
    return os.environ.get(RESTARTS, "0") != "0" and flags.ckpt_step is None


def whole_start(flags: CheckpointConfig) -> tuple[Start | None, tuple[str, ...]]:
    """The checkpoint, each of its files as it was written, and lines on those that were passed over. Collective.

    Raises:
        ConfigError: it is incomplete or damaged, and no other may be taken, or there is none.
    """
    passes_over, damaged = may_pass_over(flags), dict[Path, ConfigError]()
    while True:
        start = _start(flags, [*damaged] if passes_over else None)
        if damaged and (start is None or start.flag != "--load"):
            raise next(iter(damaged.values()))
        if start is None:
            return None, ()
        passes_over = passes_over and start.flag == "--load"
        try:
            with told_of(start.flag):
                _require_whole(start.stored)
        except ConfigError as error:
            if not passes_over:
                raise
            damaged[start.stored.path] = error
            continue
        if not passes_over:
            return start, ()
        incomplete = on_first_rank(partial(checkpoint_folder.incomplete_behind, start.stored))
        told = [f"{error.value} {error.rule}" for error in damaged.values()]
        told += [f"{path} is incomplete or damaged" for path in incomplete]
        return start, tuple(f"{each}; the checkpoint before is taken" for each in told)


def _start(flags: CheckpointConfig, passed_over: Sequence[Path] | None) -> Start | None:
    """What rank 0 finds, on every rank."""

    def find() -> list[Any] | None:
        start = start_of(flags, passed_over)
        if start is None:
            return None
        stored = start.stored
        return [str(stored.path), stored.step, stored.order, stored.mark, start.flag, start.folder, start.weights_alone]

    found = on_first_rank(find)
    if found is None:
        return None
    path, step, order, mark, *rest = found
    return Start(Stored(Path(path), step, order, mark), *rest)


def _require_whole(stored: Stored) -> None:
    # Ranks share the files, so that a checkpoint is read once for its checksums, not once per rank. The order is the same on all.
    on_first_rank(partial(checkpoint_folder.require_whole, stored, NEEDED_FILES))
    names = sorted(stored.mark["files"])
    on_every_rank(lambda: checkpoint_folder.verify(stored, names[dist.get_rank() :: dist.get_world_size()]))
