"""Bytes that a run keeps otherwise than its graph was captured: low precision, a fused loss, placeholders, two micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_overlap.tuner.capture.expression import B, Expression, S
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Collective, CostClass, Op, Phase, Storage
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.memory import PartBytes, part_bytes, stage_sizes
from moe_overlap.tuner.cost.operators import tabulate
from tests.unit.tuner.cost.test_cost_predict import by_hand, predicted

ROWS, WIDE, WORDS = 1024, 64, 1000
"""Rows of a micro-batch, width of the layer, and words of the vocabulary."""
BF16 = 2.0
TOKENS = B * S


class Graph:
    """A part whose operators say what they read and write."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []

    def hold(self, elements: Expression, bytes_each: int = 2, freed_after: int | None = None) -> int:
        index = len(self.storages)
        size = elements * bytes_each
        self.storages.append(Storage(id=index, bytes=size, role="activation", freed_after=freed_after))
        return index

    def op(
        self,
        name: str,
        phase: Phase,
        operator: str,
        cost_class: CostClass,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        shape: tuple[Expression | int, ...] = (),
        weight: bool = False,
        collective: Collective | None = None,
    ) -> None:
        index = len(self.ops)
        self.ops.append(
            Op(
                id=index,
                name=name,
                phase=phase,
                operator=operator,
                module="",
                cost_class=cost_class,
                shape=tuple(map(Expression.of, shape)),
                dtype="bfloat16",
                flops=Expression(),
                bytes=Expression(),
                reads=reads,
                writes=writes,
                after=(index - 1,) if index else (),
                collective=collective,
                is_weight_gradient=weight,
            )
        )

    def part(self, kind: str, saved: tuple[int, ...]) -> CapturedPart:
        return CapturedPart(
            kind=kind,
            variant="none",
            one_sample=False,
            ops=tuple(self.ops),
            storages=tuple(self.storages),
            saved=saved,
            inputs=(),
            outputs=(),
            gradient_inputs=(),
            gradient_outputs=(),
        )


def layer() -> CapturedPart:
    """A product behind attention, whose output both keep, and a product whose input is gathered over ranks."""
    graph, hidden = Graph(), TOKENS * WIDE
    attended, shard, out, gathered = (graph.hold(hidden) for _ in range(4))
    shape = (WIDE, WIDE, TOKENS)
    gather = Collective(kind="all_gather", axis="cp", size=2, payload_bytes=hidden * 2)
    graph.op("te.attention", "forward", "attention", "attention", (), (attended,), (1,) * 8)
    graph.op("mm", "forward", "attention", "gemm", (attended,), (out,), (TOKENS, WIDE, WIDE))
    graph.op("te.norm", "forward", "mlp", "memory", (out,), (shard,))
    graph.op("all_gather", "backward", "mlp", "collective", (shard,), (gathered,), (), collective=gather)
    graph.op("te.weight_gradient", "backward", "mlp", "gemm", (gathered,), (), shape, weight=True)
    graph.op("te.weight_gradient", "backward", "attention", "gemm", (attended,), (), shape, weight=True)
    graph.op("te.attention_backward", "backward", "attention", "attention", (attended,), (), (1,) * 8)
    return graph.part("dense", (attended, shard))


def head() -> CapturedPart:
    """A product with the vocabulary and a loss that keeps its probabilities in fp32."""
    graph, logits = Graph(), TOKENS * WORDS
    hidden, product, wide, gradient = (
        graph.hold(TOKENS * WIDE),
        graph.hold(logits, freed_after=2),
        graph.hold(logits, 4),
        graph.hold(logits),
    )
    graph.op("te.norm", "forward", "head.norm", "memory", (), (hidden,))
    graph.op("mm", "forward", "head.loss", "gemm", (hidden,), (product,), (TOKENS, WORDS, WIDE))
    graph.op("_to_copy", "forward", "head.loss", "memory", (product,), (wide,))
    graph.op("_to_copy", "backward", "head.loss", "memory", (wide,), (gradient,))
    graph.op("te.weight_gradient", "backward", "head.loss", "gemm", (gradient, hidden), (), (WORDS, WIDE, TOKENS), True)
    return graph.part("head", (hidden, wide))


