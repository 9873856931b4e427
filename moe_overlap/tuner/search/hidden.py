"""Layouts that may have the shortest step with hidden all-to-alls, although other layouts are faster without overlap.

A search by steps without overlap prunes layouts that send many bytes: wide expert groups across nodes, which save memory or
bubble. Deciding the overlap of a layout takes seconds, so a closed form selects such layouts first.

1. `HiddenCosts` prices a layout as if a way to overlap hid as much as it can: per layer and pass the longer of computation and
   all-to-alls, under the interference of this host. Recomputation and everything else are unchanged. The host launches the
   operators between the all-to-alls once per partition, of the fewest partitions; a layer that is slower so stays uncut. If the
   run replays captured graphs (`Features.listed_graphs`), each replay is one launch.
2. The requirements of each way count: partitions divide the samples of a micro-batch; two micro-batches at a time need at least
   two per step, and hold the activations of `paired`. Partitions recompute no layer norms (plan/capabilities.py), so sets of
   modules contain none.
3. `search_hidden` ranks the layouts whose priced step is below the best step without overlap. The closed form leaves out the cost
   of partitions on the device and of wider ranges on the host, so the caller simulates the ranked layouts. It is no strict bound:
   for tensor ranks it was up to a tenth above the simulated step (tests/unit/plan_search/test_overlapped_search.py).

Source: Lancet, section 4: the lower bound of a pipeline of partitions is max(computation, communication) of its range.
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
"""Operators of the narrowest range in partitions, without the gate, which may need all tokens of the micro-batch."""


class Way(StrEnum):
    """Ways to overlap, which differ in the layouts they allow and in the memory they need."""

    PARTITIONS = "partitions"
    """Partitions of a micro-batch, pipelined against each other."""
    PAIRS = "two micro-batches at a time"
    """The forward pass of one micro-batch at the same time as the backward pass of another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenLayout:
    """A layout that may be faster with a way to overlap.

    Attributes:
        ranked: the layout with its memory choice; its seconds are those of the closed form.
    """

    way: Way
    ranked: RankedLayout


class HiddenCosts(UniformCosts):
    """Prices of layouts that hide as much of their all-to-alls as a way to overlap can."""

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
        """(stages, chunks, micro-batches), which determine the share of unpaired passes; None if all passes are unpaired."""
        return pipeline_sizes(layout, self.task) if self._way is Way.PAIRS else super().paired_passes(layout)

    def _setting(self, layout: UniformLayout, plan: Plan, model: ModelDescription) -> Setting:
        setting = super()._setting(layout, plan, model)
        replays = replays_of(plan, self.task.features)
        return replace(setting, replays=replays, two_at_work=self._way is Way.PAIRS)

    def _cost(self, table: OpTable, layout: UniformLayout, setting: Setting) -> PartCost:
        cost, concurrent = super()._cost(table, layout, setting), setting.concurrent
        unpaired = setting.unpaired_share if self._way is Way.PAIRS else 0.0
        key = id(cost), unpaired
        if key not in self._hidden:
            if self._way is Way.PAIRS:
                hidden = hide_all_to_alls(cost, concurrent, unpaired)
            else:
                cut = hide_all_to_alls(launched_again(cost, table, setting, layout.micro_batch), concurrent)
                hidden = min(cost, cut, key=lambda priced: priced.seconds)
            self._hidden[key] = cost, hidden
        return self._hidden[key][1]


def launched_again(cost: PartCost, table: OpTable, setting: Setting, samples: int) -> PartCost:
    """The part with the host seconds of the fewest partitions: operators between the all-to-alls are launched once for each.

    Args:
        samples: number of samples of a micro-batch.
    """
    partitions = next((count for count in range(2, samples + 1) if samples % count == 0), 1)
    work = host_work(table, setting.features, setting.common, setting.constants.host_seconds, setting.replays)
    between = np.isin(table.operators, BETWEEN)

    def again(pass_cost: PassCost, is_backward: bool) -> PassCost:
        more = float(work.seconds[between & (table.backward == is_backward)].sum())
        return replace(pass_cost, host_seconds=pass_cost.host_seconds + (partitions - 1) * more)

    return replace(cost, forward=again(cost.forward, False), backward=again(cost.backward, True))


def with_cuttable_modules(task: UniformTask) -> UniformTask:
    """The task with only those modules to recompute that partitions allow; a rule would refuse the others after ranking."""
    module_sets = dict.fromkeys(cuttable(modules) for modules in task.modules)
    return replace(task, modules=tuple(modules for modules in module_sets if modules))


def goes_with(way: Way, layout: UniformLayout, global_batch_size: int, gpus: int) -> bool:
    """True if a layout has all-to-alls and the runtime executes this way to overlap with it."""
    if layout.expert * layout.expert_tensor == 1:
        return False
    if way is Way.PARTITIONS:
        return layout.micro_batch > 1
    data = gpus // (layout.tensor * layout.context * layout.pipeline)
    return global_batch_size // (data * layout.micro_batch) > 1


def search_hidden(
    baseline_search: UniformSearch,
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
    """The layouts whose steps may be below a bar if they hide their all-to-alls, shortest step first.

    Args:
        baseline_search: the search by steps without overlap; `progress` shows its best plan.
        bounds: as in that search; their exposed all-to-alls are left out here.
        keep: number of layouts per way.
        bar: seconds of a step; slower layouts are pruned.
    Raises:
        KeyboardInterrupt: Ctrl-C during the search.
    """
    template, _ = task.templates(1)
    result: list[HiddenLayout] = []

    def unsent(layout: UniformLayout) -> Bounds:
        baseline_bounds = bounds(layout)
        return replace(baseline_bounds, features=replace(baseline_bounds.features, overlap_experts=True))

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
            incumbent_seconds=bar,
            progress=lambda done, total, best: progress(done, total, baseline_search.solution.value),
        )
        if hidden.is_interrupted:
            raise KeyboardInterrupt
        result += [HiddenLayout(way=way, ranked=plan) for plan in hidden.ranked]
    return tuple(sorted(result, key=lambda hidden_layout: hidden_layout.ranked.order))
