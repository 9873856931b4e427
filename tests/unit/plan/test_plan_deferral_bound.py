"""Weight gradients that the bound on held bytes does not let wait: where they stand, held against a slow twin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import BufferRole, Instruction, parse_buffer
from moe_overlap.plan.lowering.deferral import early_gradients
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.sizes import ROUTED_LOAD_BOUND, deferred_bytes
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.test_plan_partitions import EP2, with_words
from tests.unit.plan.test_plan_send_slots import filled

UNBOUNDED = 1 << 40
CASES = {
    "whole": ("mm", {}, OverlapWords(gate="topk", defer=True)),
    "in partitions": ("mdmm", {}, OverlapWords(partitions=2, range_word="around", gate="topk", defer=True)),
    "pipeline": ("mdmm", {"stages": 2}, OverlapWords(gate="topk", defer=True)),
    "virtual stages": (
        "mmmm",
        {"stages": 2, "chunks": 2},
        OverlapWords(partitions=2, range_word="experts", gate="topk", defer=True),
    ),
    "two micro-batches": ("mm", {"micro_batches": 4}, OverlapWords(gate="topk", micro_batches=2, defer=True)),
}


def bounded(case: str, max_bytes: int) -> tuple[Plan, ModelDescription]:
    letters, shape, words = CASES[case]
    words = dataclasses.replace(words, max_deferred_bytes=max_bytes)
    return with_words(words, letters, 64, stage={**EP2, "micro_batch_size": 2}, **shape)


def saved_bytes(made: Sequence[Instruction], plan: Plan, model: ModelDescription, rank: int) -> dict[str, int]:
    """Bytes of every operand of a deferred weight gradient: equal shares of its partitions."""
    saved = [name for i in made for name in i.writes if parse_buffer(name).role is BufferRole.SAVED]
    sizes = {}
    for name in saved:
        buffer = parse_buffer(name)
        siblings = [
            o
            for o in saved
            if (parse_buffer(o).subject, parse_buffer(o).micro_batch) == (buffer.subject, buffer.micro_batch)
        ]
        whole = deferred_bytes(buffer.gradient, plan, plan.stages[plan.stage_of(rank)], model)
        sizes[name] = -(-whole // len(siblings))
    return sizes


def most_held(made: Sequence[Instruction], sizes: dict[str, int]) -> int:
    """Most bytes that wait while anything runs that is no weight gradient."""
    waiting: set[str] = set()
    most = 0
    for i in made:
        if i.kind == "weight-gradient":
            waiting -= set(i.reads)
        else:
            most = max(most, sum(sizes[name] for name in waiting))
            waiting |= set(i.writes) & sizes.keys()
    return most


@pytest.mark.parametrize(("case", "share"), itertools.product(CASES, (0.2, 0.5, 0.9)))
def test_what_waits_stays_within_the_bound_and_the_sums_are_the_same(case: str, share: float) -> None:
    plan, model = bounded(case, UNBOUNDED)
    for rank in {stage.devices.ranks[0] for stage in plan.stages}:
        free = lower(plan, model, rank)
        sizes = saved_bytes(free, plan, model, rank)
        bound = int(share * most_held(free, sizes))
        tight = lower(bounded(case, bound)[0], model, rank)
        assert 0 < most_held(tight, sizes) <= bound
        assert early_gradients(free) == [] and early_gradients(tight)
        plain = [
            [dataclasses.replace(i, id=0, after=()) for i in made if i.kind != "weight-gradient"]
            for made in (free, tight)
        ]
        assert plain[0] == plain[1]
        # Every operand is read once, of one gradient in the order in which it was left.
        for made in (free, tight):
            assert sorted(
                name for i in made if i.kind == "weight-gradient" for name in i.reads if name in sizes
            ) == sorted(sizes)
        assert Interpreter(tight, 2, model).outcome == Interpreter(free, 2, model).outcome


def test_only_what_does_not_fit_is_computed_early() -> None:
    """A slow twin of the decision, from the list alone: where all that an operator leaves fits, nothing is computed behind it."""
    plan, model = bounded("in partitions", UNBOUNDED)
    free = lower(plan, model, 0)
    sizes = saved_bytes(free, plan, model, 0)
    bound = most_held(free, sizes) // 2
    tight = lower(bounded("in partitions", bound)[0], model, 0)
    waiting: dict[str, int] = {}
    full = 0
    for i, after in itertools.pairwise(tight):
        if i.kind == "weight-gradient":
            for name in i.reads:
                waiting.pop(name, None)
            continue
        waiting.update((name, sizes[name]) for name in i.writes if name in sizes)
        is_early = i.kind == "compute" and after.kind == "weight-gradient"
        assert is_early == (sum(waiting.values()) > bound), i
        full += is_early
    assert full


def test_without_bytes_every_gradient_stands_behind_its_operator() -> None:
    made = lower(*bounded("in partitions", 1), 0)
    assert len(early_gradients(made)) == sum(i.kind == "weight-gradient" for i in made)
    for i in early_gradients(made):
        (saved,) = (name for name in i.reads if parse_buffer(name).role is BufferRole.SAVED)
        behind = next(other for other in reversed(made[: i.id]) if other.kind != "weight-gradient")
        assert saved in behind.writes


def test_an_early_gradient_overtakes_no_partition_of_its_weight() -> None:
    """Each gradient reads the operands of its weight that have waited longest, as many as it has."""
    plan, model = bounded("in partitions", UNBOUNDED)
    free = lower(plan, model, 0)
    sizes = saved_bytes(free, plan, model, 0)
    tight = lower(bounded("in partitions", most_held(free, sizes) // 2)[0], model, 0)
    waiting: dict[tuple[str, int | None], list[str]] = {}

    def queue_of(operand: str) -> list[str]:
        buffer = parse_buffer(operand)
        return waiting.setdefault((buffer.subject, buffer.micro_batch), [])

    for i in tight:
        if i.kind == "weight-gradient":
            operands = [name for name in i.reads if name in sizes]
            queue = queue_of(operands[0])
            assert {*operands} == {*queue[: len(operands)]}, i
            del queue[: len(operands)]
        else:
            for name in sizes.keys() & {*i.writes}:
                queue_of(name).append(name)
    assert early_gradients(tight) and not any(waiting.values())


def test_of_one_operators_gradients_those_of_its_last_products_come_first() -> None:
    names = [i.name for i in lower(*bounded("whole", 1), 0) if i.micro_batch == 0 and i.kind == "weight-gradient"]
    for last, first in (("moe.experts.fc2", "moe.experts.fc1"), ("attention.proj", "attention.qkv")):
        assert names.index(f"L1.{last}.dW") < names.index(f"L1.{first}.dW")


def test_what_stands_in_bubble_slots_of_two_micro_batches_is_not_early() -> None:
    """There the head's loss of the other micro-batch, a computation, may stand right in front of the slot."""
    words = OverlapWords(gate="topk", micro_batches=2, defer=True, max_deferred_bytes=UNBOUNDED)
    before, model = with_words(words, "mdmm", stages=2, micro_batches=4, stage=EP2)
    plan = filled(before, model)
    for stage in plan.stages:
        assert early_gradients(lower(plan, model, stage.devices.ranks[0])) == []


def test_bytes_of_a_product_written_by_hand() -> None:
    """The experts' first product: twice the routed rows, as wide as its input and as its output, gate and activation both."""
    plan, model = bounded("whole", UNBOUNDED)
    stage = plan.stages[0]
    made = lower(plan, model, 0)
    name = next(i.operator for i in made if i.name == "L0.moe.experts.fc1.dW")
    tokens = stage.micro_batch_size * plan.sequence_length
    rows = ROUTED_LOAD_BOUND * tokens * model.router_topk
    widths = model.hidden_size + model.moe_ffn_hidden_size * (2 if model.gated else 1)
    width = 4 if plan.precision == "fp32" else 2
    assert deferred_bytes(name, plan, stage, model) == rows * widths * width
