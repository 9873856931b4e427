"""The passes of a chunk's layers as pipelines: what a range of operators runs, forward and backward.

A range runs forward once and, in reverse, backward, with what is recomputed and with weight gradients under its exchanges. Each
unbroken run of its operators in a pass is a pipeline. Operators, order and buffers are those of the plan's lists
(plan/lower_layers.py), so that a simulated list of one range takes as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.layer_sequence import LayerOperator, LayerSequence
from moe_overlap.plan.list_builder import Draft
from moe_overlap.plan.lower_layers import LayerLowering
from moe_overlap.plan.operators import GATE
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.ranges import Place
from moe_overlap.tuner.search.layer.chunk_order import Step


@dataclass(frozen=True, slots=True)
class PassStep:
    """One operator of a pass.

    Attributes:
        place: layer and part whose range it runs with.
        draft: the instruction of the whole operator.
        whole: not cut in a range that is.
    """

    place: Place
    draft: Draft
    whole: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A run of neighbours in a pass.

    Attributes:
        names: of its operators, as they stand in a list.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...]


class ChunkPasses:
    """One micro-batch through the layers of a chunk.

    Args:
        plan: its overlap gives weight gradients and their slots; its ranges do not count.
        whole_gate: whether the gate of a layer decides on the whole micro-batch.
    """

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        model: ModelDescription,
        layers: range,
        whole_gate: Callable[[int], bool],
    ) -> None:
        uncut = dataclasses.replace(stage, overlap=without_ranges(stage).overlap)
        lowering = LayerLowering(plan, uncut, model)
        self.operators: tuple[LayerOperator, ...] = tuple(LayerSequence(uncut, model, lambda _: False).forward(layers))
        drafts = {one.name: one for write in (lowering.forward, lowering.backward) for one in write(layers, 0, 0)}
        slots = {name: under for one in uncut.overlap.layers for name, under in one.weight_gradient_slots.items()}
        self._passes: dict[bool, tuple[list[PassStep], ...]] = {}
        self._places: dict[bool, dict[Place, list[tuple[int, int]]]] = {}
        for cut in (False, True):
            sequence = LayerSequence(uncut, model, lambda _, cut=cut: cut)  # type: ignore[misc]
            passes = (sequence.forward(layers), sequence.backward(layers))
            self._passes[cut] = tuple(
                [step for one in members for step in _steps_of(one, drafts, slots, whole_gate)] for members in passes
            )
            found: dict[Place, list[tuple[int, int]]] = {}
            for number, members in enumerate(self._passes[cut]):
                for at, step in enumerate(members):
                    found.setdefault(step.place, []).append((number, at))
            self._places[cut] = found
        self._found: dict[tuple[int, int, bool], tuple[Pipeline, ...]] = {}

    def pipelines(self, first: int, last: int, cut: bool) -> tuple[Pipeline, ...]:
        """What the operators first, …, last - 1 of the chunk run, forward first.

        Args:
            cut: whether in partitions.
        """
        key = first, last, cut
        if key not in self._found:
            self._found[key] = tuple(_pipeline_of(run, cut) for run in self._runs(*key))
        return self._found[key]

    def _runs(self, first: int, last: int, cut: bool) -> Iterator[Sequence[PassStep]]:
        places = (self._places[cut][one.layer, one.part] for one in self.operators[first:last])
        begin = end = (0, 0)
        for at in sorted(at for several in places for at in several):
            if at != end:
                if begin != end:
                    yield self._passes[cut][begin[0]][begin[1] : end[1]]
                begin = at
            end = (at[0], at[1] + 1)
        if begin != end:
            yield self._passes[cut][begin[0]][begin[1] : end[1]]


def without_ranges(stage: StagePlan) -> StagePlan:
    """A stage in which nothing is cut; gates, dispatchers and slots of weight gradients stay."""
    layers = tuple(
        LayerOverlap(
            layer=one.layer,
            gate=one.gate,
            dispatcher=one.dispatcher,
            weight_gradient_slots=one.weight_gradient_slots,
        )
        for one in stage.overlap.layers
    )
    return dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=layers))


def _steps_of(
    one: LayerOperator,
    drafts: dict[str, Draft],
    slots: dict[str, tuple[str, ...]],
    whole_gate: Callable[[int], bool],
) -> Iterator[PassStep]:
    """An operator, and the weight gradients under it."""
    place = one.layer, one.part
    yield PassStep(place, drafts[one.name], one.part == GATE and whole_gate(one.layer))
    yield from (PassStep(place, drafts[name], True) for name in slots.get(one.name, ()))


def _pipeline_of(run: Sequence[PassStep], cut: bool) -> Pipeline:
    writer: dict[str, int] = {}
    steps = []
    for place, one in enumerate(run):
        after = {writer[buffer] for buffer in one.draft.reads if buffer in writer}
        steps.append(Step(one.draft.kind == "collective", tuple(sorted(after)), cut and one.whole))
        writer |= dict.fromkeys(one.draft.writes, place)
    return Pipeline(tuple(one.draft.name for one in run), tuple(steps))
