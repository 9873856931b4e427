"""`from moe_overlap import predict, tune, Cluster`: shorthand, results, and the examples in their docstrings."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

import moe_overlap
import moe_overlap.api as api
import moe_overlap.results as results
from moe_overlap import Cluster, predict, tune
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.job import named_by, read_job
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import PlanSearch, Tuned
from moe_overlap.results import TunedPlan
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL, searched
from tests.unit.tuner.cost.test_cost_predict import by_hand

ROOT = Path(__file__).resolve().parents[2]
MIXTRAL = ROOT / "examples" / "mixtral-8x7b.args"
asked: list[tuple[list[str], Cluster, SearchSettings]] = []


@pytest.fixture(autouse=True)
def hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(words: list[str], cluster: Cluster, settings: SearchSettings, **_: object) -> PlanSearch:
        asked.append((words, cluster, settings))
        return searched("megatron-lm")

    asked.clear()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    monkeypatch.setattr(results, "search_plan", search)


@pytest.mark.parametrize("function", ["predict", "tune"])
def test_the_examples_of_the_docstrings(function: str) -> None:
    (example,) = doctest.DocTestFinder().find(getattr(results, function), function, globs={})
    ended = doctest.DocTestRunner().run(example)
    assert ended.attempted >= 4 and ended.failed == 0


def test_the_shorthand_says_what_flags_and_cluster_say() -> None:
    run = predict(MIXTRAL, gpu="h100", num_gpus=64)
    before = api.predict([f"@{MIXTRAL}"], shipped_cluster("H100", 64))
    assert run.predicted == before.predicted and run.breakdown == before.breakdown
    again = predict([f"@{MIXTRAL}"], shipped_cluster("H100", 64))
    assert again == run and again.step_seconds == before.predicted.step_seconds
    assert again.tokens_per_second_per_gpu == before.predicted.tokens_per_second_per_gpu
    assert predict(str(MIXTRAL), gpu="H100", num_gpus=64, memory_margin=0.99).memory.margin == 0.99
    assert moe_overlap.Cluster is Cluster


def test_the_plan_is_the_one_that_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that the options give; it is read first, then once for each change that could be advised."""
    words = [word for line in MIXTRAL.read_text().splitlines() for word in line.partition("#")[0].split()]
    read: list[object] = []
    monkeypatch.setattr(api, "read_job", lambda *given, **more: read.append(given) or read_job(*given, **more))
    run = predict(words, gpu="H100", num_gpus=64, name="my-model")
    assert run.plan.model.name == "my-model"
    assert 1 <= len(read) <= 1 + 4 and len(read) >= 1 + len(run.alternatives)


def test_a_model_has_the_name_of_its_file() -> None:
    names = [named_by([f"@{file}"]) for file in ("examples/mist-gpt-2.7b.args", "run.sh", "a.d/flags")]
    assert names == ["mist-gpt-2.7b", "run", "flags"] and named_by(["--num-layers", "2"]) is None


def test_a_prediction_is_read_shown_and_written(tmp_path: Path) -> None:
    run = predict(MIXTRAL, gpu="H100", num_gpus=64)
    assert repr(run).startswith(
        "plan        64 GPUs = 4 pipeline stages × TP 2 × DP 8; "
    ) and "\nmemory      fits: " in repr(run)
    (row,) = run.frame.to_dict("records")
    assert row["step_seconds"] == run.step_seconds and row["optimizer_seconds"] == run.breakdown["optimizer_seconds"]
    assert run.interval == (row["low_seconds"], row["high_seconds"]) and row["low_seconds"] < run.step_seconds
    figures = run.to_dict()
    assert all(row[name] == figures[name] for name in ("tokens_per_second_per_gpu", "model_tflops_per_gpu", "mfu"))
    assert figures["interval"]["high_seconds"] == row["high_seconds"]
    page = run._repr_html_()
    assert page.startswith("<pre>plan ") and "<table" in page and "optimizer_seconds" in page
    assert run.write(tmp_path / "run") == ["plan.json", "prediction.json"]
    assert json.loads((tmp_path / "run" / "prediction.json").read_text()) == json.loads(json.dumps(figures))
    assert load_plan(tmp_path / "run" / "plan.json").stages == run.plan.stages
    with pytest.raises(ConfigError, match=r"cannot be written"):
        run.write(MIXTRAL)


