"""The loss of one micro-batch: the mean or the sum of the tokens that count, and the report that both have in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_overlap.describe.model import TOKEN_COUNT
from moe_overlap.runtime.state.update import micro_batch_loss

LOSSES_BS = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])


@pytest.mark.parametrize(
    ("mask", "counted", "mean"),
    [
        ([[1, 1, 1], [1, 1, 1]], None, 63.0 / 6),
        ([[1, 0, 1], [0, 1, 0]], None, 7.0),
        ([[1, 0, 1], [0, 1, 0]], 10, 2.1),
        ([[0, 0, 0], [0, 0, 0]], None, 0.0),
        ([[0, 0, 0], [0, 0, 0]], 4, 0.0),
    ],
    ids=["all", "some", "a part of sequences with 10", "none", "none of this part"],
)
def test_a_loss_is_the_mean_of_the_tokens_that_count_or_their_sum(
    mask: list[list[int]], counted: int | None, mean: float
) -> None:
    batch: dict[str, Tensor] = {"loss_mask": torch.tensor(mask, dtype=torch.float)}
    if counted is not None:
        batch[TOKEN_COUNT] = torch.tensor(float(counted))
    total, tokens = (LOSSES_BS * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
    for per_token, expected in ((False, mean), (True, float(total))):
        losses_BS = LOSSES_BS.clone().requires_grad_()
        loss, report = micro_batch_loss(losses_BS, batch, per_token)
        assert float(loss) == pytest.approx(expected, rel=1e-7)
        # The report is of this rank's part, whoever shares the sequences, and no backward pass goes through it.
        assert report.tolist() == [float(total), float(tokens)] and not report.requires_grad
        loss.backward()
        divisor = 1.0 if per_token else max(1.0, float(tokens) if counted is None else counted)
        assert torch.equal(losses_BS.grad, batch["loss_mask"] / divisor)
