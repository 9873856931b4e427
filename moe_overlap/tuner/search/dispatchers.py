"""The dispatcher of tokens as a choice of the search: which dispatchers the GPUs run, and which layouts are faster with another.

1. One search runs to its end with the first dispatcher, all-to-alls. `search_dispatchers` then searches each other dispatcher
   only for plans that are faster than the incumbent. A dispatcher changes nothing but the routed experts' block, so the graphs of
   the first dispatcher bound its layouts (`FlooredCosts`), and graphs of another dispatcher are rarely captured.
2. `Floors` prices everything but dispatch, combine and permutation under the first dispatcher, with its bytes and recomputation.
   The bound is the larger of two floors: one with the host's launches; one without them, plus the seconds of what the other
   dispatcher must send (`Bounds.exchange_seconds`), since tokens travel while the host launches.
3. With Megatron-LM's overlap of all-to-alls (paired.py) other work hides the sends: one floor, without them.
4. The result is exact: the best plans equal those of an enumeration of all layouts under all dispatchers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from moe_overlap.describe.cluster import NodeGroup
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import EXCHANGE_PARTS, EXPERTS
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.blocks import ROUTED, block_of
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Op
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.cost.layer import PartCost, Setting
from moe_overlap.tuner.cost.operators import CostClassCode, OpTable
from moe_overlap.tuner.cost.router import DISPATCH_LIBRARIES
from moe_overlap.tuner.search.bounds import Bounds, pipelined
from moe_overlap.tuner.search.paired import CostsOfBoth, with_paired
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import UniformLayout, chunks_of
from moe_overlap.tuner.search.uniform import Accepts, Progress, RankedLayout, UniformSearch, search_uniform, widened
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask

FIRST: Dispatcher = "alltoall"
"""The dispatcher that every setting allows, and the baseline of the others."""
NAMES: tuple[Dispatcher, ...] = ("alltoall", "allgather", "deepep", "hybridep")
LIBRARIES: Mapping[Dispatcher, tuple[str, ...]] = MappingProxyType(
    {"deepep": ("Ampere", "Hopper", "Blackwell"), "hybridep": ("Hopper", "Blackwell")}
)
"""Dispatchers from separate libraries -> the GPU architectures they support; both need NVLink between GPUs."""
assert tuple(LIBRARIES) == DISPATCH_LIBRARIES
CALIBRATED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"allgather": (), "deepep": ("H100",), "hybridep": ("B200", "GB200", "GB300")}
)
"""Dispatchers -> the GPUs whose constants were fitted to runs with them; `alltoall` is fitted wherever constants exist."""
PRODUCTS = ("gemm", "grouped_gemm")
"""Cost classes of operators that belong to the experts under every dispatcher."""
OF_EXPERTS = "experts"
"""Name of the experts' module inside a layer."""
KEPT = 3
"""Number of plans that are ranked per other dispatcher; each may need captures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The search under one dispatcher.

    Attributes:
        bounds: layout -> the bounds for its tensor ranks.
        paired: the task with Megatron-LM's overlap; None if that is not searched.
    """

    task: UniformTask
    bounds: Callable[[UniformLayout], Bounds]
    paired: UniformTask | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherOutcome:
    """The outcome of the search for one dispatcher.

    Attributes:
        best: its fastest plan; None if no plan is faster than the incumbent of the dispatchers before.
        layouts: layouts that it could run.
        priced: layouts that were priced with graphs of this dispatcher.
    """

    name: Dispatcher
    best: RankedLayout | None
    layouts: int
    priced: int


def dispatchers_of(links: NodeGroup) -> tuple[Dispatcher, ...]:
    """The dispatchers that run on these GPUs, beginning with FIRST."""
    has_links = links.domain_gpus > 1
    return tuple(
        name for name in NAMES if name not in LIBRARIES or (has_links and links.gpu.architecture in LIBRARIES[name])
    )


def uncalibrated(name: str, gpu: str) -> list[str]:
    """The reason why prices of a dispatcher extrapolate beyond measured steps; empty if they do not."""
    return [] if gpu in CALIBRATED.get(name, (gpu,)) else [f"no calibration run of the {name} dispatcher on {gpu}"]


def runs(name: str, layout: UniformLayout) -> bool:
    """True if a dispatcher runs a layout: megatron-core's flex dispatcher requires more than one expert rank."""
    return name not in LIBRARIES or layout.expert * layout.expert_tensor > 1


