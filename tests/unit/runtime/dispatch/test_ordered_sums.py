"""Sums in a fixed order: the bits of `index_add` on a CPU, by no operator that adds by atomics on a GPU."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires
from moe_overlap.runtime.dispatch.ordered_sums import sum_by_token

BY_ATOMICS = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_", "_index_put_impl_"}
TOKENS, EXPERTS, WIDTH = 9, 4, 5


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world = dist.group.WORLD
    yield Wires(SimpleNamespace(ep=world, expt_tp=world, tp_ep=world))
    dist.destroy_process_group()


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names[function.overloadpacket.__name__] += 1
        return function(*arguments, **(named or {}))


def one_layer(dispatcher: IrregularDispatcher, dtype: torch.dtype) -> tuple[list[torch.Tensor], Counter[str]]:
    """Output and gradients of rows that are weighed by their probabilities, and the operators that gave them."""
    drawn = torch.Generator().manual_seed(7)
    chosen = torch.rand(TOKENS, EXPERTS, generator=drawn) < 0.6
    chosen[3] = False
    hidden = torch.randn(TOKENS, WIDTH, generator=drawn).to(dtype).requires_grad_()
    probs = torch.rand(TOKENS, EXPERTS, generator=drawn).requires_grad_()
    gradient = torch.randn(TOKENS, WIDTH, generator=drawn).to(dtype)
    routed = int(chosen.sum())
    with Operators() as seen:
        handle = dispatcher.open(chosen, probs.dtype, "moe", routed + 3)
        rows, weights = dispatcher.select(hidden, probs, handle)
        output = dispatcher.unpermute((rows * weights.unsqueeze(1).to(dtype))[:routed], handle)
        output.backward(gradient)
    assert hidden.grad is not None and probs.grad is not None
    # A probability belongs to one row, rows of no token repeat the first one with a gradient of zero: any order gives its bits.
    return [output.detach(), hidden.grad, probs.grad], seen.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_index_add(wires: Wires, dtype: torch.dtype) -> None:
    plain, by_atomics = one_layer(IrregularDispatcher(wires, takes_bounds=True), dtype)
    ordered, names = one_layer(IrregularDispatcher(wires, takes_bounds=True, in_order=True), dtype)
    assert all(map(torch.equal, plain, ordered))
    assert sum(by_atomics[name] for name in BY_ATOMICS) == 3 and names["segment_reduce"] == 2
    # What is left is the gradient of the probabilities, whose rows do not meet.
    assert sum(names[name] for name in BY_ATOMICS) == 1


def test_rows_of_no_token_and_tokens_without_rows() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert sum_by_token(rows, torch.tensor([2, 0, 3, 2]), 3).tolist() == [[2.0], [0.0], [9.0]]
    assert sum_by_token(rows[:0], torch.tensor([], dtype=torch.int64), 2).tolist() == [[0.0], [0.0]]


def test_rows_are_added_first_row_first() -> None:
    large, small = 2.0**25, 1.0
    rows = torch.tensor([[small], [large], [-large], [small]])
    tokens = torch.zeros(4, dtype=torch.int64)
    # float32 loses the first one beside the large number, and keeps the last.
    assert sum_by_token(rows, tokens, 1).item() == 1.0
    assert sum_by_token(rows.flip(0)[[1, 2, 0, 3]], tokens, 1).item() == 2.0
