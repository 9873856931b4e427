"""Reports of a run besides its steps' figures: timers, memory, expert loads, each at its interval; first and last lines.

Every report about all ranks is a collective, in which all ranks take part at the same steps: the intervals alone decide. The
peak memory of a step is the allocator's figure on a GPU, that of tracked tensor storages on a CPU. Timers are seconds per step
on every rank; the caller names them, and a window sums them up between two reports.
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.training.cli.arguments import ParsedArguments
from megatron.training.cli.config import Config, LoggingConfig
from megatron.training.cli.dry_run import model_line, planned_layout_line
from megatron.training.cli.flags.without_effect import idle_flags
from megatron.training.cli.start import few_queues
from megatron.training.messages import of_all
from megatron.training.report.metrics import MetricsLog
from moe_overlap.describe.cluster import start_flags
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan

# Memory


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of tensor storages that are alive; a storage counts from the operator that first returns it.

    It slows operators down, so one step is tracked and its peak stands for the run (dropless routing changes it a little).

    Args:
        held: tensors that are alive from the start: parameters, gradients, optimizer state.
        elastic: tensors whose storages stay and whose memory is given back and taken again meanwhile.
        on_host: storages that would be host memory on a device, too; may grow.
    """

    def __init__(
        self,
        held: list[torch.Tensor],
        elastic: Sequence[torch.Tensor] = (),
        on_host: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._on_host = on_host
        self._alive: dict[int, int] = {}
        self._elastic = {(storage := tensor.untyped_storage())._cdata: storage for tensor in elastic}
        self._elastic_bytes = self.bytes = self.peak_bytes = 0
        for tensor in held:
            self._count(tensor)
        self._count_elastic()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._count_elastic()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count_elastic(self) -> None:
        if self._elastic:
            present = sum(storage.nbytes() for storage in self._elastic.values())
            self.bytes, self._elastic_bytes = self.bytes + present - self._elastic_bytes, present
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._elastic or key in self._on_host or storage.nbytes() == 0:
            return
        self._alive[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.bytes -= self._alive.pop(key, 0)


def resident_bytes() -> int:
    """Largest resident set of this process so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory() -> dict[str, float]:
    """The CUDA allocator's figures under the names of Megatron-LM's curves; nothing on a CPU. Not yet run on hardware."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": float(stats["reserved_bytes.all.current"]),
        "mem-allocated-bytes": float(stats["allocated_bytes.all.current"]),
        "mem-allocated-count": float(stats["allocation.all.current"]),
    }


def held_tensors(chunks: Any, optimizer: Any) -> list[torch.Tensor]:
    """Parameters, gradient buffers and optimizer state of this rank."""
    tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.module.buffers())]
    for chunk in chunks:
        stores = getattr(chunk, "stores", None)
        for store in stores or ():
            tensors += store.held
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers) if stores is None else ():
            tensors += [part for part in (buffer.param_data, buffer.grad_data) if part is not None]
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def elastic_tensors(chunks: Any) -> list[torch.Tensor]:
    """Weights, sums and states whose memory parameter stores give back and take again during a step."""
    return [tensor for chunk in chunks for store in getattr(chunk, "stores", ()) for tensor in store.elastic]


def storages_on_host(chunks: Any) -> Collection[int]:
    """The host memory of offloaded shares."""
    return chunks[0].host.storages if hasattr(chunks[0], "host") else ()


# Timers

NAME_WIDTH = 32


class TimerWindow:
    """Sums of timers over the steps since they were last taken, on this rank."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the timers of one step."""
        self._steps += 1
        for name, value in seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def take(self) -> dict[str, tuple[float, ...]]:
        """Empty the window: seconds per step by name, a number for each rank (0 where a rank has no such timer).

        Collective over the default group; names come in the order of the first rank that has them.
        """
        own_seconds = {name: value / self._steps for name, value in self._sums.items()}
        self._sums, self._steps = {}, 0
        ranks: list[dict[str, float]] = of_all(own_seconds)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: tuple(rank.get(name, 0.0) for rank in ranks) for name in names}


