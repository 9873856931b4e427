"""The launcher's flags, and the checks that one process makes for all ranks before it starts them. No torch.

`pretrain_moe.py --nproc-per-node N [flags]` starts its own ranks (`moe_overlap/commands/launcher.py`). The flags are torchrun's,
under torchrun's names. They belong on the command line, not in an argument file: a file describes the training, not its
machines.

1. `split_launch` takes the launcher's flags out of a command line.
2. `require_launchable` makes, once, all checks whose failure would stop every rank of the job.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli.arguments import ParsedArguments
from megatron.training.cli.config import Config
from megatron.training.cli.dry_run import missing_files
from megatron.training.cli.flags.launch import LAUNCH_FLAGS, STANDALONE
from megatron.training.cli.packages import require_packages
from megatron.training.cli.rules.checkpoint import start_of
from megatron.training.cli.sizes import describe_model, known_vocab_size
from megatron.training.cli.start import cuda_is_there, numbered_gpus
from megatron.training.data.sources import check_indexed_dataset, data_source, tokenizer_files
from megatron.training.data.tokenizers import require_readable
from megatron.training.plan_flags import plan_of_run
from megatron.training.report.outputs import prove_places
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.files import printable, whole_number

PROCESSES, NODES, NODE_RANK, RESTARTS = "--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts"
ENDPOINT, BACKEND, JOB = "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id"
ADDRESS, PORT = "--master-addr", "--master-port"
MOST_PROCESSES = 2**20
DEFAULT_PORT = 29500
"""torchrun's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The ranks of a job, and how their nodes meet.

    Attributes:
        backend: `static`: the node of rank 0 is known; `c10d`: the nodes number themselves when they meet.
        endpoint: HOST:PORT of the rendezvous; empty if a single node finds a free port itself.
        job: name of the job at the rendezvous.
    """

    processes_per_node: int
    nodes: int = 1
    node_rank: int = 0
    max_restarts: int = 0
    backend: Literal["static", "c10d"] = "c10d"
    endpoint: str = ""
    job: str = "none"

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.processes_per_node * self.nodes


def split_launch(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Launch | None, list[str]]:
    """The launcher's part of a command line, None without launcher flags, and the other arguments in their order.

    Raises:
        ConfigError: a launcher's flag is wrong, contradicts another, or the process is a rank already.
    """
    flags: dict[str, str] = {}
    arguments: list[str] = []
    position = 0
    while position < len(argv):
        name, equals, value = argv[position].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        position += 1
        if name not in LAUNCH_FLAGS:
            arguments.append(argv[position - 1])
        elif name == STANDALONE:
            require(not equals, name, value, "takes no value", f"write {name}")
            flags[name] = ""
        else:
            if not equals:
                follows = position < len(argv) and not argv[position].startswith(("--", "@"))
                require(follows, name, "", "needs a value", f"write {name} VALUE")
                value, position = argv[position], position + 1
            flags[name] = value
    if not flags:
        return None, arguments
    first = next(iter(flags))
    shown = " ".join(filter(None, (first, printable(flags[first], 40))))
    require("RANK" not in environment, shown, "", "torchrun or Slurm has started this rank already", "drop it")
    require(PROCESSES in flags, shown, "", f"{PROCESSES} says that this process starts the ranks", f"add {PROCESSES} N")
    return _launch(flags, environment), arguments


def _launch(flags: Mapping[str, str], environment: Mapping[str, str]) -> Launch:
    processes, nodes = _processes(flags[PROCESSES], environment), _integer(flags, NODES, 1, 1)
    node_rank, port = _integer(flags, NODE_RANK, 0, 0), _integer(flags, PORT, DEFAULT_PORT, 1)
    restarts = _integer(flags, RESTARTS, 0, 0)
    require(port < 2**16, PORT, port, "is no port", "use 1 to 65535")
    require(
        node_rank < nodes, NODE_RANK, node_rank, f"{NODES} says {nodes}: they count from 0", f"use 0 to {nodes - 1}"
    )
    endpoint, backend = flags.get(ENDPOINT, ""), flags.get(BACKEND)
    require(backend in (None, "c10d", "static"), BACKEND, backend, "unknown choice", "use c10d or static")
    for flag in (ENDPOINT, ADDRESS):
        require(flags.get(flag) != "", flag, "", "needs a value", f"write {flag} HOST")
        require(
            STANDALONE not in flags or flag not in flags, STANDALONE, "", f"is set together with {flag}", "drop one"
        )
        host = flags.get(flag, "").rpartition(":")[0] or flags.get(flag, "")
        require(not set(host) & set(" /@\t\n"), flag, printable(host, 60), "is no host", "write a name or an address")
    require(STANDALONE not in flags or nodes == 1, STANDALONE, "", f"is for one node, {NODES} says {nodes}", "drop it")
    both = ENDPOINT in flags and (ADDRESS in flags or PORT in flags)
    require(not both, ENDPOINT, endpoint, f"is set together with {ADDRESS if ADDRESS in flags else PORT}", "drop one")
    if nodes > 1 and not endpoint and ADDRESS not in flags:
        raise ConfigError(
            NODES, nodes, "the nodes must know where to meet", f"add {ENDPOINT} HOST:PORT, the same on all"
        )
    if backend is None:
        # torchrun's default for an endpoint is `static`, which needs the node's rank.
        backend = "static" if ADDRESS in flags or PORT in flags or NODE_RANK in flags else "c10d"
    if backend == "c10d" and NODE_RANK in flags and nodes > 1:
        raise ConfigError(NODE_RANK, node_rank, "c10d numbers the nodes itself", f"drop it or use {BACKEND} static")
    if backend == "static" and nodes > 1 and NODE_RANK not in flags:
        raise ConfigError(f"{BACKEND} static", "", "every node must know its rank", f"add {NODE_RANK} 0 to {nodes - 1}")
    if ADDRESS in flags or (backend == "static" and not endpoint):
        endpoint = f"{flags.get(ADDRESS, '127.0.0.1')}:{port}"
    elif endpoint:
        host, _, text = endpoint.rpartition(":")
        has_no_port = not host
        require(
            has_no_port or text.isascii() and text.isdigit() and 0 < int(text[:9]) < 2**16,
            ENDPOINT,
            endpoint,
            *_PORT_RULE,
        )
        endpoint = f"{endpoint}:{DEFAULT_PORT}" if has_no_port else endpoint
    job = flags.get(JOB, "none")
    require(job != "", JOB, "", "needs a value", f"write {JOB} NAME")
    return Launch(
        processes_per_node=processes,
        nodes=nodes,
        node_rank=node_rank,
        max_restarts=restarts,
        backend="static" if backend == "static" else "c10d",
        endpoint=endpoint,
        job=job,
    )


_PORT_RULE = ("names no port", "write HOST:PORT")


def _processes(text: str, environment: Mapping[str, str]) -> int:
    """A number of processes, or `gpu`: one for each GPU that this process sees."""
    if text == "gpu":
        count = visible_gpus(environment)
        rule = "WSL2 does not number its GPUs" if cuda_is_there() else "no GPU is visible here"
        require(count, PROCESSES, text, rule, "give a number")
        return count
    number = _integer({PROCESSES: text}, PROCESSES, 1, 1)
    require(number <= MOST_PROCESSES, PROCESSES, text, f"is above {MOST_PROCESSES}", "correct the value")
    return number


def _integer(flags: Mapping[str, str], flag: str, default: int, least: int) -> int:
    text = flags.get(flag)
    if text is None:
        return default
    number = whole_number(text)
    if number is None or number < least:
        raise ConfigError(flag, printable(text, 40), f"must be a whole number from {least}", "correct the value")
    return number


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that torch would count: the driver's, restricted by CUDA_VISIBLE_DEVICES. 0 where WSL2 numbers none."""
    if not cuda_is_there():
        return 0
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return numbered_gpus()
    devices = [device.strip() for device in chosen.split(",")]
    # CUDA reads the list up to the first entry that names no device.
    return next((place for place, device in enumerate(devices) if device in ("", "-1")), len(devices))


