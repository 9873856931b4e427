"""The intra-only search: the best sharding over all meshes, the nearest layout, and what lies between them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from moe_overlap.describe.cluster import GIB
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.links import collective_seconds
from moe_overlap.tuner.search.layer.intra_only import (
    IntraOnly,
    cheapest_layout,
    free_sharding,
    intra_only,
    sharding_of,
)
from moe_overlap.tuner.search.layer.sharding_algorithms import ZERO_LEVELS, turned
from moe_overlap.tuner.search.layer.sharding_graph import NotShardableError
from moe_overlap.tuner.search.layer.sharding_ilp import Chosen, solve_choices
from moe_overlap.tuner.search.layer.sharding_losses import Losses, losses
from moe_overlap.tuner.search.layer.sharding_specs import Dim, logical_meshes
from moe_overlap.tuner.search.layer.sharding_stage import StageProblem, model_graphs, stage_problem
from tests.unit.tuner.search.sharding_cases import CONSTANTS, cluster, dense, whole, workload

KINDS = ("embedding", "dense", "head")
NODES = cluster(2, 2)


@pytest.fixture(scope="module")
def answer() -> IntraOnly:
    return intra_only(dense(), workload(samples=4), NODES)


def compared(stage: StageProblem) -> tuple[Chosen, Chosen, Losses]:
    """The best sharding on the mesh of a stage, the cheapest layout there, and what lies between them."""
    layouts = tuple(stage.layouts(ZERO_LEVELS))
    cheapest = cheapest_layout(stage, layouts)
    assert cheapest is not None
    free = free_sharding(stage, cheapest, 60.0).value
    assert free is not None
    return free, cheapest[1], losses(stage, free, cheapest, layouts, 60.0)


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
    assert answer.losses is not None and bool(answer.losses.operators) == (nearest.seconds > best.seconds * (1 + 1e-9))


def test_a_layout_that_nothing_beats_is_the_answer() -> None:
    """Many micro-batches on two nodes: data ranks are best for every operator; with two samples they are not."""
    described = cluster(2, 1)
    tie = intra_only(dense(), workload(samples=4, micro_batches=8), described)
    assert tie.best is not None and tie.nearest is not None and tie.losses is not None
    assert tie.nearest.seconds == tie.best.seconds == tie.solution.bound and tie.solution.status == "optimal"
    assert (tie.nearest.data, tie.losses.operators, tie.losses.parts) == (2, (), {})
    strict = intra_only(dense(), workload(samples=2, micro_batches=2), described)
    assert strict.best is not None and strict.nearest is not None and strict.losses is not None
    assert strict.best.seconds < 0.95 * strict.nearest.seconds
    gains = {operator.operator: operator.gain_seconds for operator in strict.losses.operators}
    assert gains["embedding.word_embeddings"] == max(gains.values()) > 1e-3


def test_operators_that_no_layout_executes_are_listed_with_their_gain() -> None:
    """One sample on eight ranks: nothing of megatron-core's splits every operator as well as a free choice does."""
    load, described = workload(samples=1), cluster(2, 4)
    model = model_graphs(whole(), load, ("dense", "dense"))
    mesh = next(
        mesh for mesh in logical_meshes(8, 8, described.group_of(0), CONSTANTS.link_rates) if mesh.shape == (2, 4)
    )
    stage = stage_problem(model, mesh, load)
    free, executed, lost = compared(stage)
    lost_seconds = stage.problem.cost(executed) - stage.problem.cost(free)
    assert lost_seconds > 0 and lost.is_proven
    assert lost.layout_seconds == stage.problem.cost(executed) and lost.operators
    assert any(not operator.has_layout for operator in lost.operators)
    for operator in lost.operators:
        assert operator.ways
        for way in operator.ways:
            assert (way.free, way.free_out, way.free_zero) != (way.executed, way.executed_out, way.executed_zero)
        # One operator alone gains no more than all of its part, and that no more than all together.
        together = lost.parts[operator.part]
        assert 0.0 <= operator.gain_seconds <= together + 1e-9 and together <= lost_seconds + 1e-9
    best, layout = (sharding_of(stage, chosen) for chosen in (free, executed))
    assert layout.seconds - best.seconds == pytest.approx(lost_seconds)


def test_nothing_fits_and_nothing_is_refused_silently() -> None:
    answer = intra_only(dense(), workload(samples=4, memory_gib=1.0), NODES)
    assert answer.best is None and answer.nearest is None and answer.losses is None
    assert (answer.solution.status, answer.solution.objective) == ("infeasible", math.inf)
    with pytest.raises(NotShardableError, match="multi-token"):
        model_graphs(replace(whole(), mtp_kinds=("mtp.dense",)), workload())


def test_an_operator_gains_what_all_of_its_choices_together_allow() -> None:
    """Against every choice of its passes and its weight, all else as the layout has it."""
    load = workload(samples=1, micro_batches=4)
    mesh = logical_meshes(2, 2, cluster(2, 1).group_of(0), CONSTANTS.link_rates)[0]
    stage = stage_problem(model_graphs(whole(), load, KINDS), mesh, load)
    _, executed, lost = compared(stage)
    operators = {operator.operator: operator for operator in lost.operators}
    place = [graph.kind for graph in stage.model.graphs].index("dense")
    graph = stage.model.graphs[place]
    nodes = [stage.first_node[place] + node.id for node in graph.nodes if node.name == "self_attention.linear_proj"]
    (weight,) = [at for at, weight in enumerate(graph.weights) if weight.name == "self_attention.linear_proj.weight"]
    nodes.append(stage.first_weight[place] + weight)
    assert len(nodes) == 3
    best, anew = math.inf, list(executed)
    for choices in product(*(range(len(stage.problem.costs[node])) for node in nodes)):
        for node, choice in zip(nodes, choices, strict=True):
            anew[node] = choice
        if stage.problem.is_feasible(anew):
            best = min(best, stage.problem.cost(anew))
    gain = operators["self_attention.linear_proj"].gain_seconds
    assert gain == pytest.approx(stage.problem.cost(executed) - best, rel=1e-6) and gain > 1e-4


