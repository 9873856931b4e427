"""The intra-only search: the best sharding over all meshes, the nearest layout, and what lies between them."""

from __future__ import annotations

import math

import pytest

from moe_overlap.tuner.search.layer.intra_only import IntraOnly, executable, intra_only, sharding_of
from moe_overlap.tuner.search.layer.sharding_graph import NotShardableError
from moe_overlap.tuner.search.layer.sharding_ilp import solve_choices
from moe_overlap.tuner.search.layer.sharding_specs import logical_meshes
from moe_overlap.tuner.search.layer.sharding_stage import model_graphs, stage_problem
from tests.unit.tuner.sharding_cases import CONSTANTS, cluster, whole, workload

KINDS = ("embedding", "dense", "head")
NODES = cluster(2, 2)


@pytest.fixture(scope="module")
def answer() -> IntraOnly:
    return intra_only(whole(), workload(samples=4), NODES, kinds=KINDS)


def test_the_best_shape_is_the_least_of_all_shapes(answer: IntraOnly) -> None:
    """Each shape by itself, solved without a cutoff."""
    load = workload(samples=4)
    model = model_graphs(whole(), load, KINDS)
    alone = {
        mesh.shape: solve_choices(stage_problem(model, mesh, load).problem).objective
        for mesh in logical_meshes(4, 4, NODES.group_of(0), CONSTANTS.link_rates)
    }
    assert {shape.shape for shape in answer.shapes} == set(alone) == {(4, 1), (2, 2), (1, 4)}
    assert answer.best is not None and answer.solution.status == "optimal"
    assert answer.best.seconds == pytest.approx(min(alone.values()), rel=1e-6)
    assert alone[answer.best.shape] == pytest.approx(answer.best.seconds, rel=1e-6)
    assert answer.solution.objective == answer.best.seconds and answer.solution.gap < 1e-6
    for shape in answer.shapes:
        if shape.solution.status == "cut off":
            assert (
                shape.solution.bound <= alone[shape.shape] + 1e-9 and alone[shape.shape] >= answer.best.seconds - 1e-9
            )


def test_the_answer_is_complete_and_adds_up(answer: IntraOnly) -> None:
    best, load = answer.best, workload(samples=4)
    assert best is not None
    assert {operator.part for operator in best.operators} == set(KINDS)
    assert {weight.weight for weight in best.weights} >= {"mlp.linear_fc1.weight", "output_layer.weight"}
    seconds = sum(o.compute_seconds + o.communication_seconds + o.resharding_seconds for o in best.operators)
    total = seconds * load.micro_batches + sum(weight.step_seconds for weight in best.weights)
    assert total == pytest.approx(best.seconds, rel=1e-9), "every second belongs to an operator or to a weight"
    assert 0 < best.bytes < load.gpu.memory_gib * 2**30


def test_the_nearest_layout_is_a_plan(answer: IntraOnly) -> None:
    nearest, best = answer.nearest, answer.best
    assert nearest is not None and best is not None
    assert nearest.tensor * nearest.context * nearest.data == 4
    assert nearest.expert * nearest.expert_tensor * nearest.expert_data == 4
    assert nearest.seconds >= best.seconds - 1e-9
    assert nearest.seconds == pytest.approx(min(shape.layout_seconds for shape in answer.shapes))
    assert bool(answer.not_executed) == (nearest.seconds > best.seconds * (1 + 1e-9))


def test_operators_that_no_layout_executes_are_listed_with_their_gain() -> None:
    """One sample on eight ranks: nothing of megatron-core's splits every operator as well as a free choice does."""
    load, described = workload(samples=1), cluster(2, 4)
    model = model_graphs(whole(), load, ("dense", "dense"))
    mesh = next(
        mesh for mesh in logical_meshes(8, 8, described.group_of(0), CONSTANTS.link_rates) if mesh.shape == (2, 4)
    )
    stage = stage_problem(model, mesh, load)
    answer = executable(stage)
    assert answer.layout is not None and answer.free.value is not None and answer.restricted.value is not None
    assert answer.lost_seconds == pytest.approx(answer.restricted.objective - answer.free.objective)
    assert answer.lost_seconds > 0 and answer.operators
    assert any(operator.alone for operator in answer.operators)
    for operator in answer.operators:
        assert operator.free != operator.executed
        # One operator alone gains no more than all of them together.
        assert 0.0 <= operator.gain_seconds <= answer.lost_seconds + 1e-9
    free, layout = (sharding_of(stage, value) for value in (answer.free.value, answer.restricted.value))
    assert layout.seconds - free.seconds == pytest.approx(answer.lost_seconds)


def test_nothing_fits_and_nothing_is_refused_silently() -> None:
    answer = intra_only(whole(), workload(samples=4), NODES, kinds=("dense",), capacity=1e9)
    assert answer.best is None and answer.nearest is None and answer.not_executed == ()
    assert (answer.solution.status, answer.solution.objective) == ("infeasible", math.inf)
    with pytest.raises(NotShardableError, match="multi-token"):
        from dataclasses import replace

        model_graphs(replace(whole(), mtp_kinds=("mtp.dense",)), workload())