def require_launchable(parsed: ParsedArguments, launch: Launch) -> None:
    """Make the checks of every rank once: packages, devices, plan, data, checkpoint, outputs, port.

    Raises:
        ConfigError: the first obstacle to the job.
    """
    config = parsed.config
    require_packages(config)
    gpus = visible_gpus(os.environ)
    if cuda_is_there() and 0 < gpus < launch.processes_per_node:
        rule, fix = f"this machine has {gpus} GPUs", f"start at most {gpus} processes here"
        raise ConfigError(PROCESSES, launch.processes_per_node, rule, fix)
    _require_inputs(config)
    plan_of_run(config, describe_model(config, known_vocab_size(config) or 0, parsed.name), launch.world_size)
    # Each node checks its own disks; if nodes number themselves, any node may hold rank 0.
    first = launch.node_rank * launch.processes_per_node
    for rank in range(first, first + launch.processes_per_node):
        prove_places(config, rank)
    if launch.nodes == 1 and launch.endpoint:
        _require_free_port(launch.endpoint)


def _require_inputs(config: Config) -> None:
    for prefix in data_source(config.data).prefixes:
        check_indexed_dataset(prefix)
    start_of(config.checkpoint)
    for flag, path in missing_files(config):
        # Without --exit-on-missing-checkpoint, the folder of --load may be created by this run.
        if flag not in ("--load", "--pretrained-checkpoint"):
            raise ConfigError(flag, path, "does not exist", "correct the path")
    require_readable(config.data.tokenizer_type, tokenizer_files(config.data))


def _require_free_port(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=_family(host)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return  # The address of another machine, which checks it itself.
        fix = f"choose a free one, or drop the flag: {PROCESSES} alone finds one"
        # Python appends the address to the system's reason; an unknown host name has no reason of the system.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"port of {endpoint}", "", f"cannot be opened: {reason or error}", fix) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
