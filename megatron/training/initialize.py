"""Starts this process from flags: device, process group, seeds. Stores nothing.

Two helpers keep ranks together: `on_first_rank` for work that one process does for all, `on_every_rank` for checks on which all
must agree. In both, every rank raises the error of one rank, so that no rank waits for a peer that has stopped.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as core_random

from megatron.training import cpu_backend
from megatron.training.cli.config import Config
from megatron.training.messages import from_first, of_all
from moe_overlap.describe.errors import ConfigError

T = TypeVar("T")


class AnotherRankFailed(RuntimeError):
    """Work of all ranks failed on another rank, by an error that is no user's mistake."""


def on_first_rank(work: Callable[[], T], group: Any = None) -> T:
    """Run `work` on rank 0; every rank returns its result. Without a process group: just run it.

    Collective. The result is a JSON value: strings, numbers, lists, dictionaries, None.
    Args:
        group: every rank of the run; None: the default group.
    Raises:
        ConfigError: on every rank, when `work` raised it on rank 0.
        AnotherRankFailed: on the other ranks, when `work` raised anything else.
    """
    if not dist.is_initialized():
        return work()
    message: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            message[0] = work()
        except Exception as error:  # the other ranks wait in the broadcast: they must learn of any failure
            failure, message[1] = error, _portable(error)
    message = from_first(message, group)
    if failure is not None:
        # After the broadcast, in which the other ranks wait.
        raise failure
    if message[1] is not None:
        raise _restored(message[1])
    result: T = message[0]
    return result


def on_every_rank(work: Callable[[], T], group: Any = None) -> T:
    """Run `work` on every rank and return its own result, or raise one rank's error on all. Collective, like `on_first_rank`."""
    if not dist.is_initialized():
        return work()
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:  # the other ranks must learn of any failure here, too
        failure = error
    failures = of_all(_portable(failure) if failure is not None else None, group)
    if failure is not None:
        raise failure
    # Ranks without an error of their own raise that of the lowest rank that has one.
    for message in failures:
        if message is not None:
            raise _restored(message)
    return result  # type: ignore[return-value]


def _portable(error: Exception) -> tuple[Any, ...]:
    if isinstance(error, ConfigError):
        # As fields: library exceptions may not survive pickling, and another rank may not be able to import their classes.
        return (error.subject, str(error.value), error.rule, error.fix)
    return (f"{type(error).__name__}: {error}",)


def _restored(message: tuple[Any, ...]) -> Exception:
    if len(message) == 4:
        return ConfigError(*message)
    return AnotherRankFailed(f"another rank failed: {message[0]}")


@dataclass(frozen=True, slots=True)
class Process:
    """This process and its peers."""

    rank: int
    world_size: int


def device_of_this_process() -> torch.device:
    """The GPU that `start_process` chose, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def start_process(config: Config) -> Process:
    """Join the process group: torchrun's, or one of a single process that needs no port.

    Raises:
        ConfigError: fewer GPUs than processes, or no peer answers in time.
    """
    has_cuda = torch.cuda.is_available()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if has_cuda:
        if local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError(
                "--nproc-per-node",
                local_rank + 1,
                f"this machine has {count} GPUs",
                f"start at most {count} processes here",
            )
        torch.cuda.set_device(local_rank)
    backend = config.parallel.distributed_backend if has_cuda else "gloo"
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    # NCCL then creates communicators together with the groups, in one order on all ranks, and not at their first use.
    device = torch.device("cuda", local_rank) if has_cuda and backend == "nccl" else None
    is_single = "RANK" not in os.environ
    try:
        if is_single:
            store, rank, world_size = dist.HashStore(), 0, 1
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device)
        else:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            # torch's agent keeps its store over a restart (--max-restarts): addresses of the previous attempt are stale.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt-{attempt}", store)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
            )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            port, fix = os.environ.get("MASTER_PORT", ""), "choose a free port (torchrun --master-port N)"
            raise ConfigError("MASTER_PORT", port, "another process listens on it", fix) from error
        raise ConfigError(
            "--distributed-timeout-minutes",
            config.parallel.distributed_timeout_minutes,
            f"the {world_size} processes did not meet ({str(error).splitlines()[0]})",
            "check that every node runs the same command and that MASTER_ADDR:MASTER_PORT is free and reachable",
        ) from error
    return Process(rank, world_size)


def seed_everything(seed: int, groups: ProcessGroupCollection) -> None:
    """Seed every generator of this process as upstream does: stages differ, tensor and expert ranks have streams of their own."""
    stage_seed = seed + 100 * groups.pp.rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    if cpu_backend.is_needed():
        core_random._CUDA_RNG_STATE_TRACKER = cpu_backend.make_rng_tracker()
        core_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    core_random.model_parallel_cuda_manual_seed(
        stage_seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
    )
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # parallel_state is used for this only: a scratch buffer of the tensor-parallel linears.
        parallel_state._set_global_memory_buffer()
