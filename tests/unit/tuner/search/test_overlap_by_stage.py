"""A mechanism for each class of layers: against all combinations, and what may not be mixed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping

import pytest

import moe_overlap
import moe_overlap.results as results
from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model, known_vocab_size
from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.overlap import KernelBlocks, LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.tuner.capture.request import layer_kinds
from moe_overlap.tuner.search.layer.candidates import DEFERRED, Candidate, Candidates
from moe_overlap.tuner.search.layer.mechanisms import Mix, entries_of, layer_classes, mix_mechanisms, with_entries
from moe_overlap.tuner.search.layer.overlap import mixed
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.search.test_overlap_tuning import JOB, LIMITS

pytestmark = pytest.mark.usefixtures("whole_memory")

KEPT = ("whole micro-batches", "2 capacity chunks", "partitions")


class Undeferred(Candidates):
    """The ways of a run without weight-gradient schedules, which take longer than everything else here."""

    def deferred(self, first: Candidate) -> Iterator[Candidate]:
        return iter(())


def ways(words: str = "", gib: float = 80.0) -> tuple[Candidates, list[Candidate]]:
    """Three mechanisms of a job over links an eighth as fast as an H100's, on GPUs of so much memory."""
    group = shipped_cluster("H100", 16).groups[0]
    gpu = dataclasses.replace(group.gpu, memory_gib=gib)
    slow = dataclasses.replace(group, gpu=gpu, domain_gb_per_s=group.domain_gb_per_s / 8)
    cluster = dataclasses.replace(shipped_cluster("H100", 16), groups=(slow,))
    given = (*JOB, *words.split())
    search = Undeferred(problem_of(given, cluster, {"graphs": by_hand, "constants": CONSTANTS}), LIMITS, 1.0)
    return search, [one for one in search.uniform() if one.name in KEPT]


def best_of_all(search: Candidates, ones: list[Candidate], mix: Mix) -> float:
    """The shortest step of all legal combinations that fit."""
    entries, model = [entries_of(one.decided) for one in ones], search.problem.model
    found = []
    for chosen in itertools.product(entries, repeat=len(mix.classes)):
        pairs = zip(mix.classes, chosen, strict=True)
        plan = with_entries(
            ones[0].decided, {layer: said[layer] for one, said in pairs for layer in one.layer_class.layers}
        )
        try:
            validate_plan(plan, model)
            refuse_unsupported(plan)
        except ConfigError:
            continue
        prediction = search.predicted(plan)
        if prediction.fits:
            found.append(prediction.predicted.step_seconds)
    return min(found)


@pytest.mark.slow
def test_schedules_that_are_left_out_could_not_have_been_the_fastest() -> None:
    search, _ = ways()
    whole = Candidates(search.problem, LIMITS, 1.0)
    found = list(whole.uniform())
    best = min(one.seconds for one in found if one.prediction is not None)
    left_out = {one.name.removesuffix(f", {DEFERRED}") for one in found if "whatever the schedule" in one.refused}
    alone = [one for one in found if one.name in left_out]
    assert alone
    for first in alone:
        assert all(one.seconds > best for one in whole.deferred(first))


@pytest.mark.slow
@pytest.mark.parametrize("gib", [2.85, 80.0])
def test_no_combination_is_shorter(gib: float) -> None:
    search, uniform = ways(gib=gib)
    mix, _ = mixed(search, uniform)
    assert mix is not None and mix.seconds == pytest.approx(best_of_all(search, uniform, mix), rel=1e-12)


def test_where_parts_do_not_fit_a_mix_is_shorter_than_every_uniform_plan() -> None:
    # The last stage has no room for what is cut beside its parts: there chunks of capacity are what is left.
    search, uniform = ways(gib=2.85)
    mix, candidates = mixed(search, uniform)
    assert mix is not None and mix.changed and mix.complete
    assert [one.chosen for one in mix.classes] == ["partitioned*4", "partitioned*4", "tutel*2", "tutel*2"]
    assert mix.seconds < 0.99 * min(one.seconds for one in uniform)
    (only,) = candidates
    assert only.seconds == mix.seconds and only.prediction is not None and only.prediction.fits
    limits = [stage.overlap.search_limits for stage in only.decided.stages]
    assert limits[0] is not None and limits[1] is None
    # What the others would have cost stands beside every choice.
    for one in mix.classes:
        costs = [tried.seconds for _, tried in one.others if tried.seconds is not None]
        assert costs and min(costs) >= mix.seconds


def test_where_everything_fits_the_best_mechanism_stays_everywhere() -> None:
    search, uniform = ways()
    mix, candidates = mixed(search, uniform)
    assert mix is not None and not mix.changed and mix.complete and candidates == []
    assert mix.seconds == min(one.seconds for one in uniform)
    assert {one.chosen for one in mix.classes} == {"partitioned*4"}


def test_a_range_in_pieces_takes_as_long() -> None:
    search, uniform = ways("--num-layers 6 --moe-layer-freq ([1,0,1,1,1,0])")
    (cut,) = (one for one in uniform if one.name == "partitions")
    pieces = with_entries(cut.decided, entries_of(cut.decided))
    validate_plan(pieces, search.problem.model)
    assert len([one for stage in pieces.stages for one in stage.overlap.layers if one.partitions]) == 4
    assert len([one for stage in cut.decided.stages for one in stage.overlap.layers if one.partitions]) < 4
    assert search.predicted(pieces).predicted.step_seconds == pytest.approx(cut.seconds, rel=1e-12)


