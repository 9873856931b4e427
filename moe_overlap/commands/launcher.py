"""`pretrain_moe.py --nproc-per-node N`: start the ranks of this machine, and report in one line how they ended.

torch's elastic agent (the one of torchrun) starts and watches the ranks, restarts them (`--max-restarts`) and forwards signals.
Its log messages and errors are suppressed. The first failing rank prints its error (`exits.LaunchFolder`); for a rank that a
signal ended, this process does. If this process is killed, the kernel ends the ranks (`exits.end_with_launcher`).
"""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.training.cli.config import Config
from megatron.training.cli.launch import Launch
from moe_overlap.commands.exits import LAUNCH_FOLDER, LaunchFolder

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

ENDED_BY_SIGNAL = 128
"""The status of a process that a signal ended is this plus the signal's number, as in shells."""
STOPS_WITHIN = datetime.timedelta(seconds=30)
"""Time for a rank to end after a signal; with --exit-signal-handler, which saves first, the timeout of a collective."""


def start_ranks(launch: Launch, argv: Sequence[str], config: Config) -> int:
    """Start this machine's ranks and wait for them.

    Args:
        argv: the checked command line of a rank, without the launcher's flags.
    Returns:
        The exit status: 0, the failed rank's status, or 128 plus the number of the signal that ended it or this process.
    """
    folder = LaunchFolder(Path(tempfile.mkdtemp(prefix="moe-launch-")))
    try:
        return _watch(launch, argv, config, folder)
    except KeyboardInterrupt:  # before the agent listens to signals
        return _stopped(signal.SIGINT)
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def _watch(launch: Launch, argv: Sequence[str], config: Config, folder: LaunchFolder) -> int:
    os.environ[LAUNCH_FOLDER] = str(folder.path)
    # As in torchrun: otherwise every rank would start a thread per core.
    if launch.processes_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from moe_overlap.commands import meeting

    meeting.register()
    if launch.nodes == 1:
        meeting.stay_on_this_machine()
    # The agent logs every failure in several lines; nothing else in this process logs.
    logging.disable(logging.CRITICAL)
    program = str(Path(sys.argv[0]).resolve())
    try:
        elastic_launch(elastic_config(launch, config), sys.executable)("-u", program, *argv)
    except ChildFailedError as error:
        # The agent raises only after the last allowed start, so the line is about that one.
        last = folder.of_attempt(launch.max_restarts)
        return _failed({rank: failure.exitcode for rank, failure in error.failures.items()}, launch, last)
    except SignalException as stopped:
        # Ranks that save before they end (--exit-signal-handler) have already reported it.
        if folder.last_attempt().finished() == launch.processes_per_node:
            return 0
        return _stopped(signal.Signals(stopped.sigval))
    except Exception as error:  # The rendezvous of several machines fails in many ways, with many classes of errors.
        reason = " ".join(str(error).split()) or type(error).__name__
        where = f"the {launch.nodes} machines did not meet at {launch.endpoint}" if launch.nodes > 1 else "cannot start"
        print(f"error: {where}: {reason[:300]}", file=sys.stderr, flush=True)
        return 1
    return 0


def elastic_config(launch: Launch, config: Config) -> LaunchConfig:
    """torchrun's configuration for this launch."""
    from torch.distributed.launcher.api import LaunchConfig

    from moe_overlap.commands.meeting import BACKEND, THIS_MACHINE

    patience = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    configs: dict[str, Any] = {"timeout": max(1, int(patience.total_seconds()))}
    if launch.backend == "static":
        configs["rank"] = launch.node_rank
    # The ranks of a single machine meet on the loopback interface, whatever endpoint is given: no other machine connects.
    is_single = launch.nodes == 1
    port = launch.endpoint.rpartition(":")[2] or 0
    return LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.processes_per_node,
        run_id=launch.job if launch.endpoint else str(uuid.uuid4()),
        rdzv_backend=BACKEND,
        rdzv_endpoint=f"{THIS_MACHINE}:{port}" if is_single else launch.endpoint,
        # Otherwise the agent resolves this machine's own name, which fails on some machines.
        local_addr=THIS_MACHINE if is_single else None,
        rdzv_configs=configs,
        max_restarts=launch.max_restarts,
        shutdown_timeout=int((patience if config.training.exit_signal_handler else STOPS_WITHIN).total_seconds()),
    )


def _failed(statuses: Mapping[int, int], launch: Launch, folder: LaunchFolder) -> int:
    """Report the rank that a signal ended, unless a rank has printed an error. Returns the status of the rank that failed
    first."""
    # After a failure the agent ends the other ranks by SIGTERM: these are consequences.
    causes = {rank: status for rank, status in statuses.items() if status != -signal.SIGTERM} or dict(statuses)
    # A killed rank prints nothing, and is the reason why others lose their peer at the same time.
    rank = min(causes, key=lambda rank: (causes[rank] >= 0, rank))
    status = causes[rank]
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}  # Real-time signals have no name.
        name = names.get(-status, f"signal {-status}")
        hint = "; the kernel does so where memory is out" if -status == signal.SIGKILL else ""
        line = f"error: rank {rank} was ended by {name} ({folder.activity(rank)}){hint}"
        print(line, file=sys.stderr, flush=True)
        return ENDED_BY_SIGNAL - status
    # With several machines rank 0 may have printed the error on another one.
    if launch.nodes == 1 and not folder.has_spoken():
        print(f"error: rank {rank} ended with status {status} ({folder.activity(rank)})", file=sys.stderr, flush=True)
    return status


def _stopped(number: signal.Signals) -> int:
    cause = "Ctrl-C" if number == signal.SIGINT else number.name
    print(f"stopped by {cause}: every rank has ended", file=sys.stderr, flush=True)
    return ENDED_BY_SIGNAL + number
