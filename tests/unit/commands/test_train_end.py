"""The end of a rank's process groups: together where all have come to the end, not at all where one has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import megatron.training.initialize as initialize
import megatron.training.report.reports as reports
from megatron.training.cli.arguments import parse
from moe_overlap.commands import train as command
from moe_overlap.describe.errors import ConfigError
from tests.unit.training.test_draw_numbers import WORDS


@pytest.mark.parametrize(
    ("failure", "status"),
    [(None, 0), (RuntimeError("CUDA out of memory"), 1), (ConfigError("--x", "", "r", "f"), None)],
)
def test_a_failed_rank_leaves_without_taking_down_its_groups(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None, status: int | None
) -> None:
    """NCCL would wait there for collectives that peers have begun, so that no launcher sees the failure."""

    def run() -> None:
        if failure is not None:
            raise failure

    job = SimpleNamespace(machinery=SimpleNamespace(operation=lambda: None), reporting=SimpleNamespace(log=None))
    loop: Any = SimpleNamespace(run=run, job=job, reason=None, activity="step 1")
    destroyed: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: destroyed.append("all"))
    monkeypatch.setattr(initialize, "start_process", lambda config: SimpleNamespace(rank=0, world_size=1))
    monkeypatch.setattr(reports, "announce_end", lambda *_: None)
    checked: list[bool] = []
    monkeypatch.setattr(command, "require_usable_gpu", lambda: checked.append(True))
    for name in ("end_with_launcher", "settle_environment", "speak"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    monkeypatch.setattr(command, "assemble", lambda *_: loop)
    if status is None:
        with pytest.raises(ConfigError):
            command.train(parse(WORDS.split()), [])
    else:
        assert command.train(parse(WORDS.split()), []) == status
    assert destroyed == (["all"] if failure is None else []) and checked == [True]
