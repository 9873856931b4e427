"""Segments of the autograd graph: what they keep until their backward pass, and the gradients that leave them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.training.report.reports import StorageTracker
from moe_overlap.runtime.executor.segments import Segment

ROWS = 1000
BYTES = 4 * ROWS


def rows() -> Tensor:
    return torch.arange(ROWS, dtype=torch.float32)


def test_a_segment_keeps_what_its_function_saves_and_nothing_else() -> None:
    """A permutation saves neither what it reads nor what it leaves, a product with itself what it reads."""
    order = torch.randperm(ROWS)
    with StorageTracker([order]) as tracker:
        before = tracker.bytes
        permuted = Segment(lambda x: x.index_select(0, order), [rows()])
        (output,) = permuted.take()
        assert tracker.bytes - before == pytest.approx(BYTES, abs=64), "its input is kept"
        squared = Segment(lambda x: x * x, [output])
        squared.take()
        del output
        assert tracker.bytes - before == pytest.approx(BYTES, abs=64), "what the square has saved, and nothing else"
        (gradient,) = squared.backward(torch.ones(ROWS))
        assert gradient is not None and torch.equal(gradient, 2 * rows()[order])
        (back,) = permuted.backward(gradient)
        assert back is not None and torch.equal(back, 2 * rows())
        del gradient, back
        assert tracker.bytes - before == pytest.approx(0, abs=64)


def test_gradients_come_back_for_each_input_that_has_one() -> None:
    weight = torch.nn.Parameter(torch.ones(ROWS))
    numbers = torch.zeros(ROWS, dtype=torch.int64)

    def run(x: Tensor, missing: Tensor | None, indices: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, str]:
        assert missing is None and not indices.requires_grad and unused.requires_grad
        return x * weight, x.sum(), "a handle"

    before = rows().requires_grad_() * 1.0
    segment = Segment(run, [before, None, numbers, rows()])
    product, total, handle = segment.take()
    assert handle == "a handle" and torch.equal(product, rows()) and total == rows().sum()
    found = segment.backward(torch.full((ROWS,), 3.0), torch.tensor(2.0), None)
    assert found[0] is not None and torch.equal(found[0], torch.full((ROWS,), 5.0))
    assert found[1:] == (None, None, None)
    assert weight.grad is not None and torch.equal(weight.grad, 3.0 * rows())


def test_a_segment_is_cut_from_the_one_before() -> None:
    """Its backward pass ends at its inputs, though what it was given has a graph of its own."""
    weight = torch.nn.Parameter(torch.ones(ROWS))
    first = Segment(lambda x: x * weight, [rows()])
    (between,) = first.take()
    second = Segment(lambda x: x * 2.0, [between])
    (gradient,) = second.backward(torch.ones(ROWS))
    assert weight.grad is None and gradient is not None and torch.equal(gradient, torch.full((ROWS,), 2.0))
    first.backward(gradient)
    assert weight.grad is not None and torch.equal(weight.grad, 2.0 * rows())


def test_without_gradients_there_is_no_graph() -> None:
    with torch.no_grad():
        (output,) = Segment(lambda x: x * torch.nn.Parameter(torch.ones(ROWS)), [rows()]).take()
    assert not output.requires_grad and output.grad_fn is None
