"""What a run reports beside the figures of its steps: timers, memory and expert loads, each at its interval.

Every report that speaks for all ranks is a collective, made by all of them at the same steps: the intervals alone decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron.training.config import Config, LoggingConfig
from megatron.training.metrics import MetricsLog
from megatron.training.report.memory import device_memory
from megatron.training.report.timers import TimerWindow, slowest, timer_lines
from moe_overlap.describe.expert_load import ExpertLoad

Spans = Sequence[Any]


class Reports:
    """The reports of one run.

    Args:
        phases: (spans of a step, level of --timing-log-level) -> seconds by name.
        expert_loads: (first step, last step) -> loads since the last call, a collective; None where nobody counts.
    """

    def __init__(
        self,
        config: LoggingConfig,
        log: MetricsLog,
        phases: Callable[[Spans, int], dict[str, float]],
        expert_loads: Callable[[int, int], list[ExpertLoad]] | None,
    ) -> None:
        self._config, self._log, self._phases, self._expert_loads = config, log, phases, expert_loads
        self._level = int(config.timing_log_level)
        self._console, self._board = TimerWindow(), TimerWindow()
        self._has_boards = bool(config.tensorboard_dir or config.wandb_project)
        self._first_uncounted: int | None = None

    def curves(self, iteration: int, step_seconds: float, peak_bytes: int, spans: Spans) -> dict[str, float]:
        """What the boards get of a step beside its metrics; counts the timers of the step, so call it once for each."""
        config, values = self._config, dict[str, float]()
        phases = self._phases(spans, self._level) if self._level else {}
        self._console.add(phases)
        if not self._has_boards:
            return values
        self._board.add(phases)
        if iteration % config.tensorboard_log_interval != 0:
            return values
        if config.log_timers_to_tensorboard:
            values["iteration-time"] = step_seconds
            if self._level:
                values |= slowest(self._board.take())
        if config.log_memory_to_tensorboard:
            values |= device_memory() | {"mem-max-allocated-bytes": float(peak_bytes)}
        if config.log_world_size_to_tensorboard:
            values["world-size"] = float(dist.get_world_size())
        return values

    def after_step(self, iteration: int, peak_bytes: int, resident: int) -> None:
        """The reports that are due; collective. `resident` is this rank's memory on the host, in bytes."""
        config = self._config
        if self._first_uncounted is None:
            self._first_uncounted = iteration
        if iteration % config.log_interval == 0:
            if self._level:
                head, *lines = timer_lines(self._console.take(), config.timing_log_option)
                self._log.say("timers", "\n".join([head, *lines]))
            self.flush_loads(iteration)
        if config.log_memory_interval is not None and iteration % config.log_memory_interval == 0:
            self._log.say("memory", f"step {iteration}: {_memory_text(peak_bytes, resident)}")

    def flush_loads(self, iteration: int) -> None:
        """Expert loads up to this step, where steps have been made since the last report; collective."""
        if self._expert_loads is not None and self._first_uncounted is not None and self._first_uncounted <= iteration:
            self._log.log_loads(self._expert_loads(self._first_uncounted, iteration))
            self._first_uncounted = iteration + 1


def uses_expert_loads(config: Config) -> bool:
    """Whether anything that the flags ask for is made of expert loads; a dense model has none."""
    logging = config.logging
    by_board = logging.moe_per_layer_logging and bool(logging.tensorboard_dir or logging.wandb_project)
    return config.moe.num_experts is not None and (logging.log_expert_load is not None or by_board)


def _memory_text(peak_bytes: int, resident: int) -> str:
    """`peak 398 to 412 MiB, most on rank 1; resident 880 to 900 MiB`, over all ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (peak_bytes, resident))
    peaks, residents = zip(*ranks, strict=True)
    low, high = min(peaks) / 2**20, max(peaks) / 2**20
    host = f"resident {min(residents) / 2**20:.0f} to {max(residents) / 2**20:.0f} MiB"
    return f"peak {low:.0f} to {high:.0f} MiB, most on rank {peaks.index(max(peaks))}; {host}"