class Floors(UniformCosts):
    """Prices of the work that is the same under every dispatcher, from the graphs of the first one.

    Args:
        task: under the first dispatcher.
        is_hosted: True if a pass takes at least its host seconds. Tokens travel while the host launches, so the seconds of
            all-to-alls are added only to prices without host seconds.
    """

    def __init__(self, task: UniformTask, is_hosted: bool = True) -> None:
        self._is_hosted = is_hosted
        self._floored: dict[int, tuple[PartCost, PartCost]] = {}
        self._tables_without: dict[int, tuple[OpTable, OpTable]] = {}
        self._parts_without: dict[int, tuple[CapturedPart, CapturedPart]] = {}
        graphs = task.graphs

        def without(plan: Plan, model: ModelDescription) -> Mapping[int, CapturedModel]:
            return {index: self._model_without(captured) for index, captured in graphs(plan, model).items()}

        super().__init__(replace(task, graphs=without))

    def step_floor(self, layout: UniformLayout, exchange: float) -> float:
        """Lower bound of the seconds of a step of the layout under a dispatcher.

        Args:
            exchange: exposed seconds of a micro-batch's all-to-alls over all stages.
        """
        through = self.through_seconds(replace(layout, dispatcher="")) + self._added(exchange)
        return pipelined(through, layout, self._micro_batches(layout))

    def fitting_floor(self, layout: UniformLayout, exchange: float, capacity: float) -> float:
        """The floor of the plans that may fit memory, with their recomputation and waits; infinite if none fits.

        Args:
            capacity: bytes of a GPU that a plan may need.
        """
        bare, least = replace(layout, dispatcher=""), math.inf
        for of_modules in (False, True) if self.task.modules else (False,):
            evaluated = self.evaluate(bare, of_modules)
            fitting = evaluated.seconds[evaluated.needed_bytes <= capacity]
            least = min(least, float(fitting.min()) if fitting.size else math.inf)
        _, model = self.task.templates(layout.tensor)
        chunks = chunks_of(model.num_layers, layout.pipeline, layout.virtual)
        fewest = min(sum(sum(model.moe_layers[first:last]) for first, last in of_stage) for of_stage in chunks)
        # Reductions and gathers of states may hide beside all-to-alls of the first and the last micro-batch.
        inner_micro_batches = max(0, self._micro_batches(layout) - 2)
        return least + inner_micro_batches * self._added(exchange) * fewest / max(1, sum(model.moe_layers))

    def part_table(self, table: OpTable) -> OpTable:
        """The operators of a part without those of the dispatcher."""
        if id(table) not in self._tables_without:
            self._tables_without[id(table)] = table, without_exchange(table)
        return self._tables_without[id(table)][1]

    def _added(self, exchange: float) -> float:
        return 0.0 if self._is_hosted else exchange

    def _cost(self, table: OpTable, layout: UniformLayout, setting: Setting) -> PartCost:
        cost = super()._cost(table, layout, setting)
        # In pairs of micro-batches the other one fills the queue: the host never drains it.
        pairs = self.task.features.overlap_experts and any(op.operator in EXCHANGE_PARTS for op in table.ops)
        if self._is_hosted and not pairs:
            return cost
        if id(cost) not in self._floored:
            less: dict[str, Any] = {} if self._is_hosted else {"host_seconds": 0.0, "drained_seconds": 0.0}
            less |= {"is_overlapped": True} if pairs else {}
            forward, backward = (replace(pass_cost, **less) for pass_cost in (cost.forward, cost.backward))
            self._floored[id(cost)] = cost, replace(cost, forward=forward, backward=backward)
        return self._floored[id(cost)][1]

    def _micro_batches(self, layout: UniformLayout) -> int:
        template, _ = self.task.templates(layout.tensor)
        data = template.world_size // (layout.tensor * layout.context * layout.pipeline)
        return template.global_batch_size // (data * layout.micro_batch)

    def _model_without(self, captured: CapturedModel) -> CapturedModel:
        for part in captured.parts:
            if id(part) not in self._parts_without:
                self._parts_without[id(part)] = part, part_without_exchange(part)
        return replace(captured, parts=tuple(self._parts_without[id(part)][1] for part in captured.parts))


def is_of_dispatcher(op: Op) -> bool:
    """True if another dispatcher replaces or drops the operator: all-to-alls and permutations of rows.

    The experts themselves compute the same products and activations of as many rows under every dispatcher.
    """
    if block_of(op) != ROUTED or op.cost_class in PRODUCTS:
        return False
    return op.operator != EXPERTS or OF_EXPERTS not in op.module.split(".")


def without_exchange(table: OpTable) -> OpTable:
    """The table with the dispatcher's operators free of cost; all operators keep their rows."""
    gone = np.array([is_of_dispatcher(op) for op in table.ops], dtype=np.bool_)
    return replace(
        table,
        classes=np.where(gone, CostClassCode.FREE, table.classes),
        launches=np.where(gone, 0.0, table.launches),
        collectives=tuple(entry for entry in table.collectives if not gone[entry[0]]),
    )


