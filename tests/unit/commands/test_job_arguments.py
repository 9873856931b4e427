"""Flags of a job from a model file and an argument file: `torch_dtype` is the precision where nothing else says one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.commands.job_arguments import words_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.job import read_job

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "max_position_embeddings": 8192, "vocab_size": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


def words(folder: Path, flags: str | None = None, precision: str | None = None, **config: Any) -> list[str]:
    model = folder / "config.json"
    model.write_text(json.dumps(LLAMA | config))
    file = None
    if flags is not None:
        file = str(folder / "job.args")
        Path(file).write_text(flags)
    return words_of(argparse.Namespace(model=str(model), megatron_args=file, precision=precision))


def precisions(said: list[str]) -> list[str]:
    return [word for word in said if word in ("--bf16", "--fp16")]


@pytest.mark.parametrize(
    ("config", "expected", "decided"),
    [
        ({}, ["--bf16"], "bf16"),
        ({"torch_dtype": "bfloat16"}, ["--bf16"], "bf16"),
        ({"torch_dtype": "float16"}, ["--fp16"], "fp16"),
        ({"torch_dtype": "float32"}, [], "fp32"),
        ({"dtype": "torch.float16"}, ["--fp16"], "fp16"),
    ],
)
def test_a_config_alone(tmp_path: Path, config: dict[str, str], expected: list[str], decided: str) -> None:
    said = words(tmp_path, **config)
    assert precisions(said) == expected
    assert read_job([*said, "--global-batch-size", "1"], 1).plan.precision == decided


def test_flags_beside_it_decide_where_they_say_a_precision(tmp_path: Path) -> None:
    assert precisions(words(tmp_path, "--global-batch-size 8", torch_dtype="float16")) == ["--fp16"]
    assert precisions(words(tmp_path, "--global-batch-size 8")) == []
    # The file's own flag counts; it is read where it stands.
    assert precisions(words(tmp_path, "--bf16", torch_dtype="float16")) == []
    assert precisions(words(tmp_path, precision="bf16", torch_dtype="float16")) == []


def test_another_type_needs_a_precision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        words(tmp_path, torch_dtype="float8_e4m3fn")
    assert str(error.value).endswith(
        "config.json torch_dtype float8_e4m3fn: is no precision of a run (bfloat16, float16, float32); add --precision"
    )
    assert precisions(words(tmp_path, "--bf16", torch_dtype="float8_e4m3fn")) == []
