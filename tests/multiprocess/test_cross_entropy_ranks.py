"""Cross entropy of logits whose vocabulary two ranks share is that of whole logits."""

from __future__ import annotations

import torch

from tests.multiprocess.cross_entropy_runs import losses_and_gradients
from tests.spawn import run


def test_losses_and_gradients_of_halves_are_those_of_the_whole() -> None:
    ranks = run(2, losses_and_gradients)
    for rank in ranks:
        for whole, halves in zip(rank["whole"], rank["halves"], strict=True):
            torch.testing.assert_close(torch.tensor(halves), torch.tensor(whole), rtol=1e-6, atol=1e-6)
    assert ranks[0]["halves"][0] == ranks[1]["halves"][0]
