"""What one machine of a cluster lacks and others have: it is named, by the rank that meets it."""

from __future__ import annotations

import socket
import time

import pytest
import torch

import megatron.training.cli.start as start
from moe_overlap.commands import exits
from moe_overlap.commands.train import require_usable_gpu
from moe_overlap.describe.errors import ConfigError


def test_a_rank_that_fails_alone_speaks_when_the_first_has_had_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert exits.leave(0, "error: no such file", 2) == 2
    assert capsys.readouterr().err == "error: no such file\n" and waited == []
    assert exits.leave(41, "error: no such file", 2) == 2
    assert capsys.readouterr().err == f"error: no such file (rank 41 on {socket.gethostname()})\n"
    assert exits.leave(41, "error: the loss is not finite", 1, is_shared=True) == 1
    assert capsys.readouterr().err == "" and waited == [exits.RANK_0_SPEAKS_WITHIN_SECONDS] * 2


@pytest.mark.parametrize(
    ("built_for", "driver", "usable", "visible", "refused"),
    [
        ("12.8", True, False, None, True),
        ("12.8", True, False, "", False),  # asks for the CPU
        ("12.8", True, True, None, False),
        ("12.8", False, False, None, False),  # has no GPU
        (None, True, False, None, False),  # torch for CPUs
    ],
)
def test_gpus_that_torch_cannot_use_stop_a_start(
    monkeypatch: pytest.MonkeyPatch,
    built_for: str | None,
    driver: bool,
    usable: bool,
    visible: str | None,
    refused: bool,
) -> None:
    """Such a rank would take the CPU and gloo, while its peers wait for it in NCCL."""
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(start, "cuda_is_there", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if refused:
        with pytest.raises(ConfigError, match=rf"the GPUs of {socket.gethostname()}: torch cannot use them"):
            require_usable_gpu()
    else:
        require_usable_gpu()
