"""Graphs put together from blocks against real captures of small models of four families, under all dispatchers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_overlap.tuner.capture.capture import capture, gives, sequence_unit
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.capture.library import BlockLibrary
from moe_overlap.tuner.capture.recomputation import recomputed
from moe_overlap.tuner.capture.request import FULL, NO_RECOMPUTATION, Request
from tests.unit.tuner.capture.capture_cases import marked_parts, recorded, request

EXAMPLES = Path(__file__).parents[4] / "examples"
FAMILIES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-mtp", "gpt-oss-120b")
GRAPHS = (
    *((family, "", NO_RECOMPUTATION) for family in FAMILIES),
    ("qwen3-30b-a3b", "deepep", NO_RECOMPUTATION),
    ("gpt-oss-120b", "hybridep", NO_RECOMPUTATION),
    # Modules, but not `moe`: its graphs depend on more than a block's class, and are captured.
    ("mixtral-8x7b", "", "layernorm+moe_act"),
)
"""Family, library that dispatches its tokens (none for plain all-to-alls), and variant; not each beside each."""
MORE_GRAPHS = (
    ("qwen3-30b-a3b", "hybridep", NO_RECOMPUTATION),
    ("gpt-oss-120b", "deepep", NO_RECOMPUTATION),
    *(("deepseek-v3-mtp", library, NO_RECOMPUTATION) for library in ("deepep", "hybridep")),
    ("deepseek-v3-mtp", "", "layernorm+mla_up_proj+mlp+moe_act+shared_experts"),
)
"""The others."""
ENDS = ("embedding", "head")
"""Parts that recompute nothing: captures of a variant have none of them."""
COMPARED, FEW = 20, 6
"""Layouts that no capture shows, recorded for every family; and for its dispatch libraries and variants."""
REWRITTEN_LAYOUTS = 5
"""Under each of them a family is recorded once for every variant."""
MOST = 10
"""Captures of a model over all layouts."""


def all_requests(family: str, library: str) -> list[Request]:
    """All layouts of a family that its sizes allow.

    Args:
        library: that dispatches tokens; empty for plain all-to-alls.
    """
    lines = (EXAMPLES / f"tiny-{family}.args").read_text().splitlines()
    flags = " ".join(
        line.replace("'", "").replace("query-groups 2", "query-groups 4") for line in lines if not line.startswith("#")
    )
    if library:
        flags = flags.replace(
            "dispatcher-type alltoall", f"dispatcher-type flex --moe-flex-dispatcher-backend {library}"
        )
    base = request(f"{flags} --bf16", "te", vocabulary=512)
    # megatron-core adds biases of experts on one rank of expert tensor parallelism only; four ranks of TP would leave one query
    # head on a rank, whose sinks do not run at this width.
    tensor, context, split = ((1, 2), (1, 2, 4, 8), (1,)) if base.model.linear_bias else ((1, 2, 4), (1, 2), (1, 2))
    # A library dispatches among several ranks.
    axes = [
        (t, c, e, x) for t in tensor for c in context for e in (1, 2, 4, 8) for x in split if e * x > 1 or not library
    ]
    layouts = [Layout(tensor=t, context=c, expert=e, expert_tensor=x, sequence_parallel=t > 1) for t, c, e, x in axes]
    return [replace(base, layout=layout) for layout in layouts]


def captured_in_process(asked: Request) -> CapturedModel:
    """The capture of a request, whatever ran before it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return capture(asked)


def prepared(family: str, library: str, variant: str = NO_RECOMPUTATION) -> tuple[BlockLibrary, list[Request]]:
    """The library of a model with what it captures over all layouts, and the layouts that it puts together, in any order.

    Graphs of a variant that no rewrite answers are put together from captures of their own.
    """
    asked = [replace(of_layout, variant=variant) for of_layout in all_requests(family, library)]
    known = BlockLibrary(captured_in_process)
    known.prepare(asked)
    assert known.unlike == () and len(known.captured_layouts) <= MOST < len(asked)
    left = [of_layout for of_layout in asked if of_layout.layout not in known.captured_layouts]
    return known, random.Random(1).sample(left, len(left))


