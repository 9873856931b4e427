"""What-if: flags of the training behind --megatron-args, variables of a shell script, and a vocabulary that nothing tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.commands import autotune, predict
from moe_overlap.commands.job_arguments import job_flags, name_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.shell_script import script_flags
from moe_overlap.job import read_job
from tests.spawn import HANGS_SECONDS

LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1"
JOB = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    f"--micro-batch-size ${{MBS}} --global-batch-size 16 --bf16 {LAYOUT} --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model $2 --save /ckpt/$NAME"
)
SCRIPT = f"NAME=run-$(date)\ntorchrun --nproc_per_node 4 pretrain_gpt.py {JOB}\n"


def flags_of(folder: Path, *words: str, tool: Any = predict) -> list[str]:
    script = folder / "job.sh"
    script.write_text(SCRIPT)
    return job_flags(tool._parser().parse_args(["--megatron-args", str(script), *words]), is_predicted=True)


def test_flags_of_the_training_follow_the_file_and_win(tmp_path: Path) -> None:
    other = ("--micro-batch-size", "2", "--pipeline-model-parallel-size=2", "--vocab-size", "1000", "--gpu", "H100")
    for tool in (predict, autotune):
        job = read_job(flags_of(tmp_path, *other, tool=tool), 4)
        stages = job.plan.stages
        assert (len(stages), stages[0].tensor, stages[0].micro_batch_size) == (2, 2, 2)
        assert job.model.vocab_size == 1024 and job.assumed == () and job.model.name == "job"


def test_a_variable_of_the_script_gets_its_value(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--micro-batch-size \$\{MBS\}: the shell script gives MBS no value; write --set MBS"
    ):
        read_job(flags_of(tmp_path), 4)
    words = ("--set", "MBS=4", "--set", "2=org/Qwen3-30B")
    job = read_job(
        flags_of(tmp_path, *words), 4, name=name_of(predict._parser().parse_args(["--megatron-args", "a/b.c.sh"]))
    )
    assert job.plan.stages[0].micro_batch_size == 4 and job.model.name == "b.c"
    assert job.assumed == (
        "a vocabulary of 151936 tokens, as published with models like Qwen3-30B; --vocab-size says another",
    )


def test_flags_alone_describe_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-layers", "4", "--hidden-size", "128"]
    assert job_flags(predict._parser().parse_args(words)) == words
    with pytest.raises(ConfigError, match="nothing says what is trained"):
        job_flags(predict._parser().parse_args(words[2:]))


def test_usual_flags_stand_before_those_of_the_command_line(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    model.write_text(
        json.dumps(config | {"num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5})
    )
    words = ["--model", str(model), "--micro-batch-size", "2", "--global-batch-size", "4", "--fp16"]
    flags = job_flags(predict._parser().parse_args(words), is_predicted=True)
    job = read_job(flags, 1)
    assert job.plan.stages[0].micro_batch_size == 2 and job.plan.stages[0].zero_level == 1
    assert "--bf16" not in flags and job.plan.precision == "fp16"


def test_an_unknown_value_in_a_path_stops_nothing() -> None:
    flags = script_flags(SCRIPT, {"MBS": "1"}, "x.sh")
    assert flags.arguments[-2:] == ("--save", "/ckpt/run-${date}") and flags.unresolved == ("2",)
    assert flags.unread == ("line 1 has $(date), which cannot be read without running it",)
    with pytest.raises(ConfigError, match=r"x.sh line 1: has \$\(rate\), which cannot be read"):
        script_flags("python p.py --save a --lr $(rate)", {}, "x.sh")


WRONG_FLAGS = [
    ("predict", "--num-layers 46 --pipeline-model-parallel-size 4", "46 layers are not divisible by 4"),
    ("predict", "--num-layers four", "--num-layers four: must be a whole number"),
    ("autotune", "--num-layers 4 --alpha", "--alpha: is no flag of this tool or of the training"),
    ("autotune", "--lr fast --num-layers 4", "--lr fast: must be a number"),
    (
        "autotune",
        "--num-layers 4",
        "--hidden-size, --num-attention-heads, --seq-length, --max-position-embeddings: the model",
    ),
    ("autotune", "--overlap-only --num-layers 4", "--hidden-size, --num-attention-heads"),
]


def test_mistakes_are_answered_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    """One process for all: the modules that take seconds stay out of it."""
    source = "import sys\nfrom moe_overlap.commands import autotune, predict\n"
    sizes = "--hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --vocab-size 512"
    for tool, words, _ in WRONG_FLAGS:
        flags = f"{sizes if tool == 'predict' else ''} {words} --gpu H100 --num-gpus 8".split()
        source += f"try:\n    print({tool}.main({flags!r}))\nexcept SystemExit as end:\n    print(end.code)\n"
    source += "print([name for name in ('numpy', 'pandas', 'ortools', 'torch') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=HANGS_SECONDS)
    assert ended.stdout.split("\n")[:-1] == ["2"] * len(WRONG_FLAGS) + ["[]"], ended.stdout + ended.stderr
    for line, (_, _, message) in zip(ended.stderr.splitlines(), WRONG_FLAGS, strict=True):
        assert message in line