def part_without_exchange(part: CapturedPart) -> CapturedPart:
    """The part with its dispatcher free of cost, and with no bytes for the dispatcher's results."""
    zero, gone = Expression.of(0), [is_of_dispatcher(op) for op in part.ops]
    first: dict[int, bool] = {}
    for op, is_gone in zip(part.ops, gone, strict=True):
        for index in op.writes:
            first.setdefault(index, is_gone)
    free = [
        replace(op, cost_class="free", flops=zero, bytes=zero, collective=None) if is_gone else op
        for op, is_gone in zip(part.ops, gone, strict=True)
    ]
    storages = [replace(storage, bytes=zero) if first.get(storage.id) else storage for storage in part.storages]
    return replace(part, ops=tuple(free), storages=tuple(storages))


def floors_of(first: UniformTask, paired: UniformTask | None = None) -> dict[bool, list[Floors]]:
    """Whether a layout has Megatron-LM's overlap -> its floors under the first dispatcher.

    Without the overlap there are two floors, one by host seconds and one by sends, since both elapse at the same time. With the
    overlap sends add nothing.
    """
    floors = {False: [Floors(first, is_hosted=is_hosted) for is_hosted in (True, False)]}
    return floors if paired is None else floors | {True: [Floors(paired)]}


class FlooredCosts(CostsOfBoth):
    """Prices of layouts under another dispatcher, with bounds from the graphs of the first one.

    Args:
        side: the other dispatcher.
        first: the result of `floors_of`.
        incumbent_seconds: step seconds of the incumbent; a layout whose first bound is above them gets no tighter one.
    """

    def __init__(self, side: Side, first: Mapping[bool, Sequence[Floors]], incumbent_seconds: float) -> None:
        super().__init__(side.task, side.paired)
        self._first, self._bounds, self._incumbent_seconds = first, self.bounds(side.bounds), incumbent_seconds

    def step_bound(self, layout: UniformLayout) -> float:
        """Lower bound of the seconds of any plan of the layout; captures no graph of this dispatcher."""
        exchange = self._bounds(layout).exchange_seconds(layout)
        of_first = self._first[layout.paired]
        floor = max(floors.step_floor(layout, exchange) for floors in of_first)
        if floor > self._incumbent_seconds:
            return floor
        capacity = self.task.machine.usable_bytes
        return max(floor, *(floors.fitting_floor(layout, exchange, capacity) for floors in of_first))


def search_dispatchers(
    search: UniformSearch,
    layouts: Sequence[UniformLayout],
    first: UniformTask,
    names: Sequence[Dispatcher],
    side: Callable[[Dispatcher], Side],
    keep: int,
    accepts: Accepts = lambda layout, memory: True,
    admits: Callable[[RankedLayout], bool] = lambda plan: True,
    deadline: float = math.inf,
    progress: Progress = lambda done, total, best: None,
    paired: UniformTask | None = None,
) -> tuple[UniformSearch, tuple[DispatcherOutcome, ...]]:
    """The search joined with plans of other dispatchers that are faster than its incumbent.

    Args:
        search: the result for the first dispatcher.
        first: the task of the first dispatcher.
        paired: that task with Megatron-LM's overlap; None if that is not searched.
        names: the other dispatchers.
        keep: number of plans that are ranked in all.
    Returns:
        The joined search, and the outcome of each dispatcher that was searched before a time limit.
    """
    floors = floors_of(first, paired)
    outcomes: list[DispatcherOutcome] = []
    for name in names:
        if search.solution.status is Status.TIME_LIMIT:
            break
        dispatcher_side, before = side(name), search.solution.value
        candidates = [replace(layout, dispatcher=name) for layout in layouts if runs(name, layout)]
        candidates = candidates if dispatcher_side.paired is None else [*with_paired(candidates)]
        costs = FlooredCosts(dispatcher_side, floors, search.solution.objective)
        wide = search_uniform(
            candidates,
            costs,
            costs.bounds(dispatcher_side.bounds),
            accepts,
            admits,
            keep=KEPT,
            deadline=deadline,
            incumbent_seconds=search.solution.objective,
            progress=lambda done, total, best, before=before: progress(done, total, best or before),  # type: ignore[misc]
        )
        outcomes.append(
            DispatcherOutcome(
                name=name, best=wide.solution.value, layouts=len(candidates), priced=wide.counts.evaluated
            )
        )
        search = with_dispatcher(search, wide, keep)
    return search, tuple(outcomes)


def with_dispatcher(narrow: UniformSearch, wide: UniformSearch, keep: int) -> UniformSearch:
    """Both searches joined by `widened`, with the layout counts of both added up."""
    both = widened(narrow, wide, keep)
    counts = replace(
        both.counts,
        layouts=narrow.counts.layouts + wide.counts.layouts,
        too_large=narrow.counts.too_large + wide.counts.too_large,
        too_slow=narrow.counts.too_slow + wide.counts.too_slow,
        not_reached=narrow.counts.not_reached + wide.counts.not_reached,
        evaluated=narrow.counts.evaluated + wide.counts.evaluated,
        fitting=narrow.counts.fitting + wide.counts.fitting,
    )
    return replace(both, counts=counts)
