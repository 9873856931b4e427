"""Ranks that `srun` starts without torchrun: torch's variables from those of the job step.

`srun -n 8 python pretrain_moe.py …` starts eight tasks that know their place from Slurm only. Without this each would train the
whole job alone, as rank 0 of 1. Only variables of the step count: Slurm sets SLURM_NTASKS and SLURM_PROCID also for a batch
script, which is one process.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES". Not run under Slurm; the tests set its variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable, whole_number

TASKS, TASK, LOCAL_TASK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"
NODES, NODE, TASKS_PER_NODE = "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"
FIRST_PORT, PORTS = 20_000, 12_000
"""Ports for jobs without MASTER_PORT, below those that Linux gives to outgoing connections."""


def take_slurm_ranks(environment: MutableMapping[str, str], gpus: Callable[[Mapping[str, str]], int]) -> None:
    """Set torch's variables for a task of a job step with several tasks. Those of a launcher stay.

    Args:
        gpus: environment -> number of GPUs that this process sees; 0 on a machine without any.
    Raises:
        ConfigError: a variable of Slurm is no number, several nodes have no MASTER_ADDR, or tasks do not see all GPUs.
    """
    if environment.keys() & {"RANK", "WORLD_SIZE"} or _number(environment, TASKS, 1) <= 1:
        return
    nodes, node = _number(environment, NODES, 1), _number(environment, NODE, 0)
    if nodes > 1 and not environment.get("MASTER_ADDR"):
        rule = f"{environment[TASKS]} tasks of srun run on {nodes} nodes and do not know the node of rank 0"
        fix = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), or start by torchrun'
        raise ConfigError("MASTER_ADDR", "", rule, fix)
    per_node = tasks_per_node(environment.get(TASKS_PER_NODE, environment[TASKS]))
    if node >= len(per_node):
        rule = f"{NODE} says node {node}, which is not among its {len(per_node)} nodes"
        raise ConfigError(TASKS_PER_NODE, printable(environment.get(TASKS_PER_NODE, ""), 40), rule, "start by torchrun")
    if 0 < (seen := gpus(environment)) < per_node[node]:
        rule = f"each of {per_node[node]} tasks on this node sees {seen} of its GPUs"
        raise ConfigError(
            "srun", "", rule, "drop --gpus-per-task and --gpu-bind: every task must see all GPUs of its node"
        )
    # Tasks of one step share the job's number, so all of them choose the same port.
    port = FIRST_PORT + (_number(environment, "SLURM_JOB_ID", 0) * 7 + _number(environment, "SLURM_STEP_ID", 0)) % PORTS
    place = {
        "RANK": str(_number(environment, TASK, 0)),
        "WORLD_SIZE": environment[TASKS],
        "LOCAL_RANK": str(_number(environment, LOCAL_TASK, 0)),
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }
    environment.update(place)


def tasks_per_node(text: str) -> list[int]:
    """The tasks of every node in Slurm's short form: `4(x2),3` -> [4, 4, 3].

    Raises:
        ConfigError: the text has another form.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", entry)
        if match is None:
            raise ConfigError(TASKS_PER_NODE, printable(text, 40), "is not of the form 4(x2),3", "start by torchrun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of Slurm.

    Raises:
        ConfigError: it is none.
    """
    text = environment.get(name, str(default))
    number = whole_number(text)
    if number is None or number < 0:
        raise ConfigError(name, printable(text, 20), "must be a whole number from 0", "start by srun or torchrun")
    return number