def tied() -> CapturedModel:
    """The captured model, the head's weight being the embedding's table."""
    parts = []
    for part in whole().parts:
        storages = tuple(
            replace(storage, name="embedding.word_embeddings.weight")
            if storage.name == "output_layer.weight"
            else storage
            for storage in part.storages
        )
        parts.append(replace(part, storages=storages))
    return replace(whole(), parts=tuple(parts))


def test_gradients_of_one_weight_are_added_for_every_micro_batch() -> None:
    """For nothing where both are sums over the samples; a table's gradient split by its width is gathered for the head's."""
    load = workload(samples=4, micro_batches=3)
    mesh = logical_meshes(4, 4, NODES.group_of(0), CONSTANTS.link_rates)[1]
    stage = stage_problem(model_graphs(tied(), load, KINDS), mesh, load)
    assert stage.tied is not None
    table, head = (stage.algorithms[place] for place in (stage.tied.embedding, stage.tied.head))
    nodes = stage.first_node[0] + stage.tied.gradient, stage.first_node[stage.tied.head] + stage.tied.output_gradient
    (matrix,) = [matrix for a, b, matrix in stage.problem.edges if (a, b) == nodes]
    own = [algorithm.loops for algorithm in table.of_node[stage.tied.gradient]]
    other = [algorithm.loops for algorithm in head.of_node[stage.tied.output_gradient]]
    by_samples, by_width = (Dim.SAMPLES, Dim.SAMPLES), (Dim.OUTPUT, Dim.OUTPUT)
    assert matrix[own.index(by_samples), other.index(by_samples)] == 0.0
    size = 32000 * 4096 * load.features.gradient_bytes
    gathered = collective_seconds("all_gather", size, mesh.all_ranks, mesh.rates)
    assert 0 < matrix[own.index(by_width), other.index(by_samples)] <= 3 * float(gathered) * (1 + 1e-9)
    assert matrix[own.index(by_width), other.index(by_samples)] > float(gathered)


def test_temporaries_and_norms_are_in_the_memory() -> None:
    load = workload(samples=4)
    model = model_graphs(whole(), load, KINDS)
    mesh = logical_meshes(4, 4, NODES.group_of(0), CONSTANTS.link_rates)[1]
    stage = stage_problem(model, mesh, load)
    layouts = [chosen for _, chosen in stage.layouts((0, 1, 2, 3))]
    held = sorted(stage.held_bytes(chosen) for chosen in layouts)
    tight = stage_problem(model, mesh, workload(samples=4, memory_gib=(held[len(held) // 2] - 1.0) / GIB))
    fitting = [tight.problem.is_feasible(chosen) for chosen in layouts]
    assert fitting == [stage.held_bytes(chosen) < held[len(held) // 2] for chosen in layouts] and any(fitting)
    # Most of it: the logits of 16384 tokens in bf16 over four ranks, beside the fp32 ones that the loss keeps.
    (row,) = stage.problem.rows
    chosen = sum(float(values[choice]) for values, choice in zip(row.coefficients, layouts[0], strict=True))
    assert stage.held_bytes(layouts[0]) - chosen > 4 * 4096 * 32000 * 2 / 4


def test_embedding_and_head_with_one_weight_have_one_choice_for_it() -> None:
    """Held, reduced and updated once in a layout; the best sharding gives both the same blocks, and loses at both."""
    load = workload(samples=4, micro_batches=1)
    mesh = logical_meshes(4, 4, NODES.group_of(0), CONSTANTS.link_rates)[1]
    own, one = (stage_problem(model_graphs(model, load, KINDS), mesh, load) for model in (whole(), tied()))
    assert own.tied is None and one.tied is not None
    table, output = one.tied_weights
    separate = dict(own.layouts((0, 1, 2, 3)))
    layouts = tuple(one.layouts((0, 1, 2, 3)))
    assert len(layouts) == len(separate) > 8
    for layout, chosen in layouts:
        # The gradient of the table is reduced beside it: an edge of the weight and the backward node.
        gradient = one.first_node[0] + one.tied.gradient
        reduced = sum(float(m[chosen[a], chosen[b]]) for a, b, m in own.problem.edges if {a, b} == {table, gradient})
        swept = float(own.problem.costs[table][chosen[table]])
        assert separate[layout] == chosen and swept > 0
        assert one.problem.cost(chosen) == pytest.approx(own.problem.cost(chosen) - reduced - swept, rel=1e-9)
        held = own.held_bytes(chosen) - one.held_bytes(chosen)
        assert held == pytest.approx(float(own.problem.rows[0].coefficients[table][chosen[table]]))
    free, executed, lost = compared(one)
    assert one.problem.cost(free) < one.problem.cost(executed)
    first, second = (one.algorithms[one.place_of(index)[0]].of_weight[0][free[index]] for index in (table, output))
    assert (turned(first.split), first.level) == (second.split, second.level)
    names = {operator.operator: operator for operator in lost.operators}
    both = names["embedding.word_embeddings and output_layer"]
    assert both.gain_seconds > 0 and {way.part for way in both.ways} == {"embedding", "head"}
    assert lost.parts[both.part] >= both.gain_seconds - 1e-9
