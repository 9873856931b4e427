"""The dispatcher of tokens as a choice of the search: those that the GPUs run, and which layouts are faster with another one.

1. A search takes one dispatcher, all-to-alls, to its end. `search_dispatchers` then asks of each other one for plans that are
   faster than the best so far, and for no others: a dispatcher changes the routed experts' block alone, so its layouts have a
   bound from the graphs that are there (`FlooredCosts`), and hardly any graph of another dispatcher is ever captured.
2. The bound prices everything but dispatch, combine and permutation as the first dispatcher runs it, bytes and recomputation
   included (`Floors`), and what the other one must send (`Bounds.exchange_seconds`).
3. With Megatron-LM's overlap of all-to-alls (paired.py) other work runs beside what is sent, and the bound is without it.
4. What is kept is exactly what an enumeration of all layouts under all dispatchers would have for the best.
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
from moe_overlap.tuner.search.bounds import Bounds, pipelined
from moe_overlap.tuner.search.paired import CostsOfBoth, with_paired
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.space import UniformLayout, chunks_of
from moe_overlap.tuner.search.uniform import Accepts, Progress, RankedLayout, UniformSearch, search_uniform, widened
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask

FIRST: Dispatcher = "alltoall"
"""The dispatcher that goes with every setting, and that the others are compared with."""
NAMES: tuple[Dispatcher, ...] = ("alltoall", "allgather", "deepep", "hybridep")
LIBRARIES: Mapping[Dispatcher, tuple[str, ...]] = MappingProxyType(
    {"deepep": ("Ampere", "Hopper", "Blackwell"), "hybridep": ("Hopper", "Blackwell")}
)
"""Dispatchers that are libraries of their own, and the chips that they are written for; both want NVLink between GPUs."""
CALIBRATED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"allgather": (), "deepep": ("H100",), "hybridep": ("B200", "GB200", "GB300")}
)
"""Dispatchers and the GPUs whose constants were fitted to runs with them; of all-to-alls the constants themselves say it."""
PRODUCTS = ("gemm", "grouped_gemm")
"""Classes of operators that every dispatcher leaves to the experts."""
OF_EXPERTS = "experts"
"""The module of the experts inside of a layer."""
KEPT = 3
"""Plans of every further dispatcher that are ranked: each may need captures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The search under one dispatcher.

    Attributes:
        bounds: of a layout's tensor ranks.
        paired: the task with Megatron-LM's overlap, where that is searched, too.
    """

    task: UniformTask
    bounds: Callable[[UniformLayout], Bounds]
    paired: UniformTask | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherOutcome:
    """The outcome of the search for one dispatcher.

    Attributes:
        best: its fastest plan that was looked for; None where it has none that is faster than the first dispatcher's best.
        priced: layouts that needed graphs of its own.
    """

    name: Dispatcher
    best: RankedLayout | None
    layouts: int
    priced: int


def dispatchers_of(links: NodeGroup) -> tuple[Dispatcher, ...]:
    """The dispatchers that run on these GPUs, the first one ahead."""
    has_links = links.domain_gpus > 1
    return tuple(
        name for name in NAMES if name not in LIBRARIES or (has_links and links.gpu.architecture in LIBRARIES[name])
    )


def uncalibrated(name: str, gpu: str) -> list[str]:
    """Why prices of a dispatcher reach beyond measured steps, if they do."""
    return [] if gpu in CALIBRATED.get(name, (gpu,)) else [f"no calibration run of the {name} dispatcher on {gpu}"]


def runs(name: str, layout: UniformLayout) -> bool:
    """Whether a dispatcher runs a layout: megatron-core's flex dispatcher wants ranks that send each other tokens."""
    return name not in LIBRARIES or layout.expert * layout.expert_tensor > 1


class Floors(UniformCosts):
    """Prices of what no dispatcher changes, from the graphs of the first one.

    Args:
        task: under the first dispatcher.
        is_hosted: whether a pass takes at least as long as the host needs to launch it. Tokens travel while the host launches,
            so that what an all-to-all takes is added to prices without a host only.
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
        """Seconds of a step that no plan of the layout stays below under a dispatcher.

        Args:
            exchange: seconds of a micro-batch's all-to-alls over all stages that nothing runs beside.
        """
        through = self.through_seconds(replace(layout, dispatcher="")) + self._added(exchange)
        return pipelined(through, layout, self._micro_batches(layout))

    def fitting_floor(self, layout: UniformLayout, exchange: float, capacity: float) -> float:
        """The same of the plans that may fit, with what they recompute and wait for; infinite where none fits.

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
        alone = max(0, self._micro_batches(layout) - 2)
        return least + alone * self._added(exchange) * fewest / max(1, sum(model.moe_layers))

    def part_table(self, table: OpTable) -> OpTable:
        """The operators of a part that run under every dispatcher."""
        if id(table) not in self._tables_without:
            self._tables_without[id(table)] = table, without_exchange(table)
        return self._tables_without[id(table)][1]

    def _added(self, exchange: float) -> float:
        return 0.0 if self._is_hosted else exchange

    def _cost(self, table: OpTable, layout: UniformLayout, setting: Setting) -> PartCost:
        cost = super()._cost(table, layout, setting)
        # Beside another micro-batch the host never waits for an empty queue.
        pairs = self.task.features.overlap_experts and any(op.operator in EXCHANGE_PARTS for op in table.ops)
        if self._is_hosted and not pairs:
            return cost
        if id(cost) not in self._floored:
            less: dict[str, Any] = {} if self._is_hosted else {"host_seconds": 0.0, "drained_seconds": 0.0}
            less |= {"is_overlapped": True} if pairs else {}
            forward, backward = (replace(each, **less) for each in (cost.forward, cost.backward))
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
    """Whether an operator may run otherwise, or not at all, under another dispatcher: all-to-alls and permutations of rows.

    Experts compute the same products and activations of their rows, which are as many.
    """
    if block_of(op) != ROUTED or op.cost_class in PRODUCTS:
        return False
    return op.operator != EXPERTS or OF_EXPERTS not in op.module.split(".")


