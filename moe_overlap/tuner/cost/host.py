"""Seconds of the host to launch a pass, and of a pass in which the host waits for the device.

The host launches ahead of the device, so a pass takes as long as the slower of the two. One exception: the experts' products need
the number of rows of each expert on the host, so the host waits for these counts in the forward pass of every MoE layer (with the
dispatchers of megatron-core, DeepEP and HybridEP, if there is no capacity). After such a wait the device's queue is empty: no
operator starts before it is launched, and a delay lasts until the next wait. The backward pass has the counts already. A graph of
the complete step has static buffers and does not wait, and neither does a list with a static capacity.

A list may replay its operators as CUDA graphs (`Replays`). Then the host needs one launch for each pass of an operator, instead
of the usual ones, and the additional launches of the replay (captured_launches.py).
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
"""Operators outside of partial CUDA graphs, because their shapes depend on the routing."""
UNFUSED_CALLS = 5.0
"""Calls of torch in attention without a fused kernel: product with its mask, softmax, dropout, second product, a copy."""
UNFUSED_KERNELS = 8.0
"""Kernels of the backward pass of attention without a fused kernel: one per call, two per product."""
WAITING_CALLS = 4.0
"""Calls of torch to read the counts: a copy, an event, the wait, a list."""
BESIDE: dict[str, str] = {COUNT: GATE, DISPATCH: GATE, COMBINE: MERGE}
"""Operator of an all-to-all -> the operator that contains the computation around it, such as permutation."""
WORTH_A_LOOK = 0.05
"""Smallest term that leads to advice, as a share of the step."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Differences in launches between the executor of instruction lists and megatron-core.

    Attributes:
        captured: operators that are replayed as graphs, forward and backward.
        more_launches: (operator, is backward pass) -> mean number of launches per replay in addition to the replay itself.
        counts_rows: whether the host reads the number of rows of each expert; false with a static capacity.
    """

    captured: frozenset[OperatorKind] = frozenset()
    more_launches: Mapping[tuple[OperatorKind, bool], float] = field(default_factory=dict)
    counts_rows: bool = True


UNLISTED = Replays()


def replays_of(plan: Plan, features: Features) -> Replays:
    """The differences in launches under a plan, without `more_launches`, which depend on the list."""
    is_static = plan.static_capacity_factor is not None
    captured = captured_kinds(is_static) if features.listed_graphs else frozenset()
    return Replays(captured=captured, counts_rows=not is_static)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launching:
    """Seconds of a step that are due to launching from the host.

    Attributes:
        seconds: seconds of the step minus those with a host that launches in no time.
        graph_flags: flags of CUDA graphs that the run could add; empty if there are none, or if they gain little.
        graphed_seconds: seconds of a step with these flags.
    """

    seconds: float
    graph_flags: tuple[str, ...] = ()
    graphed_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HostWork:
    """The host's work for a part.

    Attributes:
        seconds: [N] for each operator, with the calls of a wait for counts.
        waits: [N] whether the host waits for the device before the operator.
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
        seconds_of_launch: seconds to launch one kernel of torch from Python.
    """
    if features.graphs == "full":
        return HostWork(np.zeros(len(table.ops)), np.zeros(len(table.ops), dtype=np.bool_))
    # 1. Calls, by their kind.
    prices = {
        CallCode.TORCH: 1.0,
        CallCode.FUNCTION: common.fused,
        CallCode.MODULE: common.transformer_engine,
        CallCode.EXTRA_KERNEL: common.extra_kernel,
    }
    work = np.array([prices[CallCode(code)] for code in range(len(prices))])[table.called]
    # 2. Additional kernels and quantization. A grouped product launches one kernel per group and quantizes group by group, unless
    # it is fused.
    grouped = (table.classes == GROUPED_GEMM) & features.fused_experts
    kernels = np.where(grouped, 1.0, np.maximum(table.launches, 1.0))
    work = work + common.extra_kernel * (kernels - 1.0)
    if features.precision in LOW_PRECISIONS:
        quantized = table.quantizable & ~table.weight_gradient & ~grouped
        work = work + np.where(quantized, common.low_precision * kernels, 0.0)
    if not features.flash:
        calls = np.where(table.backward, common.extra_kernel * UNFUSED_KERNELS, UNFUSED_CALLS)
        work = work + np.where(table.classes == FUSED_ATTENTION, calls, 0.0)
    # 3. Launches that fused kernels and CUDA graphs save.
    work = work * np.minimum(1.0, fused_share(table, features))
    launched = table.launches > 0
    if features.graphs == "partial":
        launched = launched & np.isin(table.operators, (*UNGRAPHED, *features.outside_graphs))
    work = _replayed(table, np.where(launched, work, 0.0), replays)
    # 4. Waits for counts.
    waits = table.waits & replays.counts_rows
    work = work + np.where(waits, WAITING_CALLS, 0.0)
    if features.overlap_experts:
        # Every node has its own call and its own backward call, each at the price of a module's.
        work = work + np.where(table.nodes, common.transformer_engine, 0.0)
    return HostWork(work * seconds_of_launch, waits)


def _replayed(table: OpTable, work: Floats, replays: Replays) -> Floats:
    """[N] launches, with those of a captured operator replaced by its replay's, all at its first kernel."""
    if not replays.captured:
        return work
    # All-to-alls are not replayed; the computation around them belongs to neighbouring operators (BESIDE).
    named = np.array([BESIDE.get(op.operator, op.operator) for op in table.ops], dtype=np.str_)
    computes = table.classes != COLLECTIVE
    work = work.copy()
    for kind in sorted(replays.captured):
        for backward in (False, True):
            places = np.flatnonzero((named == kind) & computes & (table.backward == backward) & (table.launches > 0))
            if len(places):
                work[places] = 0.0
                work[places[0]] = 1.0 + replays.more_launches.get((kind, backward), 0.0)
    return work


def drained_seconds(work: HostWork, device: Floats, in_pass: Bools) -> float:
    """Seconds of a pass whose host waits for the device once per layer; 0 if it does not wait.

    Between two waits an operator starts when it is launched and the previous one has ended. So the last of N operators ends at
    max over k of (host seconds of operators 1 to k + device seconds of operators k to N).

    Args:
        device: [N] seconds of an operator, or of an exposed collective.
    """
    places = np.flatnonzero(in_pass)
    waits = np.flatnonzero(work.waits[places])
    if not len(waits):
        return 0.0
    places = np.roll(places, -waits[0])
    launched = np.cumsum(work.seconds[places])
    on_device = np.cumsum(device[places][::-1])[::-1]
    return float((launched + on_device).max())
