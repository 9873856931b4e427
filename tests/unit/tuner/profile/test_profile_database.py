"""The database of measurements: what is kept, what damage costs, what lookups answer, what is measured and when."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training import messages
from moe_overlap.commands import profile_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.serialize import as_values
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.profile import lookup as filling
from moe_overlap.tuner.profile.cluster_file import this_device
from moe_overlap.tuner.profile.database import Database, Device, LinkKey, OperatorKey, Pass, work_of
from moe_overlap.tuner.profile.lookup import CALL_SECONDS, IN_STEP, MeasuredOperators, fill, link_grid, operator_grid
from moe_overlap.tuner.profile.measure import operators

DEVICE = Device("cpu", "a processor", 1, "2.13.0")


def gemm(m: int, n: int, k: int, direction: Pass = "forward") -> OperatorKey:
    return OperatorKey("gemm", direction, "float32", (m, n, k))


def filled(path: Path) -> Database:
    database = Database.open(path, DEVICE)
    database.add_operator(gemm(64, 64, 64), 1e-5)
    database.add_link(LinkKey("all_gather", "node", 2, 4096), 3e-4)
    database.add_rate("product_flops", 5e10)
    return database


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    made = filled(tmp_path / "here.jsonl")
    read = Database.load(tmp_path / "here.jsonl")
    again = Database.open(tmp_path / "here.jsonl", DEVICE)
    for found in (read, again):
        assert (found.device, found.operators, found.links, found.rates) == (
            DEVICE,
            made.operators,
            made.links,
            made.rates,
        )


@pytest.mark.parametrize("damage", ['{"operator": ["gemm", "forw', "null\n", '{"rate": "x", "value": -1}\n', "\xff\n"])
def test_a_damaged_line_is_dropped_and_the_file_made_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = tmp_path / "here.jsonl"
    made = filled(path)
    with path.open("ab") as file:
        file.write(damage.encode("latin-1"))
    again = Database.open(path, DEVICE)
    assert again.operators == made.operators and again.rates == made.rates
    assert "1 damaged lines are dropped" in capsys.readouterr().err
    again.add_rate("kernel_seconds", 1e-6)
    assert Database.load(path).rates == {"product_flops": 5e10, "kernel_seconds": 1e-6}
    assert capsys.readouterr().err == ""


def test_a_file_without_a_device_is_begun_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.jsonl"
    path.write_text("\x00\x01")
    with pytest.raises(ConfigError, match="is no database of measurements"):
        Database.load(path)
    assert Database.open(path, DEVICE).operators == {}
    assert "warning" in capsys.readouterr().err
    assert Database.load(path).device == DEVICE


def test_another_device_or_version_measures_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.jsonl"
    filled(path)
    newer = dataclasses.replace(DEVICE, torch="2.14.0")
    assert Database.open(path, newer).operators == {}
    assert "torch 2.13.0" in capsys.readouterr().err
    assert Database.load(path).device == newer


def test_no_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Database.load(tmp_path / "none.jsonl")


def test_exact_sizes_come_first_then_neighbours_then_nothing(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "here.jsonl", DEVICE)
    rate = 5e10
    for m in (64, 256):
        for n in (64, 256):
            database.add_operator(gemm(m, n, 64), work_of(gemm(m, n, 64)) / rate)
    database.add_operator(gemm(128, 128, 64), 1.0)
    answers = MeasuredOperators(database)
    assert answers.seconds(gemm(128, 128, 64)) == (1.0, "measured")
    seconds, origin = answers.seconds(gemm(64, 240, 64)) or (0.0, "")
    assert origin == "interpolated" and seconds == pytest.approx(work_of(gemm(64, 240, 64)) / rate, rel=0.5)
    assert answers.seconds(gemm(1 << 16, 64, 64)) is None
    assert answers.seconds(gemm(64, 64, 64, "backward")) is None
    assert answers.seconds(OperatorKey("gemm", "forward", "bfloat16", (64, 64, 64))) is None


def test_operators_bound_by_bytes_stand_in_for_each_other(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "here.jsonl", DEVICE)
    for elements in (1000, 4000):
        database.add_operator(OperatorKey("mul", "forward", "float32", (elements, 12 * elements)), 12 * elements / 1e10)
    found = MeasuredOperators(database).seconds(OperatorKey("swiglu_of_te", "backward", "float32", (2000, 24000)))
    assert found == (pytest.approx(2.4e-6), "interpolated")


def test_a_step_adds_to_operators_alone(tmp_path: Path) -> None:
    database = filled(tmp_path / "here.jsonl")
    shape = (64.0, 64.0, 64.0)
    op = Op(
        id=0,
        name="mm",
        phase="forward",
        operator="attention",
        module="",
        cost_class="gemm",
        shape=(),
        dtype="float32",
        flops=Expression.of(0),
        bytes=Expression.of(0),
        reads=(),
        writes=(),
        after=(),
    )
    assert MeasuredOperators(database)(op, shape, 0.0) == (1e-5, "measured")
    database.add_rate(IN_STEP, 1.5)
    database.add_rate(CALL_SECONDS, 2e-6)
    answers = MeasuredOperators(Database.load(database.path))
    assert answers(op, shape, 0.0) == (pytest.approx(1.7e-5), "measured")
    assert answers.seconds(gemm(64, 64, 64)) == (1e-5, "measured"), "alone"


def test_a_missing_shape_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two processes of two ranks; the second time nothing is started."""
    monkeypatch.setattr(filling, "SECONDS_EACH", 1e-4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "here.jsonl"
    keys = [gemm(8, 8, 8), gemm(8, 8, 16, "weight_gradient"), OperatorKey("silu", "forward", "float32", (64, 512))]
    unknown = OperatorKey("no_such_operator", "forward", "float32", (64, 512))
    first = fill(Database.open(path, this_device("cpu")), [*keys, unknown], ranks=2)
    assert set(first.operators) == set(keys) and all(0 < seconds < 1 for seconds in first.operators.values())
    text = path.read_text()
    monkeypatch.setattr(filling, "_start", lambda *_: pytest.fail("measured again"))
    assert fill(Database.load(path), [*keys, unknown], ranks=2).operators == first.operators
    assert path.read_text() == text


def test_nothing_is_measured_for_a_device_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_start", lambda *_: pytest.fail("measured elsewhere"))
    database = filled(tmp_path / "here.jsonl")
    assert fill(database, [gemm(8, 8, 8)], ranks=1) is database


def test_grids_have_no_key_twice_and_parts_of_equal_size() -> None:
    for device in ("cpu", "cuda"):
        for quick in (True, False):
            keys = operator_grid("float32", device, quick)
            assert len(set(keys)) == len(keys) > 100 * (not quick) + 50
            links = link_grid("node", 3, ("all_gather",), device, quick)
            assert all(key.held_bytes % 12 == 0 for key in links)


def test_a_line_is_one_json_object(tmp_path: Path) -> None:
    filled(tmp_path / "here.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "here.jsonl").read_text().splitlines()]
    assert [sorted(row) for row in rows] == [
        ["device", "format"],
        ["operator", "seconds"],
        ["link", "seconds"],
        ["rate", "value"],
    ]


def test_ranks_of_other_machines_keep_what_they_measure_until_the_first_takes_it_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their appends would write over those of the first machine on a file system that both have mounted."""
    first = Database.open(tmp_path / "d.jsonl", DEVICE)
    other = Database(tmp_path / "d.jsonl", DEVICE, is_kept=False)
    before = first.path.read_text()
    other.add_operator(gemm(8, 8, 8), 1e-3)
    assert first.path.read_text() == before and other.operators == {gemm(8, 8, 8): 1e-3}
    told = [(as_values(key), taken) for key, taken in other.operators.items()]
    monkeypatch.setattr(messages, "of_all", lambda _: json.loads(json.dumps([[], told])))
    profile_cluster._take_over(first, profile_cluster.Ranks(rank=0, world=2, local_rank=0, per_node=1))
    assert Database.load(first.path).operators == other.operators


@pytest.mark.parametrize(("per_node", "taken"), [(1, True), (2, False)])
def test_only_ranks_of_another_machine_hand_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_node: int, taken: bool
) -> None:
    """The second of two ranks, on a machine of its own and on the first one's."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": per_node}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(messages, "from_first", lambda places: places)
    measured: list[Database] = []
    monkeypatch.setattr(operators, "measure_operators", lambda database, *_: measured.append(database))
    monkeypatch.setattr(profile_cluster, "_measure_links", lambda *_: None)
    handed_over: list[Database] = []
    monkeypatch.setattr(profile_cluster, "_take_over", lambda database, _: handed_over.append(database))
    assert profile_cluster.main(["--quick", "--device", "cpu", "--output", str(tmp_path / "c.json")]) == 0
    assert [database.is_kept for database in measured] == [not taken]
    assert handed_over == (measured if taken else [])
