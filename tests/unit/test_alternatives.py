"""What an answer suggests was predicted: each change has the step and the bytes of the job with its flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import moe_overlap.alternatives as alternatives
from megatron.training.cli.arguments import expand_files
from moe_overlap.alternatives import NotCaptured, alternatives_of
from moe_overlap.api import PredictedJob, predict_job, read_job
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.report.prediction import prediction_json
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.host import Launching
from tests.unit.tuner.cost.test_cost_predict import by_hand

EXAMPLE = [f"@{Path(__file__).resolve().parents[2] / 'examples/mixtral-8x7b.args'}"]
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


@pytest.fixture(autouse=True)
def hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_overlap.api.cached_graphs", by_hand)


def job_of(*more: str) -> PredictedJob:
    return predict_job([*EXAMPLE, *more], shipped_cluster("H100", 64), {})


def test_every_change_has_the_prediction_of_its_flags() -> None:
    predicted = job_of(*AGAIN, "--micro-batch-size", "2")
    found = {change.name: change for change in predicted.prediction.alternatives}
    assert set(found) == {
        "no recomputation",
        "a larger micro-batch",
        "two model chunks a stage",
        "overlapped all-to-alls",
    }
    flags = {name: change.flags.split() for name, change in found.items()}
    for name in set(found) - {"no recomputation"}:
        alone = job_of(*AGAIN, "--micro-batch-size", "2", *flags[name]).prediction
        assert found[name].step_seconds == pytest.approx(alone.predicted.step_seconds)
        assert (found[name].high_bytes, found[name].fits) == (alone.fullest.high_bytes, alone.fits)
    without = job_of("--micro-batch-size", "2").prediction
    assert flags["no recomputation"] == ["without", *(word for word in AGAIN if word.startswith("--"))]
    assert found["no recomputation"].step_seconds == without.predicted.step_seconds
    steps = [change.step_seconds for change in predicted.prediction.alternatives]
    assert steps == sorted(steps)
    assert prediction_json(predicted.prediction)["alternatives"][0]["step_seconds"] == steps[0]


def predict_none(changed: Sequence[str]) -> Prediction:
    raise NotCaptured("a layout")


def predict_nothing(changed: Sequence[str]) -> Prediction:
    raise ConfigError("--flag", "", "refused", "drop it")


@pytest.mark.parametrize("predict", [predict_none, predict_nothing])
def test_what_is_refused_or_not_captured_is_not_suggested(predict: alternatives.Predict) -> None:
    plan = read_job(EXAMPLE, 64).plan
    arguments = list(expand_files(EXAMPLE))
    assert alternatives_of(arguments, plan, None, (), True, predict) == ()
    graphs = Launching(seconds=0.3, graph_flags=("--cuda-graph-impl", "local"), graphed_seconds=2.5)
    (only,) = alternatives_of(arguments, plan, graphs, (), True, predict)
    assert (only.flags, only.step_seconds, only.high_bytes) == ("--cuda-graph-impl local", 2.5, None)


def test_an_answer_waits_for_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plan = read_job([*EXAMPLE, *AGAIN], 64).plan

    def predict(changed: Sequence[str]) -> Prediction:
        asked.append(changed)
        monkeypatch.setattr(alternatives, "BUDGET_SECONDS", 0.0)
        return job_of().prediction

    assert alternatives_of([], plan, None, (), True, predict) and len(asked) > 2
    assert alternatives_of([], plan, None, (), True, predict) == ()


def test_a_plan_of_a_file_and_one_that_does_not_fit_have_no_alternatives() -> None:
    small = predict_job(EXAMPLE, shipped_cluster("L4", 64), {}).prediction
    assert not small.fits and not small.alternatives
