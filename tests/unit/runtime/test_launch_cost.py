"""How many operators the executor launches for one more partition: on a GPU each of them costs the host a launch."""

from __future__ import annotations

import pytest

from tests.unit.runtime.fake_ranks import LAYERS, run_step, two_ranks

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")

MOST_OPERATORS, MOST_KERNELS = 300, 117
"""Most operators per extra partition, layer and micro-batch, forward and backward: with views, detached tensors and allocations,
which cost a host less, and without. An RMSNorm counts as one kernel each way, as torch's for CUDA (`fake_ranks.py`)."""


def launched(partitions: int) -> tuple[float, float]:
    """Operators, and kernels among them, per layer and micro-batch that belong to layers."""
    device, instructions = run_step(
        f"--moe-overlap-partitions {partitions} --moe-overlap-range around --defer-weight-gradients"
    )
    micro_batches = len({i.micro_batch for i in instructions if i.micro_batch is not None})
    operators, kernels = (
        sum(
            number
            for i, number in counted.items()
            if i is not None and i.operator.layer is not None and not i.operator.is_update
        )
        for counted in (device.operators, device.kernels)
    )
    return operators / LAYERS / micro_batches, kernels / LAYERS / micro_batches


def test_operators_of_an_extra_partition() -> None:
    (whole, whole_kernels), (halves, halves_kernels) = launched(1), launched(2)
    assert whole_kernels > 80, "the layers' operators were not seen: the difference would show nothing"
    assert whole - whole_kernels > 50, "views were not told from kernels"
    assert 0 < halves - whole <= MOST_OPERATORS
    assert 0 < halves_kernels - whole_kernels <= MOST_KERNELS
