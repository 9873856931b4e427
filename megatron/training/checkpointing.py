"""Saving and loading a run: weights, optimizer, schedule, random-number states, progress.

`checkpoint_folder.py` makes a checkpoint complete or absent, `checkpoint_tensors.py` and `optimizer_state.py` say what its
tensors are, `checkpoint_rules.py` what a run may load. A run that resumes in the layout it was saved in continues bitwise; in
another one, within rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training import checkpoint_folder, checkpoint_rules
from megatron.training.checkpoint_folder import Stored
from megatron.training.checkpoint_rules import model_fingerprint
from megatron.training.checkpoint_tensors import DirectSave, differences, model_state
from megatron.training.config import Config
from megatron.training.first_rank import on_every_rank, on_first_rank
from megatron.training.loss_scale import restore_scaler, scaler_state
from megatron.training.model import unwrap
from megatron.training.optimizer_state import KEY_PREFIX, optimizer_state, restore_optimizer, step_count
from megatron.training.random_states import random_states, set_random_states
from moe_overlap.describe.errors import ConfigError

__all__ = ["Checkpointer", "Progress", "model_fingerprint"]

RANDOM_STATES = "random_states"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is: steps made, those of them that left the weights alone, samples consumed."""

    iteration: int = 0
    skipped: int = 0
    train_samples: int = 0
    valid_samples: int = 0


