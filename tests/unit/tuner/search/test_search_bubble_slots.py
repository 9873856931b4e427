"""Weight gradients in bubble slots: every way to place them, tried; bytes; and what many micro-batches change."""

from __future__ import annotations

import itertools
import random

import pytest

from moe_overlap.plan.lowering.deferral import is_send, sends_of
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.search.layer.assignment import Assignment, AssignmentProblem, Gradient
from moe_overlap.tuner.search.layer.bubble_slots import SendSlot, fill_send_slot, hiding
from moe_overlap.tuner.search.layer.slots import Slots, with_slots
from tests.unit.tuner.search.test_search_weight_gradients import PLENTY, VARIANTS, Case, scheduled, simulated_step

TWO_LAYERS = "--num-layers 2 --pipeline-model-parallel-size 2 --vocab-size 8000 --expert-model-parallel-size 8"
INSTANCES = {
    "few tokens": (f"{TWO_LAYERS} --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 1024", 2),
    "few tokens, 4 micro-batches": (f"{TWO_LAYERS} --moe-router-topk 1 --moe-router-pre-softmax", 4),
    "long experts": (f"{TWO_LAYERS} --moe-ffn-hidden-size 4096", 4),
}
PRICED = ("experts.fc2.dW", "attention.proj.dW", "output.dW")
"""Weight gradients that take time on graphs written by hand, which do not name the weights of a product."""


def every_plan(plan: Plan, model_has_head: int) -> list[Plan]:
    """All placements of weight gradients of two one-layer stages: inside, under an all-to-all, in the bubble slot."""
    options: list[tuple[int, str, list[str]]] = []
    for index, stage in enumerate(plan.stages):
        (layer,), (send,) = stage.layers, sends_of(plan, index)
        combine, dispatch = (f"L{layer}.moe.{part}.backward" for part in ("combine", "dispatch"))
        sends = [send] if send else []
        options.append((index, f"L{layer}.moe.experts.fc2.dW", ["", dispatch, *sends]))
        options.append((index, f"L{layer}.attention.proj.dW", ["", *sends]))
        if index == model_has_head:
            options.append((index, "head.loss.output.dW", ["", combine, dispatch, *sends]))
    plans = []
    for chosen in itertools.product(*(slots for _, _, slots in options)):
        found: list[dict[int, dict[str, tuple[str, ...]]]] = [{} for _ in plan.stages]
        for (index, name, _), slot in zip(options, chosen, strict=True):
            if slot:
                of_layer = found[index].setdefault(plan.stages[index].layers[0], {})
                of_layer[slot] = (*of_layer.get(slot, ()), name)
        slots: list[Slots] = list(found)
        plans.append(with_slots(plan, slots, PLENTY))
    return plans


def seconds_of(plan: Plan, case: Case) -> float:
    return simulated_step(plan, case).simulation.step_seconds


@pytest.mark.parametrize(("words", "micro_batches"), INSTANCES.values(), ids=INSTANCES)
def test_no_way_to_place_them_is_shorter(words: str, micro_batches: int) -> None:
    """Within a hundredth; all-to-alls alone leave more."""
    case = found, step, model = scheduled(f"{words} --global-batch-size {64 * micro_batches}")
    plan = step.prices[0].plan
    assert plan.stages[0].gradient_accumulation_steps == micro_batches
    plans = every_plan(plan, 1)
    assert len(plans) == 48
    for one in plans:
        validate_plan(one, model)
    best = min(seconds_of(one, case) for one in plans)
    mine = found.simulated_seconds[found.chosen]
    assert best <= mine * (1 + 1e-6) and mine <= best * 1.01
    under_exchanges = min(s for choice, s in found.simulated_seconds.items() if "bubble" not in choice)
    assert best < 0.99 * under_exchanges


