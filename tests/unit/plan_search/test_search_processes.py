"""Searches in several processes: the answer of any number of shares, in any order, from any process, is that of one search."""

from __future__ import annotations

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
from moe_overlap.plan_search.processes import in_processes, shared_search
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.tuner.search.shares import LayoutShare, SharedBar, share_of
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.uniform import UniformSearch, joined_uniform, search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask
from tests.unit.plan_search.test_plan_search import SMALL
from tests.unit.tuner.search.test_search_uniform import CASE, Case, case_of, least_memory, with_modules

KEEP = 3
TIGHT = with_modules(least_memory(case_of("--global-batch-size", "64", gpus=4), 0.055))
"""Much does not fit, so modules are recomputed."""


def search_of(case: Case, share: LayoutShare, keep: int = KEEP, bar: SharedBar | None = None) -> UniformSearch:
    shared = None if bar is None else (bar, share.index)
    own = share_of(case.sound, share)
    return search_uniform(own, costs_of(case.task), lambda layout: case.bounds, keep=keep, shared=shared)


COSTS: dict[int, UniformCosts] = {}
"""Prices by the identity of a task: what is compared are searches."""


def costs_of(task: UniformTask) -> UniformCosts:
    return COSTS.setdefault(id(task), UniformCosts(task))


def answer(search: UniformSearch) -> tuple[object, ...]:
    solution = search.solution
    return search.ranked, solution.value, solution.objective, solution.bound, solution.status


@pytest.mark.parametrize("case", [CASE, TIGHT], ids=["roomy", "tight"])
def test_any_number_of_shares_in_any_order_answers_as_one_search(case: Case) -> None:
    whole, draw = search_of(case, LayoutShare(0, 1)), random.Random(0)
    assert len(whole.ranked) == KEEP
    for count in (2, 3, 40):
        searches = [search_of(case, LayoutShare(index, count)) for index in range(count)]
        # One layout of each is not enough: shares keep what is among the best of all.
        assert sum(bool(search.ranked) for search in searches) > 1
        draw.shuffle(searches)
        together = joined_uniform(searches, KEEP)
        assert answer(together) == answer(whole)
        assert together.counts.layouts == whole.counts.layouts
        assert together.counts.evaluated >= whole.counts.evaluated


def test_every_layout_is_in_one_share() -> None:
    shares = [share_of(CASE.layouts, LayoutShare(index, 5)) for index in range(5)]
    assert sorted(layout for share in shares for layout in share) == sorted(CASE.layouts)
    assert max(map(len, shares)) < len(CASE.layouts) / 2


def test_processes_of_this_host_answer_as_one() -> None:
    def run(share: LayoutShare, bar: SharedBar | None) -> tuple[UniformSearch, list[tuple[str, str]]]:
        assert bar is not None
        return search_of(TIGHT, share, bar=bar), [(f"plan of {share.index}", "a rule")]

    found, refused = shared_search(run, 3, KEEP)
    assert answer(found) == answer(search_of(TIGHT, LayoutShare(0, 1)))
    assert [name for name, _ in refused] == ["plan of 0", "plan of 1", "plan of 2"]


@pytest.mark.parametrize("case", [CASE, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_know_of_each_other_price_what_one_alone_would(case: Case, count: int) -> None:
    """One after another, each knows what those before it have kept: the answer is the same, for less work."""
    whole, bar = search_of(case, LayoutShare(0, 1)), SharedBar(count, KEEP)
    shares = [LayoutShare(index, count) for index in range(count)]
    told = [search_of(case, share, bar=bar) for share in shares]
    untold = [search_of(case, share) for share in shares]
    assert answer(joined_uniform(told, KEEP)) == answer(whole)
    assert joined_uniform(told, KEEP).counts.stages < joined_uniform(untold, KEEP).counts.stages
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

    def run(share: LayoutShare) -> float:
        if share.index == 1:
            bar.tell(1, [2.0])
            return bar.seconds
        ends = time.monotonic() + 20.0
        while bar.seconds > 2.0 and time.monotonic() < ends:
            time.sleep(0.001)
        return bar.seconds

    assert in_processes(run, 2) == [2.0, 2.0]


def test_an_error_of_any_process_is_raised() -> None:
    def run(share: LayoutShare) -> int:
        if share.index == 1:
            raise ConfigError("the model", "", "cannot be captured", "report these flags")
        return share.index

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

    def run(share: LayoutShare) -> int:
        if share.index == 1:
            raise error
        return share.index

    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: dp2-tp4: no graph$"):
        in_processes(run, 2)


def test_shares_that_found_nothing() -> None:
    case = least_memory(CASE, 0.02)
    together = joined_uniform([search_of(case, LayoutShare(index, 2)) for index in (0, 1)], KEEP)
    assert together.solution.status is Status.INFEASIBLE and together.solution.bound == math.inf
    assert together.smallest == search_of(case, LayoutShare(0, 1)).smallest


@pytest.mark.parametrize(
    ("words", "cores", "platform", "expected"),
    [
        ([], 2, "linux", 2),
        ([], 64, "linux", autotune.JOBS),
        ([], 64, "darwin", 1),
        (["--jobs", "9"], 2, "linux", 9),
    ],
)
def test_a_search_uses_the_cores_that_it_has(
    words: list[str], cores: int, platform: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SearchSettings] = []

    def search(given: list[str], cluster: Cluster, settings: SearchSettings, **options: object) -> PlanSearch:
        asked.append(settings)
        raise ConfigError("the search", "", "ends here", "go on")

    monkeypatch.setattr("moe_overlap.plan_search.search.search_plan", search)
    monkeypatch.setattr(autotune, "usable_cores", lambda: cores)
    monkeypatch.setattr(sys, "platform", platform)
    flags = ["--megatron-args", "examples/mixtral-8x7b.args", "--gpu", "H100", "--num-gpus", "64"]
    assert autotune.main([*flags, "--output", str(tmp_path), *words]) == 2
    assert [settings.jobs for settings in asked] == [expected]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--jobs", "17"], "--jobs 17: is more than 8 for each of 2 cores; write 2, or drop it"),
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


def test_a_removed_flag_is_one_line_with_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        autotune.main(["--shard", "0/2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --shard 0/2: was removed: a search takes seconds; use --jobs N\n"


def test_processes_end_with_a_search_that_is_killed() -> None:
    """They would compute on for nobody, for minutes."""
    program = (
        "import os, time; from moe_overlap.plan_search.processes import in_processes\n"
        "in_processes(lambda share: (os.write(1, b'%d\\n' % os.getpid()), time.sleep(600)), 3)"
    )
    search = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert search.stdout is not None
    workers = {int(search.stdout.readline()) for _ in range(3)}
    search.kill()
    search.wait()
    # The pipe ends when the last that can write to it is gone.
    assert len(workers) == 3 and search.stdout.read() == ""
