"""Labels of weight gradients against searches from scratch, and against what a plan accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.deferral import default_slots
from moe_overlap.plan.lowering.dependencies import Draft, build_list
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.search.layer.slots import ancestors, dependencies, may_run_under, related
from tests.unit.plan.plan_samples import model, plan

MODELS = {
    "dense between": model("mdm"),
    "shared experts": model("mm", shared_expert_hidden_size=64, shared_expert_gate=True),
    "tied": model("mmm", tied_embeddings=True),
}
CUT = {
    "mechanism": "partitioned",
    "partitions": 2,
    "first_operator": "L0.attention",
    "last_operator": "L0.moe.merge",
    "axis": "batch",
    "gate": "topk",
}


def deferred(described: str, cut: bool = False) -> Plan:
    """Two expert ranks, every weight gradient in program order, the first layer in parts if asked."""
    which = MODELS[described]
    layers = which.num_layers
    slots = default_slots(range(layers), which, True, not which.tied_embeddings)
    entries = tuple(
        LayerOverlap(layer=n, weight_gradient_slots=found, **(CUT if cut and n == 0 else {}))  # type: ignore[arg-type]
        for n, found in sorted(slots.items())
    )
    overlap = StageOverlap(layers=entries, max_deferred_bytes=1 << 40)
    return plan(layers, stage={"data": 2, "expert": 2, "overlap": overlap})


def of_backward_pass(made: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in made if i.micro_batch == 0]


def depends(earlier: Instruction, later: Instruction) -> bool:
    """From the definitions alone: a pair of instructions."""
    if earlier.id in later.after or (earlier.channel == later.channel != "compute"):
        return True
    shared = {*earlier.reads, *earlier.writes} & {*later.reads, *later.writes}
    for name in shared:
        touched = name in earlier.writes or name in later.writes
        additions = name.startswith("gradient.") and all(
            name in i.writes and i.kind in ("compute", "weight-gradient") for i in (earlier, later)
        )
        if touched and not additions:
            return True
    return False


def reaches(edges: dict[int, list[int]], source: int, target: int) -> bool:
    """Breadth-first search."""
    seen, waiting = {source}, [source]
    while waiting:
        waiting = [after for place in waiting for after in edges[place] if after not in seen]
        seen.update(waiting)
    return target in seen


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("described", MODELS)
def test_paths_are_those_of_a_search_for_every_pair(described: str, cut: bool) -> None:
    made = of_backward_pass(lower(deferred(described, cut), MODELS[described], 0))
    places = range(len(made))
    edges = {a: [b for b in places if b > a and depends(made[a], made[b])] for a in places}
    before = ancestors(dependencies(made))
    found = {(a, b) for a in places for b in places if a < b and related(before, a, b)}
    assert found == {(a, b) for a in places for b in places if a < b and reaches(edges, a, b)}
    assert len(found) < len(places) * (len(places) - 1) / 2


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("described", MODELS)
def test_labels_are_the_slots_that_a_plan_accepts(described: str, cut: bool) -> None:
    whole = deferred(described, cut)
    made = of_backward_pass(lower(whole, MODELS[described], 0))
    last = {i.name: n for n, i in enumerate(made) if i.name.endswith(("dispatch.backward", "combine.backward"))}
    gradients = {n: i.name for n, i in enumerate(made) if i.kind == "weight-gradient"}
    labels = may_run_under(made, last.values(), gradients)
    found = {(slot, gradients[n]) for slot, place in last.items() for n in labels[place]}
    assert found == {
        (slot, name) for slot in last for name in gradients.values() if accepts(whole, slot, name, described)
    }
    assert any(slot.startswith("L0") and not name.startswith("L0") for slot, name in found)


def accepts(whole: Plan, slot: str, name: str, described: str) -> bool:
    """Whether a plan with one weight gradient in one slot is valid."""
    stage = whole.stages[0]
    number = int(slot[1 : slot.index(".")])
    layers = tuple(
        dataclasses.replace(layer, weight_gradient_slots={slot: (name,)} if layer.layer == number else {})
        for layer in stage.overlap.layers
    )
    overlap = dataclasses.replace(stage.overlap, layers=layers)
    changed = dataclasses.replace(whole, stages=(dataclasses.replace(stage, overlap=overlap),))
    try:
        validate_plan(changed, MODELS[described])
    except ConfigError as error:
        assert "has not run when the all-to-all starts" in str(error)
        return False
    return True


def test_a_reduction_bounds_what_its_sum_waits_for() -> None:
    """A bucket that is reduced between two all-to-alls, on their links: its weight gradient cannot run under the second."""

    def made(reduced: bool) -> tuple[Instruction, ...]:
        drafts = [
            Draft(kind="compute", name="b1", writes=("saved", "a")),
            Draft(kind="collective", name="a1", channel="ep", reads=("a",), writes=("rows",)),
            Draft(kind="weight-gradient", name="w", reads=("saved", "gradient.L1"), writes=("gradient.L1",)),
            Draft(kind="compute", name="b2", reads=("rows", "gradient.L1"), writes=("computed", "gradient.L1")),
            *(
                [Draft(kind="collective", name="r", channel="ep", reads=("gradient.L1",), writes=("gradient.L1",))]
                if reduced
                else []
            ),
            Draft(kind="collective", name="a2", channel="ep", reads=("computed",), writes=("returned",)),
        ]
        return build_list(0, drafts)

    free, bound = made(False), made(True)
    assert may_run_under(free, (1, 4), (2,)) == {1: (2,), 4: (2,)}
    assert may_run_under(bound, (1, 5), (2,)) == {1: (2,), 5: ()}
    elsewhere = [dataclasses.replace(i, channel="dp", after=()) if i.name == "r" else i for i in bound]
    # On other links no path leads to the exchange, but issue order forbids it.
    assert not related(ancestors(dependencies(elsewhere)), 2, 5)
    assert may_run_under(elsewhere, (1, 5), (2,)) == {1: (2,), 5: ()}


def test_writes_after_reads_and_writes_are_dependencies() -> None:
    drafts = [
        Draft(kind="compute", name="w", reads=("rows",), writes=("gradient.L0",)),
        Draft(kind="compute", name="b", writes=("rows",)),
        Draft(kind="compute", name="c", writes=("rows",)),
        Draft(kind="collective", name="a", channel="ep", reads=("rows",), writes=("received",)),
    ]
    assert dependencies(build_list(0, drafts)) == [set(), {0}, {1}, {2}]
    assert may_run_under(build_list(0, drafts), (3,), (0,)) == {3: ()}
