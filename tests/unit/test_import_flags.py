"""The flags of a shell script: variables, arrays, defaults, sums, comments; what has no value is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.arguments import parse
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.shell_script import script_flags

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/golden/train_moe.sh"
WORDS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 2048 "
    "--position-embedding-type rope --no-position-embedding --num-experts 8 --moe-layer-freq ([0]*1+[1]*3) "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model /workspace/tokenizer.model --data-path ${3} "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 7 --eval-iters 10 --no-load-optim "
    "--wandb-project Mixtral"
)


def test_a_script_as_users_write_them() -> None:
    flags = script_flags(SCRIPT.read_text(), {}, "train_moe.sh")
    assert " ".join(flags.words) == WORDS
    assert flags.unresolved == ("3",)


def test_values_from_outside_win() -> None:
    flags = script_flags(SCRIPT.read_text(), {"LAYERS": "12", "3": "/data/text", "GPUS_PER_NODE": "4"}, "train_moe.sh")
    assert " ".join(flags.words) == WORDS.replace("layers 4", "layers 12").replace("${3}", "/data/text").replace(
        "global-batch-size 8", "global-batch-size 16"
    )
    assert flags.unresolved == ()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nB=$A\npython pretrain_gpt.py --x ${B}2", "--x 12"),
        ("A='--x $B'\nB=3\npython p.py $A", "--x 3"),
        ('options=" --x 1 \\\n --y 2"\nrun_cmd="torchrun p.py ${options}"\npython p.py ${options}', "--x 1 --y 2"),
        ("srun python p.py --x $(( 2 + 3*4 )) --y ${Z:-5} --z ${Z-}", "--x 14 --y 5 --z"),
        ('A+=( --x 1 )\nA+=( --y 2 )\ntorchrun p.py "${A[@]}" > log 2>&1', "--x 1 --y 2"),
        ("torchrun p.py --x $HOME/$USER_DIR", "--x ${HOME}/${USER_DIR}"),
    ],
)
def test_ways_of_writing(script: str, words: str) -> None:
    assert " ".join(" ".join(script_flags(script, {}, "x.sh").words).split()) == words


def test_no_command() -> None:
    with pytest.raises(ConfigError, match="x.sh: holds no command that starts a Python program"):
        script_flags("A=1\necho $A\n", {}, "x.sh")


def test_a_script_is_read_as_an_argument_file() -> None:
    parsed = parse([f"@{SCRIPT}", "--data-path", "text"])
    assert (parsed.config.model.num_layers, parsed.config.training.global_batch_size) == (4, 8)
    assert parsed.config.moe.moe_layer_freq == (0, 1, 1, 1)
    assert parsed.name == "train_moe"


def test_the_tool_writes_a_file_that_parses_alike(tmp_path: Path) -> None:
    out = tmp_path / "train.args"
    command = [sys.executable, "-m", "tools.import_flags", str(SCRIPT), "--output", str(out), "--set", "LAYERS=6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}: 19 flags\n", "unresolved: ${3}\n")
    assert (
        parse([f"@{out}", "--moe-layer-freq", "2"]).config
        == parse([f"@{SCRIPT}", "--moe-layer-freq", "2", "--num-layers", "6"]).config
    )
