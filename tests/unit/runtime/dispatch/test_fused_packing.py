"""Permuting, sorting and reordering in one step each, against the operators they stand for: the same bits, there and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from moe_overlap.runtime.dispatch.row_order import ExpertOrder, Reorder, SortUnpack
from moe_overlap.runtime.dispatch.wire import Pack, PermutePacked, Unpack

TOKENS, EXPERTS, WIDTH = 6, 4, 3
SIZES_SL = torch.tensor([[2, 0, 1], [0, 3, 1]])
ROWS = 7
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]


def slowly(rows: Tensor) -> Tensor:
    """Pieces cut one by one, and joined by expert."""
    pieces = rows.split(SIZES_SL.flatten().tolist())
    return torch.cat([pieces[source * 3 + expert] for expert in range(3) for source in range(2)])


@pytest.fixture(autouse=True)
def filled_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Columns that nobody writes hold the same on both sides."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def share_bits(fused: Callable[..., object], slow: Callable[..., object], *inputs: Tensor) -> bool:
    """Whether outputs and gradients of both are equal bit for bit."""
    found = []
    for run in (fused, slow):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        returned = run(*leaves)
        outputs = list(returned) if isinstance(returned, tuple) else [returned]
        drawn = torch.Generator().manual_seed(2)
        # Numbers that every type holds: a gradient that is packed bits may be no number, but must survive.
        gradients = [torch.randint(-4, 5, x.shape, generator=drawn).to(x.dtype) for x in outputs]
        torch.autograd.backward(outputs, gradients)
        found.append([*(x.detach() for x in outputs), *(leaf.grad for leaf in leaves)])
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(("rows_dtype", "probs_dtype"), TYPES)
def test_permute_is_select_and_pack(rows_dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    hidden, probs = torch.randn(TOKENS, WIDTH, generator=drawn), torch.rand(TOKENS, EXPERTS, generator=drawn)
    sources = torch.tensor([0, 4, 9, 23, 1, 5, 0])  # token 0 and 1 twice and more, the last row a filling one
    places = sources // EXPERTS

    def fused(hidden_TH: Tensor, probs_TE: Tensor) -> Tensor:
        packed: Tensor = PermutePacked.apply(hidden_TH, probs_TE, places, sources)
        return packed

    def slow(hidden_TH: Tensor, probs_TE: Tensor) -> Tensor:
        packed: Tensor = Pack.apply(hidden_TH.index_select(0, places), probs_TE.reshape(-1).index_select(0, sources))
        return packed

    assert share_bits(fused, slow, hidden.to(rows_dtype), probs.to(probs_dtype))


@pytest.mark.parametrize(("rows_dtype", "probs_dtype"), TYPES)
def test_sort_is_unpack_and_reorder(rows_dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    rows, probs = torch.randn(ROWS, WIDTH, generator=drawn), torch.rand(ROWS, generator=drawn)
    packed = Pack.apply(rows.to(rows_dtype), probs.to(probs_dtype))

    def slow(x: Tensor) -> tuple[Tensor, Tensor]:
        rows_NH, probs_N = Unpack.apply(x, probs_dtype)
        return slowly(rows_NH), slowly(probs_N)

    assert share_bits(lambda x: SortUnpack.apply(x, probs_dtype, ExpertOrder.of(SIZES_SL, ROWS)), slow, packed)


@pytest.mark.parametrize(("rows_dtype", "probs_dtype"), TYPES)
def test_packed_rows_stay_aligned(rows_dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    """Rows for a peer begin at a multiple of 16 bytes, as NCCL's wide copies ask for, where a row is such a multiple."""
    for width in (16, 64, 4096):
        packed = Pack.apply(torch.ones(3, width, dtype=rows_dtype), torch.ones(3, dtype=probs_dtype))
        assert packed.stride() == (packed.shape[1], 1) and packed.shape[1] > width
        assert packed.stride(0) * packed.element_size() % 16 == 0


def test_reordering_is_undone() -> None:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    order = ExpertOrder.of(SIZES_SL, ROWS)
    assert share_bits(lambda x: Reorder.apply(x, order), slowly, rows)
    assert share_bits(lambda x: Reorder.apply(Reorder.apply(x, order), order.back), lambda x: x * 1, rows)


def test_equal_pieces_need_no_counts_on_the_device() -> None:
    counted, equal = ExpertOrder.of(torch.full((2, 3), 4), 24), ExpertOrder.of_equal(2, 3, 4, torch.device("cpu"))
    assert counted.by_expert is not None and equal.by_expert is not None
    assert counted.by_arrival is not None and equal.by_arrival is not None
    assert torch.equal(counted.by_expert, equal.by_expert) and torch.equal(counted.by_arrival, equal.by_arrival)
