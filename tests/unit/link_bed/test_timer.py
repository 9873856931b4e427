"""Profiles spread over lists, and the chunked list of the baseline."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lower import lower
from moe_overlap.plan.races import check_races
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.runtime.spans import Span
from tools.link_bed.chunked_list import chunk_list
from tools.link_bed.profile import apply_profile, mean_of_ranks, median_seconds

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def golden_list(name: str) -> tuple[Instruction, ...]:
    values = json.loads((GOLDEN / "pp2_ep2_model.json").read_text())
    return lower(load_plan(GOLDEN / name), read_record(ModelDescription, values, "model"), 0)


def compute(name: str, *partition: int) -> Instruction:
    kind = "weight-gradient" if name.endswith(".dW") else "compute"
    return Instruction(id=0, kind=kind, name=name, stage=0, chunk=0, micro_batch=0, partition=partition)


PROFILE = {
    "L0.attention": 4.0,
    "L0.moe.experts": 8.0,
    "L0.moe.experts.backward": 9.0,
    "L0.moe.experts.fc1.dW": 5.0,
    "L0.moe.experts.fc2.dW": 3.0,
}


def test_weight_gradients_are_charged_where_the_list_has_them() -> None:
    whole = apply_profile(PROFILE, [compute("L0.moe.experts.backward")])
    assert whole.of(compute("L0.moe.experts.backward")) == 17.0
    apart = [compute("L0.moe.experts.backward"), compute("L0.moe.experts.fc1.dW")]
    seconds = apply_profile(PROFILE, apart)
    assert [seconds.of(i) for i in apart] == [12.0, 5.0]


def test_partitions_share_the_time() -> None:
    listed = [compute("L0.attention", p) for p in range(4)] + [compute("L0.moe.experts.fc2.dW", 0, 1)]
    seconds = apply_profile(PROFILE, listed)
    assert [seconds.of(i) for i in listed] == [1.0] * 4 + [3.0], "one weight gradient of both partitions is whole"
    assert apply_profile(PROFILE, [compute("L0.attention.recompute")]).of(compute("L0.attention.recompute")) == 4.0


def test_an_unmeasured_operator_is_an_error() -> None:
    with pytest.raises(KeyError, match="L7.attention"):
        apply_profile(PROFILE, [compute("L7.attention")])


def test_medians_of_spans() -> None:
    def step(*seconds: float) -> list[Span]:
        spans = [Span("a", "compute", 0, m, 0.0, s) for m, s in enumerate(seconds)]
        return [*spans, Span("a", "compute", 0, 0, 5.0, 6.0), Span("b", "ep", 0, 0, 0.0, 9.0)]

    medians = median_seconds([[*step(1.0, 4.0), Span("optimizer.L0", "compute", 0, 0, 0.0, 9.0)], step(2.0, 5.0)])
    assert medians == {"a": 3.5}, "pieces of a micro-batch are summed; communication and update are left out"
    assert mean_of_ranks([{"a": 1.0}, {"a": 2.0}]) == {"a": 1.5}


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_chunked_list(degree: int) -> None:
    whole = golden_list("pp2_ep2.json")
    chunked = chunk_list(whole, degree)
    check_races(chunked)
    counts, before = (Counter((i.name, i.micro_batch) for i in listed) for listed in (chunked, whole))
    pieces = {"moe.dispatch", "moe.experts", "moe.combine"}
    for (name, micro_batch), count in before.items():
        expected = degree if any(part in name for part in pieces) else 1
        assert counts[name, micro_batch] == count * expected
    assert counts.keys() == before.keys()
    assert sum(i.bytes for i in chunked) == sum(i.bytes for i in whole)


def test_chunks_overlap() -> None:
    """All dispatches of a pass stand before its first experts, and each chunk's combine right behind its experts."""
    chunked = [
        i for i in chunk_list(golden_list("pp2_ep2.json"), 2) if i.micro_batch == 0 and i.name.startswith("L0.moe")
    ]
    names = [i.name.removeprefix("L0.moe.") for i in chunked]
    pipeline = ["dispatch", "dispatch", "experts", "combine", "experts", "combine"]
    forward = [name for name in names if name in pipeline]
    assert forward == pipeline
    mirror = ["combine", "combine", "experts", "dispatch", "experts", "dispatch"]
    assert [n.removesuffix(".backward") for n in names if n.endswith(".backward") and n[:-9] in pipeline] == mirror
