"""Saving and loading a run: weights, optimizer, schedule, random-number states, progress.

`folder.py` makes a checkpoint complete or absent, `saver.py` and `optimizer_state.py` define its tensors,
`cli/rules/checkpoint.py` defines which checkpoints a run may load. A run that resumes in the saved layout continues bitwise; in
another layout, within rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron.training.checkpoint import folder as checkpoint_folder
from megatron.training.checkpoint.folder import Stored, non_persistent_folder
from megatron.training.checkpoint.loader import (
    CommonLoad,
    RestrictedLoad,
    decoded_states,
    encoded_states,
    index_of,
    tensor_shapes,
    without_extra_states,
)
from megatron.training.checkpoint.lock import FolderLock
from megatron.training.checkpoint.optimizer_state import KEY_PREFIX, optimizer_state, restore_optimizer, step_count
from megatron.training.checkpoint.padding import changed_rows_note
from megatron.training.checkpoint.saver import (
    Keep,
    Saver,
    differences,
    first_reason,
    model_state,
    replica_range,
    without_keys,
)
from megatron.training.checkpoint.start import verified_start
from megatron.training.cli.arguments import config_to_flags
from megatron.training.cli.config import Config
from megatron.training.cli.rules import checkpoint as checkpoint_rules
from megatron.training.cli.rules.checkpoint import Start, model_fingerprint
from megatron.training.cli.rules.resume import require_same_run
from megatron.training.initialize import on_every_rank, on_first_rank
from megatron.training.model.build import unwrap
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan

# The dynamic loss scale of fp16


def scaler_state(optimizer: Any) -> dict[str, float] | None:
    """The dynamic loss scale and its counters, in JSON numbers equal on every rank; None without a dynamic scale.

    Args:
        optimizer: megatron-core's chained optimizers; the first one's scaler counts (moe_overlap/runtime/state/optimizer.py).
    """
    scaler = optimizer.chained_optimizers[0].grad_scaler
    if not isinstance(scaler, DynamicGradScaler):
        return None
    return {name: float(value) for name, value in scaler.state_dict().items()}


def restore_scaler(optimizer: Any, state: dict[str, float] | None) -> None:
    """Restore a saved loss scale; a scale that is constant now, or was in the saved run, follows the flags.

    A window that has become shorter may be over already: it ends at the next step, since megatron-core tests for equality.
    """
    scaler = optimizer.chained_optimizers[0].grad_scaler
    if state is None or not isinstance(scaler, DynamicGradScaler):
        return
    scaler.load_state_dict(
        {
            "scale": torch.full_like(scaler.scale, state["scale"]),
            "growth_tracker": int(min(state["growth_tracker"], scaler.growth_interval - 1)),
            "hysteresis_tracker": int(min(state["hysteresis_tracker"], scaler.hysteresis)),
        }
    )


# Random-number generators


def random_states() -> dict[str, Any]:
    """States of this process's generators: Python, numpy, torch on host and GPU, megatron-core's named streams."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue where `random_states` was called; a GPU's state is restored if both sides have a GPU."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


__all__ = ["Checkpointer", "Progress", "model_fingerprint"]