def test_nothing_is_mixed_where_nothing_fits() -> None:
    assert mixed(*ways(gib=1.0)) == (None, [])


def made(words: str = "") -> tuple[Plan, ModelDescription]:
    """A plan of three layers without overlap."""
    given = (*JOB, *f"--pipeline-model-parallel-size 1 --num-layers 3 {words}".split())
    task = problem_of(given, shipped_cluster("H100", 16), {"graphs": by_hand, "constants": CONSTANTS})
    return task.plan, task.model


def with_mechanism(plan: Plan, **fields: object) -> Plan:
    layers = {layer: LayerOverlap(layer=layer, gate="topk", **fields) for layer in plan.stages[0].layers}  # type: ignore[arg-type]
    return with_entries(plan, layers)


def options(plan: Plan) -> list[Plan]:
    """None, two chunks, four chunks."""
    chunked = [with_mechanism(plan, mechanism="tutel", tutel_degree=degree) for degree in (2, 4)]
    return [with_mechanism(plan), *chunked]


def costs(plan: Plan, table: Mapping[tuple[int | None, ...], float]) -> float:
    return table[tuple(one.tutel_degree for one in plan.stages[0].overlap.layers)]


def test_any_table_of_steps_ends_where_no_class_alone_is_better() -> None:
    plan, model = made()
    classes = layer_classes(plan, model, layer_kinds(model))
    assert [one.layers for one in classes] == [(0,), (1,), (2,)]
    drawn, ways_of = random.Random(7), list(itertools.product((None, 2, 4), repeat=3))
    gaps = []
    for _ in range(20):
        table = {way: drawn.uniform(1.0, 2.0) for way in ways_of}
        start, *others = options(plan)
        mix = mix_mechanisms(
            start,
            table[None, None, None],
            others,
            classes,
            lambda _: None,
            lambda one, table=table: costs(one, table),
            27,
        )
        assert mix.complete and mix.predictions <= 26 and mix.seconds == pytest.approx(costs(mix.plan, table))
        at = [one.tutel_degree for one in mix.plan.stages[0].overlap.layers]
        near = [way for way in ways_of if sum(a != b for a, b in zip(way, at, strict=True)) == 1]
        assert all(table[way] >= mix.seconds for way in near)
        gaps.append(mix.seconds / min(table.values()) - 1)
    # Steps without any order are the worst case: what only two classes together gain is missed.
    assert min(gaps) == 0 and max(gaps) > 0
    table = {way: 1.0 + sum((degree or 1) * 0.1 * (layer - 1) for layer, degree in enumerate(way)) for way in ways_of}
    start, *others = options(plan)
    judged: list[Plan] = []

    def counted(one: Plan) -> float:
        judged.append(one)
        return costs(one, table)

    mix = mix_mechanisms(start, table[None, None, None], others, classes, lambda _: None, counted, 27)
    assert mix.seconds == pytest.approx(min(table.values())) and len(judged) == mix.predictions
    few = mix_mechanisms(start, table[None, None, None], others, classes, lambda _: None, counted, 1)
    assert few.predictions == 1 and not few.complete


def test_what_the_runtime_does_not_execute_is_passed_over_with_its_reason() -> None:
    plan, model = made()
    fused = with_mechanism(plan, mechanism="fused", kernel_blocks=KernelBlocks(dispatch=8, combine=8))

    def refuse(one: Plan) -> None:
        validate_plan(one, model)
        refuse_unsupported(one)

    classes = layer_classes(plan, model, layer_kinds(model))
    mix = mix_mechanisms(with_mechanism(plan), 2.0, [fused], classes, refuse, lambda _: 1.0, 9)
    assert not mix.changed and mix.predictions == 0
    assert {tried.refused for one in mix.classes for _, tried in one.others} == {"mechanism fused: not executed"}


def test_layers_that_are_alike_are_decided_once() -> None:
    words = [*JOB, *"--num-layers 12 --pipeline-model-parallel-size 2 --moe-layer-freq ([0]*1+[1]*11)".split()]
    plan, model = made("--num-layers 12 --moe-layer-freq ([0]*1+[1]*11)")
    found = layer_classes(plan, model, layer_kinds(model))
    assert [(one.name, one.layers) for one in found] == [
        ("moe after dense, first", (1,)),
        ("moe, between", tuple(range(2, 11))),
        ("moe, last", (11,)),
    ]
    config = parse(words).config
    described = describe_model(config, known_vocab_size(config), "job")
    task = problem_of(words, shipped_cluster("H100", 16), {"graphs": by_hand, "constants": CONSTANTS})
    assert [one.layers for one in layer_classes(task.plan, described, layer_kinds(described))] == [
        (1,),
        (2, 3, 4),
        (5,),
        (6,),
        (7, 8, 9, 10),
        (11,),
    ]


def test_tune_is_exported_beside_predict() -> None:
    assert moe_overlap.tune is results.tune
    assert set(moe_overlap.__all__) == {"Cluster", "ConfigError", "predict", "tune"}
