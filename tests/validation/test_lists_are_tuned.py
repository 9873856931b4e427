"""`tools/autotune.py` answers for the argument lists of real MoE jobs, and loses none of their flags without a word.

Graphs are written by hand and few layouts are searched: what is shown is that every list goes through, not how good its plan is.
The record of whole searches is made by `python -m tools.tune_lists`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import moe_overlap.plan_search.search as plan_search
import moe_overlap.plan_search.task as search_task
from megatron.training.cli.arguments import expand_files
from moe_overlap.api import arguments_to_run
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.job import read_job
from moe_overlap.plan_search.flags import Target
from moe_overlap.plan_search.overlapped import Overlapped
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import closing_lines
from moe_overlap.tuner.search.space import Run, UniformLayout, uniform_layouts
from moe_overlap.tuner.write.argument_file import layout_flags
from tests.unit.tuner.cost.test_cost_predict import by_hand
from tools.bench.real_lists import LISTS, answer
from tools.tune_lists import record, smallest

MOE = {entry["name"]: entry for entry in json.loads(LISTS.read_text(encoding="utf-8")) if entry["moe"]}
BY_HAND = ("--mtp-num-layers", "0", "--recompute-granularity", "full", "--recompute-method", "uniform")
"""What hand-written graphs do not have: prediction layers and modules that are recomputed."""
OVERLAP = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-token-dispatcher-type flex".split()
HYBRIDEP = ("--moe-flex-dispatcher-backend", "hybridep", "--moe-hybridep-num-sms", "16")
DEEPEP = ("--moe-enable-deepep", "--moe-deepep-num-sms", "16")


def few_layouts(model: ModelDescription, run: Run) -> list[UniformLayout]:
    plain = [layout for layout in uniform_layouts(model, run) if layout.context == 1 and layout.micro_batch == 1]
    return plain[:: max(1, len(plain) // 4)]


def tuned(words: Sequence[str], gpus: int, monkeypatch: pytest.MonkeyPatch, target: Target) -> PlanSearch:
    monkeypatch.setattr(search_task, "uniform_layouts", few_layouts)
    monkeypatch.setattr(search_task, "MODULE_SETS", 0)
    monkeypatch.setattr(
        plan_search, "decide_overlaps", lambda finalists, *_, **__: Overlapped(chosen=finalists[0], tuned=None)
    )
    settings = SearchSettings(target=target, has_baseline=False)
    return search_plan(words, shipped_cluster("H100", gpus), settings, graphs=by_hand)


def lost(words: Sequence[str], search: PlanSearch) -> list[str]:
    """Flags that the plan does not decide, that are not among its run's with their values, and of which nothing is said."""
    left, written = grouped(search.written.arguments), search.written
    told = {name for name, reason in written.left_out if reason and name in written.text}
    return [
        name
        for name, values in grouped(words).items()
        if left.get(name) != values and name not in layout_flags() and name not in told
    ]


def check(name: str, monkeypatch: pytest.MonkeyPatch, more: Sequence[str] = ()) -> None:
    words = [*MOE[name]["arguments"], *BY_HAND, "--recompute-num-layers", "1", *more]
    words = [word for word in words if not word.startswith("Et")]
    words = [word for word in words if word != "--pipeline-model-parallel-layout"]  # Of prediction layers, too.
    gpus = smallest(MOE[name]["arguments"])
    targets: tuple[Target, ...] = ("moe-overlap", "megatron-lm")
    for target in targets:
        search = tuned(words, gpus, monkeypatch, target)
        assert lost(words, search) == []
        read_job(search.written.arguments, gpus)
        told = [line for line in closing_lines(search, Path("out"), ()) if line.startswith("without ")]
        assert len(told) == len(search.written.left_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_every_list_is_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if answer(MOE[name]).refused is None:
        check(name, monkeypatch)


def test_upstreams_overlap_makes_way_for_ours_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = MOE["gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer"]["arguments"]
    here = tuned([*words, *OVERLAP, *HYBRIDEP], 8, monkeypatch, "moe-overlap")
    assert lost([*words, *OVERLAP, *HYBRIDEP], here) == []
    left_out = dict(here.written.left_out)
    assert set(left_out) == {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"}
    assert "instruction lists" in left_out["--delay-wgrad-compute"]
    assert "# left out" in here.written.text and "--delay-wgrad-compute: this fork defers" in here.written.text
    upstream = tuned([*words, *OVERLAP, *HYBRIDEP], 8, monkeypatch, "megatron-lm")
    kept = grouped(upstream.written.arguments)
    assert {*OVERLAP[:2], "--moe-hybridep-num-sms"} <= set(kept) and upstream.written.left_out == ()


@pytest.mark.parametrize("dispatcher", [HYBRIDEP, DEEPEP])
def test_a_listed_run_goes_without_the_flags_of_another_dispatcher(dispatcher: Sequence[str]) -> None:
    job = ["@examples/mixtral-8x7b.args", "--vocab-size", "32000"]
    words = [*job, *OVERLAP, *dispatcher]
    by_hand_words = [*expand_files(job)]
    by_hand_words += [
        "--moe-token-dispatcher-type",
        "irregular",
        "--moe-overlap-partitions",
        "2",
        "--micro-batch-size",
        "2",
    ]
    listed = read_job(by_hand_words, 64)
    arguments, dropped = arguments_to_run(words, listed.plan, read_job(words, 64).config)
    flags = [word for word in dispatcher if word.startswith("--")]
    assert set(dropped) >= {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", *flags}
    assert not {*dropped, "hybridep", "16"} & set(arguments)
    assert grouped(arguments)["--moe-token-dispatcher-type"] == ("irregular",)
    assert "--num-layers" in arguments and "32000" in arguments
    plain = read_job(job, 64)
    assert arguments_to_run(words, plain.plan, plain.config)[1] == ()


def test_the_record_has_a_row_for_every_list() -> None:
    change = {"name": "micro-batch", "before": ["--a", "1"], "after": [], "alone_step_seconds": 1.25}
    found = {"gpus": 8, "seconds": 61.2, "before": 2.0, "after": 1.0, "plan": "EP8", "overlap": None, "change": change}
    answers = {"one": found | {"without": ["--b"]}, "two": {"gpus": 8, "ended": "no answer after 9 s"}}
    rows = [
        line
        for line in record(answers, {"three": "no"}, "make it").splitlines()
        if line.startswith(("| one", "| two", "- "))
    ]
    assert rows == [
        "| one | 8 | 61 | 2.000 s | 1.000 s | EP8 | micro-batch: --a 1 → nothing (-0.750 s) | --b |",
        "| two | 8 |  | | | no answer after 9 s | | |",
        "- three: no",
    ]