class Checkpointer:
    """Saves and loads one run; both are collective over all ranks.

    Args:
        chunks: the DDP-wrapped model chunks of this rank.
        optimizer: megatron-core's chained distributed optimizers.
        scheduler: megatron-core's OptimizerParamScheduler, not yet stepped.
        groups: this rank's process groups.
        fingerprint: what a checkpoint must share with the run that loads it, JSON values by flag (`model_fingerprint`).
    """

    def __init__(
        self,
        config: Config,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        groups: ProcessGroupCollection,
        fingerprint: Mapping[str, Any],
    ) -> None:
        self._config, self._chunks, self._groups = config, list(chunks), groups
        self._optimizer, self._scheduler, self._fingerprint = optimizer, scheduler, dict(fingerprint)

    def save(self, progress: Progress) -> None:
        """Write `<save>/step-N`; killed before it returns, the step is absent or complete.

        Raises:
            ConfigError: on every rank, when the folder cannot be written.
        """
        flags = self._config.checkpoint
        assert flags.save is not None
        folder, step, rank = Path(flags.save), progress.iteration, dist.get_rank()
        content = {
            "progress": dataclasses.asdict(progress),
            "fingerprint": self._fingerprint,
            "layout": self._layout(),
            "scheduler": self._scheduler.state_dict(),
            "optimizer": None if flags.no_save_optim else self._optimizer_mark(),
            "random_states": not flags.no_save_rng,
            "versions": _versions(),
        }
        temporary = on_first_rank(lambda: checkpoint_folder.open_temporary(folder, step))
        on_every_rank(lambda: _require_shared(folder, temporary))
        with self._gathered_weights():
            self._write(folder, temporary)
        mine = on_every_rank(lambda: checkpoint_folder.checksums(temporary.glob(f"__{rank}_*.distcp")))
        sums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sums, mine)

        def finish() -> None:
            files = {name: sizes for part in sums for name, sizes in part.items()}
            files |= checkpoint_folder.checksums(path for path in temporary.iterdir() if path.name not in files)
            checkpoint_folder.publish(temporary, folder, step, {**content, "files": files})
            checkpoint_folder.prune(folder, step, flags.keep_last_checkpoints, flags.save_retain_interval)

        on_first_rank(finish)

    def load(self) -> Progress | None:
        """Load the newest complete checkpoint of --load, or that of --ckpt-step.

        --finetune takes the weights alone and starts at step 0; --no-load-optim leaves out optimizer and schedule, as upstream.
        Random-number states are taken in the layout they were saved in only: elsewhere the run keeps those of its seed.

        Returns:
            Where the run stands; None without --load, or when the folder is absent or empty.
        Raises:
            ConfigError: on every rank: incomplete, corrupt, or not a checkpoint of this run.
        """
        flags = self._config.checkpoint
        if flags.load is None:
            return None
        load, step, must_exist = flags.load, flags.ckpt_step, flags.exit_on_missing_checkpoint
        stored = on_first_rank(lambda: checkpoint_folder.choose(load, step, must_exist))
        if stored is None:
            return None
        names = sorted(stored.mark["files"])
        on_every_rank(lambda: checkpoint_folder.verify(stored, names[dist.get_rank() :: dist.get_world_size()]))
        with_optimizer = not (flags.finetune or flags.no_load_optim)
        with_random = not (flags.finetune or flags.no_load_rng) and stored.mark["layout"] == self._layout()
        checkpoint_rules.require_same_fingerprint(stored, load, self._fingerprint)
        optimizer = self._optimizer_mark() if with_optimizer else None
        checkpoint_rules.require_parts(stored, load, optimizer, with_random)

        request = self._state(with_optimizer, with_random, loading=True)
        ignored = () if with_optimizer else (KEY_PREFIX,)
        checkpoint_rules.require_fit(stored, load, differences(request, stored.path, ignored))
        loaded = _read(stored, request)
        for index, chunk in enumerate(self._chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{index}"])
        if with_optimizer:
            name, steps = self._config.optimizer.optimizer, stored.mark["optimizer"]["steps"]
            restore_optimizer(self._optimizer, name, loaded["optimizer"], steps)
            restore_scaler(self._optimizer, stored.mark["optimizer"].get("scaler"))
            self._load_schedule(stored, load)
        else:
            self._optimizer.reload_model_params()
        if with_random:
            set_random_states(loaded[RANDOM_STATES])
        return Progress() if flags.finetune else Progress(**stored.mark["progress"])

    def _state(self, with_optimizer: bool, with_random: bool, *, loading: bool) -> dict[str, Any]:
        models = {f"model{index}": model_state(unwrap(c), self._groups) for index, c in enumerate(self._chunks)}
        state: dict[str, Any] = dict(models)
        if with_optimizer:
            name = self._config.optimizer.optimizer
            state["optimizer"] = optimizer_state(self._optimizer, name, models, loading=loading)
        if with_random:
            mine = None if loading else random_states()
            state[RANDOM_STATES] = ShardedObject(RANDOM_STATES, mine, (dist.get_world_size(),), (dist.get_rank(),))
        return state

    def _write(self, folder: Path, temporary: Path) -> None:
        flags = self._config.checkpoint
        state = self._state(not flags.no_save_optim, not flags.no_save_rng, loading=False)
        try:
            with checkpoint_folder.writing(folder):
                dist_checkpointing.save(state, str(temporary), sharded_strategy=DirectSave())
        except CheckpointException as error:
            with checkpoint_folder.writing(folder):
                raise OSError(_first_reason(error)) from error

    @contextlib.contextmanager
    def _gathered_weights(self) -> Iterator[None]:
        """With an overlapped gather the weights of other ranks are stale until the next forward pass: fetch them now."""
        overlapped = [chunk for chunk in self._chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for chunk in overlapped:
                chunk.enable_forward_pre_hook()

    def _layout(self) -> dict[str, int]:
        groups = self._groups
        sizes = {"tensor": groups.tp, "context": groups.cp, "pipeline": groups.pp, "expert": groups.ep}
        sizes["expert_tensor"] = groups.expt_tp
        return {"world": dist.get_world_size(), "chunks": len(self._chunks)} | {k: g.size() for k, g in sizes.items()}

    def _optimizer_mark(self) -> dict[str, Any]:
        flags = self._config.optimizer
        precision = "fp16" if self._config.precision.fp16 else "bf16" if flags.bf16 else "fp32"
        steps, scaler = step_count(self._optimizer), scaler_state(self._optimizer)
        return {"name": flags.optimizer, "precision": precision, "steps": steps, "scaler": scaler}

    def _load_schedule(self, stored: Stored, load: str) -> None:
        mine = self._scheduler.state_dict()
        saved = checkpoint_rules.schedule_to_load(stored, load, mine, self._config.optimizer)
        self._scheduler.load_state_dict(saved)
        # megatron-core leaves the run's own bounds in the parameter groups, where they win over the schedule's, and sets this
        # step's weight decay before it takes over the saved one.
        for group in self._optimizer.param_groups:
            for bound in ("max_lr", "min_lr"):
                if group.get(bound) == mine[bound]:
                    group[bound] = getattr(self._scheduler, bound)
        self._scheduler.step(increment=0)


def _read(stored: Stored, request: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(request, str(stored.path))
    except CheckpointException as error:
        fix = "choose another checkpoint by --ckpt-step"
        raise ConfigError("--load", stored.path, f"cannot be read: {_first_reason(error)}", fix) from error
    return loaded


def _first_reason(error: CheckpointException) -> str:
    failure = next(iter(error.failures.values()))[0]
    return str(getattr(failure, "strerror", None) or failure).splitlines()[0]


def _require_shared(folder: Path, temporary: Path) -> None:
    if not temporary.is_dir():
        raise ConfigError("--save", folder, "is not the same folder on every node", "choose a shared file system")


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "megatron-core", "numpy")}
    return {"python": platform.python_version(), **packages}
