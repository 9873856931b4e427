"""Seconds of a step that are due to launching from the host, and the CUDA graphs that answers name for it."""

from __future__ import annotations

import pytest

from moe_overlap.api import predict, problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.answer import Answer, answer_lines
from moe_overlap.report.prediction import prediction_json
from moe_overlap.report.search import answer_of, search_json
from moe_overlap.tuner.cost.analytic import Prediction
from tests.unit.plan_search.test_plan_search import OPTIONS, SMALL
from tests.unit.tuner.cost.test_cost_predict import JOB, by_hand
from tests.unit.tuner.search.test_graphs_are_tuned import GRAPHS, SHORT, paced
from tests.unit.tuner.search.test_overlap_tuning import slow_links

SLOW, FAST = 4e-4, 1e-9
"""Seconds of a launch that the device waits for, and of one that it does not."""
UPSTREAM = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn", "moe_router")
CLUSTER = shipped_cluster("H100", 16)


def predicted(*words: str, host: float = SLOW) -> Prediction:
    return predict([*JOB, *words], CLUSTER, graphs=by_hand, constants=paced(host))


def lines(prediction: Prediction, *words: str) -> list[str]:
    plan = problem_of([*JOB, *words], CLUSTER, {"graphs": by_hand}).plan
    return answer_lines(Answer(plan=plan, prediction=prediction, cluster=CLUSTER))


def test_launches_cost_what_a_host_that_launches_for_nothing_would_save() -> None:
    slow, at_once = predicted(), predicted(host=0.0)
    assert slow.launching is not None and at_once.launching is not None and at_once.launching.seconds == 0.0
    assert slow.launching.seconds == pytest.approx(slow.predicted.step_seconds - at_once.predicted.step_seconds)
    assert slow.launching.seconds > 0.2 * slow.predicted.step_seconds
    share = f"{100 * slow.launching.seconds / slow.predicted.step_seconds:.1f} % because the CPU launches kernels too slowly"
    assert any(line.startswith("waiting ") and line.endswith(share) for line in lines(slow))
    assert prediction_json(slow)["launching"]["seconds"] == slow.launching.seconds


def test_graphs_that_megatron_has_are_named_with_the_step_that_their_flags_are_predicted_to_have() -> None:
    found = predicted()
    assert found.launching is not None and found.launching.graph_flags == UPSTREAM
    graphed = predicted(*UPSTREAM)
    assert found.launching.graphed_seconds == graphed.predicted.step_seconds < found.predicted.step_seconds
    (change,) = (change for change in found.alternatives if change.flags == " ".join(UPSTREAM))
    assert change.step_seconds == graphed.predicted.step_seconds and change.high_bytes is None
    assert change.name == "CUDA graphs (Megatron-LM's, not this fork's)"
    # What has them is not advised to have them.
    assert graphed.launching is not None and graphed.launching.graph_flags == ()


def test_graphs_that_megatron_refuses_are_not_named() -> None:
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    found = predicted(*words.split())
    assert found.launching is not None and found.launching.seconds > 0
    assert found.launching.graph_flags == () and found.launching.graphed_seconds is None
    assert not any("cuda-graph" in line for line in lines(found, *words.split()))


def test_a_host_that_is_fast_enough_is_not_spoken_of() -> None:
    found = predicted(host=FAST)
    assert found.launching is not None and found.launching.graph_flags == ()
    assert not any("host" in line for line in lines(found))


def test_lists_are_predicted_with_graphs_of_their_own() -> None:
    words = (*SHORT, *"--moe-overlap-partitions 2 --moe-gate topk --moe-token-dispatcher-type irregular".split())
    cluster, given = slow_links(4.0), {"graphs": by_hand, "constants": paced(1.5e-4)}
    found, replayed = predict(words, cluster, **given), predict([*words, GRAPHS], cluster, **given)
    assert found.launching is not None and found.launching.graph_flags == (GRAPHS,)
    assert found.launching.graphed_seconds == pytest.approx(replayed.predicted.step_seconds)
    assert replayed.launching is not None and replayed.launching.graph_flags == ()
    assert any((change.flags, "not yet run" in change.name) == (GRAPHS, True) for change in found.alternatives)


def test_a_search_says_what_its_plan_waits_for() -> None:
    options = {**OPTIONS, "constants": paced(SLOW)}
    found = search_plan(SMALL, CLUSTER, SearchSettings(target="megatron-lm"), **options)
    assert found.launching is not None and found.launching.seconds > 0
    assert search_json(found)["launching"]["seconds"] == found.launching.seconds
    assert any("the CPU launches kernels too slowly" in line for line in answer_lines(answer_of(found)))
