"""How many operators the executor launches for one more partition: on a GPU each of them costs the host a launch."""

from __future__ import annotations

import pytest

from moe_overlap.plan.operators import FORWARD, GATE
from tests.unit.runtime.fake_ranks import LAYERS, run_step, two_ranks

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")

MOST_OPERATORS, MOST_KERNELS = 430, 206
"""Most operators per extra partition, layer and micro-batch, forward and backward, and those of them that launch a kernel."""
MOST_KERNELS_OF_A_GATE = 31
"""In its forward pass, norm and packing of rows included: the part of a layer that no library fuses."""


def launched(partitions: int, gates_only: bool = False) -> tuple[float, float]:
    """Operators per layer and micro-batch that belong to layers, and those that launch kernels."""
    device, instructions = run_step(
        f"--moe-overlap-partitions {partitions} --moe-overlap-range around --defer-weight-gradients"
    )
    micro_batches = len({i.micro_batch for i in instructions if i.micro_batch is not None})
    inside = [
        i
        for i in device.operators
        if i is not None and i.operator.layer is not None and not i.operator.is_update
        if not gates_only or (i.operator.kind, i.operator.phase) == (GATE, FORWARD)
    ]
    operators, views = (sum(counted[i] for i in inside) for counted in (device.operators, device.views))
    return operators / LAYERS / micro_batches, (operators - views) / LAYERS / micro_batches


def test_operators_of_an_extra_partition() -> None:
    whole, halves = launched(1), launched(2)
    assert whole[1] > 100, "the layers' operators were not seen: the difference would show nothing"
    for before, after, most in zip(whole, halves, (MOST_OPERATORS, MOST_KERNELS), strict=True):
        assert 0 < after - before <= most


def test_kernels_of_a_gate() -> None:
    """Without a capacity nothing is counted or dropped, and the losses' choice is the gate's own."""
    kernels = launched(2, gates_only=True)[1] - launched(1, gates_only=True)[1]
    assert 20 < kernels <= MOST_KERNELS_OF_A_GATE
