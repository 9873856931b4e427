"""Instructions print on one line and are read back, one by one, as lists and as JSON."""

from __future__ import annotations

import json

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction, format_list, from_json, to_json
from moe_overlap.plan.lowering.lower import lower
from tests.unit.plan import plan_samples
from tests.unit.plan.printed_lists import parse_line, parse_list

FULL = Instruction(
    id=57,
    kind="weight-gradient",
    name="L0.moe.experts.fc2.dW",
    stage=1,
    chunk=2,
    micro_batch=3,
    partition=(0, 1),
    channel="compute",
    reads=("saved.m1.p0", "saved.m1.p1"),
    writes=("gradient.L0",),
    bytes=5,
    peers=(2, 3),
    after=(53, 55),
)
LINE = (
    "57 weight-gradient L0.moe.experts.fc2.dW S1 c2 m3 p0,1 compute "
    "saved.m1.p0,saved.m1.p1 -> gradient.L0 5B @2,3 after 53,55"
)


def test_one_line() -> None:
    assert str(FULL) == LINE
    assert parse_line(LINE) == FULL
    assert str(Instruction(id=0, kind="compute", name="embedding", stage=0)) == (
        "0 compute embedding S0 - - p- compute - -> - 0B @- after -"
    )


def test_lists_round_trip() -> None:
    plan = plan_samples.plan(layers=4, stages=2, chunks=2, stage={"data": 2, "expert": 2})
    made = (*lower(plan, plan_samples.model("mdmm"), 1), FULL)
    assert parse_list(format_list(made)) == made
    assert from_json(json.loads(json.dumps(to_json(made)))) == made
    assert format_list(()) == ""


def test_columns_are_aligned() -> None:
    lines = format_list(lower(plan_samples.plan(stages=2), plan_samples.model(), 0)).splitlines()
    assert len({line.index(" after ") for line in lines}) == 1
    assert len({line.index(" -> ") for line in lines}) == 1


@pytest.mark.parametrize(
    "line", ["", "57", LINE + " 3", LINE.replace("->", "<-"), LINE.replace("weight-gradient", "pause")]
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not an instruction"):
        parse_line(line)


def test_wrong_json_is_refused() -> None:
    (value,) = to_json([FULL])
    with pytest.raises(ConfigError, match=r'^instructions \[0\]\.kind "pause": unknown choice'):
        from_json([{**value, "kind": "pause"}])
