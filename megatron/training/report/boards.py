"""TensorBoard and Weights & Biases behind one interface; made on the rank that speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.config import LoggingConfig


class Boards:
    """What the flags ask for: none, one of the two, or both.

    Args:
        settings: all flags of the run; W&B shows them beside its curves.
    """

    def __init__(self, config: LoggingConfig, settings: Mapping[str, Any]) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(config.tensorboard_dir, max_queue=config.tensorboard_queue_size)
        if config.wandb_project:
            import wandb

            if config.wandb_save_dir:
                Path(config.wandb_save_dir).mkdir(parents=True, exist_ok=True)
            self._wandb = wandb.init(
                project=config.wandb_project,
                name=config.wandb_exp_name or None,
                entity=config.wandb_entity or None,
                dir=config.wandb_save_dir or None,
                config=dict(settings),
            )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Points of several curves at one step."""
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None and values:
            self._wandb.log(dict(values), step=step)

    def loads(self, name: str, load: Sequence[int], step: int) -> None:
        """A bar for every expert: the histogram's bucket e holds the tokens of expert e."""
        if self._tensorboard is None or not any(load):
            return
        self._tensorboard.add_histogram_raw(
            name,
            min=0,
            max=len(load) - 1,
            num=sum(load),
            sum=sum(expert * tokens for expert, tokens in enumerate(load)),
            sum_squares=sum(expert**2 * tokens for expert, tokens in enumerate(load)),
            bucket_limits=[expert + 0.5 for expert in range(len(load))],
            bucket_counts=list(load),
            global_step=step,
        )

    def close(self) -> None:
        """Write what is waiting."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
