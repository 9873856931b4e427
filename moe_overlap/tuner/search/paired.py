"""Megatron-LM's overlap of all-to-alls as a choice of the search: layouts that run two micro-batches at a time.

With --overlap-moe-expert-parallel-comm each layer runs the forward pass of one micro-batch at the same time as the backward pass
of another. This requires several expert ranks, and model chunks in pipelines. Layouts with and without the overlap form one
search space, so that the fastest plans of both kinds prune the rest. Both kinds share graphs, operators, bytes and device
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from moe_overlap.tuner.search.bounds import Bounds
from moe_overlap.tuner.search.space import UniformLayout
from moe_overlap.tuner.search.uniform_cost import Evaluated, UniformCosts, UniformTask


class CostsOfBoth(UniformCosts):
    """Prices of layouts with and without the overlap.

    Args:
        task: the task without the overlap.
        paired: the same task with the features of the overlap; None if no layout has it.
    """

    def __init__(self, task: UniformTask, paired: UniformTask | None) -> None:
        super().__init__(task)
        self._paired = UniformCosts(paired or task, like=self)

    def step_bound(self, layout: UniformLayout) -> float:
        """Lower bound of the seconds of the layout's plans, with the overlap if the layout has it."""
        return self._paired.step_bound(layout) if layout.paired else super().step_bound(layout)

    def evaluate(self, layout: UniformLayout, of_modules: bool = False) -> Evaluated:
        """Steps and bytes of a layout under every memory choice, with the overlap if the layout has it."""
        if not layout.paired:
            return super().evaluate(layout, of_modules)
        before = self._paired.stages_priced
        evaluated = self._paired.evaluate(layout, of_modules)
        self.stages_priced += self._paired.stages_priced - before
        return evaluated

    def bounds(self, of_layout: Callable[[UniformLayout], Bounds]) -> Callable[[UniformLayout], Bounds]:
        """The bounds of all layouts, from those of layouts without the overlap."""
        bounds_of_tensor: dict[int, Bounds] = {}

        def bounds(layout: UniformLayout) -> Bounds:
            if not layout.paired:
                return of_layout(layout)
            if layout.tensor not in bounds_of_tensor:
                bounds_of_tensor[layout.tensor] = replace(of_layout(layout), features=self._paired.task.features)
            return bounds_of_tensor[layout.tensor]

        return bounds


def with_paired(layouts: Sequence[UniformLayout]) -> Iterator[UniformLayout]:
    """Each layout without the overlap, and with it if megatron-core runs that."""
    for layout in layouts:
        yield layout
        if layout.expert > 1 and (layout.pipeline == 1 or layout.virtual > 1):
            yield replace(layout, paired=True)