def without_exchange(table: OpTable) -> OpTable:
    """The operators of a part of which those of the dispatcher take no time; all keep their places."""
    gone = np.array([is_of_dispatcher(op) for op in table.ops], dtype=np.bool_)
    return replace(
        table,
        classes=np.where(gone, CostClassCode.FREE, table.classes),
        launches=np.where(gone, 0.0, table.launches),
        collectives=tuple(each for each in table.collectives if not gone[each[0]]),
    )


def part_without_exchange(part: CapturedPart) -> CapturedPart:
    """A part whose dispatcher takes no time, and whose results take no bytes."""
    zero, gone = Expression.of(0), [is_of_dispatcher(op) for op in part.ops]
    first: dict[int, bool] = {}
    for op, is_gone in zip(part.ops, gone, strict=True):
        for index in op.writes:
            first.setdefault(index, is_gone)
    free = [
        replace(op, cost_class="free", flops=zero, bytes=zero, collective=None) if is_gone else op
        for op, is_gone in zip(part.ops, gone, strict=True)
    ]
    storages = [replace(each, bytes=zero) if first.get(each.id) else each for each in part.storages]
    return replace(part, ops=tuple(free), storages=tuple(storages))


def floors_of(first: UniformTask, paired: UniformTask | None = None) -> dict[bool, list[Floors]]:
    """Floors under the first dispatcher of layouts without Megatron-LM's overlap, and of those with it.

    Without it the host is told apart from what is sent while it launches; with it nothing is added for what is sent.
    """
    floors = {False: [Floors(first, is_hosted=is_hosted) for is_hosted in (True, False)]}
    return floors if paired is None else floors | {True: [Floors(paired)]}


class FlooredCosts(CostsOfBoth):
    """Prices layouts under another dispatcher than the first, whose graphs give their bounds.

    Args:
        side: this dispatcher.
        first: of `floors_of`.
        known: seconds of a plan; layouts whose bound is above it are bounded no further.
    """

    def __init__(self, side: Side, first: Mapping[bool, Sequence[Floors]], known: float) -> None:
        super().__init__(side.task, side.paired)
        self._first, self._bounds, self._known = first, self.bounds(side.bounds), known

    def step_bound(self, layout: UniformLayout) -> float:
        """Seconds that no plan of the layout stays below; asks for no graph of this dispatcher."""
        exchange = self._bounds(layout).exchange_seconds(layout)
        of_first = self._first[layout.paired]
        floor = max(floors.step_floor(layout, exchange) for floors in of_first)
        if floor > self._known:
            return floor
        capacity = self.task.machine.usable_bytes
        return max(floor, *(floors.fitting_floor(layout, exchange, capacity) for floors in of_first))


def search_dispatchers(
    found: UniformSearch,
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
    """Plans of further dispatchers that are faster than the best of the first one.

    Args:
        found: of the first dispatcher.
        first: its task.
        paired: that task with Megatron-LM's overlap, where that is searched, too.
        names: the further dispatchers.
        keep: plans that are ranked in all.
    """
    floors = floors_of(first, paired)
    outcomes: list[DispatcherOutcome] = []
    for name in names:
        if found.solution.status is Status.TIME_LIMIT:
            break
        under, before = side(name), found.solution.value
        own = [replace(layout, dispatcher=name) for layout in layouts if runs(name, layout)]
        own = own if under.paired is None else [*with_paired(own)]
        costs = FlooredCosts(under, floors, found.solution.objective)
        wide = search_uniform(
            own,
            costs,
            costs.bounds(under.bounds),
            accepts,
            admits,
            keep=KEPT,
            deadline=deadline,
            known=found.solution.objective,
            progress=lambda done, total, best, before=before: progress(done, total, best or before),  # type: ignore[misc]
        )
        outcomes.append(
            DispatcherOutcome(name=name, best=wide.solution.value, layouts=len(own), priced=wide.counts.evaluated)
        )
        found = with_further(found, wide, keep)
    return found, tuple(outcomes)


def with_further(found: UniformSearch, wide: UniformSearch, keep: int) -> UniformSearch:
    """Both searches as one: `widened`, with the layouts of both counted."""
    both = widened(found, wide, keep)
    counts = replace(
        both.counts,
        layouts=found.counts.layouts + wide.counts.layouts,
        too_large=found.counts.too_large + wide.counts.too_large,
        too_slow=found.counts.too_slow + wide.counts.too_slow,
        not_reached=found.counts.not_reached + wide.counts.not_reached,
        evaluated=found.counts.evaluated + wide.counts.evaluated,
        fitting=found.counts.fitting + wide.counts.fitting,
    )
    return replace(both, counts=counts)
