"""Searches in several processes: the answer of any number of shards, in any order, from any process, is that of one search."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_overlap.commands import autotune
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.asked import SearchSettings
from moe_overlap.plan_search.processes import Processes, job_sha256, search_shards
from moe_overlap.plan_search.search import search_plan
from moe_overlap.plan_search.shards import Shard, ShardsMissingError, in_processes, merged, share_of
from moe_overlap.report.search import PlanSearch
from moe_overlap.tuner.search.shared_bar import SharedBar
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.uniform import UniformSearch, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL
from tests.unit.tuner.test_search_uniform import CASE, Case, case_of, least_memory, with_modules

KEEP = 3
TIGHT = with_modules(least_memory(case_of("--global-batch-size", "64", gpus=4), 0.055))
"""Much does not fit, so modules are recomputed."""


def search_of(case: Case, shard: Shard, keep: int = KEEP, bar: SharedBar | None = None) -> UniformSearch:
    shared = None if bar is None else (bar, shard.index - 1)
    own = share_of(case.sound, shard)
    return search_uniform(own, costs_of(case.task), lambda layout: case.bounds, keep=keep, shared=shared)


COSTS: dict[int, UniformCosts] = {}
"""Prices by the identity of a task: what is compared are searches."""


def costs_of(task: UniformTask) -> UniformCosts:
    return COSTS.setdefault(id(task), UniformCosts(task))


def answer(search: UniformSearch) -> tuple[object, ...]:
    solution = search.solution
    return search.ranked, solution.value, solution.objective, solution.bound, solution.status


@pytest.mark.parametrize("case", [CASE, TIGHT], ids=["roomy", "tight"])
def test_any_number_of_shards_in_any_order_answers_as_one_search(case: Case) -> None:
    whole, draw = search_of(case, Shard(1, 1)), random.Random(0)
    assert len(whole.ranked) == KEEP
    for count in (2, 3, 40):
        shards = [search_of(case, Shard(index, count)) for index in range(1, count + 1)]
        # One layout of each is not enough: shards keep what is among the best of all.
        assert sum(bool(shard.ranked) for shard in shards) > 1
        draw.shuffle(shards)
        together = merged(shards, KEEP)
        assert answer(together) == answer(whole)
        assert together.counts.layouts == whole.counts.layouts
        assert together.counts.evaluated >= whole.counts.evaluated


def test_every_layout_is_in_one_shard() -> None:
    shares = [share_of(CASE.layouts, Shard(index, 5)) for index in range(1, 6)]
    assert sorted(layout for share in shares for layout in share) == sorted(CASE.layouts)
    assert max(map(len, shares)) < len(CASE.layouts) / 2


def test_processes_of_this_host_answer_as_one() -> None:
    def run(shard: Shard, bar: SharedBar | None) -> tuple[UniformSearch, list[tuple[str, str]]]:
        assert bar is not None
        return search_of(TIGHT, shard, bar=bar), [(f"plan of {shard.name}", "a rule")]

    found, refused = search_shards(run, Processes(jobs=3), lambda: "", KEEP)
    assert answer(found) == answer(search_of(TIGHT, Shard(1, 1)))
    assert [name for name, _ in refused] == ["plan of 1/3", "plan of 2/3", "plan of 3/3"]


@pytest.mark.parametrize("case", [CASE, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_know_of_each_other_price_what_one_alone_would(case: Case, count: int) -> None:
    """One after another, each knows what those before it have kept: the answer is the same, for less work."""
    whole, bar = search_of(case, Shard(1, 1)), SharedBar(count, KEEP)
    shards = [Shard(index, count) for index in range(1, count + 1)]
    told = [search_of(case, shard, bar=bar) for shard in shards]
    untold = [search_of(case, shard) for shard in shards]
    assert answer(merged(told, KEEP)) == answer(whole)
    assert merged(told, KEEP).counts.stages < merged(untold, KEEP).counts.stages
    assert bar.seconds == max(plan.seconds for plan in whole.ranked)


def test_the_bar_of_all_processes_is_the_last_step_that_is_kept() -> None:
    bar = SharedBar(2, 3)
    assert bar.seconds == math.inf
    bar.tell(0, [5.0, 3.0])
    assert bar.seconds == math.inf, "two plans are not three"
    bar.tell(1, [4.0])
    assert bar.seconds == 5.0
    bar.tell(1, [4.0, 1.0, 9.0])
    assert bar.seconds == 4.0


def test_processes_share_the_bar() -> None:
    bar = SharedBar(2, 1)

    def run(shard: Shard) -> float:
        if shard.index == 2:
            bar.tell(1, [2.0])
            return bar.seconds
        ends = time.monotonic() + 20.0
        while bar.seconds > 2.0 and time.monotonic() < ends:
            time.sleep(0.001)
        return bar.seconds

    assert in_processes(run, 2) == [2.0, 2.0]


def test_an_error_of_any_process_is_raised() -> None:
    def run(shard: Shard) -> int:
        if shard.index == 2:
            raise ConfigError("the model", "", "cannot be captured", "report these flags")
        return shard.index

    with pytest.raises(ConfigError, match="cannot be captured"):
        in_processes(run, 3)


class _NotMadeAgain(Exception):
    """An error that pickles, and whose class cannot make it again from its message alone."""

    def __init__(self, layout: str, reason: str) -> None:
        super().__init__(f"{layout}: {reason}")


class _NotPickled(Exception):
    """An error that holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__("dp2-tp4: no graph")
        self.compute = lambda: None


