"""Figures of a run and their destinations: console, JSON lines, TensorBoard and W&B, the file of expert loads."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import IO, Any

from megatron.training.cli.config import LoggingConfig
from megatron.training.report.live_line import LiveLine
from megatron.training.report.outputs import Sink
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.describe.files import printable


class Boards:
    """TensorBoard and Weights & Biases behind one interface: none, one or both, by the flags; only rank 0 has them.

    Args:
        settings: all flags of the run; W&B shows them next to its curves.
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

    @property
    def exist(self) -> bool:
        """Whether there is any."""
        return self._tensorboard is not None or self._wandb is not None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each of several curves at one step."""
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None and values:
            self._wandb.log(dict(values), step=step)

    def loads(self, name: str, load: Sequence[int], step: int) -> None:
        """Draw a bar for every expert: bucket e of the histogram holds the tokens of expert e."""
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
        """Write the buffered points."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


CURVES = {
    "loss": "lm loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "params_norm": "params-norm",
    "num_zeros_in_grad": "num-zeros",
    "loss_scale": "loss-scale",
    "step_seconds": "iteration-time",
    "model_tflops_per_device": "throughput",
    "valid": "lm loss validation",
    "test": "lm loss test",
}
"""Figure -> its curve in TensorBoard and W&B, by Megatron-LM's name, so that runs of both share a chart; figures that
Megatron-LM lacks keep their names."""
LARGEST_EXPONENT = 20
"""Largest exponent of a perplexity, as upstream bounds it."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Figures of one step on one rank. Loss, tokens and norm are those of the run, the others are this rank's."""

    step: int
    loss: float
    step_seconds: float
    tokens_per_second: float
    grad_norm: float
    learning_rate: float
    comm_seconds: float | None
    """None where no spans were recorded, as no line or curve shows the step by itself."""
    exposed_comm_seconds: float | None
    comm_covered: tuple[str, ...]
    """Channels whose communication is measured."""
    peak_bytes: int
    resident_bytes: int
    consumed_samples: int
    optional: dict[str, float]
    """Figures behind flags: params_norm, num_zeros_in_grad, model_tflops; with fp16 loss_scale and skipped_iterations so far;
    the mean of every balancing loss (load_balancing_loss, z_loss, …)."""
    predictions: tuple[float, ...]
    """Mean loss of every multi-token-prediction layer: figures `mtp_1_loss`, …; Megatron-LM's curves are called `mtp_1 loss`."""
    deferred: dict[str, int]
    """Deferred weight gradients so far: deferred_peak_bytes, the largest memory they held; deferred_early, how many were computed
    early for lack of memory capacity; empty where none are deferred."""

    @property
    def extra_figures(self) -> dict[str, float]:
        """The figures that not every run has, by name, without those of deferred gradients."""
        return {f"mtp_{depth}_loss": loss for depth, loss in enumerate(self.predictions, 1)} | self.optional


