"""Rows padded to a static capacity: what leaves the dispatcher, and what comes back, are those of counted rows."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires

TOKENS, EXPERTS, WIDTH, CAPACITY = 7, 3, 4, 4


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world = dist.group.WORLD
    yield Wires(SimpleNamespace(ep=world, expt_tp=world, tp_ep=world))
    dist.destroy_process_group()


def one_layer(dispatcher: IrregularDispatcher, capacity: int | None) -> tuple[list[torch.Tensor], list[int]]:
    """Output and gradients of experts with a bias, one scale each; and the rows that they were given."""
    drawn = torch.Generator().manual_seed(3)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    chosen[1:5, 0] = chosen[4, 2] = True  # one expert is full, one is empty; tokens 0, 5 and 6 go nowhere
    hidden = torch.randn(TOKENS, WIDTH, generator=drawn, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, generator=drawn, requires_grad=True)
    scale = torch.randn(EXPERTS, WIDTH, generator=drawn, requires_grad=True)
    bias = torch.randn(EXPERTS, WIDTH, generator=drawn, requires_grad=True)
    gradient = torch.randn(TOKENS, WIDTH, generator=drawn)
    rows, handle = dispatcher.permute(hidden, probs, chosen, capacity=capacity)
    if capacity is None:
        dispatcher.start_counts(handle)
    received = dispatcher.start_dispatch(rows, handle).wait().detach().requires_grad_()
    tokens, per_expert, weights = dispatcher.sort(received, handle)
    experts = torch.arange(EXPERTS).repeat_interleave(per_expert)
    output = dispatcher.unsort((tokens * scale[experts] + bias[experts]) * weights.unsqueeze(1), handle)
    returned = dispatcher.start_combine(output, handle).wait().detach().requires_grad_()
    merged = dispatcher.unpermute(returned, handle)
    merged.backward(gradient)
    assert returned.grad is not None and received.grad is None
    torch.autograd.backward(output, dispatcher.start_combine_backward(returned.grad, handle).wait())
    assert received.grad is not None
    torch.autograd.backward(rows, dispatcher.start_dispatch_backward(received.grad, handle).wait())
    gradients = [leaf.grad for leaf in (hidden, probs, scale, bias)]
    assert all(value is not None for value in gradients)
    return [merged.detach(), *(value for value in gradients if value is not None)], per_expert.tolist()


@pytest.mark.parametrize("in_order", [False, True])
def test_empty_places_change_no_number(wires: Wires, in_order: bool) -> None:
    counted, rows = one_layer(IrregularDispatcher(wires, in_order=in_order), None)
    copies = wires.counts.host_copies
    static = IrregularDispatcher(wires, in_order=in_order, static_capacity=True)
    padded, places = one_layer(static, CAPACITY)
    assert rows == [4, 0, 1] and places == [CAPACITY] * EXPERTS
    assert all(map(torch.equal, counted, padded))
    assert wires.counts.host_copies == copies, "the counts of a static capacity are read from no device"


def test_a_pass_without_its_capacity_is_a_mistake_of_ours(wires: Wires) -> None:
    with pytest.raises(AssertionError, match="a static capacity belongs to every pass"):
        one_layer(IrregularDispatcher(wires, static_capacity=True), None)
    with pytest.raises(AssertionError, match="a static capacity belongs to every pass"):
        one_layer(IrregularDispatcher(wires), CAPACITY)
