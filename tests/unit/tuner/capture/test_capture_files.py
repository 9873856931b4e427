"""The rules of a legal graph, captured graphs as files, and the cache; on a graph made by hand."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError, OutOfTime
from moe_overlap.tuner.capture import request as requests
from moe_overlap.tuner.capture.cache import CaptureFiles, CorruptFileError, joined, load_captured, save_captured
from moe_overlap.tuner.capture.expression import B, Expression, S
from moe_overlap.tuner.capture.graph import (
    CapturedModel,
    CapturedPart,
    Collective,
    Layout,
    Op,
    Storage,
    check,
    complaints,
)
from moe_overlap.tuner.capture.library import Libraries
from moe_overlap.tuner.capture.processes import CaptureError, CaptureProcesses
from moe_overlap.tuner.capture.request import Request
from tests.unit.tuner.capture.capture_cases import MOE, request

ROWS = B * S


def op(index: int, **fields: Any) -> Op:
    """A product, unless said otherwise."""
    defaults: dict[str, Any] = {
        "name": "mm",
        "phase": "forward",
        "operator": "mlp",
        "module": "mlp.linear_fc1",
        "cost_class": "gemm",
        "shape": (ROWS, Expression.of(8), Expression.of(4)),
        "dtype": "bfloat16",
        "flops": 64 * ROWS,
        "bytes": 24 * ROWS,
        "after": (),
    }
    return Op(**{**defaults, "id": index, **fields})


def part() -> CapturedPart:
    """input 0 times weight 1 is 2, reduced in place; its gradient 4 gives the gradients 3 of the weight and 5 of the input."""
    collective = Collective(kind="all_reduce", axis="tp", size=2, payload_bytes=16 * ROWS)
    return CapturedPart(
        kind="dense",
        variant="none",
        one_sample=False,
        ops=(
            op(0, reads=(0, 1), writes=(2,)),
            op(
                1,
                name="allreduce",
                cost_class="collective",
                shape=(),
                reads=(2,),
                writes=(2,),
                after=(0,),
                collective=collective,
            ),
            op(2, phase="backward", reads=(4, 0), writes=(3,), is_weight_gradient=True),
            op(3, phase="backward", reads=(4, 1), writes=(5,)),
        ),
        storages=(
            Storage(id=0, bytes=8 * ROWS, role="input"),
            Storage(id=1, bytes=Expression.of(64), role="parameter", name="weight", replicas="dp"),
            Storage(id=2, bytes=16 * ROWS, role="activation", freed_after=1),
            Storage(id=3, bytes=Expression.of(128), role="gradient", name="weight", replicas="dp"),
            Storage(id=4, bytes=16 * ROWS, role="input"),
            Storage(id=5, bytes=8 * ROWS, role="activation"),
        ),
        saved=(0,),
        inputs=(0,),
        outputs=(2,),
        gradient_inputs=(4,),
        gradient_outputs=(5,),
    )


def changed(index: int, **fields: Any) -> CapturedPart:
    """The part with another operator `index`."""
    ops = list(part().ops)
    ops[index] = dataclasses.replace(ops[index], **fields)
    return dataclasses.replace(part(), ops=tuple(ops))


def stored(index: int, **fields: Any) -> CapturedPart:
    """The part with another storage `index`."""
    storages = list(part().storages)
    storages[index] = dataclasses.replace(storages[index], **fields)
    return dataclasses.replace(part(), storages=tuple(storages))


BROKEN = {
    "not numbered": changed(1, id=7),
    "does not exist": changed(0, reads=(0, 9)),
    "before anything has written it": changed(0, reads=(5,)),
    "freed after operator": stored(2, freed_after=0),
    "a forward operator stands behind": changed(0, phase="backward"),
    "a collective has a group": changed(1, collective=None),
    "is not before it": changed(0, after=(3,)),
    "does not wait for 0, which wrote storage 2": changed(1, after=()),
    "a weight gradient is a product": changed(0, is_weight_gradient=True),
    "recomputed in the forward pass": changed(0, is_recomputed=True),
    "is saved, but of role parameter": dataclasses.replace(part(), saved=(0, 1)),
    "is saved, but not written": dataclasses.replace(part(), saved=(0, 5)),
    "is an output, but neither": dataclasses.replace(part(), outputs=(5,)),
    "is negative": changed(0, bytes=8 - ROWS),
}


def test_a_legal_graph_passes() -> None:
    check(part())


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_graph_is_named(rule: str) -> None:
    assert any(rule in complaint for complaint in complaints(BROKEN[rule])), list(complaints(BROKEN[rule]))
    with pytest.raises(AssertionError, match="dense"):
        check(BROKEN[rule])


def captured(sha256: str = "0") -> CapturedModel:
    return CapturedModel(
        parts=(part(),),
        layer_kinds=("dense",),
        mtp_kinds=(),
        layout=Layout(tensor=2),
        implementation="torch",
        versions=(("torch", "2"),),
        sha256=sha256,
    )


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    save_captured(captured(), tmp_path / "a" / "graph.json")
    assert load_captured(tmp_path / "a" / "graph.json") == captured()


def test_a_file_of_another_release_is_told(tmp_path: Path) -> None:
    """Its hash is right, and its operators have a field less."""
    path = tmp_path / "graph.json"
    save_captured(captured(), path)
    values = json.loads(path.read_text().partition("\n")[2])
    for part in values["parts"]:
        part["ops"] = [row[:-1] for row in part["ops"]]
    body = json.dumps(values)
    path.write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n")
    with pytest.raises(CorruptFileError, match="graph.json"):
        load_captured(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("sha256",), 5),
        (("layer_kinds",), [1]),
        (("expressions",), [5]),
        (("expressions",), ["1/0"]),
        (("layout", "tensor"), "2"),
        (("layout", "tensor"), True),
        (("parts", 0, "saved"), [0.5]),
        (("parts", 0, "ops", 0, 0), None),
        (("parts", 0, "storages"), [[]]),
    ],
)
def test_values_of_other_types_are_told(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    """Their hash is right: a search would fail with them, wherever it first computes."""
    path = tmp_path / "graph.json"
    save_captured(captured(), path)
    values = json.loads(path.read_text().partition("\n")[2])
    inside = values
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    body = json.dumps(values)
    path.write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n")
    with pytest.raises(CorruptFileError, match="graph.json"):
        load_captured(path)


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-40], lambda text: text.replace("mm", "mn"), lambda text: "\x00"]
)
def test_a_corrupt_file_is_told(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "graph.json"
    save_captured(captured(), path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CorruptFileError, match="graph.json"):
        load_captured(path)


def test_the_cache_captures_once_and_again_when_corrupt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def capture(missing: Mapping[Path, Request]) -> None:
        for path, asked in missing.items():
            ran.append(asked.variant)
            save_captured(captured(asked.sha256()), path)

    asked = [request(MOE), request(MOE, variant="full")]
    for _ in range(2):
        found = joined(CaptureFiles(tmp_path, capture=capture).captures(asked), asked[0].model)
    assert ran == ["none", "full"] and len(found.parts) == 2 and found.layer_kinds == ("moe", "moe")
    assert capsys.readouterr().err == ""
    one, other = (tmp_path / f"{each.sha256()}.json" for each in asked)
    one.write_text("{}")
    CaptureFiles(tmp_path, capture=capture).captures(asked)
    assert len(ran) == 3 and "captured again" in capsys.readouterr().err
    # Whole, and of another request: the names of files are all that tell them apart.
    other.write_bytes(one.read_bytes())
    CaptureFiles(tmp_path, capture=capture).captures(asked)
    assert ran[3:] == ["full"] and "the capture of another request; captured again" in capsys.readouterr().err


def test_the_key_knows_what_matters() -> None:
    base = request(MOE)
    deeper = request(MOE.replace("--num-layers 2", "--num-layers 4"))
    renamed = dataclasses.replace(base, model=dataclasses.replace(base.model, name="another"))
    assert base.sha256() == deeper.sha256() == renamed.sha256()
    others = (request(MOE, "te"), request(f"{MOE} --bf16"), request(MOE, variant="full"), request(MOE, vocabulary=512))
    assert len({base.sha256(), *(other.sha256() for other in others)}) == 5


def test_files_that_answer_are_no_part_of_a_capture() -> None:
    """A change of them leaves stored captures valid, so no file that a capture depends on may import one."""
    root = Path(requests.__file__).parents[3]
    answering = {f"moe_overlap.tuner.capture.{Path(name).stem}" for name in requests._ANSWERING}
    counted = requests.captured_by()
    assert (
        Path("moe_overlap/tuner/capture/record.py") in counted and Path("megatron/training/model/build.py") in counted
    )
    for path in counted:
        imported = {
            node.module
            for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not imported & answering, path


STAND_IN = """
import json, os, sys
for line in sys.stdin:
    values = json.loads(line)
    if values["variant"] == "full":
        raise SystemExit("what failed")
    with open(values["path"], "w") as file:
        file.write(str(os.getpid()))
    print(values["path"], flush=True)