class MetricsLog:
    """Console, TensorBoard, W&B and the file of expert loads on rank 0, JSON lines on every rank.

    A destination that fails costs one warning and its further output; the run goes on.

    Args:
        total_steps: end of the console's counter.
        settings: all flags of the run, for W&B.
    """

    def __init__(
        self, config: LoggingConfig, rank: int, total_steps: int, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._config, self._rank, self._total = config, rank, total_steps
        path = config.log_json if rank == 0 or config.log_json is None else f"{config.log_json}.rank{rank}"
        self._json = _appended(path)
        self._loads = _appended(config.log_expert_load if rank == 0 else None)
        self._boards = Boards(config, settings) if rank == 0 else None
        self._to_json, self._to_loads = Sink("--log-json", path), Sink("--log-expert-load", config.log_expert_load)
        board = "--tensorboard-dir" if config.tensorboard_dir else "--wandb-project"
        self._to_boards = Sink(board, config.tensorboard_dir or config.wandb_project)
        self._to_console = Sink("stdout", "")
        self._line = LiveLine(sys.stdout)
        self._untold: list[StepMetrics] = []
        """Steps since the last line on the console."""

    def log(self, metrics: StepMetrics, board_only: Mapping[str, float] = MappingProxyType({})) -> None:
        """Record one training step.

        Args:
            board_only: further curves for TensorBoard and W&B only.
        """
        row = _common(metrics) | metrics.extra_figures | metrics.deferred
        self._write_line(json.dumps({name: _or_null(value) for name, value in row.items()}))
        if metrics.step % self._config.tensorboard_log_interval == 0:
            values = {**_board_values(metrics), **board_only}
            if not self._config.log_loss_scale_to_tensorboard:
                values.pop(CURVES["loss_scale"], None)
            self._draw(lambda boards: boards.scalars(values, metrics.step))
        self._untold.append(metrics)
        if self._has_line(metrics.step):
            self._print(step_line(mean_of(self._untold), self._total))
            self._untold.clear()
        elif self._rank == 0:
            text = f"step {metrics.step}/{self._total}, {metrics.step_seconds:.3g} s, loss {metrics.loss:.4f}"
            self._to_console.attempt(lambda: self._line.show(text))

    def shows(self, step: int) -> bool:
        """Whether a line or curve shows what this step communicated. The console's mean is over the steps that were measured."""
        draws = self._boards is not None and self._boards.exist and step % self._config.tensorboard_log_interval == 0
        return self._json is not None or draws or self._has_line(step)

    def _has_line(self, step: int) -> bool:
        return step % self._config.log_interval == 0 or step in (1, self._total)

    def _write_line(self, line: str) -> None:
        file = self._json
        if file is not None:
            self._to_json.attempt(lambda: (file.write(line + "\n"), file.flush()))

    def _draw(self, work: Callable[[Boards], None]) -> None:
        boards = self._boards
        if boards is not None:
            self._to_boards.attempt(lambda: work(boards))

    def _print(self, line: str) -> None:
        if self._rank == 0:
            self._to_console.attempt(self._line.clear)
            self._to_console.attempt(lambda: print(line, flush=True))

    def log_evaluation(self, name: str, loss: float, step: int, note: str = "") -> None:
        """Record the loss on a split that is not trained on."""
        values = {CURVES[name]: loss}
        if self._config.log_validation_ppl_to_tensorboard:
            values[f"{CURVES[name]} ppl"] = math.exp(min(loss, LARGEST_EXPONENT))
        self._draw(lambda boards: boards.scalars(values, step))
        self._print(f"{name:<12} loss {loss:.4f}{note}")

    def log_loads(self, loads: Sequence[ExpertLoad]) -> None:
        """Record how loaded the experts were, layer by layer."""
        file = self._loads
        if file is not None:
            self._to_loads.attempt(lambda: (file.writelines(load.to_line() + "\n" for load in loads), file.flush()))
        if self._config.moe_per_layer_logging:
            self._draw(lambda boards: _draw_loads(boards, loads))

    def say(self, subject: str, text: str) -> None:
        """Print lines on the console of rank 0; control characters in names from outside are escaped."""
        lines = (printable(line, len(line)) for line in text.split("\n"))
        shown = "\n".join(lines)
        self._print(f"{subject:<12} {shown}")

    def close(self) -> None:
        """Flush and close the files."""
        self._to_console.attempt(self._line.clear)
        for sink, file in ((self._to_json, self._json), (self._to_loads, self._loads)):
            if file is not None:
                sink.attempt(file.close)
        self._draw(Boards.close)


def _draw_loads(boards: Boards, loads: Sequence[ExpertLoad]) -> None:
    for load in loads:
        name = f"router/L{load.layer}"
        values = {"imbalance": load.imbalance, "dropped_share": load.dropped_share, "entropy": load.entropy}
        boards.scalars({f"{name}/{key}": value for key, value in values.items()}, load.last_step)
        boards.loads(f"{name}/load", load.load, load.last_step)


def _appended(path: str | None) -> IO[str] | None:
    """A file opened for appending; its folder is made if it is missing. None without a path."""
    if path is None:
        return None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(path).open("a", encoding="utf-8")


def mean_of(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Average the losses and times of consecutive steps, as Megatron-LM's console does; other figures are the last step's.

    Seconds of communication are averaged over the steps that measured them, and over these alone: the last is one of them.
    """
    last, seconds = steps[-1], [step.step_seconds for step in steps]
    tokens = [step.tokens_per_second * step.step_seconds for step in steps]
    return replace(
        last,
        loss=fmean(step.loss for step in steps),
        predictions=tuple(fmean(of_depth) for of_depth in zip(*(step.predictions for step in steps), strict=True)),
        step_seconds=fmean(seconds),
        tokens_per_second=sum(tokens) / sum(seconds) if sum(seconds) else last.tokens_per_second,
        comm_seconds=fmean(s for s in (step.comm_seconds for step in steps) if s is not None),
        exposed_comm_seconds=fmean(s for s in (step.exposed_comm_seconds for step in steps) if s is not None),
    )


def step_line(metrics: StepMetrics, total: int) -> str:
    """The console's line of a step, or of the mean of several."""
    width = len(str(total))
    assert metrics.comm_seconds is not None and metrics.exposed_comm_seconds is not None, "a line's step has its spans"
    share = metrics.exposed_comm_seconds / metrics.step_seconds if metrics.step_seconds else 0.0
    optional = "".join(f"  {name} {value:.4g}" for name, value in metrics.extra_figures.items())
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


def _or_null(value: Any) -> Any:
    """The value, or None for a number that is not finite (the norm of a step that overflowed): JSON has no such numbers."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _common(metrics: StepMetrics) -> dict[str, Any]:
    """The figures that every run has, by name."""
    row = asdict(metrics)
    return {name: value for name, value in row.items() if name not in ("optional", "predictions", "deferred")}


def _board_values(metrics: StepMetrics) -> dict[str, float]:
    figures = _common(metrics) | metrics.optional | metrics.deferred
    predictions = {f"mtp_{depth} loss": loss for depth, loss in enumerate(metrics.predictions, 1)}
    return predictions | {
        CURVES.get(name, name): value
        for name, value in figures.items()
        if isinstance(value, (int, float)) and name != "step"
    }
