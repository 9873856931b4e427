"""A plan's JSON: exact round trip, and errors by path."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import KernelBlocks, LayerOverlap, LoweredLimit, SearchLimits, StageOverlap
from moe_overlap.plan.plan import AllGather, PeakBytes, Predicted, PredictedStage, Provenance, Tile, Transfer
from moe_overlap.plan.serialize import format_json, from_json, load_plan, save_plan, to_json
from tests.unit.plan import plan_samples

EXAMPLE = plan_samples.GOLDEN / "example_plan.json"
LIMITS = SearchLimits(max_partitions=8, group_seconds=1e-3, range_limit=4)
Change = Callable[[dict[str, Any]], object]


def full_plan() -> Any:
    """A plan in which every part of the schema is used."""
    provenance = Provenance(measured=0.5, interpolated=0.25, roofline=0.25)
    peak = PeakBytes(
        parameters=1, gradients=2, optimizer=3, activations=4, temporaries=5, communication=6, fragmentation=7
    )
    predicted = PredictedStage(
        stable_seconds=0.1,
        first_seconds=0.2,
        last_seconds=1e-7,
        peak_bytes=28,
        peak_bytes_by_category=peak,
        exposed_communication_seconds=0.01,
        provenance=provenance,
    )
    layer = LayerOverlap(
        layer=0,
        gate="switch",
        mechanism="fused",
        kernel_blocks=KernelBlocks(dispatch=8, combine=12),
        weight_gradient_slots={"L0.moe.dispatch.backward": ("L0.attention.qkv.dW",)},
    )
    lowered = LoweredLimit(first_operator="L0.attention", last_operator="L0.moe.merge", max_partitions=2)
    limits = dataclasses.replace(LIMITS, lowered=(lowered,))
    overlap = StageOverlap(max_deferred_bytes=1 << 20, search_limits=limits, layers=(layer,))
    tile = Tile(source=0, target=1, batch=(0, 2), sequence=(0, 256))
    return plan_samples.plan(
        stages=2,
        stage={"overlap": overlap},
        transfers=(
            Transfer(from_stage=0, to_stage=1, tiles=(tile,), all_gather=AllGather(axis="batch", groups=((1,),))),
        ),
        predicted=Predicted(
            step_seconds=1 / 3,
            tokens_per_second_per_gpu=1e5,
            model_tflops_per_gpu=123.4,
            stages=(predicted, predicted),
            provenance=provenance,
        ),
    )


def test_example_is_byte_for_byte_stable() -> None:
    assert to_json(load_plan(EXAMPLE)) == EXAMPLE.read_text()


def test_what_older_plans_do_not_say_means_nothing_was_lowered() -> None:
    plan = full_plan()
    stages = tuple(dataclasses.replace(one, overlap=StageOverlap(search_limits=LIMITS)) for one in plan.stages)
    older = to_json(dataclasses.replace(plan, stages=stages))
    assert '"lowered"' not in older
    assert from_json(older).stages[0].overlap.search_limits == LIMITS and LIMITS.lowered == ()


def test_every_part_of_the_schema_round_trips() -> None:
    plan = full_plan()
    again = from_json(to_json(plan))
    assert again == plan
    assert to_json(again) == to_json(plan)


def test_keys_are_the_fields() -> None:
    values = json.loads(EXAMPLE.read_text())
    fields = dataclasses.fields(plan_samples.plan())
    # A field that older files do not have is written where it differs from its default.
    assert list(values) == [field.name for field in fields if not field.metadata.get("may_be_missing")]
    assert list(values["stages"][0]) == [field.name for field in dataclasses.fields(plan_samples.plan().stages[0])]


def test_save_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_samples.plan(), path)
    with path.open() as reader:
        save_plan(full_plan(), path)
        assert reader.read() == to_json(plan_samples.plan()), "whoever has the old file open reads it to its end"
    assert load_plan(path) == full_plan()
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_save_leaves_the_old_file_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_samples.plan(), path)
    before = path.read_text()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        save_plan(full_plan(), path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def put(path: str, value: Any) -> Change:
    """Set one value of a JSON object, by dotted path."""

    def change(values: dict[str, Any]) -> None:
        *way, last = path.split(".")
        target: Any = values
        for key in way:
            target = target[int(key) if key.isdigit() else key]
        target[int(last) if last.isdigit() else last] = value

    return change


WRONG: list[tuple[Change, str]] = [
    (put("colour", 1), "plan.json colour: unknown key; use one of schema_version, "),
    (lambda v: v.pop("cluster"), "plan.json cluster: is missing; add cluster"),
    (put("schema_version", 2), "plan.json schema_version 2: this release reads version 1; write the plan again"),
    (put("schema_version", True), "plan.json schema_version true: this release reads version 1"),
    (lambda v: v.pop("schema_version"), "plan.json schema_version missing: this release reads version 1"),
    (put("stages.1.offload.disk", 0.5), "plan.json stages[1].offload.disk: unknown key; use one of weights, gradients"),
    (
        put("stages.1.offload.optimizer", "half"),
        'plan.json stages[1].offload.optimizer "half": must be a finite number',
    ),
    (
        put("stages.1.offload.optimizer", float("nan")),
        "plan.json stages[1].offload.optimizer NaN: must be a finite number",
    ),
    (put("stages.1.offload", 3), "plan.json stages[1].offload 3: must be an object; give the fields of Offload"),
    (put("stages.0.tensor", 1.0), "plan.json stages[0].tensor 1.0: must be an integer"),
    (put("stages.0.tensor", True), "plan.json stages[0].tensor true: must be an integer"),
    (put("stages.0.chunks", 1), "plan.json stages[0].chunks 1: must be a list"),
    (put("stages.0.chunks.0", [0, 1, 2]), "plan.json stages[0].chunks[0] [0, 1, 2]: must have 2 entries"),
    (put("precision", "fp64"), 'plan.json precision "fp64": unknown choice; use one of fp32, bf16'),
    (put("model.name", 7), "plan.json model.name 7: must be a string"),
    (put("loss_stage", None), "plan.json loss_stage null: must be an integer"),
    (
        put("stages.0.overlap.layers.0.weight_gradient_slots", []),
        "plan.json stages[0].overlap.layers[0].weight_gradient_slots []: must be an object",
    ),
    (
        put("stages.0.overlap.layers.0.weight_gradient_slots", {"x": [1]}),
        'plan.json stages[0].overlap.layers[0].weight_gradient_slots["x"][0] 1: must be a string',
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_wrong_json_is_refused_by_path(change: Change, message: str) -> None:
    values = json.loads(EXAMPLE.read_text())
    change(values)
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(values))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.json: is no JSON: line 1: Expecting value; write the file again"),
        ("{", "plan.json: is no JSON: "),
        ("[1]", "plan.json: must be a JSON object"),
        ('{"model": 1, "model": 2}', "plan.json: holds the key model twice"),
        ("[" * 200_000, "plan.json: is no JSON: it nests too deep"),
        ("[" * 201 + "]" * 201, "plan.json: nests deeper than 200 levels"),
        (f"[{'0,' * 4_000_000}0]", "plan.json: is too large: it holds more than 4000000 values"),
    ],
)
def test_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert str(caught.value).startswith(message)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.json: cannot be read: No such file or directory"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary.json: cannot be read: not UTF-8 text"):
        load_plan(tmp_path / "binary.json")


def test_format_json_breaks_only_long_lines() -> None:
    assert format_json({"a": [1, 2], "b": {}}) == '{"a": [1, 2], "b": {}}'
    long = {"list": [["x" * 50] * 2] * 3, "empty": []}
    text = format_json(long)
    assert json.loads(text) == long
    assert max(map(len, text.splitlines())) <= 120
