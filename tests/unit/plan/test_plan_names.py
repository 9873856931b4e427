"""Names of operators and buffers: reading and printing are inverse for every name of the golden lists and of lowered plans."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import (
    BufferId,
    BufferRole,
    Home,
    Instruction,
    ScheduleError,
    channel_group,
    parse_access,
    parse_buffer,
    placed,
    saved_for,
    stem_of,
    whole_buffer,
)
from moe_overlap.plan.lowering.deferral import default_slots
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.operators import (
    OperatorKind,
    Phase,
    in_backward_operator,
    kind_of,
    parse_group,
    parse_operator,
    state_operator,
)
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.plan import Offload, Recompute
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_list


def golden_lists() -> list[Instruction]:
    return [i for path in sorted(plan_samples.GOLDEN.glob("*rank*.txt")) for i in parse_list(path.read_text())]


def lowered_lists() -> list[Instruction]:
    """Recomputation, ZeRO, offloading, reductions in buckets, deferred weight gradients, prediction layers."""
    found: list[Instruction] = []
    recomputes = (Recompute(), Recompute(layers=2, granularity="full"), Recompute(layers=1, granularity="uniform"))
    model, predicting = plan_samples.model("dmmm"), plan_samples.model("mmmm", mtp_layers=2)
    for recompute, zero in itertools.product(recomputes, (0, 1, 2, 3)):
        stage = {"data": 2, "expert": 2, "recompute": recompute, "zero_level": zero}
        for rank in (0, 2):
            found += lower(plan_samples.plan(layers=4, stages=2, stage=stage), model, rank)
    share = Offload(weights=0.5, gradients=0.5, optimizer=0.5, activations=0.5)
    found += lower(plan_samples.plan(layers=4, stages=2, stage={"data": 2, "offload": share}), model, 2)
    slots = default_slots(range(4), plan_samples.model("mmmm"), exchanges=True, holds_head=True)
    layers = tuple(LayerOverlap(layer=n, weight_gradient_slots=names) for n, names in sorted(slots.items()))
    overlap = StageOverlap(gradient_chunk_bytes=1 << 12, max_deferred_bytes=1 << 30, layers=layers)
    stage = {"data": 2, "expert": 2, "overlap": overlap}
    found += lower(plan_samples.plan(layers=4, stages=1, stage=stage), plan_samples.model("mmmm"), 0)
    found += lower(plan_samples.plan(layers=4, stages=1, stage={"data": 2, "expert": 2}, mtp_stage=0), predicting, 0)
    return found


@cache
def names() -> tuple[set[str], set[str]]:
    """Operators and buffers."""
    lists = [*golden_lists(), *lowered_lists()]
    return {i.name for i in lists}, {name for i in lists for name in (*i.reads, *i.writes)}


def test_every_name_is_read_and_printed() -> None:
    operators, buffers = names()
    assert len(operators) > 150 and len(buffers) > 200
    assert {parse_operator(name).kind for name in operators} >= {
        *(OperatorKind.SEND, OperatorKind.RECEIVE, OperatorKind.GRADIENTS, OperatorKind.PARAMETERS, OperatorKind.NORM),
        *(OperatorKind.OFFLOAD, OperatorKind.PREFETCH, OperatorKind.PROJECT, OperatorKind.DISPATCH),
    }
    assert {parse_operator(name).phase for name in operators} == set(Phase)
    assert {parse_buffer(name).home for name in buffers} >= {Home.DEVICE, Home.HOST, Home.MOVED}
    assert all(str(parse_operator(name)) == name for name in operators)
    assert all(str(parse_buffer(name)) == name for name in buffers)
    assert len({parse_operator(name) for name in operators}) == len(operators)
    assert len({parse_buffer(name) for name in buffers}) == len(buffers)


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_name_is_refused_or_another_name(seed: int) -> None:
    draw = random.Random(seed)
    for kind, parse in zip(names(), (parse_operator, parse_buffer), strict=True):
        known = sorted(kind)
        for name in draw.sample(known, min(300, len(known))):
            place = draw.randrange(len(name))
            changed = draw.choice(
                [name[:place] + name[place + 1 :], name[:place] + draw.choice(".0Lmp>dx ") + name[place:], f"{name}.x"]
            )
            try:
                read = parse(changed)
            except (ConfigError, ScheduleError):
                continue
            assert str(read) == changed


WRONG_BUFFERS = [
    *(
        "",
        "x",
        f"a.L{'9' * 5000}",
        f"a.L3.m{'9' * 5000}",
        f"a.L3.m0.p{'9' * 5000}",
        "a.",
        ".a",
        "a.L3.m",
        "a.L3.p1.m0",
        "a.L03.m0",
        "a.L3.m00",
        "A.L3",
        "a.L3.m0.p1.p2",
        "cache.L3",
        "a..m0",
    ),
    *("host", "host.", "host.moved.a.L3", "hosts.state.L3", "state.L3 ", "a.mlp", "gradient.L3.qkv", "h.mtp", "ddh.L3"),
    *("saved.L3", "saved.L3.attention.fc1.m0", "saved.L3.moe.dispatch.m0", "saved.head.m0", "rows.L-1.m0"),
]


@pytest.mark.parametrize("name", WRONG_BUFFERS)
def test_not_a_buffer(name: str) -> None:
    with pytest.raises((ScheduleError, ConfigError), match="not a"):
        parse_buffer(name)


def test_fields_of_buffers() -> None:
    assert parse_buffer("a.L3.m0.p1") == BufferId(BufferRole.ATTENDED, "L3", 0, 1)
    assert parse_buffer("dh.mtp0.loss.m2") == BufferId(BufferRole.D_HIDDEN, "mtp0.loss", 2)
    assert parse_buffer("host.state.L3") == BufferId(BufferRole.STATE, "L3", home=Home.HOST)
    assert parse_buffer("tiles.h.L3.m0").word == "tiles" and parse_buffer("h.L3.m0").word == "h"
    assert str(parse_buffer("saved.L3.attention.qkv.m0.p1").gradient) == "L3.attention.qkv.dW"
    assert saved_for(parse_operator("head.loss.output.dW"), 3) == "saved.head.loss.output.m3"
    assert BufferRole.D_ROWS.differentiated is BufferRole.ROWS
    assert BufferRole.ROWS.differentiated is BufferRole.ROWS


def test_parts_of_buffer_names() -> None:
    assert whole_buffer("rows.L3.m0.p1") == whole_buffer("rows.L3.m0") == "rows.L3.m0"
    assert stem_of("a.L3.m0.p1") == stem_of("a.L3") == "a.L3"
    assert placed("h.L3", 2) == "h.L3.m2" and placed("gradient.L3", 2) == "gradient.L3"
    assert parse_access(" a.L3  shared.L3 -> h.L4 ") == (("a.L3", "shared.L3"), ("h.L4",))
    assert parse_access("dh.L3 -> ") == (("dh.L3",), ())
    assert [channel_group(c) for c in ("ep.counts", "pp.S0>S1.backward", "dp")] == ["ep", "pp", "dp"]


@pytest.mark.parametrize("name", ["embedding", "L0", "L12", "mtp0", "head"])
def test_parameter_groups(name: str) -> None:
    group = parse_group(name)
    assert str(group) == name
    for kind in (OperatorKind.GRADIENTS, OperatorKind.PARAMETERS, OperatorKind.OPTIMIZER):
        assert parse_operator(state_operator(kind, name)).group == name
    order = sorted(["head", "mtp1", "L10", "mtp0", "L9", "embedding"], key=lambda other: parse_group(other).order)
    assert order == ["embedding", "L9", "L10", "mtp0", "mtp1", "head"]


@pytest.mark.parametrize("name", ["", "L", "L03", "l3", "mtp", "mtp-1", "heads", "embedding.word", "L3.attention"])
def test_not_a_parameter_group(name: str) -> None:
    with pytest.raises(ConfigError, match="not a parameter group"):
        parse_group(name)


def test_keys_of_measurements() -> None:
    kinds = {name: kind_of(name) for name in names()[0]}
    assert kinds["L1.moe.dispatch.backward"] == "moe.dispatch.backward" and kinds["send.S0>S1"] == "send"
    assert kind_of("gradients.L3") == "gradients" and kind_of("gradients.head") == "gradients.head"
    assert kind_of("no.name") == "no.name"
    assert in_backward_operator("attention.dW") == in_backward_operator("attention.recompute") == "attention.backward"
    assert in_backward_operator("attention") is None and in_backward_operator("attention.backward") is None


def test_passes_and_updates() -> None:
    for name in names()[0]:
        operator = parse_operator(name)
        assert operator.in_backward_pass == (operator.phase in (Phase.BACKWARD, Phase.WEIGHT_GRADIENT, Phase.RECOMPUTE))
        assert not (operator.is_bucket and operator.is_update)
        assert operator.is_of_model or not operator.weight
    updates = {name for name in ("gradients", "optimizer.norm", "optimizer.L0", "parameters") if name in names()[0]}
    assert len(updates) == 4 and all(parse_operator(name).is_update for name in updates)
