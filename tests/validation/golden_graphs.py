"""Graphs for golden prices: the hand-made layers of the cost model's tests, with what those leave out. Nothing is captured.

Beside the hand-made layers: tensor parallelism without sequence parallelism, expert-tensor ranks, attention that is computed
again, windows, prediction layers, and storages that operators write and read, so that passes have temporaries and products keep
their inputs.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from megatron.training.cli.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Collective, Layout, Storage
from moe_overlap.tuner.capture.request import layer_kinds, prediction_kinds
from moe_overlap.tuner.cost.stage_parts import WORDS, stage_variants
from tests.unit.tuner.hand_made import E, Maker, Pass


class GoldenPass(Pass):
    """Operators with results, products that keep their inputs for weight gradients, and the collectives that a layout has."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.recomputing = False
        self.inputs: dict[frozenset[str], list[int]] = {}
        """Widths of a product -> the inputs that were kept for its weight gradient."""

    def op(self, *given: Any, **named: Any) -> None:
        """An operator with its result, which the next one may overwrite; attention's is kept."""
        super().op(*given, **named)
        operator = self.ops[-1]
        if operator.collective is not None:
            return
        forward = self.phase == "forward" or self.recomputing
        products = {"gemm": (0, 1), "grouped_gemm": (1, 2)}.get(operator.cost_class)
        rows, width = (operator.shape[place] for place in products) if products else (operator.bytes, Fraction(1, 4))
        result = self._result(rows * width * 2, kept=forward and operator.cost_class == "attention")
        written, read = [result], []
        if products:
            is_gradient = operator.is_weight_gradient and operator.cost_class == "gemm"
            # A product is rows x n x k, the gradient of its weights n x k x rows.
            widths = frozenset(map(str, operator.shape[:2] if is_gradient else operator.shape[-2:]))
            if operator.is_weight_gradient:
                read = [self.inputs[widths].pop()] if self.inputs.get(widths) else []
            elif forward:
                written.append(self._result(rows * operator.shape[-1] * 2, kept=True))
                self.inputs.setdefault(widths, []).append(written[-1])
        self.ops[-1] = dataclasses.replace(operator, writes=tuple(written), reads=tuple(read))

    def _result(self, size: E, kept: bool) -> int:
        """A storage that goes behind its operator, unless it is kept: for the backward pass, or in it to its end."""
        index = len(self.storages)
        freed = None if kept else self.ops[-1].id
        self.storages.append(Storage(id=index, bytes=E.of(size), role="activation", freed_after=freed))
        if kept and not self.recomputing:
            self.saved.append(index)
        return index

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
        self.variant, self.is_ahead = "none", False

    def layer(self, kind: str, variant: str) -> CapturedPart:
        """A layer of a kind; `core_attn` among the modules of a variant is computed again."""
        self.variant = variant
        return _with_writers(super().layer(kind, variant))

    def ends(self) -> tuple[CapturedPart, CapturedPart]:
        """Embedding and head."""
        first, last = super().ends()
        return first, _with_writers(last)

    def attention(self, run: Pass, window: int, phase: str) -> None:
        """Attention, in the backward pass a recomputation where forward; at its edge what a prediction layer projects."""
        self._begin(run, phase)
        if self.is_ahead and phase == "forward":
            run.gemm("project", self.tokens, self.hidden, 2 * self.hidden)
        super().attention(run, window, phase)
        if self.is_ahead and phase == "backward":
            run.gemm("project", self.tokens, 2 * self.hidden, self.hidden)
            self.weight(run, "project", self.hidden, 2 * self.hidden)

    def mlp(self, run: Pass, width: int, phase: str, operator: str) -> None:
        """An MLP, alike; behind it the loss of a prediction layer."""
        self._begin(run, phase)
        of_layer = self.is_ahead and operator == "mlp"
        if of_layer and phase == "backward":
            self.loss(run)
        super().mlp(run, width, phase, operator)
        if of_layer and run.phase == "forward":
            self.loss(run)

    @staticmethod
    def _begin(run: Pass, phase: str) -> None:
        assert isinstance(run, GoldenPass)
        run.recomputing = phase == "forward" and run.phase == "backward"

    def keep(self, run: Pass, moe: bool, variant: str) -> None:
        """Parameters, the layer's input, and what operators were seen to keep; of a recomputed layer the input alone."""
        kept = list(run.saved)
        run.saved.clear()
        super().keep(run, moe, variant)
        run.saved[1:] = [] if variant == "full" else kept

    def core(self, run: Pass, flops: E, shape: tuple[E | int, ...], factor: Any) -> None:
        """Attention, in the backward pass behind another forward pass of it where it is selected."""
        if factor != 1 and "core_attn" in self.variant:
            super().core(run, flops, shape, 1)
            run.ops[-1] = dataclasses.replace(run.ops[-1], is_recomputed=True)
        super().core(run, flops, shape, factor)

    def experts(self, run: Pass, phase: str) -> None:
        """The experts, whose rows the expert-tensor ranks gather before and add up behind; then a prediction layer's loss."""
        self._begin(run, phase)
        if self.is_ahead and phase == "backward":
            self.loss(run)
        rows = self.local * self.model.router_topk * self.layout.expert_tensor * self.hidden
        run.communicate("all_gather", "etp", rows, "moe.dispatch")
        super().experts(run, phase)
        run.communicate("reduce_scatter", "etp", rows, "moe.combine")
        if self.is_ahead and run.phase == "forward":
            self.loss(run)

    def loss(self, run: Pass) -> None:
        """Logits and loss of a prediction layer, in the pass that runs."""
        words = self.model.vocab_size // self.layout.tensor
        if run.phase == "forward":
            run.gemm("loss", self.tokens, words, self.hidden)
            run.stream("cross_entropy", "loss", self.tokens * words * 6)
            return
        run.stream("cross_entropy", "loss", self.tokens * words * 4)
        run.gemm("loss", self.tokens, self.hidden, words)
        self.weight(run, "loss", words, self.hidden)

    def prediction(self, kind: str, variant: str) -> CapturedPart:
        """A prediction layer: one of the decoder's behind what it projects, its loss, and the word embedding that it reads."""
        self.is_ahead = True
        part = self.layer(kind.removeprefix("mtp."), variant)
        self.is_ahead = False
        size = Expression.of(self.model.vocab_size // self.layout.tensor * self.hidden * 2)
        words = Storage(id=len(part.storages), bytes=size, role="constant", name=WORDS)
        return dataclasses.replace(part, kind=kind, storages=(*part.storages, words))


def _with_writers(part: CapturedPart) -> CapturedPart:
    """The part whose last forward operator writes what is saved and what no operator was said to write."""
    written = {index for op in part.ops for index in op.writes}
    left = tuple(index for index in part.saved if index not in written)
    place = max(op.id for op in part.ops if op.phase == "forward")
    ops = [dataclasses.replace(op, writes=(*op.writes, *left)) if op.id == place else op for op in part.ops]
    return dataclasses.replace(part, ops=tuple(ops))


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
