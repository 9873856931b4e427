"""The folder of an answer: what an earlier answer had beside it goes by another name, and files of others are not replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_overlap.commands import autotune
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.search import SearchSettings, search_plan
from moe_overlap.report import search_folder
from moe_overlap.report.answer_files import FILES, put_away_others, require_no_other_files
from moe_overlap.report.search_folder import write_answer
from tests.faults.fault import room_for
from tests.unit.plan_search.test_plan_search import H100, HALF, OPTIONS, SMALL, searched
from tests.unit.tuner.search.spaces import SPACES


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_script_of_an_earlier_answer_does_not_stand_beside_a_plan_that_nothing_runs(
    tmp_path: Path,
) -> None:
    runs, told = searched("megatron-lm"), list[str]()
    for _ in range(2):
        written = set(write_answer(tmp_path, runs, told.append))
        assert written == names_of(tmp_path) >= {"launch.sbatch", "megatron_args.txt"}
        assert told == [], "the same command again is nothing to tell"
    found = search_plan(HALF, H100, SearchSettings(target="any", space=SPACES["zero3"]), **OPTIONS)
    script = (tmp_path / "launch.sbatch").read_text()
    written = set(write_answer(tmp_path, found, told.append))
    assert names_of(tmp_path) == {*written, "launch.sbatch.old", "megatron_args.txt.old"}
    assert not {"launch.sbatch", "megatron_args.txt"} & written
    assert (tmp_path / "launch.sbatch.old").read_text() == script
    assert told == [
        f"not of this answer: megatron_args.txt, launch.sbatch in {tmp_path}; "
        "they are now megatron_args.txt.old, launch.sbatch.old"
    ]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("plan.json", "--num-gpus 8"),
        ("launch.sbatch", "--num-gpus 8"),
        ("8-gpus/launch.sbatch", "--num-gpus 4,8"),
        ("megatron-lm/launch.sbatch", "--num-gpus 8 --target both"),
        ("plan.json", "--num-gpus 8 --overlap-only"),
    ],
)
def test_a_file_that_no_answer_has_written_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    (tmp_path / "job.args").write_text("\n".join(SMALL))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"of": "somebody"}')
    words = ["--megatron-args", str(tmp_path / "job.args"), "--gpu", "H100", *option.split()]
    assert autotune.main([*words, "--output", str(tmp_path)]) == 2
    rule = f"{file} is not of an answer, and would be replaced; give another folder, or move the file"
    assert capsys.readouterr().err == f"error: --output {file.parent}: {rule}\n"
    assert file.read_text() == '{"of": "somebody"}'


def test_the_plan_and_script_of_an_answer_are_known_and_a_script_of_others_stays(tmp_path: Path) -> None:
    write_answer(tmp_path, searched("megatron-lm"), print)
    require_no_other_files(tmp_path)
    require_no_other_files(tmp_path / "none yet")
    (tmp_path / "launch.sbatch").write_text("srun ours")
    require_no_other_files(tmp_path, has_script=False)
    put_away_others(tmp_path, (), print)
    assert (tmp_path / "launch.sbatch").read_text() == "srun ours"
    assert names_of(tmp_path) == {"launch.sbatch", *(f"{name}.old" for name in FILES if name != "launch.sbatch")}


@pytest.mark.parametrize("name", ["report.html", "trace.json"])
def test_a_disk_that_is_full_leaves_the_page_and_the_trace_of_an_earlier_answer_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = searched("megatron-lm")
    written = write_answer(tmp_path, found, print)
    earlier = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = {"report.html": "write_trace", "trace.json": "write_report"}[name]
    monkeypatch.setattr(search_folder, other, lambda *_, **__: None)
    monkeypatch.setattr(search_folder, "write_search", lambda *_: [*written])
    refused = pytest.raises(ConfigError, match=rf"--output {tmp_path / name}: cannot be written: File too large")
    with room_for(len(earlier[name]) // 2), refused:
        write_answer(tmp_path, found, print)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == earlier