"""


def answered_by(paths: list[Path]) -> list[int]:
    """The processes that wrote files."""
    return [int(path.read_text()) for path in paths]


def test_processes_stay_for_later_requests_and_share_many(tmp_path: Path) -> None:
    processes = CaptureProcesses((sys.executable, "-c", STAND_IN), cores=2)
    paths = [tmp_path / str(number) for number in range(9)]
    processes.capture({paths[0]: request(MOE)})
    (first,) = answered_by(paths[:1])
    processes.capture(dict.fromkeys(paths[1:], request(MOE)))
    assert first in answered_by(paths[1:]) and len(set(answered_by(paths[1:]))) == 2
    ended = set(answered_by(paths))
    del processes
    for process in ended:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_process_that_fails_says_why_and_another_goes_on(tmp_path: Path) -> None:
    processes = CaptureProcesses((sys.executable, "-c", STAND_IN), cores=1)
    with pytest.raises(CaptureError, match="^what failed$"):
        processes.capture({tmp_path / "0": request(MOE), tmp_path / "1": request(MOE, variant="full")})
    processes.capture({tmp_path / "2": request(MOE)})
    assert answered_by([tmp_path / "0"]) != answered_by([tmp_path / "2"])


def test_every_capture_is_reported_and_a_report_may_end_them(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    command = (sys.executable, "-c", STAND_IN)
    processes = CaptureProcesses(command, cores=1, report=lambda done, total: reports.append((done, total)))
    processes.capture({tmp_path / str(number): request(MOE) for number in range(3)})
    assert list(dict.fromkeys(reports)) == [(0, 3), (1, 3), (2, 3)]

    def end(done: int, total: int) -> None:
        raise ConfigError("--time-limit", 1, "passed", "give more time")

    with pytest.raises(ConfigError, match="--time-limit 1: passed"):
        CaptureProcesses(command, cores=1, report=end).capture({tmp_path / "never": request(MOE)})


def test_captures_end_at_a_deadline_of_their_context(tmp_path: Path) -> None:
    """Both of the files and of the libraries that answer from them; behind the context none holds."""

    def capture(missing: Mapping[Path, Request]) -> None:
        for path, asked in missing.items():
            save_captured(captured(asked.sha256()), path)

    files = CaptureFiles(tmp_path, capture=capture)
    for context in (files.until(-math.inf), Libraries(files).until(-math.inf)):
        with context, pytest.raises(OutOfTime, match="--time-limit: passed while layers of the model were captured"):
            files.captures([request(MOE)])
    assert files.captures([request(MOE)]) == [captured(request(MOE).sha256())]


def test_a_forked_process_asks_its_own(tmp_path: Path) -> None:
    processes = CaptureProcesses((sys.executable, "-c", STAND_IN), cores=1)
    processes.capture({tmp_path / "0": request(MOE)})
    forked = multiprocessing.get_context("fork").Process(
        target=processes.capture, args=({tmp_path / "1": request(MOE)},)
    )
    forked.start()
    forked.join()
    processes.capture({tmp_path / "2": request(MOE)})
    before, of_forked, after = answered_by([tmp_path / str(number) for number in range(3)])
    assert before == after != of_forked


def test_forked_processes_share_the_cores(tmp_path: Path) -> None:
    processes = CaptureProcesses((sys.executable, "-c", STAND_IN), cores=4)
    paths = [tmp_path / str(number) for number in range(9)]
    forked = multiprocessing.get_context("fork").Process(
        target=processes.capture, args=(dict.fromkeys(paths, request(MOE)),)
    )
    forked.start()
    forked.join()
    assert len(set(answered_by(paths))) == 1


@pytest.mark.slow
def test_a_capture_runs_nothing_of_the_folder_it_is_asked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the working directory was imported')")
    monkeypatch.chdir(tmp_path)
    (captured,) = CaptureFiles(tmp_path).captures([request(MOE)])
    assert captured.part("moe").ops


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_captured() -> None:
    files = CaptureFiles(Path("/proc/nowhere/captures"), capture=lambda missing: pytest.fail("captured"))
    with pytest.raises(ConfigError) as refused:
        files.captures([request(MOE)])
    assert str(refused.value) == (
        "/proc/nowhere/captures: captured layouts cannot be kept there: No such file or directory; "
        "set XDG_CACHE_HOME to a folder that can be written"
    )