def test_few_captures_tell_of_all_layouts() -> None:
    """The number of captures, and a layout that was not captured, as it is captured; slow tests compare more of them."""
    known, (of_layout, *_) = prepared("mixtral-8x7b", "")
    assert set(known.composed(of_layout)) == set(captured_in_process(of_layout).parts)


def test_more_tensor_ranks_than_key_value_heads_follow_the_sums_of_the_others() -> None:
    """Two captures with four ranks and two heads; a sum of two products needs a third value, which fewer ranks give."""
    lines = (EXAMPLES / "tiny-qwen3-30b-a3b.args").read_text().splitlines()
    flags = " ".join(line for line in lines if not line.startswith("#"))
    base = request(f"{flags} --num-attention-heads 8 --bf16", "te", vocabulary=512)
    assert base.model.num_query_groups == 2
    axes = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2)]
    shown = [Layout(tensor=t, context=c, expert=2, sequence_parallel=t > 1) for t, c in axes]
    known = BlockLibrary(captured_in_process)
    for layout in shown:
        known.model(replace(base, layout=layout))
    wanted = replace(base, layout=Layout(tensor=4, context=4, expert=2, sequence_parallel=True))
    before = len(known.captured_layouts)
    assert set(known.model(wanted).parts) == set(captured_in_process(wanted).parts)
    assert len(known.captured_layouts) == before and known.unlike == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "library", "variant"),
    [*GRAPHS, *(pytest.param(*graphs, marks=pytest.mark.sweep) for graphs in MORE_GRAPHS)],
)
def test_graphs_from_blocks_are_those_of_captures(family: str, library: str, variant: str) -> None:
    """The parts of one layout as they are captured; of others, each number of each operator and storage at a batch."""
    known, (first, *others) = prepared(family, library, variant)
    assert set(known.composed(first)) == set(captured_in_process(first).parts)
    for of_layout in others[: FEW if library or variant != NO_RECOMPUTATION else COMPARED]:
        point = (3, sequence_unit(of_layout.config, of_layout.model, of_layout.layout))
        model = known.model(of_layout)
        assert {part.kind for part in model.parts} >= {*model.layer_kinds, *model.mtp_kinds}
        if variant == NO_RECOMPUTATION:
            expected = marked_parts(of_layout, point, has_ends=True)
        else:
            expected = {kind: part for kind, (part,) in recorded(of_layout, [point]).items() if kind not in ENDS}
        for kind, part in expected.items():
            assert gives(model.part(kind, variant, samples=point[0]), part, point), (of_layout.layout, kind)


VARIANTS = {
    "mixtral-8x7b": (FULL, "layernorm+moe_act", "layernorm+moe", "core_attn"),
    "qwen3-30b-a3b": (FULL, "layernorm+moe_act", "layernorm+moe", "core_attn"),
    "deepseek-v3-mtp": (
        *(FULL, "layernorm+mla_up_proj+moe_act", "layernorm+mlp+moe"),
        "core_attn+layernorm+mla_up_proj+mlp+moe_act+shared_experts",
    ),
    "gpt-oss-120b": (FULL, "layernorm+moe_act", "layernorm+moe"),
}
"""Variants of each family; core attention with sinks is captured, as gradients of its inputs are copied once more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "library"),
    [*((family, "") for family in FAMILIES), pytest.param("deepseek-v3-mtp", "hybridep", marks=pytest.mark.sweep)],
)
def test_rewritten_graphs_are_those_of_captures(family: str, library: str) -> None:
    """Each number of each operator and storage of the layers, at a batch."""
    for asked in random.Random(0).sample(all_requests(family, library), REWRITTEN_LAYOUTS):
        point = (3, sequence_unit(asked.config, asked.model, asked.layout))
        plain = marked_parts(asked, point)
        for variant in VARIANTS[family]:
            captured = recorded(replace(asked, variant=variant), [point])
            for kind, part in plain.items():
                assert recomputed(part, variant) == captured[kind][0], (asked.layout, variant, kind)
