"""From flags to a running process: device, process group, seeds. Stores nothing."""

from __future__ import annotations

import datetime
import os
import random
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as core_random

from megatron.training import cpu_backend
from megatron.training.config import Config
from moe_overlap.describe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Process:
    """This process among its peers."""

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
    alone = "RANK" not in os.environ
    try:
        if alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (dist.DistError, ValueError) as error:
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
        # The one thing of parallel_state that is used: a scratch buffer of the tensor-parallel linears.
        parallel_state._set_global_memory_buffer()