@pytest.mark.parametrize("error", [_NotMadeAgain("dp2-tp4", "no graph"), _NotPickled()], ids=lambda e: type(e).__name__)
def test_an_error_that_no_other_process_can_have_is_told_by_its_class_and_text(error: Exception) -> None:
    """A process that could not send it would end without an answer, as one that was killed for want of memory does."""

    def run(shard: Shard) -> int:
        if shard.index == 2:
            raise error
        return shard.index

    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: dp2-tp4: no graph$"):
        in_processes(run, 2)


def test_shards_that_found_nothing() -> None:
    case = least_memory(CASE, 0.02)
    together = merged([search_of(case, Shard(index, 2)) for index in (1, 2)], KEEP)
    assert together.solution.status is Status.INFEASIBLE and together.solution.bound == math.inf
    assert together.smallest == search_of(case, Shard(1, 1)).smallest


# Over hosts, through a folder


def test_the_last_shard_answers_as_one_search(tmp_path: Path) -> None:
    order = (3, 1, 2)

    def settings(shard: Shard | None = None) -> SearchSettings:
        return SearchSettings(target="megatron-lm", processes=Processes(shard=shard, folder=tmp_path))

    for index in order[:-1]:
        with pytest.raises(ShardsMissingError) as missing:
            search_plan(SMALL, H100, settings(Shard(index, 3)), **OPTIONS)
        assert Shard(order[-1], 3) in missing.value.missing
    last = search_plan(SMALL, H100, settings(Shard(order[-1], 3)), **OPTIONS)
    whole = search_plan(SMALL, H100, settings(), **OPTIONS)
    assert answer(last.found) == answer(whole.found)
    assert last.chosen.arguments == whole.chosen.arguments
    assert last.chosen.simulated_seconds == whole.chosen.simulated_seconds
    assert [other.name for other in last.others] == [other.name for other in whole.others]


def test_an_answer_of_another_search_is_refused(tmp_path: Path) -> None:
    def run(shard: Shard, bar: SharedBar | None) -> tuple[UniformSearch, list[tuple[str, str]]]:
        assert bar is None, "other shards may run on other hosts"
        return search_of(TIGHT, shard), []

    def shard(index: int, job: str) -> UniformSearch:
        return search_shards(run, Processes(shard=Shard(index, 2), folder=tmp_path), lambda: job, KEEP)[0]

    with pytest.raises(ShardsMissingError):
        shard(1, "these flags")
    with pytest.raises(ConfigError, match=r"1-of-2.json: is of other flags, GPUs, options or another release"):
        shard(2, "other flags")
    (tmp_path / "1-of-2.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no answer of a shard"):
        shard(2, "other flags")
    with pytest.raises(ShardsMissingError, match="2-of-3|2/3"):
        search_shards(run, Processes(shard=Shard(1, 3), folder=tmp_path), lambda: "", KEEP)


