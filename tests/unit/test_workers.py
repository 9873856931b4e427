"""How `make test` divides the tests between its workers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("xdist")

from tests.workers import LONGEST, TOGETHER, Workers

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A worker that notes the tests it gets."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def given(files: list[str]) -> list[list[str]]:
    """Files that two workers get, of five tests each, where the second one works five times as fast."""
    option = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(getvalue={"tx": ["popen"] * 2}.__getitem__, option=option)
    scheduler, workers = Workers(config), [Worker("slow"), Worker("fast")]
    tests = [f"{file}::test_{number}" for file in files for number in range(5)]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    ended = [0, 0]
    while scheduler.has_pending:
        for index, speed in enumerate((1, 5)):
            for _ in range(speed):
                if ended[index] < len(workers[index].given):
                    scheduler.mark_test_complete(workers[index], workers[index].given[ended[index]])
                    ended[index] += 1
    assert sorted(workers[0].given + workers[1].given) == list(range(len(tests)))
    return [list(dict.fromkeys(tests[number].partition("::")[0] for number in worker.given)) for worker in workers]


def test_one_worker_launches_ranks_while_there_is_anything_else() -> None:
    launching = [f"tests/multiprocess/test_{letter}.py" for letter in "abcd"]
    single = [f"tests/unit/test_{letter}.py" for letter in "abcdef"]
    slow, fast = given([*launching, *single])
    assert slow == launching[:2] and fast == [*single, *launching[2:]]


def test_long_files_come_before_others() -> None:
    launching = [f"tests/multiprocess/test_{letter}.py" for letter in "abcd"]
    others = [f"tests/unit/test_{letter}.py" for letter in "abc"]
    _, fast = given([*launching, *others, *LONGEST])
    assert fast[: len(LONGEST)] == [*LONGEST] and all((ROOT / file).is_file() for file in LONGEST)


def test_files_that_share_a_run_are_on_one_worker() -> None:
    others = [f"tests/unit/test_{letter}.py" for letter in "abc"]
    for files in TOGETHER:
        by_worker = given([*others, *reversed(files)])
        assert sum(bool(set(files) & set(got)) for got in by_worker) == 1


def test_what_measures_or_slows_links_down_has_the_machine_to_itself() -> None:
    """Programs that do so are named in the files that start them; their quick tests, of mistakes, may run beside others."""
    files = {path: path.read_text() for path in (ROOT / "tests/end_to_end").glob("test_*.py")}
    starts = {
        path for path, text in files.items() if re.search("emulator|namespaces|profile_cluster|slurm_cluster", text)
    }
    marked = {path for path, text in files.items() if "pytest.mark.alone" in text}
    assert starts == marked and len(marked) == 9
    for path in marked:
        assert files[path].count("mark.slow") == files[path].count("mark.alone"), path.name


@pytest.mark.parametrize(
    ("files", "shared"), zip(TOGETHER, ("undisturbed: Undisturbed", "link_hosts import"), strict=True)
)
def test_every_file_that_shares_a_run_is_named(files: tuple[str, ...], shared: str) -> None:
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    users = sorted(path.relative_to(ROOT).as_posix() for path in tests if shared in path.read_text())
    assert users == sorted(files)