def bytes_of(part: CapturedPart, **features: object) -> PartBytes:
    return part_bytes(tabulate(part, 1, ROWS), 1, ROWS, BF16, replace(Features(), **features))  # type: ignore[arg-type]


HIDDEN = ROWS * WIDE * BF16


@pytest.mark.parametrize(("precision", "element"), [("fp8", 1.0), ("mxfp8", 33 / 32), ("nvfp4", 9 / 16)])
def test_inputs_of_products_are_kept_quantized(precision: str, element: float) -> None:
    """The gathered shard is kept quantized alone; attention's output in bf16, too, since attention reads it itself."""
    assert bytes_of(layer()).saved == 2 * HIDDEN
    assert bytes_of(layer(), precision=precision).saved == HIDDEN + 2 * element * HIDDEN / BF16
    # The head stays in bf16.
    assert bytes_of(head(), precision=precision) == bytes_of(head())


def test_heads_sent_over_context_ranks_keep_attentions_output_twice() -> None:
    assert bytes_of(layer(), context_exchange="a2a").saved == 3 * HIDDEN


def scores_of(part: CapturedPart) -> float:
    """Elements of attention's scores in the forward pass."""
    table = tabulate(part, 1, ROWS)
    return float(table.scores[~table.backward].sum())


def test_scores_are_kept_in_bf16_and_with_dropout_its_mask_and_result_too() -> None:
    scores = scores_of(layer())
    fused, plain = bytes_of(layer()), bytes_of(layer(), flash=False)
    dropped = bytes_of(layer(), flash=False, dropped_scores=True)
    assert [plain.saved - fused.saved, dropped.saved - fused.saved] == [2 * scores, 5 * scores] and scores > 0


def test_scores_of_attention_that_is_computed_again_are_not_kept() -> None:
    again = replace(layer(), variant="core_attn+layernorm")
    fused, plain = bytes_of(again), bytes_of(again, flash=False)
    assert plain.saved == fused.saved and plain.working - fused.working == 6 * scores_of(again) > 0


def test_a_fused_loss_keeps_logits_alone() -> None:
    logits = ROWS * WORDS * BF16
    plain, fused = bytes_of(head()), bytes_of(head(), fused_loss=True)
    assert plain.saved == HIDDEN + 2 * logits and plain.working == logits
    assert fused.saved == HIDDEN + logits and fused.working == 0


def test_placeholders_stand_beside_whatever_works() -> None:
    kinds = [bytes_of(layer()), bytes_of(layer()), bytes_of(head())]
    of_layers, of_head = WIDE * WIDE * BF16, WORDS * WIDE * BF16
    saved, working = stage_sizes(kinds, [False, False, True], False)
    assert saved.tolist() == [kinds[0].saved, kinds[0].saved, of_head]
    layers = kinds[0].working + of_layers
    assert working.tolist() == [layers, layers, kinds[2].saved + kinds[2].working + of_layers]
    assert not bytes_of(layer(), fused_gradients=False).placeholders


def test_the_heads_placeholder_stands_once_for_all_micro_batches_in_flight() -> None:
    """Of two chunks a last stage has three passes in flight; its head runs backward right behind its forward pass."""

    def with_placeholder(*asked: Any, **named: Any) -> dict[int, CapturedModel]:
        graphs = by_hand(*asked, **named)
        for index, graph in graphs.items():
            (head,) = (part for part in graph.parts if part.kind == "head")
            ops = tuple(replace(op, name="te.weight_gradient") if op.is_weight_gradient else op for op in head.ops)
            parts = tuple(replace(part, ops=ops) if part is head else part for part in graph.parts)
            graphs[index] = replace(graph, parts=parts)
        return graphs

    words = "--num-virtual-stages-per-pipeline-rank 2".split()
    plain, held = (
        predicted(*words, graphs=graphs).predicted.stages[-1].peak_bytes_by_category.activations
        for graphs in (by_hand, with_placeholder)
    )
    assert held - plain == 32000 * 2048 * BF16


def test_two_micro_batches_at_work_hold_a_layer_more() -> None:
    kinds = [bytes_of(layer()), bytes_of(head())]
    alone, both = (stage_sizes(kinds, [False, True], two)[1] for two in (False, True))
    assert (both - alone).tolist() == [kinds[0].working + kinds[0].saved, 0]