RANDOM_STATES = "random_states"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run: executed steps, those among them that changed no weight, consumed samples."""

    iteration: int = 0
    skipped: int = 0
    train_samples: int = 0
    valid_samples: int = 0


def layout_of(plan: Plan) -> dict[str, int]:
    """The sizes of a run's groups: if they equal the saved ones, every rank can restore its random-number states.

    Stages of different shape are listed one by one, since a rank's groups describe only its own stage.
    """
    sizes = ("tensor", "context", "expert", "expert_tensor")
    first = plan.stages[0]
    layout = {"world": plan.world_size, "chunks": len(first.chunks), "pipeline": len(plan.stages)}
    layout |= {name: getattr(first, name) for name in sizes}
    if plan.transfers:
        stages = enumerate(plan.stages)
        layout |= {f"stages[{n}].{name}": getattr(stage, name) for n, stage in stages for name in (*sizes, "data")}
    return layout


class Checkpointer:
    """Saves and loads one run; both are collective over all ranks.

    Args:
        chunks: the DDP-wrapped model chunks of this rank.
        optimizer: megatron-core's chained distributed optimizers.
        scheduler: megatron-core's OptimizerParamScheduler, not yet stepped.
        groups: this rank's process groups.
        plan: the layout of the whole run, equal on every rank.
        fingerprint: values that checkpoint and run must share, JSON values by flag (`model_fingerprint`).
        facts: further values that a resumed run must share with it (rules/resume.py).
        whole_weights: context in which every rank has all of its weights, if the update of a step leaves them in shards.
    Attributes:
        notes: lines for the user about the last load.
    """

    def __init__(
        self,
        config: Config,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        groups: ProcessGroupCollection,
        plan: Plan,
        fingerprint: Mapping[str, Any],
        facts: Mapping[str, Any],
        whole_weights: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._whole_weights = whole_weights
        self._config, self._chunks, self._groups = config, list(chunks), groups
        self._optimizer, self._scheduler, self._fingerprint = optimizer, scheduler, dict(fingerprint)
        self._layout, self._facts = layout_of(plan), dict(facts)
        self._tied_blocks = plan.tied_blocks // groups.tp.size()
        self._saver = Saver(config.checkpoint, groups)
        self._locks: list[FolderLock] = []
        self.notes: tuple[str, ...] = ()

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folders of this run's checkpoints for this job. Collective.

        Raises:
            ConfigError: on every rank, when another job has one of them.
        """
        flags = self._config.checkpoint
        folders = [("--save", flags.save), ("--non-persistent-global-ckpt-dir", flags.non_persistent_global_ckpt_dir)]

        def acquire() -> None:
            for flag, folder in folders:
                if folder is None or flags.save is None:
                    continue
                with checkpoint_folder.writing(Path(folder)):
                    Path(folder).mkdir(parents=True, exist_ok=True)
                lock = FolderLock(Path(folder), flag)
                lock.acquire()
                self._locks.append(lock)

        try:
            on_first_rank(acquire)
            yield
        finally:
            for lock in self._locks:
                lock.release()
            self._locks.clear()

    def save(self, progress: Progress, persistent: bool = True) -> None:
        """Write `<save>/step-N`, or start to with --async-save; killed at any moment, the step is absent or complete.

        Args:
            persistent: whether to keep it; else it replaces the previous non-persistent checkpoint, in a separate folder.
        Raises:
            ConfigError: on every rank, when the folder cannot be written.
        """
        flags = self._config.checkpoint
        assert flags.save is not None
        folder, keep = Path(flags.save), Keep(flags.keep_last_checkpoints, flags.save_retain_interval)
        if not persistent:
            # A separate folder, so that --keep-last-checkpoints never counts these and `prune` never deletes the others.
            folder, keep = non_persistent_folder(flags.save, flags.non_persistent_global_ckpt_dir), Keep(last=1)
        content = {
            "progress": dataclasses.asdict(progress),
            "fingerprint": self._fingerprint,
            "run": self._facts,
            "arguments": config_to_flags(self._config),
            "layout": self._layout,
            "scheduler": self._scheduler.state_dict(),
            "optimizer": None if flags.no_save_optim else self._optimizer_mark(),
            "random_states": not flags.no_save_rng,
            "versions": _versions(),
        }
        on_first_rank(self._require_folders)
        # Collective, and before any gather: a folder that cannot be written fails on all ranks before any work is done.
        temporary = self._saver.open(folder, progress.iteration)
        with self._gathered_weights():
            state = self._state(not flags.no_save_optim, not flags.no_save_rng, loading=False)
            self._saver.save(state, temporary, progress.iteration, content, keep)

    def completed(self, wait: bool) -> Path | None:
        """The checkpoint that has become complete since the last call.

        Args:
            wait: whether to wait until a save in flight is complete.
        Raises:
            ConfigError: on every rank, when it could not be written.
        """
        return self._saver.completed(wait)

    def load(self) -> Progress | None:
        """Load the newest complete checkpoint of --load, or that of --ckpt-step; where there is none, --pretrained-checkpoint.

        --finetune takes only the weights and starts at step 0; --no-load-optim leaves out optimizer and schedule, as upstream.
        Random-number states are restored only in the layout in which they were saved: elsewhere the run keeps those of its seed.

        With --max-restarts a damaged checkpoint of --load becomes a note, and the previous one is loaded (`verified_start`).

        Returns:
            The run's progress; None if there is nothing to load.
        Raises:
            ConfigError: on every rank: incomplete, corrupt, or not a checkpoint of this run.
        """
        flags = self._config.checkpoint
        start, self.notes = verified_start(flags)
        note = checkpoint_rules.missing_note(flags, start)
        self.notes += () if note is None else (note,)
        if start is None:
            return None
        with checkpoint_rules.told_of(start.flag), self._whole_weights():
            self._load(start)
        return Progress() if start.weights_alone else Progress(**start.stored.mark["progress"])

    def _require_folders(self) -> None:
        for lock in self._locks:
            lock.require()

    def _load(self, start: Start) -> None:
        flags, stored, load = self._config.checkpoint, start.stored, start.folder
        with_optimizer = not (start.weights_alone or flags.no_load_optim)
        with_random = not (start.weights_alone or flags.no_load_rng)
        same_layout = stored.mark["layout"] == self._layout
        checkpoint_rules.require_same_fingerprint(stored, load, self._fingerprint)
        changed = require_same_run(stored, load, self._config, self._facts, start.weights_alone)
        optimizer = self._optimizer_mark() if with_optimizer else None
        checkpoint_rules.require_parts(stored, load, optimizer, with_random and same_layout)

        request = self._state(with_optimizer, with_random and same_layout, loading=True)
        ignored = () if with_optimizer else (KEY_PREFIX,)
        metadata = on_every_rank(lambda: index_of(stored))
        differing = differences(request, tensor_shapes(metadata), ignored)
        notes = checkpoint_rules.require_fit(stored, load, differing, flags.dist_ckpt_strictness)
        if differing.rows is not None:
            notes = (*notes, changed_rows_note(*differing.rows, self._groups.tp.size()))
        loaded = self._read(stored, metadata, without_keys(request, differing.absent_keys))
        del request  # It holds the loaded tensors, too.
        dropped = 0
        for index, chunk in enumerate(self._chunks):
            weights, count = without_extra_states(loaded[f"model{index}"])
            unwrap(chunk).load_state_dict(weights, strict=not differing.absent_keys)
            dropped += count
        if dropped:
            notes = (*notes, f"the extra states of {dropped} layers begin anew: they are pickles, which are not loaded")
        if with_optimizer:
            name, steps = self._config.optimizer.optimizer, stored.mark["optimizer"]["steps"]
            restore_optimizer(self._optimizer, name, loaded["optimizer"], steps)
            restore_scaler(self._optimizer, stored.mark["optimizer"].get("scaler"))
            self._load_schedule(stored, load)
        else:
            # Master weights are copies: without this the first step would write the old weights back.
            self._optimizer.reload_model_params()
        if with_random and same_layout:
            on_every_rank(lambda: _take_over_random_states(stored, loaded[RANDOM_STATES]))
        elif with_random:
            notes = (*notes, "random-number states begin anew: they were saved in another layout")
        self.notes += (f"{stored.path}{', weights alone' if start.weights_alone else ''}", *changed, *notes)

    def _state(self, with_optimizer: bool, with_random: bool, *, loading: bool) -> dict[str, Any]:
        models = {
            f"model{index}": model_state(unwrap(c), self._groups, self._tied_blocks)
            for index, c in enumerate(self._chunks)
        }
        state: dict[str, Any] = dict(models)
        if with_optimizer:
            name = self._config.optimizer.optimizer
            state["optimizer"] = optimizer_state(self._optimizer, name, models, loading=loading)
        if with_random:
            # One object per rank: in another layout no rank owns these streams.
            states = None if loading else encoded_states(random_states())
            state[RANDOM_STATES] = ShardedObject(RANDOM_STATES, states, (dist.get_world_size(),), (dist.get_rank(),))
        return state

    def _read(self, stored: Stored, metadata: Metadata, request: dict[str, Any]) -> dict[str, Any]:
        strategy: Any = RestrictedLoad(metadata)
        if self._config.checkpoint.ckpt_fully_parallel_load and replica_range(self._groups)[1] > 1:
            strategy = FullyParallelLoadStrategyWrapper(strategy, self._groups.dp_cp)
        common = CommonLoad()
        on_every_rank(lambda: common.load_common(stored.path))
        try:
            loaded: dict[str, Any] = dist_checkpointing.load(request, str(stored.path), strategy, common)
        except CheckpointException as error:
            fix = "choose another checkpoint by --ckpt-step"
            raise ConfigError("--load", stored.path, f"cannot be read: {first_reason(error)}", fix) from error
        return loaded

    @contextlib.contextmanager
    def _gathered_weights(self) -> Iterator[None]:
        """Gather the weights of other ranks, which an overlapped gather leaves outdated until the next forward pass."""
        overlapped = [chunk for chunk in self._chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            with self._whole_weights():
                yield
        finally:
            for chunk in overlapped:
                chunk.enable_forward_pre_hook()

    def _optimizer_mark(self) -> dict[str, Any]:
        flags = self._config.optimizer
        precision = "fp16" if self._config.precision.fp16 else "bf16" if flags.bf16 else "fp32"
        steps, scaler = step_count(self._optimizer), scaler_state(self._optimizer)
        return {"name": flags.optimizer, "precision": precision, "steps": steps, "scaler": scaler}

    def _load_schedule(self, stored: Stored, load: str) -> None:
        of_run = self._scheduler.state_dict()
        saved = checkpoint_rules.schedule_to_load(stored, load, of_run, self._config.optimizer)
        self._scheduler.load_state_dict(saved)
        # megatron-core leaves the run's own bounds in the parameter groups, where they override the schedule's, and sets this
        # step's weight decay before it restores the saved one.
        for group in self._optimizer.param_groups:
            for bound in ("max_lr", "min_lr"):
                if group.get(bound) == of_run[bound]:
                    group[bound] = getattr(self._scheduler, bound)
        self._scheduler.step(increment=0)


def _take_over_random_states(stored: Stored, states: Any) -> None:
    try:
        set_random_states(decoded_states(states))
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        rule = f"holds random-number states that no generator takes ({type(error).__name__})"
        raise ConfigError("--load", stored.path, rule, "add --no-load-rng") from None


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "megatron-core", "numpy")}
    return {"python": platform.python_version(), **packages}