def test_a_tuned_plan_is_read_shown_and_written(tmp_path: Path) -> None:
    tuned = tune(SMALL, gpu="H100", num_gpus=8, target="megatron-lm", search_space="megatron", time_limit=60)
    assert isinstance(tuned, TunedPlan)
    (words, cluster, settings) = asked[0]
    assert words == SMALL and cluster == H100
    assert (settings.target, settings.space, settings.seconds) == ("megatron-lm", "megatron", 60)
    search = searched("megatron-lm")
    assert tuned.plan == search.plan and tuned.step_seconds == search.prediction.predicted.step_seconds
    assert tuned.arguments == search.written.arguments
    figures = json.loads(json.dumps(tuned.to_dict()))
    assert figures["step_seconds"] == tuned.step_seconds and figures["arguments"] == tuned.arguments
    assert tuned.interval is not None and list(tuned.interval) == [
        figures["interval"][name] for name in ("low_seconds", "high_seconds")
    ]
    kinds = tuned.frame.kind.value_counts()
    assert kinds["chosen"] == 1 and kinds["runner-up"] == len(search.others)
    assert kinds["frontier"] == len(search.uniform.frontier)
    assert repr(tuned).startswith("plan  ") and "\nrunner-up " in repr(tuned)
    assert "frontier" in tuned._repr_html_()
    assert set(tuned.write(tmp_path / "tuned")) == {path.name for path in (tmp_path / "tuned").iterdir()}


def test_limits_ask_for_the_overlap_alone() -> None:
    limits = SearchLimits(max_partitions=2, group_seconds=1e-3, range_limit=2)
    tuned = tune(SMALL, H100, limits, 0.2, **OPTIONS)
    assert isinstance(tuned, Tuned) and not asked


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"^gpu: the machines are unknown; give gpu and num_gpus, or cluster"):
        predict(MIXTRAL)
    with pytest.raises(ConfigError, match=r"^cluster H100-8: stands beside gpu or num_gpus"):
        predict(MIXTRAL, H100, gpu="H100")
    with pytest.raises(ConfigError, match=r"^gpu H1000: unknown GPU; did you mean H100 or"):
        tune(SMALL, gpu="H1000", num_gpus=8)
    with pytest.raises(ConfigError, match=r"^time_limit 0: must be greater than 0 seconds"):
        tune(SMALL, gpu="H100", num_gpus=8, time_limit=0)
    with pytest.raises(ConfigError, match=r"^traces t.json: they refine the overlap of one layout"):
        tune(SMALL, H100, traces=["t.json"])  # type: ignore[call-overload]


ON = {"gpu": "H100", "num_gpus": 64}
LIST = 'give ["--num-layers", "4", ...], or the path of a file'


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"precission": "fp8"}, "precission 'fp8': is no option; did you mean precision?"),
        ({"tme_limit": 3}, "tme_limit 3: is no option; did you mean time_limit?"),
        ({"target": "megatron"}, "target megatron: unknown choice; use moe-overlap, megatron-lm or any"),
        ({"precision": "fp7"}, 'precision "fp7": unknown choice; use one of fp32, bf16, fp16, fp8, mxfp8, nvfp4'),
        (
            {"software": 26},
            "software 26: must be a string without control characters; write a string without control characters",
        ),
        (
            {"plan": {}},
            "plan {}: must be a string without control characters; write a string without control characters",
        ),
        ({"memory_margin": "0.9"}, 'memory_margin "0.9": must be a finite number; write a finite number'),
        ({"num_gpus": "64"}, "num_gpus '64': is no whole number from 1; give one such as 8"),
        ({"num_gpus": True}, "num_gpus True: is no whole number from 1; give one such as 8"),
        ({"gpu": 100}, 'gpu 100: is no name of a GPU; give a text such as "H100"'),
        (
            {"cluster": "nowhere.json"},
            "cluster 'nowhere.json': is no Cluster; use moe_overlap.describe.cluster.load_cluster(path), or gpu and num_gpus",
        ),
        ({"args": None}, f"args None: is of type NoneType, and flags are a list of texts; {LIST}"),
        (
            {"args": {"num_layers": 4}},
            f"args {{'num_layers': 4}}: is of type dict, and flags are a list of texts; {LIST}",
        ),
        ({"args": ["--num-layers", 4]}, 'args 4: is of type int, and flags are text; write "4"'),
        ({"time_limit": "3"}, "time_limit 3: must be greater than 0 seconds; drop it to search all"),
    ],
    ids=str,
)
def test_an_option_that_there_is_not_answers_nothing(given: dict[str, object], line: str) -> None:
    words = {"args": MIXTRAL, **ON, **given}
    calls = [tune] if given.keys() & {"target", "tme_limit", "time_limit"} else [tune, predict]
    for call in calls:
        with pytest.raises(moe_overlap.ConfigError) as error:
            call(**words)  # type: ignore[call-overload, arg-type, operator]
        assert str(error.value) == line
    assert asked == []


def test_what_is_typed_is_said_to_be() -> None:
    assert (ROOT / "moe_overlap" / "py.typed").is_file() and '"moe_overlap": ["py.typed"]' in (
        ROOT / "setup.py"
    ).read_text()
