"""Tasks of srun without torchrun: torch's variables from Slurm's, or one line."""

from __future__ import annotations

import pytest

from moe_overlap.commands.slurm_tasks import take_slurm_ranks, tasks_per_node
from moe_overlap.commands.train import main
from moe_overlap.describe.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "MASTER_ADDR": "node7",
}


def taken(variables: dict[str, str], gpus: int = 0) -> dict[str, str]:
    environment = dict(variables)
    take_slurm_ranks(environment, lambda _: gpus)
    return {name: value for name, value in environment.items() if variables.get(name) != value}


def test_a_task_of_a_step_is_a_rank() -> None:
    added = taken(STEP)
    port = int(added.pop("MASTER_PORT"))
    assert added == {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert 20_000 <= port < 32_000
    # All tasks of a step meet at one port, and the next step of the job at another.
    other = taken({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert (other["MASTER_PORT"], other["LOCAL_WORLD_SIZE"]) == (str(port), "4")
    assert taken({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != str(port)
    assert "MASTER_PORT" not in taken({**STEP, "MASTER_PORT": "29500"})


def test_one_node_needs_no_address() -> None:
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    del alone["MASTER_ADDR"]
    assert taken(alone)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_launcher_and_single_tasks_keep_their_variables(launcher: dict[str, str]) -> None:
    assert taken({**STEP, **launcher}) == {}


def test_a_batch_script_is_one_process() -> None:
    """Slurm describes the job's tasks to a batch script, too, which is none of them."""
    assert taken({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) == {}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"MASTER_ADDR": ""},
            "MASTER_ADDR: 7 tasks of srun run on 2 nodes and do not know the node of rank 0; export MASTER_ADDR=$(",
        ),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID x: must be a whole number from 0; start by srun or torchrun"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4(x"},
            "SLURM_STEP_TASKS_PER_NODE 4(x: is not of the form 4(x2),3; start by torchrun",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "7"},
            "SLURM_STEP_TASKS_PER_NODE 7: SLURM_NODEID says node 1, which is not among its 1 nodes;",
        ),
    ],
)
def test_what_slurm_does_not_say_is_one_line(
    changed: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        taken({**STEP, **changed})
    assert str(caught.value).startswith(line)
    for name, value in {**STEP, **changed}.items():
        monkeypatch.setenv(name, value)
    assert main(["--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_tasks_that_see_single_gpus_are_told_why() -> None:
    """With --gpus-per-task=1 each task has a GPU of its own, and ranks choose theirs by LOCAL_RANK."""
    assert taken(STEP, gpus=3)["LOCAL_WORLD_SIZE"] == "3"
    with pytest.raises(
        ConfigError, match="^srun: each of 3 tasks on this node sees 1 of its GPUs; drop --gpus-per-task"
    ):
        taken(STEP, gpus=1)


def test_with_its_own_launcher_each_task_starts_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of the launcher is read before Slurm's variables, of which one would be an error here."""
    monkeypatch.setattr("moe_overlap.commands.train.take_slurm_ranks", lambda *_: pytest.fail("took Slurm's ranks"))
    assert main(["--nproc-per-node", "x"]) == 2


def test_tasks_of_nodes() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
