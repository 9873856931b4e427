"""How many operators the executor launches for one more partition: on a GPU each of them costs the host a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.captured import captured_kinds
from moe_overlap.plan.operators import ATTENTION, EXPERTS, FORWARD
from moe_overlap.tuner.cost.captured_launches import more_launches_by_row, replayed_in
from moe_overlap.tuner.cost.hardware import CommonConstants, Features
from moe_overlap.tuner.cost.host import Replays, host_work
from moe_overlap.tuner.cost.operators import tabulate
from tests.stand_ins.cuda_graphs import RecordedGraphs
from tests.unit.runtime.fake_ranks import LAYERS, DeviceMode, run_step, two_ranks
from tests.validation.golden_graphs import golden_graphs
from tests.validation.golden_prices import EIGHT, MOE

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")

MOST_OPERATORS, MOST_KERNELS = 321, 126
"""Most operators per extra partition, layer and micro-batch, forward and backward: with views, detached tensors and allocations,
which cost a host less, and without. An RMSNorm counts as one kernel each way, as torch's for CUDA (`fake_ranks.py`)."""


def test_the_documented_limits_are_these() -> None:
    text = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    assert f"No more than {MOST_OPERATORS} operators are launched" in text
    assert f"no more than {MOST_KERNELS} kernels among them" in text


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


MOST_SEGMENTED, MOST_REPLAYED = 169, 21
"""Most kernels per layer and micro-batch with a static capacity: of segments, and where they are graphs, each of them one launch,
with the copies to them and the additions between them."""


STATIC = "--moe-expert-capacity-factor 0.75 --moe-pad-expert-input-to-capacity --moe-overlap-micro-batches 2"


@cache
def replayed(flags: str) -> tuple[DeviceMode, tuple[Instruction, ...]]:
    return run_step(flags, lambda device: RecordedGraphs(device.launched))


def test_a_graph_is_one_launch() -> None:
    flags = f"{STATIC} --defer-weight-gradients"
    plain, instructions = run_step(flags)
    graphed, _ = replayed(flags)
    assert 100 < in_layers(plain.kernels, instructions) <= MOST_SEGMENTED
    assert 10 < in_layers(graphed.kernels, instructions) <= MOST_REPLAYED
    attention = [i for i in instructions if i.operator.kind is ATTENTION and i.operator.phase is FORWARD]
    assert {graphed.kernels[i] for i in attention} <= {1, 2}, "a graph, and a copy of what the embedding has made"


EXPERTS_OF_RANK = 2
"""Each has a weight gradient, and a graph, of its own on a CPU. Grouped products of a GPU have one, as is priced."""


@pytest.mark.parametrize(
    "flags",
    [f"{STATIC} --defer-weight-gradients", "--moe-overlap-partitions 2 --moe-shared-expert-intermediate-size 32"],
)
def test_launches_are_priced_as_they_are_counted(flags: str) -> None:
    counted, instructions = replayed(flags)
    is_static = "--moe-pad" in flags
    priced = replayed_in(instructions, is_static, lambda i, role, parts: 1.0)
    assert len(priced) > 40
    for i in instructions:
        if i.id in priced:
            of_experts = i.kind == "weight-gradient" and i.operator.kind is EXPERTS
            assert priced[i.id].launches * (EXPERTS_OF_RANK if of_experts else 1) == counted.kernels[i], i


def test_a_layer_is_charged_what_its_graphs_launch() -> None:
    """All but its all-to-alls, on a layer made by hand; the graphs of the second expert's weight gradients are none of it."""
    counted, instructions = replayed(f"{STATIC} --defer-weight-gradients")
    (beside,) = more_launches_by_row(
        instructions, replayed_in(instructions, True, lambda i, role, parts: 1.0), lambda layer: 0
    ).values()
    problem = problem_of(f"{MOE} {EIGHT}".split(), shipped_cluster("H100", 8), {"graphs": golden_graphs})
    table = tabulate(next(part for part in problem.graphs[0].parts if part.kind == "moe"), 1, 16)
    price = CommonConstants(transformer_engine=10.0, fused=4.0, low_precision=3.0, extra_kernel=0.5)
    work = host_work(table, Features(), price, 1.0, Replays(captured_kinds(True), beside, counts_rows=False))
    charged = sum(float(s) for s, op in zip(work.seconds, table.ops, strict=True) if op.cost_class != "collective")
    of_second = 2 * (EXPERTS_OF_RANK - 1)
    assert charged == pytest.approx(in_layers(counted.kernels, instructions) - of_second, abs=0.01)
