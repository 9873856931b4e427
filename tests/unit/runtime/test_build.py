"""The machinery of a run is complete when it is built: nothing is set on it, and nothing of it is set on what it is given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint.checkpointing import Progress
from megatron.training.checkpoint.lock import LOCK
from megatron.training.cli.arguments import parse
from moe_overlap.commands import train as pretrain_moe
from moe_overlap.describe.errors import ConfigError
from tests.unit.runtime.one_process import MOE, small

CALLBACKS = ("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func")


def assembled(flags: str, folder: Path) -> Any:
    words = f"{MOE} {flags} --eval-iters 0 --data-cache-path {folder} --num-workers 0"
    small(words)  # makes the group
    return pretrain_moe.assemble(parse(words.split()), 0).job


def test_steps_set_nothing_new_on_a_runner(tmp_path: Path) -> None:
    job = assembled("", tmp_path)
    before = dict(vars(job.machinery.runner))
    feed = job.batches("train", 0)
    for step in (1, 2):
        assert job.machinery.runner.run(job.schedule.instructions, feed, step).updated
    assert vars(job.machinery.runner).keys() == before.keys()


def test_the_schedule_leaves_the_models_configuration_alone(tmp_path: Path) -> None:
    job = assembled("", tmp_path)
    (chunk,) = job.machinery.chunks
    assert [getattr(chunk.config, name) for name in CALLBACKS] == [None] * 4
    job.machinery.runner.run(job.schedule.instructions, job.batches("train", 0), 1)
    assert [getattr(chunk.config, name) for name in CALLBACKS] == [None] * 4


def test_a_job_that_lost_its_folder_saves_nothing(tmp_path: Path) -> None:
    """Another job took it while this one stood still: two that save into one folder would delete each other's checkpoints."""
    saved = tmp_path / "saved"
    job = assembled(f"--save {saved}", tmp_path)
    with job.checkpoints.claimed():
        owner = json.loads((saved / LOCK).read_text())
        (saved / LOCK).write_text(json.dumps({**owner, "process": 1, "started": 1}))
        with pytest.raises(ConfigError, match=f"^--save {saved}: belongs to process 1 on .* now: "):
            job.checkpoints.save(Progress(iteration=1))
    assert sorted(path.name for path in saved.iterdir()) == [LOCK]


def test_a_context_does_not_change(tmp_path: Path) -> None:
    context = assembled("", tmp_path).machinery.runner.context
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.recorder = None
    assert context.stage is context.plan.stages[0] and context.bucket_reduction is None
    assert context.deferral_figures() == {}
