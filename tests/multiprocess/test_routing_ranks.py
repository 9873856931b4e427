"""Balancing losses over ranks that share a sequence or a batch: in partitions as in megatron-core's router."""

from __future__ import annotations

import pytest
import torch

from tests.multiprocess.routing_ranks import balance
from tests.spawn import run


def test_balance_over_two_ranks_equals_megatron_core() -> None:
    for answers in run(2, balance, [2, 2, 1]):
        assert len(answers) == 4
        for stock, ours in zip(answers[::2], answers[1::2], strict=True):
            assert ours["values"] == pytest.approx(stock["values"], rel=1e-6)
            assert ours["groups"] == stock["groups"]
            expected, mine = torch.tensor(stock["gradients"]), torch.tensor(ours["gradients"])
            assert (mine - expected).norm() <= 1e-6 * expected.norm()
        assert answers[0]["values"] != answers[2]["values"]
