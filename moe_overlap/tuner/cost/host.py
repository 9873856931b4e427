"""Seconds of the host to launch a pass, and of a pass in which the host waits for the device.

The host launches ahead of the device, so that a pass takes as long as the slower of the two, with one exception: the products of
the experts want to know how many rows each expert has, so the host waits for the counts of every MoE layer in its forward pass
(megatron-core's dispatchers and those of DeepEP and HybridEP all do, without capacity). Behind such a wait nothing is queued: no
operator starts before it was launched, and what is launched late stays late until the next wait. The backward pass knows the
counts. A graph of the whole step has static buffers and waits for nothing, and neither does a list with a static capacity.

A list may have its operators replayed as CUDA graphs (`Replays`). Then the host pays one launch for each pass of an operator,
whatever it launches otherwise, and what the replay needs beside it (captured_launches.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.lowering.captured import captured_kinds
from moe_overlap.plan.operators import COMBINE, COUNT, DISPATCH, GATE, MERGE, OperatorKind
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.calls import CallCode
from moe_overlap.tuner.cost.hardware import CommonConstants, Features
from moe_overlap.tuner.cost.operators import (
    COLLECTIVE,
    FUSED_ATTENTION,
    GROUPED_GEMM,
    LOW_PRECISIONS,
    OpTable,
    fused_share,
)

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UNGRAPHED = ("moe.dispatch", "moe.experts", "moe.combine", "moe.merge")
"""Operators that partial CUDA graphs leave to the host: their shapes depend on the routing."""
UNFUSED_CALLS = 5.0
"""Calls of torch in attention without a fused kernel: product with its mask, softmax, dropout, second product, a copy."""
UNFUSED_KERNELS = 8.0
"""Kernels of its backward pass: each again, each product twice."""
WAITING_CALLS = 4.0
"""Calls of torch to get the counts: a copy, an event, the wait, a list."""
BESIDE: dict[str, str] = {COUNT: GATE, DISPATCH: GATE, COMBINE: MERGE}
"""Operator of an all-to-all -> the operator that the computation around it, such as permutation, belongs to."""
WORTH_A_LOOK = 0.05
"""Smallest term that leads to advice, as a share of the step."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Launches in which a run by instruction lists differs from megatron-core's passes.

    Attributes:
        captured: operators that are replayed as graphs, forward and backward.
        beside: operator and whether it is its backward pass -> launches that one replay needs beside its own, in the mean.
        counts_rows: whether the host reads how many rows each expert has; not with a static capacity.
    """

    captured: frozenset[OperatorKind] = frozenset()
    beside: Mapping[tuple[OperatorKind, bool], float] = field(default_factory=dict)
    counts_rows: bool = True


UNLISTED = Replays()


def replays_of(plan: Plan, features: Features) -> Replays:
    """Launches in which the executor of lists differs under a plan, whatever the list; its copies depend on the list."""
    is_static = plan.static_capacity_factor is not None
    captured = captured_kinds(is_static) if features.listed_graphs else frozenset()
    return Replays(captured=captured, counts_rows=not is_static)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launching:
    """Seconds of a step that are due to launching from the host.

    Attributes:
        seconds: by which it is longer than on a host that launches for nothing.
        graph_flags: of CUDA graphs that the run does not have and may; none where there are none, or little to gain.
        graphed_seconds: of a step with them.
    """

    seconds: float
    graph_flags: tuple[str, ...] = ()
    graphed_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HostWork:
    """[N] seconds of the host for each operator of a part; where it waits for counts, those of the wait are among them.

    Attributes:
        waits: whether the host waits for the device ahead of an operator.
    """

    seconds: Floats
    waits: Bools


def host_work(
    table: OpTable,
    features: Features,
    common: CommonConstants,
    seconds_of_launch: float,
    replays: Replays = UNLISTED,
) -> HostWork:
    """The host's work for every operator.

    Args:
        seconds_of_launch: to launch one kernel of torch from Python.
    """
    if features.graphs == "full":
        return HostWork(np.zeros(len(table.ops)), np.zeros(len(table.ops), dtype=np.bool_))
    prices = {
        CallCode.TORCH: 1.0,
        CallCode.FUNCTION: common.fused,
        CallCode.MODULE: common.transformer_engine,
        CallCode.FURTHER: common.further,
    }
    work = np.array([prices[CallCode(code)] for code in range(len(prices))])[table.called]
    # A grouped product launches a kernel for every group, and quantizes every group's rows by itself, unless it is fused.
    grouped = (table.classes == GROUPED_GEMM) & features.fused_experts
    kernels = np.where(grouped, 1.0, np.maximum(table.launches, 1.0))
    work = work + common.further * (kernels - 1.0)
    if features.precision in LOW_PRECISIONS:
        quantized = table.quantizable & ~table.weight_gradient & ~grouped
        work = work + np.where(quantized, common.low_precision * kernels, 0.0)
    if not features.flash:
        calls = np.where(table.backward, common.further * UNFUSED_KERNELS, UNFUSED_CALLS)
        work = work + np.where(table.classes == FUSED_ATTENTION, calls, 0.0)
    work = work * np.minimum(1.0, fused_share(table, features))
    launched = table.launches > 0
    if features.graphs == "partial":
        launched = launched & np.isin(table.operators, (*UNGRAPHED, *features.outside_graphs))
    work = _replayed(table, np.where(launched, work, 0.0), replays)
    waits = table.waits & replays.counts_rows
    work = work + np.where(waits, WAITING_CALLS, 0.0)
    if features.overlap_experts:
        # Nodes are run and differentiated one by one: a call as dear as a module's for each.
        work = work + np.where(table.nodes, common.transformer_engine, 0.0)
    return HostWork(work * seconds_of_launch, waits)


def _replayed(table: OpTable, work: Floats, replays: Replays) -> Floats:
    """[N] launches, where those of a captured operator are one at its first, with those that its replay needs beside it."""
    if not replays.captured:
        return work
    # All-to-alls stay instructions, and what the capture has around them belongs to the operators beside them.
    named = np.array([BESIDE.get(op.operator, op.operator) for op in table.ops], dtype=np.str_)
    computes = table.classes != COLLECTIVE
    work = work.copy()
    for kind in sorted(replays.captured):
        for backward in (False, True):
            places = np.flatnonzero((named == kind) & computes & (table.backward == backward) & (table.launches > 0))
            if len(places):
                work[places] = 0.0
                work[places[0]] = 1.0 + replays.beside.get((kind, backward), 0.0)
    return work


def drained_seconds(work: HostWork, device: Floats, in_pass: Bools) -> float:
    """Seconds of a pass, one layer after another, whose host waits for the device once in each; 0 where it does not wait.

    From one wait to the next, operators begin when they are launched and the one before is done, so that the last of N ends at
    the largest of sums of what the host takes for the first k and the device for those from the k-th on.

    Args:
        device: [N] seconds that an operator or an exposed collective takes.
    """
    places = np.flatnonzero(in_pass)
    waits = np.flatnonzero(work.waits[places])
    if not len(waits):
        return 0.0
    places = np.roll(places, -waits[0])
    launched = np.cumsum(work.seconds[places])
    left = np.cumsum(device[places][::-1])[::-1]
    return float((launched + left).max())
