"""--moe-overlap-cuda-graphs in the tuner: kept where the flags ask for it, named with its gain where not."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from moe_overlap.api import predict, problem_of, tune
from moe_overlap.describe.errors import ConfigError
from moe_overlap.host_launches import launching_of
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan_search.overlapped import OverlapSearch, decide_overlaps
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import Finalist, PlanSearch, Tuned
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import closing_lines, detail_lines, search_json, write_search
from moe_overlap.report.search_page import competitors
from moe_overlap.report.tuning import graphs_lines, tuned_json, tuned_lines, write_run
from moe_overlap.tuner.cost.hardware import Constants
from moe_overlap.tuner.cost.prediction import estimate_plan, predict_plan
from moe_overlap.tuner.search.layer.candidates import DEFERRED, NOT_REPLAYED, PLAIN, WHOLE
from moe_overlap.tuner.search.layer.overlap import GraphsChoice
from tests.unit.plan_search.test_overlapped_search import at_speed
from tests.unit.plan_search.test_plan_search import OPTIONS, SMALL
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.search.test_overlap_tuning import JOB, slow_links

GRAPHS = "--moe-overlap-cuda-graphs"
HOST = 1.5e-4
"""Seconds of a launch."""
LIMITS = SearchLimits(max_partitions=2, group_seconds=0.0, range_limit=12)
SHORT = (
    *JOB,
    *"--num-layers 2 --pipeline-model-parallel-size 1".split(),
)


def paced(host_seconds: float) -> Constants:
    """The constants on a host that takes so long for a launch."""
    gpus = {name: dataclasses.replace(gpu, host_seconds=host_seconds) for name, gpu in CONSTANTS.gpus.items()}
    return dataclasses.replace(CONSTANTS, gpus=gpus)


@cache
def tuned(*words: str, host: float = HOST, slower: float = 4.0) -> Tuned:
    return tune([*SHORT, *words], slow_links(slower), LIMITS, 0.5, graphs=by_hand, constants=paced(host))


def test_a_plan_that_was_found_without_graphs_names_what_they_would_gain() -> None:
    found = tuned()
    assert found.chosen.prediction is not None and GRAPHS not in found.arguments
    assert found.graphs is not None and found.graphs.other is not None and not found.graphs.is_on
    other = found.graphs.other.predicted.step_seconds
    assert other < 0.97 * found.chosen.seconds
    (line,) = graphs_lines(found.graphs, found.chosen.prediction)
    assert f"({other / found.chosen.seconds - 1:+.1%})" in line and "search again with the flag" in line
    assert "not run on hardware" in line and f"graphs      {line}" in tuned_lines(found, Path("x"), slow_links(4.0))
    assert tuned_json(found)["graphs"]["other_step_seconds"] == other
    # Transformer Engine's split of weight gradients is not replayed, so neither is a plan that needs it.
    problem = problem_of(SHORT, slow_links(4.0), {"graphs": by_hand, "constants": paced(HOST)}).replaying(True)
    candidates = [each for each in (found.chosen, *found.others) if each.prediction is not None]
    (replayed,) = (each for each in candidates if each.name == found.graphs.name)
    assert DEFERRED not in replayed.name
    assert other == predict_plan(replayed.decided, problem).predicted.step_seconds


def test_what_the_flags_ask_for_is_searched_with_and_written(tmp_path: Path) -> None:
    plain, found = tuned(), tuned(GRAPHS)
    assert found.graphs is not None and found.graphs.is_on and found.graphs.other is not None
    assert GRAPHS in found.arguments and GRAPHS not in found.dropped
    assert found.chosen.seconds < min(found.graphs.other.predicted.step_seconds, 0.97 * plain.chosen.seconds)
    # The runtime refuses Transformer Engine's split of weight gradients among graphs.
    deferring = [other for other in (found.chosen, *found.others) if DEFERRED in other.name]
    assert all(other.refused for other in deferring) and NOT_REPLAYED in {other.refused for other in deferring}
    write_run(tmp_path, found)
    words = [f"@{tmp_path / 'megatron_args.txt'}"]
    again = predict(words, slow_links(4.0), graphs=by_hand, constants=paced(HOST))
    assert again.predicted.step_seconds == pytest.approx(found.chosen.seconds, rel=1e-9)


def test_the_time_that_launches_take_is_told_as_a_prediction_of_the_written_flags_tells_it(tmp_path: Path) -> None:
    found = tuned()
    write_run(tmp_path, found)
    again = predict([f"@{tmp_path / 'megatron_args.txt'}"], slow_links(4.0), graphs=by_hand, constants=paced(HOST))
    assert found.launching is not None and again.launching is not None
    assert found.launching.seconds == pytest.approx(again.launching.seconds, rel=1e-9) and again.launching.seconds > 0
    share = 100 * found.launching.seconds / found.chosen.seconds
    (waiting,) = (line for line in tuned_lines(found, None, slow_links(4.0)) if line.startswith("waiting"))
    assert f"idle {share:.1f} % because the CPU launches kernels too slowly" in waiting


def test_megatron_cores_own_modules_defer_among_graphs() -> None:
    found = tuned(GRAPHS, "--transformer-impl", "local")
    deferring = [other for other in (found.chosen, *found.others) if DEFERRED in other.name]
    assert any(other.prediction is not None for other in deferring)


def test_what_a_graph_does_not_hold_is_refused_and_a_plan_without_lists_goes_without() -> None:
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 2: its collectives run inside operators"):
        tuned(GRAPHS, *"--tensor-model-parallel-size 2 --sequence-parallel".split())
    refused = tuned(*"--tensor-model-parallel-size 2 --sequence-parallel".split()).graphs
    assert refused is not None and refused.other is None and "--tensor-model-parallel-size 2" in refused.refused
    plain = tuned(GRAPHS, host=0.0, slower=0.01)
    assert plain.chosen.name == PLAIN and plain.graphs is None
    assert GRAPHS in plain.dropped and GRAPHS not in plain.arguments


def test_a_search_of_plans_keeps_the_flag_and_its_files_are_predicted_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--num-experts 16 --moe-ffn-hidden-size 8191 --global-batch-size 64".split()
    settings = SearchSettings(solver_seconds=0.5, overlap_limits=LIMITS)
    options = {**OPTIONS, "constants": paced(1e-4)}
    with_graphs = search_plan([*SMALL, *words, GRAPHS], at_speed(150.0), settings, **options)
    assert with_graphs.tuned is not None and with_graphs.tuned.graphs is not None
    assert GRAPHS in with_graphs.written.flags and GRAPHS not in dict(with_graphs.written.left_out)
    assert search_json(with_graphs)["graphs"]["replayed"]
    # All that stands beside the answer is priced as the answer is.
    (chosen, *_) = competitors(with_graphs)
    for plan, problem in ((with_graphs.plan, with_graphs.problem), (chosen.plan, chosen.problem)):
        again = estimate_plan(plan, problem).predicted.step_seconds
        assert again == pytest.approx(with_graphs.prediction.predicted.step_seconds, rel=1e-9)
    assert with_graphs.launching is not None
    without = launching_of(with_graphs.plan, with_graphs.chosen.problem, again, {})
    assert with_graphs.launching.seconds < 0.9 * without.seconds
    assert named_graphs(with_graphs) == (True, False)
    # Without the flag the answer names graphs where they gain something, elsewhere --verbose does.
    predicted = with_graphs.prediction.predicted
    for times, is_named in ((0.9, True), (1.0, False), (1.1, False)):
        step = dataclasses.replace(predicted, step_seconds=times * predicted.step_seconds)
        other = GraphsChoice(is_on=False, name="A", other=dataclasses.replace(with_graphs.prediction, predicted=step))
        assert named_graphs(dataclasses.replace(with_graphs, graphs=other)) == (is_named, not is_named)
    write_search(tmp_path, with_graphs)
    monkeypatch.chdir(tmp_path)
    again = predict(["@megatron_args.txt"], at_speed(150.0), **options)
    assert again.predicted == with_graphs.prediction.predicted


def named_graphs(search: PlanSearch) -> tuple[bool, bool]:
    """Whether the answer of a search has a line on graphs, and whether --verbose adds one."""
    lines = closing_lines(search, Path("x"), []), detail_lines(search)
    answer, details = (any(line.startswith("graphs ") for line in each) for each in lines)
    return answer, details


def finalist(name: str, seconds: float) -> Finalist:
    problem = problem_of(SHORT, slow_links(4.0), {"graphs": by_hand, "constants": paced(HOST)})
    prediction = predict_plan(problem.plan, problem)
    faster = dataclasses.replace(prediction.predicted, step_seconds=seconds)
    prediction = dataclasses.replace(prediction, predicted=faster)
    return Finalist(name=name, problem=problem, prediction=prediction, arguments=SHORT, plan_arguments=())


def test_a_search_that_overlaps_nothing_still_names_graphs() -> None:
    """A plain plan is faster than the other's overlap, so that nothing is overlapped; with graphs it would be."""
    options = {"graphs": by_hand, "constants": paced(HOST)}
    finalists = [finalist("A", 1e-3)]
    search = OverlapSearch(read=lambda ranked: finalists[0], cluster=slow_links(4.0), limits=LIMITS, solver_seconds=0.5)
    found = decide_overlaps(finalists, lambda bar: [], search, **options)
    assert found.tuned is None and found.graphs is not None and not found.graphs.is_on
    assert found.graphs.name.startswith("A, ") and found.graphs.other is not None
    asked = decide_overlaps(finalists, lambda bar: [], dataclasses.replace(search, replays=True), **options)
    assert asked.tuned is None and asked.graphs is None


def test_whole_micro_batches_are_an_answer_where_they_are_replayed(tmp_path: Path) -> None:
    """A step of one micro-batch has no two, and a slow host none to launch partitions; the run accepts the plan."""
    one = ("--global-batch-size", "64")
    found, plain = tuned(GRAPHS, *one, slower=0.01, host=1e-3), tuned(*one, slower=0.01, host=1e-3)
    assert found.chosen.name == WHOLE and found.chosen.seconds < 0.99 * found.plain_seconds
    assert plain.chosen.name != WHOLE and WHOLE not in {other.name for other in plain.others if not other.refused}
    assert plain.graphs is not None and plain.graphs.name == WHOLE
    write_run(tmp_path, found)
    words = [
        *expand_files([f"@{tmp_path / 'megatron_args.txt'}"]),
        *"--mock-data --tokenizer-type NullTokenizer".split(),
    ]
    validate(with_plan(parse(words), 16).config, 16)
