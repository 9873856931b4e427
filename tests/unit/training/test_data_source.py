"""Flags that name text: one blend or a blend for each part, in words or in files; what contradicts is one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import DataConfig
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.validation import validate
from megatron.training.data.sources import Blend, DataSource, check_data_flags, data_source
from moe_overlap.describe.errors import ConfigError

JOB = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
JOB += "--micro-batch-size 1 --train-iters 1 --lr 1e-3"


def test_words_and_files_say_the_same(tmp_path: Path) -> None:
    whole = DataSource(all_parts=Blend(("a", "b"), (3.0, 1.0)))
    assert data_source(DataConfig(data_path=("3", "a", "1", "b"))) == whole
    (tmp_path / "args").write_text("3 a\n1 b\n")
    assert data_source(DataConfig(data_args_path=str(tmp_path / "args"))) == whole
    assert whole.prefixes == ("a", "b") and str(whole) == "3 a 1 b"

    parts = DataSource(parts=(Blend(("a", "b"), (3.0, 1.0)), Blend(("a",), None), None))
    assert data_source(DataConfig(train_data_path=("3", "a", "1", "b"), valid_data_path=("a",))) == parts
    path = tmp_path / "parts.json"
    path.write_text(json.dumps({"train": [3, "a", "1", "b"], "valid": ["a"], "test": []}))
    assert data_source(DataConfig(per_split_data_args_path=str(path))) == parts
    assert parts.prefixes == ("a", "b") and str(parts) == "train 3 a 1 b, valid a"
    assert data_source(DataConfig()) == data_source(DataConfig(mock_data=True)) == DataSource()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mock_data": True, "data_path": ("a",)}, "--mock-data: is set together with --data-path"),
        ({"data_path": ("a",), "data_args_path": "f"}, "--data-path: is set together with --data-args-path"),
        ({"data_path": ("a",), "valid_data_path": ("b",)}, "--data-path: is set together with --valid-data-path"),
        ({"train_data_path": ("a",), "split": "1"}, "--split 1: --train-data-path names the parts already"),
        ({"per_split_data_args_path": "f", "split": "1"}, "--split 1: --per-split-data-args-path names"),
        ({"train_data_path": ("1", "a", "b")}, "--train-data-path 1 a b: weights and prefixes must alternate"),
        ({"valid_data_path": ("0", "a")}, "--valid-data-path 0 a: weights must be positive"),
        ({"data_path": ("nan", "a")}, "--data-path nan a: weights must be positive"),
    ],
)
def test_what_contradicts_is_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data_flags(DataConfig(**flags))  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a JSON object"),
        ('["a"]', "must be a JSON object of lists"),
        ('{"train": "a"}', "must be a JSON object of lists"),
        ('{"training": ["a"]}', "names the part 'training'; use train, valid, test"),
        ('{"train": [1, "a", "b"]}', "weights and prefixes must alternate"),
    ],
)
def test_a_wrong_file_of_parts(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "f").write_text(content)
    with pytest.raises(ConfigError, match=f"^--per-split-data-args-path .*{message}"):
        data_source(DataConfig(per_split_data_args_path=str(tmp_path / "f")))


def test_a_dry_run_finds_wrong_blends_and_lists_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-path 1 a b: weights and prefixes must alternate"):
        validate(parse([*JOB.split(), "--data-path", "1", "a", "b"]).config, 1)

    def printed(*words: str) -> str:
        out = io.StringIO()
        dry_run(parse([*JOB.split(), *words]), None, out)
        return out.getvalue()

    assert "/nowhere does not exist" in printed("--data-args-path", "/nowhere")
    (tmp_path / "args").write_text(f"3 {tmp_path}/a")
    assert f"{tmp_path}/a.idx does not exist" in printed("--data-args-path", str(tmp_path / "args"))
    assert f"{tmp_path}/b.bin does not exist" in printed("--valid-data-path", f"{tmp_path}/b")
