"""What an answer suggests was predicted: each change has the step and the bytes of the job with its flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import moe_overlap.alternatives as alternatives
from megatron.training.cli.arguments import expand_files
from moe_overlap.alternatives import NotCaptured, alternatives_of
from moe_overlap.api import PredictedJob, predict_job, read_job
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.serialize import save_plan
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


@pytest.mark.parametrize(("seconds", "begun"), [(0.0, 4), (0.5, 2), (2.0, 1)])
def test_no_change_is_begun_after_a_few_seconds(seconds: float, begun: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction that takes so many times the budget leaves time for so many."""
    arguments, prediction = [*expand_files(EXAMPLE), *AGAIN], job_of().prediction
    plan, changes, now = read_job(arguments, 64).plan, [], [0.0]
    monkeypatch.setattr(alternatives.time, "monotonic", lambda: now[0])

    def predict(changed: Sequence[str]) -> Prediction:
        changes.append(changed)
        now[0] += seconds * alternatives.BUDGET_SECONDS
        return prediction

    assert len(alternatives_of(arguments, plan, None, (), True, predict)) == len(changes) == begun


@pytest.mark.parametrize(
    "flags",
    [
        AGAIN,
        ["--recompute-granularity=full", *AGAIN[2:]],
        ["--recompute-activations"],
        ["--moe-layer-recompute"],
    ],
)
def test_recomputation_is_dropped_however_it_is_written(flags: list[str]) -> None:
    arguments, prediction = list(expand_files(EXAMPLE)), job_of().prediction
    changes: list[Sequence[str]] = []
    plan = read_job([*arguments, *AGAIN], 64).plan
    found = alternatives_of(
        [*arguments, *flags], plan, None, (), True, lambda changed: changes.append(changed) or prediction
    )
    (again,) = (change for change in found if change.name == "no recomputation")
    assert again.flags.split() == ["without", *(word.partition("=")[0] for word in flags if word.startswith("--"))]
    assert grouped(tuple(changes[0])) == grouped(tuple(arguments))


def test_an_overlap_is_suggested_beside_flags_that_it_replaces() -> None:
    """With the library's dispatcher in the flags the change would be refused, and never be suggested."""
    names = {
        change.name
        for change in job_of("--moe-enable-deepep", "--moe-token-dispatcher-type", "flex").prediction.alternatives
    }
    assert "overlapped all-to-alls" in names


def test_layouts_that_are_not_captured_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would have to wait for a capture is told of it by `tell`, which ends the prediction."""

    def captured(*arguments: object, tell: Callable[[str], None] | None = None) -> object:
        if tell is not None:
            tell("capturing")
        return by_hand(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("moe_overlap.api.cached_graphs", captured)
    assert job_of().prediction.alternatives == ()


def test_a_plan_of_a_file_and_one_that_does_not_fit_have_no_alternatives(tmp_path: Path) -> None:
    small = predict_job(EXAMPLE, shipped_cluster("L4", 64), {}).prediction
    assert not small.fits and not small.alternatives
    file = tmp_path / "plan.json"
    save_plan(read_job(EXAMPLE, 64).plan, file)
    assert job_of().prediction.alternatives and not job_of("--plan", str(file)).prediction.alternatives
    decided = predict_job(EXAMPLE, shipped_cluster("H100", 64), {"plan": str(file)}).prediction
    assert not decided.alternatives
