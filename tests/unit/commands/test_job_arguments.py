"""Flags of a job from a model file and an argument file: `torch_dtype` is the precision where nothing else says one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.commands import autotune, predict
from moe_overlap.commands.job_arguments import assumed_of, job_flags
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
    return job_flags(
        argparse.Namespace(
            routing=None,
            set=[],
            training_flags=[],
            ignore_unknown=False,
            model=str(model),
            megatron_args=file,
            precision=precision,
        )
    )


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


def test_the_length_of_samples_that_nothing_says_is_said_to_be_assumed(tmp_path: Path) -> None:
    """4096 tokens, or as many as the model covers; what a flag, an option, a plan or a file of ours says is none."""
    model, flags = tmp_path / "config.json", tmp_path / "job.args"

    def assumed(covered: int = 8192, given: str | None = None, **options: Any) -> tuple[str, ...]:
        model.write_text(json.dumps(LLAMA | {"max_position_embeddings": covered}))
        flags.write_text(given or "")
        file = None if given is None else str(flags)
        said = {"model": str(model), "megatron_args": file, "seq_length": None, "plan": None} | options
        return assumed_of(argparse.Namespace(routing=None, set=[], training_flags=[], ignore_unknown=False, **said))

    (sentence,) = assumed()
    assert sentence.startswith("samples of 4096 tokens, as a config.json says none; --seq-length")
    assert assumed(2048)[0].startswith("samples of 2048 tokens") and assumed(given="--bf16") == assumed()
    assert assumed(given="--bf16 --seq-length 1024") == assumed(given="--seq-length=1024") == ()
    assert assumed(seq_length=1024) == assumed(plan="plan.json") == assumed(model=None) == ()
    assert assumed(model=str(Path(__file__).resolve().parents[3] / "examples/models/mixtral-8x7b.json")) == ()


def test_a_search_says_what_it_assumes_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    machines = ["--gpu", "H100", "--num-gpus", "8", "--output", str(tmp_path / "tuned")]
    # Without a batch it ends behind the sentence.
    assert autotune.main(["--model", str(tmp_path / "config.json"), *machines]) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith("assumed: samples of 4096 tokens, as a config.json")


def test_flags_alone_may_describe_the_model_in_either_spelling() -> None:
    for words in (["--num-layers", "4"], ["--num-layers=4"]):
        assert job_flags(predict._parser().parse_args(words)) == words
    with pytest.raises(ConfigError, match="nothing says what is trained"):
        job_flags(predict._parser().parse_args(["--hidden-size", "4"]))
    with pytest.raises(ConfigError, match="--ignore-unknown: is about the file of --megatron-args, and there is none"):
        job_flags(predict._parser().parse_args(["--model", "tiny-gpt", "--ignore-unknown"]))