def slowest(timers: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """The largest of all ranks by curve name (`forward-backward-time`), as upstream names them."""
    return {f"{name}-time": max(values) for name, values in timers.items()}


def timer_lines(timers: Mapping[str, tuple[float, ...]], option: str) -> list[str]:
    """The console's lines, in milliseconds.

    Args:
        option: `max`, `minmax` or `all`.
    """
    heads = {"max": "max time across ranks", "minmax": "(min, max) time across ranks", "all": "times of the ranks"}
    return [f"{heads[option]} (ms):"] + [
        f"    {name} {'.' * (NAME_WIDTH - len(name))} {_shown(values, option)}" for name, values in timers.items()
    ]


def _shown(values: tuple[float, ...], option: str) -> str:
    if option == "max":
        return f"{max(values) * 1e3:.2f}"
    if option == "minmax":
        return f"({min(values) * 1e3:.2f}, {max(values) * 1e3:.2f})"
    return " ".join(f"{rank}: {value * 1e3:.2f}" for rank, value in enumerate(values))


Spans = Sequence[Any]


class Reports:
    """The reports of one run.

    Args:
        phases: (spans of a step, level of --timing-log-level) -> seconds by name.
        expert_loads: (first step, last step) -> loads since the last call, a collective; None if nothing counts them.
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

    @property
    def has_timers(self) -> bool:
        """Whether the timers of phases add up the spans of every step."""
        return self._level > 0

    def curves(self, iteration: int, step_seconds: float, peak_bytes: int, spans: Spans) -> dict[str, float]:
        """The boards' curves of a step besides its metrics; it adds the step's timers, so call it once per step."""
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
        """Make the reports that are due; collective. `resident` is this rank's memory on the host, in bytes."""
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
        """Record expert loads up to this step, if steps were executed since the last report; collective."""
        if self._expert_loads is not None and self._first_uncounted is not None and self._first_uncounted <= iteration:
            self._log.log_loads(self._expert_loads(self._first_uncounted, iteration))
            self._first_uncounted = iteration + 1


def uses_expert_loads(config: Config) -> bool:
    """Whether the flags ask for expert loads anywhere; a dense model has none."""
    logging = config.logging
    by_board = logging.moe_per_layer_logging and bool(logging.tensorboard_dir or logging.wandb_project)
    return config.moe.num_experts is not None and (logging.log_expert_load is not None or by_board)


def _memory_text(peak_bytes: int, resident: int) -> str:
    """`peak 398 to 412 MiB, most on rank 1; resident 880 to 900 MiB`, over all ranks."""
    peaks, residents = zip(*of_all((peak_bytes, resident)), strict=True)
    low, high = min(peaks) / 2**20, max(peaks) / 2**20
    host = f"resident {min(residents) / 2**20:.0f} to {max(residents) / 2**20:.0f} MiB"
    return f"peak {low:.0f} to {high:.0f} MiB, most on rank {peaks.index(max(peaks))}; {host}"


# First and last lines


def announce(log: MetricsLog, parsed: ParsedArguments, model: ModelDescription, plan: Plan, corpus: str) -> None:
    """Print environment, corpus, model, layout, decisions between flags, and the flags without effect in this run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    packages = f"torch {torch.__version__} ({device}), megatron-core {version('megatron-core')}"
    log.say("environment", f"python {platform.python_version()}, {packages}")
    log.say("corpus", corpus)
    log.say("model", model_line(model))
    for note in parsed.model_notes:
        log.say("not the same", note)
    log.say("layout", planned_layout_line(plan, parsed.config))
    for subject, text in parsed.remarks:
        log.say(subject, text)
    if torch.cuda.is_available() and (beware := few_queues(plan, os.environ)):
        log.say("beware", beware)
    idle = idle_flags(parsed)
    if idle:
        log.say("no effect", " ".join(name for name, _ in idle))


def start_command(environment: Mapping[str, str], program: str, world_size: int, argv: Sequence[str]) -> str:
    """The simplest command line that starts this run again on as many ranks.

    Args:
        environment: of this rank; gives the number of ranks of each machine if a launcher sets it.
        program: the path that this process was started by.
        argv: the run's flags, without a launcher's.
    """
    name, arguments = Path(program).name, shlex.join(argv)
    start = start_flags(world_size, int(environment.get("LOCAL_WORLD_SIZE", world_size)))
    return f"{name if name == 'moe-train' else 'python pretrain_moe.py'} {start}{arguments}"


def announce_end(log: MetricsLog, argv: Sequence[str], config: Config, world_size: int, reason: str | None) -> None:
    """Print the reason of an early end, if there is one, and the command that continues the run.

    Args:
        argv: the arguments of this run's command line.
        reason: the reason of an early end, or None.
    """
    if reason is not None:
        log.say("stopped", reason)
    if config.checkpoint.save is None:
        return
    command = start_command(os.environ, sys.argv[0], world_size, argv)
    longer = f" --train-iters {2 * (config.training.train_iters or 0)} --override-opt-param-scheduler"
    more = longer if reason is None and config.training.train_iters else ""
    # Not repeated if --load already names the folder of the checkpoints.
    load = "" if config.checkpoint.load == config.checkpoint.save else f" --load {config.checkpoint.save}"
    log.say("next", f"{command}{load}{more}")
