"""How many operators the executor launches for one more partition: on a GPU each of them costs the host a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.operators import ATTENTION, FORWARD
from tests.stand_ins.cuda_graphs import RecordedGraphs
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
    return in_layers(device.operators, instructions), in_layers(device.kernels, instructions)


def in_layers(counted: Counter[Instruction | None], instructions: Sequence[Instruction]) -> float:
    """Launches per layer and micro-batch."""
    micro_batches = len({i.micro_batch for i in instructions if i.micro_batch is not None})
    of_layers = (
        number
        for i, number in counted.items()
        if i is not None and i.operator.layer is not None and not i.operator.is_update
    )
    return sum(of_layers) / LAYERS / micro_batches


def test_operators_of_an_extra_partition() -> None:
    (whole, whole_kernels), (halves, halves_kernels) = launched(1), launched(2)
    assert whole_kernels > 80, "the layers' operators were not seen: the difference would show nothing"
    assert whole - whole_kernels > 50, "views were not told from kernels"
    assert 0 < halves - whole <= MOST_OPERATORS
    assert 0 < halves_kernels - whole_kernels <= MOST_KERNELS


MOST_SEGMENTED, MOST_REPLAYED = 164, 21
"""Most kernels per layer and micro-batch with a static capacity: of segments, and where they are graphs, each of them one launch,
with the copies to them and the additions between them."""


def test_a_graph_is_one_launch() -> None:
    flags = "--moe-expert-capacity-factor 0.75 --moe-pad-expert-input-to-capacity --moe-overlap-micro-batches 2"
    flags += " --defer-weight-gradients"
    plain, instructions = run_step(flags)
    graphed, _ = run_step(flags, lambda device: RecordedGraphs(device.launched))
    assert 100 < in_layers(plain.kernels, instructions) <= MOST_SEGMENTED
    assert 10 < in_layers(graphed.kernels, instructions) <= MOST_REPLAYED
    attention = [i for i in instructions if i.operator.kind is ATTENTION and i.operator.phase is FORWARD]
    assert {graphed.kernels[i] for i in attention} <= {1, 2}, "a graph, and a copy of what the embedding has made"
