"""Tails of storages and saved activations that wait in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_overlap.runtime.state.host_memory import HostMemory, OffloadedTail
from moe_overlap.runtime.state.saved_activations import SavedActivations


@pytest.mark.parametrize(("share", "staying"), [(0.25, 96), (0.5, 64), (1.0, 0)])
def test_a_tail_leaves_the_device_and_comes_back(share: float, staying: int) -> None:
    flat, host = torch.arange(128.0), HostMemory()
    views, content = (flat[10:70], flat[70:128]), flat.clone()
    tail = OffloadedTail(flat, share, host)
    assert host.bytes == 4 * (128 - staying) and tail.holds(views[0])
    tail.store()
    tail.release()
    assert flat.untyped_storage().nbytes() == 4 * staying
    for view, first, last in zip(views, (10, 70), (70, 128), strict=True):
        assert torch.equal(tail.read(view), content[first:last])
    # A store without the tail would copy what is not there.
    tail.store()
    tail.fetch()
    assert torch.equal(flat, content) and torch.equal(views[1], content[70:])


def test_what_is_written_elsewhere_is_there_after_the_next_fetch() -> None:
    flat = torch.zeros(64)
    view, tail = flat[8:40], OffloadedTail(flat, 0.5, HostMemory())
    for away in (True, False):
        if away:
            tail.store()
            tail.release()
        tail.write(view, torch.full((32,), 1.0 + away))
        tail.fetch()
        assert flat.unique().tolist() == [0.0, 1.0 + away] and int((flat > 0).sum()) == 32


def test_the_host_waits_for_copies_before_it_reads_or_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a list may be under way when a save reads the host's memory, or a load writes it."""
    events: list[str] = []

    class Observed(HostMemory):
        def settle(self) -> None:
            events.append("settled")

    flat = torch.arange(64.0)
    tail = OffloadedTail(flat, 1.0, Observed())
    tail.store()
    tail.release()
    assert not events
    tail.read(flat)
    tail.write(flat, torch.zeros(64))
    assert events == ["settled", "settled"]
    device = SimpleNamespace(synchronize=lambda: events.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    HostMemory().settle()
    assert events[-1] == "synchronized"


def test_a_tail_that_is_opened_is_not_fetched() -> None:
    """An update writes it all, and its copy on the host is an older one."""
    flat = torch.zeros(32)
    tail = OffloadedTail(flat, 1.0, HostMemory())
    tail.store()
    tail.release()
    tail.make_room()
    flat.fill_(3.0)
    tail.store()
    tail.release()
    tail.fetch()
    assert torch.equal(flat, torch.full((32,), 3.0))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_saved_activations_wait_on_the_host(share: float) -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    host = HostMemory()
    saved = SavedActivations(share, host, lambda group: [weight])
    x = torch.randn(4, 8, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ weight) @ weight).exp()

    expected = torch.autograd.grad(layer(x).sum(), (x, weight))
    for step in range(2):
        with saved.saving("L0", 0):
            out = layer(x)
        records = list(saved._records["L0", 0].values())
        assert {record.size for record in records} == {4 * 32} and len(records) >= 3
        saved.store("L0", 0)
        moved = sum(record.present is None for record in records)
        assert moved == int(share * len(records)) > 0
        # The memory of a place serves every step.
        assert host.bytes == moved * 4 * 32, step
        with pytest.raises(AssertionError, match="before its activations are back"):
            torch.autograd.grad(out.sum(), (x, weight), retain_graph=True)
        saved.fetch("L0", 0)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (x, weight)), expected))
    assert not saved._records


def test_tensors_of_one_storage_move_once() -> None:
    host = HostMemory()
    saved = SavedActivations(1.0, host, lambda group: [])
    x = torch.randn(16, requires_grad=True)
    with saved.saving("L0", 1):
        y = x * 2.0
        left, right = y.chunk(2)
        out = (left.exp() * right).sum() + (y * y).sum()
    saved.store("L0", 1)
    before = len(host.storages)
    saved.fetch("L0", 1)
    (gradient,) = torch.autograd.grad(out, x)
    left, right = (2.0 * x.detach()).chunk(2)
    expected = 2.0 * (torch.cat([left.exp() * right, left.exp()]) + 2.0 * torch.cat([left, right]))
    assert torch.allclose(gradient, expected) and before <= 3