@pytest.mark.parametrize(
    ("words", "cores", "platform", "expected"),
    [
        ([], 2, "linux", 2),
        ([], 64, "linux", autotune.JOBS),
        ([], 64, "darwin", 1),
        (["--jobs", "9"], 2, "linux", 9),
        (["--shard", "1/2"], 64, "linux", 1),
    ],
)
def test_a_search_uses_the_cores_that_it_has(
    words: list[str], cores: int, platform: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SearchSettings] = []

    def search(given: list[str], cluster: Cluster, settings: SearchSettings, **options: object) -> PlanSearch:
        asked.append(settings)
        raise ConfigError("the search", "", "ends here", "go on")

    monkeypatch.setattr(autotune, "search_plan", search)
    monkeypatch.setattr(autotune, "usable_cores", lambda: cores)
    monkeypatch.setattr(sys, "platform", platform)
    flags = ["--megatron-args", "examples/mixtral-8x7b.args", "--gpu", "H100", "--num-gpus", "64"]
    assert autotune.main([*flags, "--output", str(tmp_path), *words]) == 2
    assert [settings.processes.jobs for settings in asked] == [expected]


def test_a_job_is_its_flags_its_gpus_and_its_options() -> None:
    jobs = {
        job_sha256((flags, target), cluster, options)
        for flags in (["--a"], ["--b"])
        for target in ("any", "megatron-lm")
        for cluster in (CASE.cluster, TIGHT.cluster)
        for options in ({}, {"memory_margin": 0.9})
    }
    assert len(jobs) == 16


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--jobs", "17"], "--jobs 17: is more than 8 for each of 2 cores; write 2, or drop it"),
        (["--shard", "0/4"], "--shard 0/4: is no i/n with i from 1 to n"),
        (["--shard", "5/4"], "--shard 5/4: is no i/n"),
        (["--shard", "2"], "--shard 2: is no i/n"),
        (["--shard", f"1/{'9' * 5000}"], "…: is no i/n"),
        (["--shard", "1/2", "--jobs", "2"], "--jobs 2: a shard is one process"),
        (["--shard", "1/2", "--target", "both"], "--shard 1/2: is a share of one search"),
        (["--shard", "1/2", "--num-gpus", "8,16"], "--shard 1/2: is a share of one search"),
        (["--shard", "1/2", "--overlap-only"], "--shard 1/2: has no effect with --overlap-only"),
        (["--jobs", "2", "--overlap-only"], "--jobs 2: has no effect with --overlap-only"),
        (["--no-imbalance", "--overlap-only"], "--no-imbalance: has no effect with --overlap-only"),
        (["--num-gpus", "2,4", "--overlap-only"], "--num-gpus 2,4: --overlap-only keeps one layout"),
    ],
)
def test_mistakes(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autotune, "usable_cores", lambda: 2)
    flags = tmp_path / "job.args"
    flags.write_text("\n".join(SMALL))
    job = ["--megatron-args", str(flags), "--gpu", "H100", "--num-gpus", "8", "--output", str(tmp_path / "tuned")]
    assert autotune.main([*job, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1
    assert not (tmp_path / "tuned").exists()


def test_a_shard_writes_its_answer_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tmp_path / "job.args"
    flags.write_text("\n".join(SMALL))
    monkeypatch.setattr(autotune, "_options", lambda arguments, tell: OPTIONS)
    job = ["--megatron-args", str(flags), "--gpu", "H100", "--num-gpus", "8", "--output", str(tmp_path / "tuned")]
    assert autotune.main([*job, "--shard", "1/2"]) == 0
    written = capsys.readouterr()
    assert written.out == "" and "the shards 2/2" in written.err
    assert json.loads((tmp_path / "tuned/shards/1-of-2.json").read_text())["ranked"]
    assert not (tmp_path / "tuned/plan.json").exists()
    assert autotune.main([*job, "--shard", "2/2"]) == 0
    assert (tmp_path / "tuned/plan.json").exists()


def test_processes_end_with_a_search_that_is_killed() -> None:
    """They would compute on for nobody, for minutes."""
    program = (
        "import os, time; from moe_overlap.plan_search.shards import in_processes\n"
        "in_processes(lambda shard: (os.write(1, b'%d\\n' % os.getpid()), time.sleep(600)), 3)"
    )
    search = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert search.stdout is not None
    workers = {int(search.stdout.readline()) for _ in range(3)}
    search.kill()
    search.wait()
    # The pipe ends when the last that can write to it is gone.
    assert len(workers) == 3 and search.stdout.read() == ""
