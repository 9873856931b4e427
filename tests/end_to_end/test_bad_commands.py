"""Wrong command lines through the real program: one line on stderr that names flag, value, rule and fix; exit status 2.

A port that is taken: without torchrun it is our line (below). torchrun opens its port itself before it starts the program, and
answers with a traceback of its own (`EADDRINUSE`), which we cannot shorten; `torchrun --standalone` looks for a free port.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.data.indexed import indexed_dataset
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.serialize import save_plan
from tests.end_to_end.conftest import Undisturbed
from tests.end_to_end.program import PROGRAM, SMALL, Ended, alone, environment, torchrun
from tests.spawn import HANGS_SECONDS

ONE = (*SMALL, "--expert-model-parallel-size", "1")
WITHIN_SECONDS = 300.0
"""A rank that waited for one that has ended would wait ten minutes, the timeout of a collective."""
"""The small job in a single process."""

WRONG = {
    "--expert-model-parallel-size 3": "--expert-model-parallel-size 3: 4 experts are not divisible by 3; use 1, 2 or 4",
    "--pipeline-model-parallel-size 3": "--pipeline-model-parallel-size 3: 2 layers are not divisible by 3; use 1 or 2",
    "--pipeline-model-parallel-size 2": (
        "world size 1: not a multiple of TP × PP × CP = 1 × 2 × 1; use a multiple of 2 ranks"
    ),
    "@missing.args": "@missing.args: cannot read missing.args: No such file or directory; correct the path",
    "--num-layer 2": "--num-layer: unknown flag; did you mean --num-layers?",
    "--use-megatron-fsdp": "--use-megatron-fsdp: not supported: ",
    "--optimizer muon": "--optimizer muon: not supported: this fork has AdamW and SGD; use adam or sgd",
    "--normalization BatchNorm": "--normalization BatchNorm: unknown choice; use LayerNorm or RMSNorm",
    "--lr fast": "--lr fast: must be a number; correct the value",
    "--seq-length 32.5": "--seq-length 32.5: must be a whole number; correct the value",
    "--global-batch-size 7": (
        "--micro-batch-size 2: global batch 7 is not a multiple of micro-batch × data-parallel = 2 × 1; "
        "use 1 or 7, or --global-batch-size 6 or 8"
    ),
    "--exit-duration-in-mins 0": "--exit-duration-in-mins 0: must be at least 1; use 1 or more",
    "--fp8-format hybrid": "--fp8-format hybrid: needs Transformer Engine on a GPU: this machine lacks ",
    "--mtp-standalone": (
        "--mtp-standalone: multi-token prediction on other stages than the loss: not executed yet; "
        "drop the flag; --dry-run accepts it"
    ),
    "--num-query-groups": "--num-query-groups: needs a value; write --num-query-groups VALUE",
    "--train-samples 100": "--train-samples 100: a run counts steps or samples; give --train-iters or --train-samples",
    "--world-size 2": "--world-size 2: torchrun sets it; use torchrun --nproc-per-node N",
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication": (
        "--no-overlap-p2p-communication: interleaved stages train wrongly with transfers in batches (2 stages); drop the flag"
    ),
}
"""Words after those of the job -> the line, or how it begins."""


def the_line(ended: Ended) -> str:
    """The one line on stderr of a run that was refused."""
    assert ended.status == 2, ended
    (line,) = ended.err.splitlines()
    head, _, rest = line.removeprefix("error: ").partition(": ")
    assert line.startswith("error: ") and head and "; " in rest, line
    return line.removeprefix("error: ")


def agrees(line: str, expected: str) -> bool:
    """Whether it is the expected line, or begins like one that is given to a colon, semicolon or "lacks" only."""
    return line.startswith(expected) if expected.endswith((": ", "; ", " lacks ")) else line == expected


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words(words: str) -> None:
    ended = alone([*ONE, *words.split()])
    assert agrees(the_line(ended), WRONG[words])
    assert ended.out == ""


def test_wrong_words_are_answered_without_torch() -> None:
    watch = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import pretrain_moe"
    ended = python(f"{watch}; sys.exit(pretrain_moe.main(['--lr', 'fast']))")
    assert (ended.status, ended.out) == (2, "False\n")


ANSWER = """
import contextlib, io, json, sys
import pretrain_moe
import torch.distributed as dist
for words in json.loads(sys.argv[1]):
    error, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
        status = pretrain_moe.main(words)
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps([status, out.getvalue(), error.getvalue()]))
"""
"""Answers several command lines in one process: importing torch takes longer than they do. A run that fails leaves its default
group to the end of the process."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Files that a user might hand over, and what each is answered with."""

    folder: Path

    def commands(self) -> dict[str, str]:
        """Words after those of the job -> the line, with `F` for the folder."""
        return {
            "--data-path F/nowhere": "--data-path F/nowhere: F/nowhere.idx does not exist; "
            "give the path of PREFIX.bin and PREFIX.idx without the ending",
            "--data-path F/cut": "--data-path F/cut: is corrupt: F/cut.bin has 150 bytes, its index says 400; "
            "make it again with tools/preprocess_data.py",
            "--data-path F/text": "--data-path F/text: is corrupt: F/text.idx is not the index of a Megatron dataset; "
            "make it again with tools/preprocess_data.py",
            "--data-path F/large": "--data-path F/large: holds token id 900, the vocabulary has 257 ids; "
            "choose the --tokenizer-type (and --vocab-size) the dataset was made with",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model F/nowhere": "--tokenizer-model F/nowhere: ",
            "--plan F/nowhere.json": "--plan F/nowhere.json: ",
            "--plan F/value.json": "F/value.json stages[0].zero_level 7: ",
            "--plan F/key.json": "F/key.json stages[0].colour: unknown key; ",
            "--plan F/other.json": "F/other.json stages[0].micro_batch_size 1: --micro-batch-size says 2; "
            "drop the flag or correct the plan",
            "--plan F/two.json": "world size 1: F/two.json is for 2 processes; start 2",
            "--plan F/two.json --dry-run --world-size 1": "--world-size 1: F/two.json is for 2 processes; use 2",
            "--plan F/narrow.json --dry-run": "F/narrow.json precision nvfp4: layers that overlap are not executed in 4 bits: "
            "their products would run in the weights' type; use bf16 or overlap nothing",
            "--dry-run --world-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type irregular "
            "--defer-weight-gradients --bf16 --fp8-format hybrid": "--fp8-recipe delayed: --defer-weight-gradients cuts passes "
            "into operators, and the scales of this recipe may be those of whole passes; use tensorwise, blockwise or mxfp8",
            "--load F/incomplete": "--load F/incomplete: step 40 is incomplete (no completion mark); "
            "there is no complete checkpoint: delete step-000040 to start afresh",
            "--load F/damaged": "--load F/damaged/step-000040/__0_0.distcp: is corrupt: its content is not what was written; "
            "delete step-000040, or choose another checkpoint by --ckpt-step",
            "--load F/saved --num-layers 4": "--load F/saved: step 40 was saved with --num-layers 2, this run has 4 "
            "(also different: --moe-layer-freq); give the flags of the saved model",
            "--load F/saved --ckpt-step 30": "--ckpt-step 30: F/saved holds no such step; it holds step 40",
            "--load F/empty --exit-on-missing-checkpoint": "--load F/empty: holds no checkpoint; ",
            "--train-iters 1 --lr-warmup-iters 0 --save F/text.idx/saved": "--save F/text.idx/saved: cannot be written: ",
        }


