"""Graphs for golden prices: the hand-made layers of the cost model's tests, with what those leave out. Nothing is captured.

Beside the hand-made layers: tensor parallelism without sequence parallelism, expert-tensor ranks, attention that is computed
again, windows, prediction layers, and a result of every operator, so that passes have temporaries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.training.cli.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedModel, Collective, Layout, Part, Storage
from moe_overlap.tuner.capture.request import layer_kinds, prediction_kinds
from moe_overlap.tuner.cost.analytic import WORDS, stage_variants
from tests.unit.tuner.hand_made import E, Maker, Pass


class GoldenPass(Pass):
    """Operators with results, and the collectives that a layout has."""

    def op(self, *given: Any, **named: Any) -> None:
        """An operator, and its result of half the bytes that it moves, which the next one may overwrite."""
        super().op(*given, **named)
        operator = self.ops[-1]
        if operator.collective is None:
            result = len(self.storages)
            size = operator.bytes / 2
            self.storages.append(Storage(id=result, bytes=size, role="activation", freed_after=operator.id))
            self.ops[-1] = dataclasses.replace(operator, writes=(result,))

    def communicate(self, kind: str, axis: str, elements: E, operator: str) -> None:
        """A collective over an axis, if there is one; without sequence parallelism partial sums are added up."""
        layout = self.layout
        sizes = {"tp": layout.tensor, "cp": layout.context, "ep": layout.expert, "etp": layout.expert_tensor}
        if axis == "tp" and not layout.sequence_parallel:
            if kind == "all_gather":
                return
            kind = "all_reduce"
        if sizes[axis] > 1:
            moved = Collective(kind=kind, axis=axis, size=sizes[axis], payload_bytes=elements * 2)  # type: ignore[arg-type]
            self.op(kind, operator, "collective", (), 0, 0, moved)


class GoldenMaker(Maker):
    """Parts of one model under one layout."""

    passes = GoldenPass

    def __init__(self, model: ModelDescription, layout: Layout) -> None:
        super().__init__(model, layout)
        self.local = self.tokens / layout.tensor if layout.sequence_parallel else self.tokens
        self.variant = "none"

    def layer(self, kind: str, variant: str) -> Part:
        """A layer of a kind; `core_attn` among the modules of a variant is computed again."""
        self.variant = variant
        return super().layer(kind, variant)

    def core(self, run: Pass, flops: E, shape: tuple[E | int, ...], factor: Any) -> None:
        """Attention, in the backward pass behind another forward pass of it where it is selected."""
        if factor != 1 and "core_attn" in self.variant:
            super().core(run, flops, shape, 1)
            run.ops[-1] = dataclasses.replace(run.ops[-1], is_recomputed=True)
        super().core(run, flops, shape, factor)

    def experts(self, run: Pass, phase: str) -> None:
        """The experts, whose rows the expert-tensor ranks gather before and add up behind."""
        rows = self.local * self.model.router_topk * self.layout.expert_tensor * self.hidden
        run.communicate("all_gather", "etp", rows, "moe.dispatch")
        super().experts(run, phase)
        run.communicate("reduce_scatter", "etp", rows, "moe.combine")

    def prediction(self, kind: str, variant: str) -> Part:
        """A prediction layer: one of the decoder's, and the word embedding that it reads."""
        part = self.layer(kind.removeprefix("mtp."), variant)
        size = Expression.of(self.model.vocab_size // self.layout.tensor * self.hidden * 2)
        words = Storage(id=len(part.storages), bytes=size, role="constant", name=WORDS)
        return dataclasses.replace(part, kind=kind, storages=(*part.storages, words))


def golden_graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> dict[int, CapturedModel]:
    """The graphs of every stage of a plan, by hand. Arguments as `tuner.capture.cache.cached_graphs` has them."""
    graphs = {}
    for index, stage in enumerate(plan.stages):
        layout = Layout(
            tensor=stage.tensor,
            context=stage.context,
            expert=stage.expert,
            expert_tensor=stage.expert_tensor if model.num_experts else 1,
            sequence_parallel=config.parallel.sequence_parallel and stage.tensor > 1,
        )
        maker, variants = GoldenMaker(model, layout), sorted(stage_variants(stage))
        kinds, predictions = layer_kinds(model), prediction_kinds(model)
        parts = [maker.layer(kind, variant) for kind in dict.fromkeys(kinds) for variant in variants]
        parts += [maker.prediction(kind, variant) for kind in dict.fromkeys(predictions) for variant in variants]
        graphs[index] = CapturedModel(
            parts=(*parts, *maker.ends()),
            layer_kinds=kinds,
            mtp_kinds=predictions,
            layout=layout,
            implementation="te",
            versions=(),
            sha256="",
        )
    return graphs
