"""Where checkpoints are read to, and on which device their thread works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.checkpoint import optimizer_state, saver
from megatron.training.cli.config import CheckpointConfig


def test_whole_parameters_are_read_to_the_host() -> None:
    """On the device, all kinds of all parameters would be several times what the rank keeps of them."""
    shard: Any = SimpleNamespace(parameter=torch.empty(6, dtype=torch.bfloat16, device="meta"))
    read = optimizer_state._empty(shard)
    assert (read.device.type, read.dtype, read.numel()) == ("cpu", torch.float32, 6)


def test_a_whole_parameter_goes_when_its_shard_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    main = torch.zeros(2)
    inner, group = SimpleNamespace(state={}), {"step": 0}
    kinds = ("exp_avg", "exp_avg_sq")
    shard = SimpleNamespace(inner=inner, group=group, main=main, place=1, holders=((0, 0, 4), (1, 4, 6)))
    shard.kinds = lambda _: kinds
    monkeypatch.setattr(optimizer_state, "_shards", lambda _: iter([shard]))
    whole = torch.arange(6.0)
    state = {"0.exp_avg": whole, "0.exp_avg_sq": whole + 1}
    optimizer_state.restore_optimizer(None, "adam", state, steps=3)
    kept = inner.state[main]
    assert state == {} and group["step"] == 3
    assert kept["exp_avg"].tolist() == [4.0, 5.0] and kept["exp_avg_sq"].tolist() == [5.0, 6.0]
    assert kept["exp_avg"].untyped_storage().nbytes() == 8


def test_the_thread_of_saves_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current device is GPU 0, whatever the process has chosen."""
    chosen: list[torch.device] = []
    device = torch.device("cuda", 5)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(saver, "device_of_this_process", lambda: device)
    monkeypatch.setattr(saver.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(saver, "replica_range", lambda _: (1, 1))
    groups: Any = SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: 1))
    saving = saver.Saver(CheckpointConfig(save="x", async_save=True), groups)
    assert saving._thread is not None
    saving._thread.submit(lambda: None).result()
    assert chosen == [device]
