"""Layouts whose steps may be the shortest once they hide their all-to-alls, though others are faster without overlap.

A search by plain steps rules out layouts that send much: wide expert groups across nodes, which spare memory or bubble. Deciding
the overlap of every layout takes seconds each, so they are found by a closed form first.

1. `HiddenCosts` prices a layout as if a way to overlap hid all that it can: per layer and pass the longer of computation and
   all-to-alls, under the interference of this host. Recomputation and everything else stay what they are. The host launches what
   stands between the all-to-alls once for each of the fewest partitions; a layer for which that is longer stays whole. Where the
   run replays captured graphs (`Features.listed_graphs`), each is one launch.
2. What a way needs counts: partitions divide the samples of a micro-batch; two micro-batches at a time need two of them, and hold
   the activations of `paired`. Partitions recompute no layer norms (plan/capabilities.py), so sets of modules go without.
3. `search_hidden` ranks the layouts whose step may then be below the best plain one. What partitions cost the device, and wider
   ranges the host, is not in the form, so the caller simulates what is ranked. The form is no strict bound: it was up to a tenth
   above simulated steps of tensor ranks (tests/unit/plan_search/test_overlapped_search.py).

Source: Lancet, section 4: what a pipeline of partitions reaches at best is max(computation, communication) of its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import cuttable
from moe_overlap.plan.lowering.pipeline_order import held_in_pairs
from moe_overlap.plan.operators import COMBINE, DISPATCH, EXPERTS, MERGE
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.analytic import replays_of
from moe_overlap.tuner.cost.host import host_work
from moe_overlap.tuner.cost.layer import PartCost, PassCost, Setting, hide_all_to_alls
from moe_overlap.tuner.cost.operators import OpTable
from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.space import UniformLayout
from moe_overlap.tuner.search.uniform import Accepts, Progress, RankedLayout, UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask, pipeline_sizes

BETWEEN = (DISPATCH, EXPERTS, COMBINE, MERGE)
"""Operators of the narrowest range in partitions; a gate may decide over the whole micro-batch."""


class Way(StrEnum):
    """Ways to overlap that differ in which layouts they go with, and in the memory that they need."""

    PARTITIONS = "partitions"
    """Partitions of a micro-batch, pipelined against each other."""
    PAIRS = "two micro-batches at a time"
    """The forward pass of one beside the backward pass of another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenLayout:
    """A layout that may gain by a way to overlap.

    Attributes:
        ranked: its seconds are the closed form's.
    """

    way: Way
    ranked: RankedLayout


class HiddenCosts(UniformCosts):
    """Prices layouts that hide their all-to-alls as far as a way to overlap may."""

    def __init__(self, task: UniformTask, way: Way) -> None:
        super().__init__(task)
        self._way = way
        self._hidden: dict[tuple[int, float], tuple[PartCost, PartCost]] = {}

    def held(self, plan: Plan, index: int) -> float:
        """Micro-batches whose activations a stage holds at once."""
        if self._way is not Way.PAIRS:
            return super().held(plan, index)
        stage = plan.stages[index]
        layers = tuple(end - first for first, end in stage.chunks)
        return held_in_pairs(len(plan.stages), index, stage.gradient_accumulation_steps, layers)

    def paired_passes(self, layout: UniformLayout) -> tuple[int, int, int] | None:
        """Stages, chunks and micro-batches, by which passes run in pairs or alone."""
        return pipeline_sizes(layout, self.task) if self._way is Way.PAIRS else super().paired_passes(layout)

    def _setting(self, layout: UniformLayout, plan: Plan, model: ModelDescription) -> Setting:
        setting = super()._setting(layout, plan, model)
        replays = replays_of(plan, self.task.features)
        return replace(setting, replays=replays, two_at_work=self._way is Way.PAIRS)

    def _cost(self, table: OpTable, layout: UniformLayout, setting: Setting) -> PartCost:
        cost, concurrent = super()._cost(table, layout, setting), setting.concurrent
        unpaired = setting.alone if self._way is Way.PAIRS else 0.0
        key = id(cost), unpaired
        if key not in self._hidden:
            if self._way is Way.PAIRS:
                hidden = hide_all_to_alls(cost, concurrent, unpaired)
            else:
                cut = hide_all_to_alls(launched_again(cost, table, setting, layout.micro_batch), concurrent)
                hidden = min(cost, cut, key=lambda each: each.seconds)
            self._hidden[key] = cost, hidden
        return self._hidden[key][1]


def launched_again(cost: PartCost, table: OpTable, setting: Setting, samples: int) -> PartCost:
    """A part whose host launches what stands between the all-to-alls for each of the fewest partitions.

    Args:
        samples: of a micro-batch.
    """
    partitions = next((count for count in range(2, samples + 1) if samples % count == 0), 1)
    work = host_work(table, setting.features, setting.common, setting.constants.host_seconds, setting.replays)
    between = np.isin(table.operators, BETWEEN)

    def again(one: PassCost, is_backward: bool) -> PassCost:
        more = float(work.seconds[between & (table.backward == is_backward)].sum())
        return replace(one, host_seconds=one.host_seconds + (partitions - 1) * more)

    return replace(cost, forward=again(cost.forward, False), backward=again(cost.backward, True))


def with_cuttable_modules(task: UniformTask) -> UniformTask:
    """The run whose plans recompute only modules that partitions may: a rule would refuse others after they were ranked."""
    kept = dict.fromkeys(cuttable(modules) for modules in task.modules)
    return replace(task, modules=tuple(modules for modules in kept if modules))


def goes_with(way: Way, layout: UniformLayout, global_batch_size: int, gpus: int) -> bool:
    """Whether a layout exchanges tokens, and a way to overlap is executed with it."""
    if layout.expert * layout.expert_tensor == 1:
        return False
    if way is Way.PARTITIONS:
        return layout.micro_batch > 1
    data = gpus // (layout.tensor * layout.context * layout.pipeline)
    return global_batch_size // (data * layout.micro_batch) > 1


def search_hidden(
    found: UniformSearch,
    layouts: Sequence[UniformLayout],
    task: UniformTask,
    bounds: Callable[[UniformLayout], Bounds],
    keep: int,
    bar: float,
    accepts: Accepts = lambda layout, memory: True,
    admits: Callable[[RankedLayout], bool] = lambda plan: True,
    deadline: float = math.inf,
    progress: Progress = lambda done, total, best: None,
) -> tuple[HiddenLayout, ...]:
    """The layouts whose steps may be below a bar if they hide their all-to-alls, the shortest first.

    Args:
        found: the search by plain steps, whose best stays the best that progress shows.
        bounds: as of that search; what is sent does not count here.
        keep: layouts of each way.
        bar: seconds of a step.
    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    template, _ = task.templates(1)
    result: list[HiddenLayout] = []

    def unsent(layout: UniformLayout) -> Bounds:
        own = bounds(layout)
        return replace(own, features=replace(own.features, overlap_experts=True))

    for way in Way:
        priced = with_cuttable_modules(task) if way is Way.PARTITIONS else task
        hidden = search_uniform(
            [layout for layout in layouts if goes_with(way, layout, template.global_batch_size, template.world_size)],
            HiddenCosts(priced, way),
            unsent,
            accepts,
            admits,
            keep,
            deadline,
            known=bar,
            progress=lambda done, total, best: progress(done, total, found.solution.value),
        )
        if hidden.is_interrupted:
            raise KeyboardInterrupt
        result += [HiddenLayout(way=way, ranked=plan) for plan in hidden.ranked]
    return tuple(sorted(result, key=lambda each: each.ranked.order))
