"""Slurm scripts on a real Slurm: those of examples/slurm, where an interruption costs steps at most and changes no loss; and a
written launch.sbatch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import plan_from_flags
from megatron.training.plan_values import arguments_of, layout_values
from moe_overlap.commands.compare import compare_losses
from moe_overlap.tuner.write.argument_file import argument_file
from moe_overlap.tuner.write.slurm import SlurmJob, slurm_script
from tests.end_to_end.program import SMALL, line_count
from tests.end_to_end.slurm_cluster import SlurmCluster, lacking, slurm_cluster
from tests.spawn import HANGS_SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.alone]
STEPS = 100
SAVE_INTERVAL = 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    lack = lacking()
    if lack:
        pytest.skip(f"no private Slurm: {lack}")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster(folder, nodes=2) as running:
        yield running
    deadline = time.monotonic() + 10
    while left := processes_with(str(tmp_path)):
        assert time.monotonic() < deadline, f"the cluster left processes {left} running"
        time.sleep(0.1)


def processes_with(*words: str) -> list[int]:
    """Ids of the processes whose command line contains all of these."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(path.parent.name))
    return found


def submit(cluster: SlurmCluster, script: str, folder: Path, processes_per_node: int) -> str:
    """Submit the small job; its id. `folder` takes log, losses and checkpoints."""
    folder.mkdir()
    settings = f"--export=ALL,PYTHON={sys.executable},RUN={folder}/saved"
    options = [settings, f"--gpus-per-node={processes_per_node}", f"--output={folder}/log"]
    words = [*SMALL, "--train-iters", str(STEPS), "--save-interval", str(SAVE_INTERVAL)]
    return cluster.submit(*options, script, *words, "--log-json", f"{folder}/losses.jsonl")


def steps_of(losses: Path) -> list[int]:
    return [json.loads(line)["step"] for line in losses.read_text().splitlines()]


def wait_for_steps(cluster: SlurmCluster, job: str, losses: Path, further: int) -> None:
    """Until a job has made so many steps from now on."""
    count, deadline = line_count(losses) + further, time.monotonic() + HANGS_SECONDS
    while line_count(losses) < count:
        log = losses.with_name("log")
        said = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline and cluster.state(job) in ("PENDING", "RUNNING", "COMPLETING"), said
        time.sleep(0.1)


def test_interrupted_job_goes_on_by_itself_bitwise(cluster: SlurmCluster, tmp_path: Path) -> None:
    calm, fire = tmp_path / "calm", tmp_path / "fire"
    job = submit(cluster, "examples/slurm/single_node.sbatch", calm, processes_per_node=2)
    assert cluster.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED")) == "COMPLETED", (calm / "log").read_text()

    losses, saved = fire / "losses.jsonl", fire / "saved"
    job = submit(cluster, "examples/slurm/multi_node.sbatch", fire, processes_per_node=1)
    # A rank dies: torchrun starts the ranks of both nodes again, from the last save.
    wait_for_steps(cluster, job, losses, 7)
    os.kill(processes_with("-u pretrain_moe.py", str(losses))[0], signal.SIGKILL)
    before = after_pause(losses)
    wait_for_steps(cluster, job, losses, 3)
    assert steps_of(losses)[before] % SAVE_INTERVAL == 1 < steps_of(losses)[before] <= steps_of(losses)[before - 1] + 1

    # Another job preempts it: it saves the step it is in, makes room, and continues with the next one.
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.wait_for(urgent, ("COMPLETED",))
    before, last = line_count(losses), steps_of(losses)[-1]
    assert (saved / f"step-{last:06d}").is_dir() and last < STEPS
    wait_for_steps(cluster, job, losses, 3)
    assert steps_of(losses)[before] == last + 1

    # It is requeued without warning: from the last save.
    cluster.run("scontrol", "requeue", job)
    before, last = after_pause(losses), steps_of(losses)[-1]
    assert cluster.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED")) == "COMPLETED", (fire / "log").read_text()
    # A rank that is quick enough saves the step it is in before it is killed.
    first = steps_of(losses)[before]
    assert (saved / f"step-{first - 1:06d}").is_dir() and 1 < first <= last + 1

    assert "Restarts=2" in cluster.run("scontrol", "show", "job", job)
    log = (fire / "log").read_text()
    assert log.count("stopped      signal 10") == 1
    assert "User defined signal 1" not in log, "the signal killed torchrun; the ranks had seconds to save"
    assert set(steps_of(losses)) == set(range(1, STEPS + 1))
    assert compare_losses(["--bitwise", str(calm / "losses.jsonl"), str(losses)]) == 0


@pytest.mark.parametrize("option", ["gpus-per-node", "gres"])
def test_a_written_script_trains(
    cluster: SlurmCluster, tmp_path: Path, option: Literal["gpus-per-node", "gres"]
) -> None:
    """The flags of a plan and the script beside them, submitted from elsewhere, on two nodes with one rank each."""
    folder, words = tmp_path / "tuned", list(expand_files(SMALL))
    folder.mkdir()
    config = parse(words).config
    plan = plan_from_flags(config, describe_model(config, 257), 2)
    written = argument_file([*words, "--train-iters", "3"], plan, arguments_of(layout_values(plan, 0)))
    (folder / "megatron_args.txt").write_text(written.text)
    job = SlurmJob(name="small", nodes=2, gpus_per_node=1, gpu_option=option)
    (folder / "launch.sbatch").write_text(slurm_script(job, "moe-overlap", written))
    settings = f"--export=ALL,PYTHON={sys.executable},RUN={tmp_path}/saved"
    losses = tmp_path / "losses.jsonl"
    number = cluster.submit(
        settings, f"--output={tmp_path}/log", str(folder / "launch.sbatch"), "--log-json", str(losses)
    )
    ended = cluster.wait_for(number, ("COMPLETED", "FAILED", "CANCELLED"))
    assert ended == "COMPLETED", (tmp_path / "log").read_text()
    assert steps_of(losses) == [1, 2, 3]
    assert "2 processes" in (tmp_path / "log").read_text()


def after_pause(losses: Path) -> int:
    """Number of lines once none has come for a second: the ranks are gone, and those that follow have not begun."""
    count = -1
    while count != (count := line_count(losses)):
        time.sleep(1)
    return count