def write_dataset(prefix: Path, tokens: list[int]) -> None:
    with indexed_dataset(str(prefix), 65536) as writer:
        writer.add_document(tokens)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, undisturbed: Undisturbed) -> Wrong:
    folder = tmp_path_factory.mktemp("wrong")
    write_dataset(folder / "cut", [7] * 100)
    os.truncate(folder / "cut.bin", 150)
    for ending in ("idx", "bin"):
        (folder / f"text.{ending}").write_text("once upon a time there was no index\n" * 10)
    write_dataset(folder / "large", [900] * 100)
    config = parse(ONE).config
    plan = plan_from_flags(config, describe_model(config, 257, "small"), 1)
    save_plan(plan, folder / "right.json")
    right = (folder / "right.json").read_text()
    for name, before, after in (
        ("value", '"zero_level": 1', '"zero_level": 7'),
        ("key", '"zero_level": 1', '"colour": "red", "zero_level": 1'),
    ):
        assert before in right
        (folder / f"{name}.json").write_text(right.replace(before, after))
    smaller = dataclasses.replace(plan.stages[0], micro_batch_size=1, gradient_accumulation_steps=8)
    save_plan(dataclasses.replace(plan, stages=(smaller,)), folder / "other.json")
    save_plan(plan_from_flags(config, describe_model(config, 257, "small"), 2), folder / "two.json")
    spread = plan_from_flags(parse(SMALL).config, describe_model(config, 257, "small"), 2)
    overlap = StageOverlap(layers=(LayerOverlap(layer=0, mechanism="tutel", tutel_degree=2),))
    overlapped = dataclasses.replace(spread.stages[0], overlap=overlap)
    save_plan(dataclasses.replace(spread, precision="nvfp4", stages=(overlapped,)), folder / "narrow.json")
    for name in ("saved", "incomplete", "damaged"):
        shutil.copytree(undisturbed.folder / "saved", folder / name)
    (folder / "incomplete/step-000040/complete.json").unlink()
    damaged = folder / "damaged/step-000040/__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    return Wrong(folder)


@pytest.mark.slow
def test_wrong_files(wrong: Wrong) -> None:
    commands = [[*ONE, *words.replace("F/", f"{wrong.folder}/").split()] for words in wrong.commands()]
    ended = python(ANSWER, json.dumps(commands))
    assert ended.status == 0, ended.err
    answers = [Ended(*json.loads(line)) for line in ended.out.splitlines()]
    found = [the_line(answer).replace(f"{wrong.folder}/", "F/") for answer in answers]
    assert [pair for pair in zip(found, wrong.commands().values(), strict=True) if not agrees(*pair)] == []
    assert sorted(path.name for path in (wrong.folder / "saved").iterdir()) == ["step-000040"]


def test_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        meeting = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = alone(SMALL, meeting)
    assert (
        the_line(ended)
        == f"MASTER_PORT {port}: another process listens on it; choose a free port (torchrun --master-port N)"
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.slow,
        ),
        "--load F/incomplete",
    ],
)
def test_under_torchrun_rank_0_prints_the_line_and_every_process_ends(wrong: Wrong, words: str) -> None:
    ended = torchrun([*SMALL, *words.replace("F/", f"{wrong.folder}/").split()], timeout_seconds=WITHIN_SECONDS)
    assert ended.status == 1  # torchrun's own; that of the ranks stands in its summary
    lines = ended.err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert "exitcode  : 2" in ended.err
    assert not any(PROGRAM.name in line and line.lstrip().startswith("File ") for line in lines), ended.err


def python(source: str, *words: str) -> Ended:
    command = [sys.executable, "-c", source, *words]
    ended = subprocess.run(
        command, cwd=PROGRAM.parent, env=environment(), capture_output=True, text=True, timeout=HANGS_SECONDS
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)
