"""Searches for the papers' comparisons: kept as soon as they are done, limited in processor time; what becomes of them."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.validation import validate
from moe_overlap.tuner.search.space import LEVELS
from tests.unit.tuner.search.spaces import SPACES
from tools.bench import alpa_figures, mist_figures
from tools.bench.mist_figures import DIMENSIONS, FULL, HEURISTIC, MEAN, UNIFORM, averaged, losses
from tools.bench.paper_searches import ROOT, KeptSearches, Machines, Outcome, Search, run
from tools.bench.paper_spaces import (
    AGAINST,
    Figure,
    PaperCase,
    Space,
    gains,
    is_worse,
    rows,
    search_all,
    seconds_and_gains,
    sizes,
)
from tools.benchmark_papers import SEARCHED, main

SPACE = SPACES["data"]
SEARCH = Search(arguments=("--bf16",), machines=Machines(gpu="L4", gpus=2), space=SPACE)


def outcome(seconds: float | None, objective: float | None = None, points: int = 0, cpu: float = 0.0) -> Outcome:
    step = seconds if objective is None else objective
    return Outcome(seconds=seconds, objective=step, plan="P", status="searched", cpu_seconds=cpu, points=points)


# Kept


def test_what_is_kept_is_not_searched_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "kept", []

    def searched(search: Search) -> Outcome:
        asked.append(search)
        return outcome(float(len(asked)))

    other = dataclasses.replace(SEARCH, averages=True)
    first = KeptSearches(path=path, cpu_seconds=9.0, searcher=searched)
    assert [first.outcome(search) for search in (SEARCH, SEARCH, other)] == [outcome(1.0), outcome(1.0), outcome(2.0)]
    again = KeptSearches(path=path, cpu_seconds=9.0, searcher=searched)
    assert (again.outcome(other), again.outcome(SEARCH)) == (outcome(2.0), outcome(1.0)) and len(asked) == 2
    longer = KeptSearches(path=path, cpu_seconds=99.0, searcher=searched)
    assert longer.outcome(SEARCH) == outcome(3.0), "another limit is another search"
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3
    named = dataclasses.replace(SEARCH, arguments=(f"@{ROOT / 'examples' / 'tiny-gpt.args'}",))
    longer.outcome(named)
    assert json.loads(path.read_text().splitlines()[-1])["search"]["words"] == ["@examples/tiny-gpt.args"]
    elsewhere = path.read_text().replace("@examples/tiny-gpt.args", "@examples/other.args")
    path.write_text(elsewhere)
    assert KeptSearches(path=path, cpu_seconds=99.0, only_kept=True).outcome(named) is None


def test_few_gpus_are_searched_first_until_the_processor_seconds_are_spent() -> None:
    asked: list[int] = []

    def searched(search: Search) -> Outcome:
        asked.append(search.machines.gpus)
        return outcome(1.0, cpu=4.0)

    def figure(*gpus: int) -> Figure:
        cases = [PaperCase(name=str(size), arguments=(), machines=Machines(gpu="L4", gpus=size)) for size in gpus]
        return Figure(name="F", spaces=(FULL, MEAN), cases=tuple(cases), columns=gains)

    figures = [figure(16, 2), figure(8, 64, 2)]
    searches = KeptSearches(searcher=searched, budget=21.0)
    search_all(figures, searches, most_gpus=32)
    assert asked == [2, 2, 8, 8, 16, 16], "what two figures share is searched once, and 64 GPUs are too many"
    assert searches.spent == 24.0
    assert searches.outcome(figures[1].cases[1].search(FULL)) is None, "the budget is spent"
    assert searches.outcome(figures[0].cases[0].search(FULL)) == outcome(1.0, cpu=4.0)


def test_an_unknown_search_stays_unknown(tmp_path: Path) -> None:
    searches = KeptSearches(path=tmp_path / "kept", only_kept=True)
    assert searches.outcome(SEARCH) is None
    case = PaperCase(name="case", arguments=("--bf16",), machines=SEARCH.machines)
    figure = Figure(name="F", spaces=(Space(name="data", space=SPACE),), cases=(case,), columns=gains)
    (row,) = rows(figure, searches, 2)
    assert row.figures == {"CPU seconds": 0.0, AGAINST: None} and row.notes == ("case, data: not searched",)
    assert not list(rows(figure, searches, 1)), "two GPUs are more than one"


# In a process


def until_interrupted(search: Search) -> Outcome:
    begun = time.process_time()
    try:
        while time.process_time() < begun + 30.0:
            pass
    except KeyboardInterrupt:
        return dataclasses.replace(outcome(1.0), status="ended early")
    return outcome(2.0)


def without_a_plan(search: Search) -> Outcome:
    raise KeyboardInterrupt


def deaf(search: Search) -> Outcome:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    begun = time.process_time()
    while time.process_time() < begun + 30.0:
        pass
    return outcome(2.0)


def refused(search: Search) -> Outcome:
    return outcome(None)


@pytest.mark.parametrize(
    ("answer", "status", "seconds"),
    [(until_interrupted, "ended early", 1.0), (without_a_plan, "ended early", None), (deaf, "killed", None)],
)
def test_a_search_ends_with_its_processor_seconds(
    answer: Callable[[Search], Outcome], status: str, seconds: float | None
) -> None:
    known = run(SEARCH, 0.3, answer)
    assert (known.status, known.seconds) == (status, seconds)
    assert known.cpu_seconds < 5.0, "those of the search alone"


def test_a_process_says_what_it_took() -> None:
    known = run(SEARCH, 5.0, refused)
    assert known.status == "searched" and known.seconds is None
    assert 0.0 <= known.cpu_seconds < 5.0 and 0.0 < known.rss_gib < 5.0


# Columns


def test_the_first_space_is_what_others_gain_against() -> None:
    known = {"a": outcome(6.0, cpu=1.0), "b": outcome(3.0, cpu=2.0), "c": outcome(None, cpu=4.0)}
    assert gains(known) == {"a seconds": 6.0, "b": 2.0, "c": None, "CPU seconds": 7.0}
    steps = seconds_and_gains(known)
    assert (steps["a seconds"], steps["b seconds"], steps["c seconds"], steps["b"]) == (6.0, 3.0, None, 2.0)
    assert sizes({"a": outcome(1.0, points=7, cpu=2.0)}) == {"a points": 7.0, "a CPU seconds": 2.0}


def test_what_means_and_uniform_heuristics_lose() -> None:
    columns = averaged({MEAN.name: outcome(5.0, objective=4.0), FULL.name: outcome(4.0)})
    assert columns["mean's own error"] == pytest.approx(-0.2) and columns[FULL.name] == 1.25
    columns = losses({HEURISTIC.name: outcome(5.0), UNIFORM.name: outcome(None), FULL.name: outcome(4.0)})
    assert columns["same in all stages loses"] == pytest.approx(0.2) and columns["uniform loses"] is None


def test_the_widest_space_is_compared_with_the_best_other() -> None:
    case = PaperCase(name="case", arguments=("--bf16",), machines=SEARCH.machines, paper="said")
    spaces = tuple(Space(name=name, space=dataclasses.replace(SPACE, name=name)) for name in "abc")
    figure = Figure(name="F", spaces=spaces, cases=(case,), columns=gains)

    def row_of(*steps: float) -> dict[str, float | None]:
        by_name = dict(zip("abc", steps, strict=True))
        searches = KeptSearches(searcher=lambda search: outcome(by_name[search.space.name]))
        (row,) = rows(figure, searches, 8)
        assert row.paper == "said" and is_worse(row) == (steps[2] > 1.02 * min(steps))
        return row.figures

    assert row_of(4.0, 2.0, 1.0)[AGAINST] == 2.0
    assert row_of(4.0, 1.0, 1.005)[AGAINST] == pytest.approx(1 / 1.005)
    assert row_of(4.0, 1.0, 2.0)[AGAINST] == 0.5


# Figures


@pytest.mark.parametrize("name", SEARCHED)
def test_every_case_is_a_job(name: str) -> None:
    figure = SEARCHED[name]()
    searches = [case.search(space) for case in figure.cases for space in figure.spaces]
    assert len({json.dumps(dataclasses.asdict(search)) for search in searches}) == len(searches)
    assert len({case.name for case in figure.cases}) == len(figure.cases)
    for case in figure.cases:
        cluster = case.machines.cluster()
        assert cluster.gpus == case.machines.gpus
        config = parse(list(case.arguments)).config
        validate(config, cluster.gpus)
        assert case.machines.constants().gpus


def test_machines_are_those_of_the_papers() -> None:
    l4, a100 = (machines.cluster().group_of(0) for machines, _ in mist_figures._both("22b"))
    assert (l4.gpus, l4.gpu.memory_gib, a100.gpus, a100.gpu.memory_gib) == (32, 24, 32, 40)
    assert a100.network_gb_per_s == 400 / 8 / 8
    v100 = alpa_figures.job("moe", "10b", 16).machines
    assert v100.cluster().group_of(0).network_gb_per_s == 25 / 8 / 8
    assert v100.constants().gpus["V100-16GB (p3.16xlarge)"] == v100.constants().gpus["A100"]
    assert v100.cluster().group_of(0).gpu.memory_gib == 16


def test_each_dimension_adds_to_the_one_before() -> None:
    spaces = [space.space for space in DIMENSIONS]
    assert [space.all_layers for space in spaces] == [True] * 2 + [False] * 5
    assert [len(space.offloads) for space in spaces] == [0, 0, 0, 1, 2, 3, 4]
    assert [space.zero_levels for space in spaces] == [(1,), *[LEVELS] * 6]
    assert all(set(before.offloads) <= set(after.offloads) for before, after in zip(spaces, spaces[1:], strict=False))
    assert all(space.frees_stages and not space.meshes for space in spaces)


def test_nothing_is_searched_for_a_table_of_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kept"
    machines = mist_figures.figure_3().cases[0]
    KeptSearches(path=path, cpu_seconds=600.0, searcher=lambda search: outcome(2.0)).outcome(machines.search(FULL))
    assert main(["--only", "mist-3", "--kept", str(path), "--only-kept"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"| case | full seconds | CPU seconds | {AGAINST} | paper |"
    assert lines[4].startswith("| GPT-7B, 8 L4 | 2.000 | 0.000 |  | 1.22 against parallelism alone")
    assert "- GPT-7B, 8 L4, parallelism: not searched" in lines
