"""How many operators the executor launches for one more partition: on a GPU each of them costs the host a launch."""

from __future__ import annotations

import pytest

from tests.unit.runtime.fake_ranks import LAYERS, run_step, two_ranks

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")

MOST_OPERATORS = 455
"""Most operators per extra partition, layer and micro-batch, forward and backward; views and detached tensors count, too."""


def launched(partitions: int) -> float:
    """Operators per layer and micro-batch that belong to layers."""
    device, instructions = run_step(
        f"--moe-overlap-partitions {partitions} --moe-overlap-range around --defer-weight-gradients"
    )
    micro_batches = len({i.micro_batch for i in instructions if i.micro_batch is not None})
    in_layers = sum(
        number
        for i, number in device.operators.items()
        if i is not None and i.operator.layer is not None and not i.operator.is_update
    )
    return in_layers / LAYERS / micro_batches


def test_operators_of_an_extra_partition() -> None:
    whole, halves = launched(1), launched(2)
    assert whole > 100, "the layers' operators were not seen: the difference would show nothing"
    assert 0 < halves - whole <= MOST_OPERATORS
