"""The start of a process on a pretended machine with GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.training import initialize
from megatron.training.cli.arguments import parse


@pytest.mark.parametrize("variables", [{}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}])
def test_communicators_exist_before_the_first_step(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`device_id` has NCCL make communicators when groups are made, in one order on all ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    joined: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        initialize.dist, "init_process_group", lambda backend, **named: joined.append((backend, named["device_id"]))
    )
    store = torch.distributed.HashStore()
    monkeypatch.setattr(initialize.dist, "rendezvous", lambda url, timeout: iter([(store, 1, 2)]))
    initialize.start_process(parse(["--distributed-backend", "nccl"]).config)
    initialize.start_process(parse(["--distributed-backend", "gloo"]).config)
    place = int(variables.get("LOCAL_RANK", "0"))
    assert joined == [("nccl", torch.device("cuda", place)), ("gloo", None)] and chosen == [place, place]
