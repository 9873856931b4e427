"""`--memory-margin`: quantiles of errors of memory, and the verdicts that follow them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

import pytest

import moe_overlap.api as api
from moe_overlap.commands import autotune, predict
from moe_overlap.describe.cluster import GIB
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants
from moe_overlap.tuner.cost.memory_errors import MemoryErrors, student_quantile
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL
from tests.unit.tuner.cost.test_cost_predict import by_hand

pytestmark = pytest.mark.usefixtures("whole_memory")

ROOT = Path(__file__).resolve().parents[4]
JOB = ["--megatron-args", str(ROOT / "examples" / "mixtral-8x7b.args"), "--gpu", "H100", "--num-gpus", "64"]


@pytest.mark.parametrize(
    ("quantile", "freedom", "expected"),
    # Tables of Student's distribution.
    [
        (0.95, 1, 6.3138),
        (0.95, 2, 2.9200),
        (0.99, 3, 4.5407),
        (0.9, 4, 1.5332),
        (0.95, 12, 1.7823),
        (0.995, 12, 3.0545),
        (0.999, 13, 3.8520),
    ],
)
def test_quantiles_of_students_distribution(quantile: float, freedom: int, expected: float) -> None:
    assert student_quantile(quantile, freedom) == pytest.approx(expected, abs=6e-5)
    assert student_quantile(1 - quantile, freedom) == pytest.approx(-expected, abs=6e-5)
    normal = statistics.NormalDist().inv_cdf(quantile)
    assert student_quantile(quantile, 4000) == pytest.approx(normal, rel=2e-3)
    assert student_quantile(0.5, freedom) == pytest.approx(0.0, abs=1e-12)


def test_the_shipped_quantiles_are_those_of_the_shipped_errors() -> None:
    constants = shipped_constants()
    assert constants.memory_errors is not None
    assert constants.memory_errors.quantiles(0.95) == constants.memory
    assert constants.with_margin(None) is constants and constants.with_margin(0.95) is constants
    factors = [constants.with_margin(margin).memory.high for margin in (0.01, 0.05, 0.5, 0.9, 0.95, 0.99, 0.999999)]
    memory, middle = constants.memory, math.exp(constants.memory_errors.mean)
    assert (
        factors == sorted(factors) and factors[0] < memory.low < 1 < memory.high < factors[-2] < factors[-1] < math.inf
    )
    assert factors[1] == constants.memory.low
    half = constants.with_margin(0.5).memory
    assert half == MemoryQuantiles(low=memory.low, high=pytest.approx(middle, abs=5e-3), margin=0.5)


@pytest.mark.parametrize("margin", [0.0, 1.0, 1.2, -0.5, math.nan])
def test_what_is_no_quantile_is_refused(margin: float) -> None:
    with pytest.raises(ConfigError, match=f"^--memory-margin {margin}: must be a quantile, between 0 and 1; use 0.95"):
        shipped_constants().with_margin(margin)


def test_a_machine_without_known_errors_takes_no_other_margin() -> None:
    with pytest.raises(ConfigError, match="--memory-margin 0.9: no errors of predicted memory were measured"):
        Constants({}).with_margin(0.9)
    assert Constants({}).with_margin(0.95).memory == MemoryQuantiles()


def test_a_prediction_fits_or_not_as_its_margin_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    needed = {}
    for margin in ("0.5", "0.95", "0.999"):
        assert predict.main([*JOB, "--memory-margin", margin, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["memory_margin"] == float(margin)
        needed[margin] = answer["fullest_stage"]["high_bytes"] / answer["fullest_stage"]["needed_bytes"]
    memory = shipped_constants().memory
    assert needed["0.5"] < needed["0.95"] < needed["0.999"] and needed["0.95"] == pytest.approx(memory.high)
    assert needed["0.5"] == pytest.approx(shipped_constants().with_margin(0.5).memory.high)
    assert predict.main([*JOB, "--memory-margin", "0.999"]) == 0
    assert "(99.9 %), of " in capsys.readouterr().out
    for tool in (lambda words: predict.main(words), lambda words: autotune.main([*words, "--output", "never"])):
        assert tool([*JOB, "--memory-margin", "1.2"]) == 2
        assert capsys.readouterr().err == "error: --memory-margin 1.2: must be a quantile, between 0 and 1; use 0.95\n"


def test_a_search_keeps_what_fits_with_its_margin() -> None:
    """The capacity lies between two quantiles of the smallest plan: it fits with the lower margin alone."""
    errors = MemoryErrors(mean=0.0, deviation=0.2, runs=13)
    constants = dataclasses.replace(OPTIONS["constants"], memory=errors.quantiles(), memory_errors=errors)
    options = {**OPTIONS, "constants": constants}
    settings = SearchSettings(target="megatron-lm", space="megatron", has_baseline=False)
    words = [
        *SMALL,
        "--moe-shared-expert-overlap",
    ]  # of no shared expert: keeps a faster overlap out, which needs more memory
    found = search_plan(words, H100, settings, **options).uniform
    smallest = min(plan.needed_bytes for plan in found.frontier) / GIB
    group = H100.groups[0]
    tight = dataclasses.replace(
        H100, groups=(dataclasses.replace(group, gpu=dataclasses.replace(group.gpu, memory_gib=1.2 * smallest)),)
    )
    chosen = search_plan(words, tight, settings, memory_margin=0.6, **options).prediction
    assert chosen.fits and chosen.memory.margin == 0.6
    with pytest.raises(ConfigError) as refused:
        search_plan(words, tight, settings, **options)
    # What the smallest plan may need is more than what there is, though its prediction is less.
    text = r"no plan fits the ([\d.]+) GiB .* needs up to ([\d.]+) with 95 % certainty"
    room, needed = map(float, re.findall(text, str(refused.value))[0])
    assert smallest < room < needed
