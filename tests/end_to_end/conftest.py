"""The undisturbed run that the others are compared with: made once, by torchrun, with every record switched on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.program import SMALL, Ended, torchrun

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 39 --profile-step-end 1000"


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Two ranks, EP 2, 40 steps, an evaluation every 20."""

    ended: Ended
    folder: Path
    losses: Path
    """The file that --log-json wrote on rank 0."""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    losses = folder / "losses.jsonl"
    files = ["--log-json", str(losses), "--trace", str(folder / "trace.json"), "--tensorboard-dir", str(folder)]
    files += ["--save", str(folder / "saved")]
    evaluation = "--eval-interval 20 --eval-iters 2 --log-throughput".split()
    ended = torchrun([*SMALL, *files, *evaluation, *PROFILE.split()])
    assert ended.status == 0, ended.err
    return Undisturbed(ended, folder, losses)
