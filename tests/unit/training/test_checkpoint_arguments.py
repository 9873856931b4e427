"""--use-checkpoint-args: which flags come from the checkpoint, and what is said where the command line contradicts. No torch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint import folder as cf
from megatron.training.checkpoint.arguments import with_checkpoint_arguments
from megatron.training.cli.arguments import ParsedArguments, config_to_flags, parse
from megatron.training.cli.dry_run import dry_run
from moe_overlap.describe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 --swiglu "
    "--position-embedding-type rope --num-experts 8 --moe-router-topk 4 --moe-layer-freq [0,1,1,1] --disable-bias-linear"
)
SAVED = (
    f"{MODEL} --vocab-size 300 --micro-batch-size 2 --train-iters 9 --lr 0.5 "
    "--expert-model-parallel-size 2 --tensor-model-parallel-size 2"
)
RUN = "--micro-batch-size 1 --train-iters 5 --lr 1e-3"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, {"arguments": config_to_flags(parse(SAVED.split()).config)})
    return tmp_path


def save(folder: Path, content: dict[str, Any]) -> None:
    cf.publish(cf.open_temporary(folder, 7), folder, 7, {"files": {}, **content})


def taken(words: str) -> ParsedArguments:
    return with_checkpoint_arguments(parse(words.split()))


def lines(parsed: ParsedArguments) -> list[str]:
    return [text for _, text in parsed.remarks]


def test_the_model_comes_from_the_checkpoint_the_rest_from_the_command_line(saved: Path) -> None:
    parsed = taken(f"{RUN} --load {saved} --use-checkpoint-args")
    expected = parse(f"{MODEL} --vocab-size 300 {RUN} --load {saved} --use-checkpoint-args".split()).config
    assert parsed.config == expected
    assert lines(parsed) == [f"of {saved}/step-000007"]
    untouched = parse(RUN.split())
    assert with_checkpoint_arguments(untouched) is untouched


def test_parallel_sizes_come_from_it_on_demand(saved: Path) -> None:
    parsed = taken(
        f"{RUN} --tensor-model-parallel-size 4 --load {saved} --use-checkpoint-args --use-mp-args-from-checkpoint-args"
    )
    parallel = parsed.config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size) == (2, 2)
    assert lines(parsed)[1:] == ["--tensor-model-parallel-size 2 holds, not --tensor-model-parallel-size 4"]


def test_contradictions_are_decided_as_upstream_and_told(saved: Path) -> None:
    given = "--num-layers 2 --moe-router-topk 2 --normalization RMSNorm --squared-relu --max-position-embeddings 64"
    parsed = taken(f"{RUN} {given} --load {saved} --use-checkpoint-args")
    assert (parsed.config.model.num_layers, parsed.config.moe.moe_router_topk) == (2, 4)
    assert (parsed.config.model.normalization, parsed.config.model.squared_relu) == ("LayerNorm", False)
    assert lines(parsed)[1:] == [
        "--num-layers 2 of the command line holds, not --num-layers 4",
        "--normalization LayerNorm holds, not --normalization RMSNorm",
        "no --squared-relu holds, not --squared-relu",
        "--moe-router-topk 4 holds, not --moe-router-topk 2",
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_the_tokenizer_comes_from_it_unless_it_is_kept(tmp_path: Path, keep: bool) -> None:
    words = f"{MODEL} --vocab-size 300 --tokenizer-type NullTokenizer"
    save(tmp_path, {"arguments": config_to_flags(parse(words.split()).config)})
    no = "--no-use-tokenizer-model-from-checkpoint-args" if keep else ""
    data = taken(f"{RUN} --load {tmp_path} --use-checkpoint-args {no}").config.data
    assert data.vocab_size == 300 and data.tokenizer_type == (None if keep else "NullTokenizer")


def test_nothing_to_take_them_from(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--use-checkpoint-args: there is no checkpoint to take them from; add --load"
    ):
        taken(f"{RUN} --use-checkpoint-args")
    parsed = taken(f"{RUN} --load {tmp_path} --use-checkpoint-args")
    assert lines(parsed) == [f"{tmp_path} holds no checkpoint: the command line alone counts"]
    save(tmp_path, {})
    with pytest.raises(ConfigError, match="step 7 carries no arguments: an older version saved it; drop --use"):
        taken(f"{RUN} --load {tmp_path} --use-checkpoint-args")


def test_a_dry_run_takes_them_without_torch(saved: Path) -> None:
    words = [*RUN.split(), "--load", str(saved), "--use-checkpoint-args", "--dry-run"]
    source = f"import sys, pretrain_moe; assert not pretrain_moe.main({words!r}); assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (
        f"arguments     of {saved}/step-000007\n" in ended.stdout and "4 layers, hidden 32, 8 experts" in ended.stdout
    )
    out = io.StringIO()
    dry_run(taken(" ".join(words)), 2, out)
    assert "--moe-router-topk 4" in out.getvalue()