def test_a_way_is_the_shortest_for_all_micro_batches() -> None:
    """A way is chosen for all micro-batches of a step, although it was found on few of them."""
    words, _ = INSTANCES["long experts"]
    few, many = (scheduled(f"{words} --global-batch-size {64 * count}") for count in (2, 24))
    moved, kept = (sum(case.found.bubble_slot_seconds) for case in (few, many))
    assert moved >= kept > 0
    for found in (few.found, many.found):
        assert found.simulated_seconds[found.chosen] == pytest.approx(min(found.simulated_seconds.values()), abs=1e-9)
    assert seconds_of(few.found.plan, few) == pytest.approx(few.found.simulated_seconds[few.found.chosen], rel=1e-9)
    assert seconds_of(many.found.plan, many) == pytest.approx(many.found.simulated_seconds[many.found.chosen], rel=2e-3)


@pytest.mark.parametrize("words", ["two stages", "interleaved stages"])
def test_every_chunk_that_sends_has_its_own(words: str) -> None:
    found = scheduled(VARIANTS[words]).found
    chunks = [chunk for stage in found.plan.stages for chunk in stage.chunks]
    sending = {
        entry.layer
        for stage in found.plan.stages
        for entry in stage.overlap.layers
        if any(is_send(parse_operator(slot)) for slot in entry.weight_gradient_slots)
    }
    assert sending == {first for first, _ in chunks if first > 0}
    assert [seconds > 0 for seconds in found.bubble_slot_seconds] == [len(found.plan.stages[0].chunks) > 1, True]


def test_bytes_bound_what_waits_for_the_send() -> None:
    words, _ = INSTANCES["long experts"]
    found = [scheduled(f"{words} --global-batch-size 256", most).found for most in (PLENTY, 1 << 30, 1)]
    seconds = [sum(one.bubble_slot_seconds) for one in found]
    assert seconds[0] > seconds[1] > seconds[2] == 0


def some_problem(seed: int) -> tuple[AssignmentProblem, Assignment]:
    """A chunk's problem with a last slot that hides nothing, and an assignment to the others."""
    draw = random.Random(seed)
    slots = draw.randint(1, 4)
    gradients, chosen = [], []
    for first in sorted(draw.randint(0, slots) for _ in range(draw.randint(1, 7))):
        under = (*range(first, slots), slots)
        gradients.append(Gradient(draw.choice((0.0, 1.0, 2.0, 5.0)), draw.choice((0, 1, 4)), first, under))
        chosen.append(draw.choice((None, *under[:-1])))
    problem = AssignmentProblem(
        tuple(gradients), (*(draw.choice((1.0, 3.0)) for _ in range(slots)), 0.0), draw.choice((6, 100))
    )
    return problem, tuple(chosen)


def test_thinned_and_completed_assignments() -> None:
    """Nothing that stays hides less than its share; nothing moves between all-to-alls; what fits and takes time waits."""
    seen = 0
    for seed in range(400):
        problem, assignment = some_problem(seed)
        if not problem.is_feasible(assignment):
            continue
        seen += 1
        for share in (0.0, 0.4, 1.0, float("inf")):
            kept = hiding(problem, assignment, share)
            assert all(mine in (None, before) for mine, before in zip(kept, assignment, strict=True))
            for index, slot in enumerate(kept):
                if slot is not None and problem.gradients[index].seconds > 0:
                    less = tuple(None if n == index else other for n, other in enumerate(kept))
                    hidden = problem.hidden_seconds(kept) - problem.hidden_seconds(less)
                    assert hidden >= share * problem.gradients[index].seconds - 1e-9
            names = tuple(map(str, range(len(kept))))
            send = SendSlot("send", 0, names, problem)
            full = fill_send_slot(send, names, kept)
            assert problem.is_feasible(full)
            for index, (before, slot) in enumerate(zip(kept, full, strict=True)):
                assert slot == before or (before is None and slot == send.place)
                if slot is None and problem.gradients[index].seconds > 0:
                    more = tuple(send.place if n == index else other for n, other in enumerate(full))
                    assert not problem.is_feasible(more)
            assert send.seconds(full) == sum(problem.gradients[int(name)].seconds for name in send.named(full))
    assert seen > 200
