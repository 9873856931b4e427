"""--async-save: training goes on while a save is written, the next save waits for it, and a writer's error reaches every rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from tests.multiprocess.checkpoint_runs import Steps, train
from tests.spawn import HANGS_SECONDS, run

EP2 = "--expert-model-parallel-size 2"


Seen = list[tuple[str, int, list[str]]]


def held_back(folder: Path, flags: str) -> tuple[Seen, Steps]:
    """A run whose first save is not written before step 4 is made: the checkpoints there are at some moments, and its steps."""
    from megatron.training.checkpoint.saver import Saver
    from megatron.training.training import TrainingLoop

    may_write = threading.Event()
    seen: Seen = []
    write, step, save = Saver._finish, TrainingLoop.step, Saver.open

    def patient_write(self: Any, *arguments: Any) -> None:
        assert may_write.wait(HANGS_SECONDS), "training waits for the writer"
        write(self, *arguments)

    def watched_step(self: Any, iteration: int, feed: Any) -> Any:
        if iteration == 4:
            seen.append(("step", iteration, names(folder)))
            may_write.set()
        return step(self, iteration, feed)

    def watched_open(self: Any, place: Path, number: int) -> Path:
        seen.append(("save", number, names(folder)))
        return save(self, place, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "_finish", patient_write)
        patch.setattr(TrainingLoop, "step", watched_step)
        patch.setattr(Saver, "open", watched_open)
        steps = train(folder, "held-back", flags)
    return seen, steps


def names(folder: Path) -> list[str]:
    saved = folder / "saved"
    return sorted(path.name for path in saved.glob("step-*"))


def failing(folder: Path, flags: str) -> str:
    """The error line of a run whose files rank 1 cannot write, with the last step that was made."""
    import errno
    import os

    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", full)
        try:
            train(folder, "failing", flags)
        except ConfigError as error:
            return str(error)
    return "no error"


def all_runs(place: str) -> dict[str, Any]:
    """The results of one rank: checkpoints seen, the run's steps, those of a resumed run, and an error line."""
    folder = Path(place)
    saved, full = folder / "saved", folder / "full"
    flags = f"{EP2} --train-iters 5 --save-interval 2 --async-save --save"
    seen, whole = held_back(folder, f"{flags} {saved}")
    again = train(folder, "again", f"{EP2} --train-iters 5 --load {saved} --ckpt-step 2")
    return {"seen": seen, "whole": whole, "again": again, "failing": failing(folder, f"{flags} {full}")}


def test_async_saves(tmp_path: Path) -> None:
    for rank in run(2, all_runs, str(tmp_path)):
        places = [(kind, number) for kind, number, _ in rank["seen"]]
        assert places == [("save", 2), ("step", 4), ("save", 4), ("save", 5)]
        contents = [content for _, _, content in rank["seen"]]
        # Steps 3 and 4 are made while the save of step 2 is not there; each later save finds the former one complete.
        assert contents[:2] == [[], []]
        assert contents[2] == ["step-000002"] and contents[3] == ["step-000002", "step-000004"]
        # What was written is what there was at step 2.
        assert rank["again"] == {step: rank["whole"][step] for step in (3, 4, 5)}
        assert rank["failing"] == (
            f"--save {tmp_path}/full: cannot be written: No space left on device; "
            "free space, correct permissions, or choose another folder"
        )
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-000002", "step-000004", "step-000005"]
    assert [*(tmp_path / "full").iterdir()] == []
