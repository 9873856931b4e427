"""Where a step's figures go: one `log(metrics)` for console, JSON lines and TensorBoard."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron.training.config import LoggingConfig


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Figures of one step on one rank. Loss, tokens and norm are those of the whole run, the rest this rank's."""

    step: int
    loss: float
    step_seconds: float
    tokens_per_second: float
    grad_norm: float
    learning_rate: float
    comm_seconds: float
    exposed_comm_seconds: float
    comm_covered: tuple[str, ...]
    """Channels whose communication is measured."""
    peak_bytes: int
    resident_bytes: int
    consumed_samples: int
    optional: dict[str, float]
    """Figures behind flags: params_norm, num_zeros_in_grad, model_tflops."""
    deferred: dict[str, int]
    """Weight gradients put aside so far: deferred_peak_bytes they held, deferred_early ones that had no room; else empty."""


class MetricsLog:
    """Console on rank 0, JSON lines on every rank, TensorBoard on rank 0.

    Args:
        total_steps: for the console's counter.
    """

    def __init__(self, config: LoggingConfig, rank: int, total_steps: int) -> None:
        self._config, self._rank, self._total = config, rank, total_steps
        self._json: IO[str] | None = None
        if config.log_json is not None:
            path = Path(config.log_json if rank == 0 else f"{config.log_json}.rank{rank}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._json = path.open("a")
        self._board: Any = None
        if config.tensorboard_dir is not None and rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(config.tensorboard_dir)

    def log(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        if self._json is not None:
            row = asdict(metrics)
            row.update(row.pop("optional") | row.pop("deferred"))
            self._json.write(json.dumps(row) + "\n")
            self._json.flush()
        if self._board is not None and metrics.step % self._config.tensorboard_log_interval == 0:
            for name, value in _board_values(metrics).items():
                self._board.add_scalar(name, value, metrics.step)
        if self._rank == 0 and (metrics.step % self._config.log_interval == 0 or metrics.step == 1):
            print(step_line(metrics, self._total), flush=True)

    def log_evaluation(self, name: str, loss: float, step: int, note: str = "") -> None:
        """Record the loss on a split that is not trained on."""
        if self._board is not None:
            self._board.add_scalar(f"{name}/loss", loss, step)
        if self._rank == 0:
            print(f"{name:<12} loss {loss:.4f}{note}", flush=True)

    def say(self, subject: str, text: str) -> None:
        """One line on the console of rank 0."""
        if self._rank == 0:
            print(f"{subject:<12} {text}", flush=True)

    def close(self) -> None:
        """Flush and close the files."""
        if self._json is not None:
            self._json.close()
        if self._board is not None:
            self._board.close()


def step_line(metrics: StepMetrics, total: int) -> str:
    """The console's line of a step."""
    width = len(str(total))
    share = metrics.exposed_comm_seconds / metrics.step_seconds if metrics.step_seconds else 0.0
    optional = "".join(f"  {name} {value:.4g}" for name, value in metrics.optional.items())
    if metrics.deferred:
        held, early = metrics.deferred["deferred_peak_bytes"], metrics.deferred["deferred_early"]
        optional += f"  deferred {held / 2**20:.1f} MiB, {early} early"
    return (
        f"step {metrics.step:>{width + 2}}/{total}  loss {metrics.loss:.4f}  grad {metrics.grad_norm:.2f}"
        f"  lr {metrics.learning_rate:.1e}  {_thousands(metrics.tokens_per_second):>6} tok/s  {metrics.step_seconds:.2f} s"
        f"  comm {metrics.comm_seconds:.2f} s, exposed {metrics.exposed_comm_seconds:.2f} s ({share:.0%})"
        f"  peak {metrics.peak_bytes / 2**20:.0f} MiB{optional}"
    )


def _thousands(value: float) -> str:
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def _board_values(metrics: StepMetrics) -> dict[str, float]:
    row = asdict(metrics)
    optional = row.pop("optional") | row.pop("deferred")
    return {
        name: value for name, value in (row | optional).items() if isinstance(value, (int, float)) and name != "step"
    }
