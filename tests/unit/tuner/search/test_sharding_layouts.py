"""megatron-core's layouts on a mesh: their collectives against captures, and the restricted program against the enumeration."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moe_overlap.describe.cluster import Cluster
from moe_overlap.tuner.capture.graph import Collective, Layout
from moe_overlap.tuner.cost.links import collective_seconds
from moe_overlap.tuner.search.layer.sharding_graph import NotShardableError, operator_graph
from moe_overlap.tuner.search.layer.sharding_ilp import ChoiceProblem, Chosen, MemoryRow, solve_choices
from moe_overlap.tuner.search.layer.sharding_layouts import MeshLayout, layouts_of
from moe_overlap.tuner.search.layer.sharding_specs import PARTIAL, REPLICATED, Dim, logical_meshes
from moe_overlap.tuner.search.layer.sharding_stage import StageProblem, model_graphs, stage_problem
from tests.unit.tuner.search.sharding_cases import (
    CONSTANTS,
    LAYOUTS,
    captured_now,
    cluster,
    collectives,
    group_of,
    rows_of,
    whole,
    workload,
)

SHAPES = {LAYOUTS[0]: (4, 2), LAYOUTS[1]: (2, 4), LAYOUTS[2]: (4, 2)}
PARTS = ("embedding", "dense", "moe", "head")


@functools.cache
def stage_of(shape: tuple[int, int], kinds: tuple[str, ...], nodes: int = 1, samples: int = 16) -> StageProblem:
    return fresh_stage(shape, kinds, cluster(nodes, 8 // nodes), samples)


def fresh_stage(
    shape: tuple[int, int],
    kinds: tuple[str, ...],
    described: Cluster,
    samples: int = 16,
    memory_gib: float | None = None,
) -> StageProblem:
    load = workload(samples, memory_gib=memory_gib)
    meshes = logical_meshes(described.gpus, described.gpus, described.group_of(0), CONSTANTS.link_rates)
    mesh = next(mesh for mesh in meshes if mesh.shape == shape)
    return stage_problem(model_graphs(whole(), load, kinds), mesh, load)


def is_layout(layout: MeshLayout, wanted: Layout, has_experts: bool) -> bool:
    same = [layout.ranks(axis) == getattr(wanted, axis) for axis in ("tensor", "context")]
    if has_experts:
        same += [layout.ranks(axis) == getattr(wanted, axis) for axis in ("expert", "expert_tensor")]
    return all(same) and layout.sequence_parallel == wanted.sequence_parallel


@pytest.mark.parametrize(("wanted", "nodes"), [(LAYOUTS[0], 1), (LAYOUTS[0], 2), (LAYOUTS[1], 2), (LAYOUTS[2], 2)])
def test_layouts_send_what_captures_of_them_send(wanted: Layout, nodes: int) -> None:
    """Every part: the seconds of all collectives under a layout, against those of a capture on so many ranks."""
    for part in PARTS:
        rows = [sent for kind, _, sent in collectives(wanted) if kind == part]
        # The probabilities that go with the rows are a few numbers per token; where experts are split twice, chains for them are
        # in another order than for rows.
        tolerance = 0.01 if part == "moe" and wanted.expert_tensor > 1 else 1e-6
        found, expected = sent_under(wanted, stage_of(SHAPES[wanted], (part,), nodes), rows, cluster(nodes, 8 // nodes))
        assert found == pytest.approx(expected, rel=tolerance)
        assert expected > 0 or (part == "embedding" and wanted.tensor == 1) or part == "head"


def sent_under(wanted: Layout, stage: StageProblem, rows: list[Collective], described: Cluster) -> tuple[float, float]:
    """Seconds of communication of one micro-batch in a stage of one part, and of the collectives of a capture."""
    algorithms = stage.algorithms[0]
    layout, chosen = next(
        (layout, chosen)
        for layout, chosen in stage.layouts((0,))
        if is_layout(layout, wanted, algorithms.graph.experts > 0)
    )
    nodes = len(algorithms.of_node)
    found = sum(algorithms.of_node[node][chosen[node]].communication_seconds for node in range(nodes))
    for a, b, matrix in stage.problem.edges:
        if max(a, b) < nodes:
            found += float(matrix[chosen[a], chosen[b]]) / stage.workload.micro_batches
    samples, rates = stage.workload.samples // layout.ranks("data"), CONSTANTS.link_rates
    expected = 0.0
    for sent in rows:
        size, group = sent.payload_bytes.value(samples, 4096), group_of(sent.axis, wanted, described)
        expected += float(collective_seconds(sent.kind, size, group, rates))
    return found, expected


def restricted(stage: StageProblem, layouts: Sequence[tuple[MeshLayout, Chosen]]) -> ChoiceProblem:
    """The problem in which every node takes what one layout gives to it; the layout is a further node, the last."""
    problem = stage.problem
    edges = list(problem.edges)
    for node, costs in enumerate(problem.costs):
        ties = np.full((len(costs), len(layouts)), np.inf)
        for column, (_, places) in enumerate(layouts):
            ties[places[node], column] = 0.0
        edges.append((node, len(problem.costs), ties))
    nothing = np.zeros(len(layouts))
    rows = tuple(MemoryRow((*row.coefficients, nothing), row.limit) for row in problem.rows)
    return ChoiceProblem((*problem.costs, nothing), tuple(edges), rows)


@pytest.mark.parametrize("kinds", [("dense", "dense"), ("moe", "moe")], ids=["dense", "moe"])
@pytest.mark.parametrize(("shape", "nodes"), [((4, 2), 2), ((2, 4), 2)])
def test_the_restricted_program_is_the_enumeration(shape: tuple[int, int], nodes: int, kinds: tuple[str, ...]) -> None:
    """Layout and seconds, at a capacity that does not bind and at one that does."""
    stage = stage_of(shape, kinds, nodes)
    layouts = tuple(stage.layouts((1,) if "moe" in kinds else (0, 1, 3)))
    costs = [stage.problem.cost(chosen) for _, chosen in layouts]
    best = int(np.argmin(costs))
    held = [
        sum(float(values[choice]) for values, choice in zip(stage.problem.rows[0].coefficients, chosen, strict=True))
        for _, chosen in layouts
    ]
    for limit in (max(held), 0.5 * (min(held) + held[best])):
        rows = (replace(stage.problem.rows[0], limit=limit),)
        problem = replace(stage, problem=replace(stage.problem, rows=rows))
        fitting = [
            cost if problem.problem.is_feasible(chosen) else np.inf
            for cost, (_, chosen) in zip(costs, layouts, strict=True)
        ]
        solution = solve_choices(restricted(problem, layouts))
        assert solution.status == "optimal"
        assert solution.objective == pytest.approx(min(fitting), rel=1e-9)
        assert solution.value is not None and fitting[solution.value[-1]] == pytest.approx(min(fitting), rel=1e-9)
        assert solution.value[:-1] == layouts[solution.value[-1]][1], "every operator takes what the layout gives to it"
    assert len({layout for layout, _ in layouts}) == len(layouts) >= 12


def test_layouts_keep_the_order_of_ranks_and_the_rules_of_sequence_parallelism() -> None:
    mesh = stage_of((4, 2), ("moe", "moe"), 2).mesh
    dense = {layout.dense for layout in layouts_of(mesh, has_experts=False)}
    assert ("data", "tensor") in dense and ("tensor", "data") not in dense
    assert {layout.experts for layout in layouts_of(mesh, has_experts=False)} == {("expert_data", "expert_data")}
    routed = list(layouts_of(mesh, has_experts=True))
    assert all(layout.sequence_parallel for layout in routed if layout.ranks("tensor") > 1)
    assert {layout.ranks("expert") for layout in routed} == {1, 2, 4, 8}
    flat = stage_of((8, 1), ("moe", "moe")).mesh
    assert {layout.dense for layout in layouts_of(flat, has_experts=True)} == {
        ("data", "data"),
        ("context", "data"),
        ("tensor", "data"),
    }


def test_hidden_states_go_from_part_to_part() -> None:
    """Three layers and the ends: a changed spec is paid once per micro-batch and border, forward and backward."""
    stage = stage_of((1, 8), ("embedding", "dense", "dense", "dense", "head"))
    graphs, number = [algorithms.graph for algorithms in stage.algorithms], stage.workload.micro_batches
    hidden = 16 * 4096 * 4096 * 2
    gather = float(collective_seconds("all_gather", hidden, stage.mesh.axes[1], stage.mesh.rates))
    embedding, dense, head = range(3)
    for before, after, times in ((embedding, dense, 1), (dense, dense, 2), (dense, head, 1)):
        for source, target, start, end in (
            (before, after, graphs[before].leaves, graphs[after].enters),
            (after, before, graphs[after].gradient_leaves, graphs[before].gradient_enters),
        ):
            assert start is not None and end is not None
            ends = stage.first_node[source] + start[0], stage.first_node[target] + end
            (matrix,) = [m if a == ends[0] else m.T for a, b, m in stage.problem.edges if {a, b} == set(ends)]
            outs = [algorithm.out for algorithm in stage.algorithms[source].of_node[start[0]]]
            needs = [algorithm.out for algorithm in stage.algorithms[target].of_node[end]]
            split, copied = (REPLICATED, Dim.TOKENS), (REPLICATED, REPLICATED)
            assert matrix[outs.index(split), needs.index(copied)] == pytest.approx(gather * number * times)
            assert matrix[outs.index(split), needs.index(split)] == 0.0


def test_light_operators_follow_and_norms_keep_the_width() -> None:
    graph = operator_graph(whole().part("moe"), 16, 4096)
    heavy = sorted(index for node in graph.nodes for index in node.heavy)
    light = [index for node in graph.nodes for index in node.light]
    classes = {graph.part.ops[index].cost_class for index in heavy}
    assert classes == {"gemm", "grouped_gemm", "attention", "memory"} and len(set(light)) == len(light)
    assert not set(heavy) & set(light)
    by_label = {node.label: node for node in graph.nodes}
    assert by_label["self_attention.linear_proj forward"].whole_width, "the norm behind it needs the whole width"
    assert not by_label["mlp.experts.linear_fc1 forward"].whole_width, "its activation works entry by entry"
    assert {node.kind for node in graph.nodes if node.operator == "moe.merge"} == {"rows"}
    stage = stage_of((4, 2), ("moe", "moe"), 2)
    for algorithm in stage.algorithms[0].of_node[by_label["self_attention.linear_proj forward"].id]:
        assert Dim.WIDTH not in algorithm.out and Dim.PARTIAL not in algorithm.out


def test_a_split_graph_is_refused() -> None:
    part = whole().part("dense")
    recomputed = replace(part, ops=tuple(replace(op, is_recomputed=op.phase == "backward") for op in part.ops))
    with pytest.raises(NotShardableError, match="recomputed"):
        operator_graph(recomputed, 16, 4096)


def without_rewrite(stage: StageProblem) -> ChoiceProblem:
    """The problem in which sums end whole on all ranks, and no weight is sharded: nothing is reduced and scattered."""
    costs = [of_node.copy() for of_node in stage.problem.costs]
    for place, algorithms in enumerate(stage.algorithms):
        for node, candidates in zip(algorithms.graph.nodes, algorithms.of_node, strict=True):
            for choice, candidate in enumerate(candidates):
                axes = zip(algorithms.pending(node, candidate.loops), candidate.out, strict=True)
                if any(before == PARTIAL and out != REPLICATED for before, out in axes):
                    costs[stage.first_node[place] + node.id][choice] = np.inf
        for at, choices in enumerate(algorithms.of_weight):
            costs[stage.first_weight[place] + at][[choice.level > 0 for choice in choices]] = np.inf
    return replace(stage.problem, costs=tuple(costs))


def test_without_the_rewrite_results_are_whole_and_nothing_is_cheaper() -> None:
    """One sample cannot be split: tensor ranks work, and sequence parallelism and ZeRO come from the rewrite alone."""
    stage = fresh_stage((1, 8), ("dense",) * 8, cluster(1, 8), samples=1, memory_gib=56.0)
    with_rewrite, without = solve_choices(stage.problem), solve_choices(without_rewrite(stage))
    assert with_rewrite.value is not None
    assert with_rewrite.objective < 0.95 * without.objective
    outs = {
        algorithms[place].out
        for algorithms, place in zip(stage.algorithms[0].of_node, with_rewrite.value, strict=False)
        if place is not None
    }
    assert (REPLICATED, Dim.TOKENS) in outs


def test_less_memory_shards_the_states() -> None:
    stage = fresh_stage((8, 1), ("dense",) * 8, cluster(1, 8), memory_gib=1e4)
    (row,) = stage.problem.rows

    def limited(limit: float) -> ChoiceProblem:
        return replace(stage.problem, rows=(replace(row, limit=limit),))

    def held(chosen: tuple[int, ...]) -> float:
        return sum(float(values[place]) for values, place in zip(row.coefficients, chosen, strict=True))

    many = solve_choices(stage.problem)
    assert many.value is not None
    limit = 1.02 * sum(float(values.min()) for values in row.coefficients)
    assert held(many.value) > limit
    few = solve_choices(limited(limit))
    assert few.value is not None and held(few.value) <= limit and few.objective > many.objective
    levels = [
        [choices[place].level for choices, place in zip(stage.algorithms[0].of_weight, value[12:], strict=True)]
        for value in (many.value, few.value)
    ]
    assert max(levels[0]) <= 1 < max(levels[1]), "weights and gradients are sharded, not only states"
    assert solve_choices(limited(1e9)).status == "infeasible"


def test_gradients_join_the_weight_they_belong_to() -> None:
    for kind in PARTS:
        graph = operator_graph(whole().part(kind), 16, 4096)
        for weight in graph.weights:
            assert weight.backward is not None
            names = {
                graph.part.storages[index].name
                for heavy in graph.nodes[weight.backward].heavy
                for index in graph.part.ops[heavy].writes
                if graph.part.storages[index].role == "gradient"
            }
            assert all(weight.name.removesuffix("weight") in name for name in names), (weight.name, names)


@pytest.mark.slow
def test_latent_attention_and_shared_experts_send_what_captures_send() -> None:
    from tests.unit.tuner.capture.capture_cases import LATENT

    flags = f"{LATENT} --moe-shared-expert-intermediate-size 2048 --bf16"
    for small, large in (("hidden-size 64", "hidden-size 1024"), ("heads 4", "heads 16"), ("size 96", "size 1024")):
        flags = flags.replace(small, large)
    wanted = Layout(tensor=2, expert=4, sequence_parallel=True)
    one, several = captured_now(Layout(), flags), captured_now(wanted, flags)
    load, described = workload(), cluster(2, 2)
    mesh = next(m for m in logical_meshes(4, 4, described.group_of(0), CONSTANTS.link_rates) if m.shape == (2, 2))
    for kind in PARTS:
        stage = stage_problem(model_graphs(one, load, (kind,)), mesh, load)
        backward = [
            node for node in stage.algorithms[0].graph.nodes if node.phase == "backward" and node.weight is not None
        ]
        assert all(len(node.heavy) == (1 if kind == "embedding" else 2) for node in backward), (
            "a gradient of each operand"
        )
        axes = ("tp", "cp", "ep", "etp")
        ops = [op.collective for op in several.part(kind).ops if op.collective is not None]
        rows = [sent for sent in ops if sent.axis in axes and sent.size > 1]
        found, expected = sent_under(wanted, stage, rows, described)
        # Keys' rotary part is gathered by itself, at one more latency.
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_the_files_are_what_a_capture_gives() -> None:
    fresh = captured_now(Layout())
    assert {(part.kind, part.ops) for part in fresh.parts} == {(part.kind, part.ops) for part in whole().parts}
    for layout in LAYOUTS:
        rows = [
            [kind, operator, c.kind, c.axis, c.size, str(c.payload_bytes)] for kind, operator, c in collectives(layout)
        ]
        assert rows_of(captured_now(layout)) == rows
