"""Packed rows carry tokens and probabilities bit by bit, both ways."""

from __future__ import annotations

import pytest
import torch

from moe_overlap.runtime.dispatch import wire as packing

PAIRS = [
    (torch.bfloat16, torch.float32, 8),
    (torch.float16, torch.float32, 8),
    (torch.float32, torch.float32, 4),
    (torch.bfloat16, torch.bfloat16, 8),
    (torch.float32, torch.float64, 4),
    (torch.float32, torch.bfloat16, 4),
]


@pytest.mark.parametrize(("rows_dtype", "probs_dtype", "extra"), PAIRS)
def test_bits_survive(rows_dtype, probs_dtype, extra):
    rows = torch.randn(7, 3).to(rows_dtype)
    probs = torch.randn(7).to(probs_dtype)
    probs[0], probs[1], probs[2] = 0.1, float("inf"), -0.0
    packed = packing.join(rows, probs)
    assert packed.dtype == rows_dtype and packed.shape == (7, 3 + extra)
    rows_again, probs_again = packing.cut(packed, probs_dtype)
    assert torch.equal(rows_again, rows) and torch.equal(probs_again, probs)
    assert torch.signbit(probs_again[2])


def test_every_bit_pattern_of_a_probability_survives_bf16_columns():
    bits = torch.tensor([0x00000001, 0x7FC12345, 0x7F800001, -1, 0x3DCCCCCD], dtype=torch.int32)
    packed = packing.join(torch.zeros(5, 2, dtype=torch.bfloat16), bits.view(torch.float32))
    assert torch.equal(packing.cut(packed, torch.float32)[1].view(torch.int32), bits)


def test_gradients_travel_packed():
    rows, probs = torch.randn(4, 3, dtype=torch.bfloat16).requires_grad_(), torch.randn(4).requires_grad_()
    rows_out, probs_out = packing.Unpack.apply(packing.Pack.apply(rows, probs), torch.float32)
    rows_gradient, probs_gradient = torch.randn(4, 3).bfloat16(), torch.randn(4)
    torch.autograd.backward((rows_out, probs_out), (rows_gradient, probs_gradient))
    assert torch.equal(rows.grad, rows_gradient) and torch.equal(probs.grad, probs_gradient)


def test_no_rows():
    rows, probs = packing.cut(packing.join(torch.zeros(0, 3), torch.zeros(0)), torch.float32)
    assert rows.shape == (0, 3) and probs.shape == (0,)
