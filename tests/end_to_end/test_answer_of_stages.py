"""A search whose answer has unlike stages: what it writes starts as it is, at full size and as a small model that trains."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.plan_values import arguments_of, layout_values
from moe_overlap.job import read_job
from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.plan.serialize import load_plan, save_plan
from moe_overlap.tuner.write.argument_file import argument_file
from tests.end_to_end.program import PROGRAM, ROOT, Ended, environment
from tests.spawn import HANGS_SECONDS

SMALL_WIDTHS = """
    --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 257 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope
"""


def command(*words: str, folder: Path = ROOT) -> Ended:
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=HANGS_SECONDS
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module", params=[("2.7b", 4), ("7b", 8)], ids=["GPT-2.7B", "GPT-7B"])
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the default search for a model on L4."""
    folder, (size, gpus) = tmp_path_factory.mktemp("answer"), request.param
    words = f"--megatron-args examples/mist-gpt-{size}.args --gpu L4 --num-gpus {gpus} --output {folder}".split()
    ended = command("tools/autotune.py", *words, "--json")
    assert ended.status == 0, ended.err
    (folder / "answer.json").write_text(ended.out)
    return folder


@pytest.mark.slow
def test_the_answer_has_unlike_stages_and_starts_as_written(answer: Path) -> None:
    said = json.loads((answer / "answer.json").read_text())
    plan = load_plan(answer / "plan.json")
    assert said["not_executed"] is None and said["step_seconds"] < 0.97 * said["equal_stages_step_seconds"]
    assert len({stage.recompute for stage in plan.stages}) > 1 and len({len(stage.layers) for stage in plan.stages}) > 1
    ended = command(str(PROGRAM), f"@{answer / 'megatron_args.txt'}", "--dry-run", folder=answer)
    assert ended.status == 0, ended.err
    assert f"{plan.world_size} processes: PP 4" in ended.out
    # Eight times three bytes of GPT-7B's states have no room on eight L4 beside its activations.
    offloads = any(stage.offload != Offload() for stage in plan.stages)
    assert offloads == (plan.world_size == 8) == ("optimizer states on the host" in ended.out)
    others = f"@{answer / 'megatron_args.txt'} --recompute-granularity full --recompute-method block --recompute-num-layers 2"
    refused = command(str(PROGRAM), *others.split(), "--dry-run", folder=answer)
    assert refused.status == 2 and refused.err.count("\n") == 1
    assert "recompute" in refused.err and "drop the flag or correct the plan" in refused.err


@pytest.mark.slow
def test_a_small_model_with_the_same_stages_trains(answer: Path, tmp_path: Path) -> None:
    plan = load_plan(answer / "plan.json")
    words = [*SMALL_WIDTHS.split(), "--num-layers", str(sum(len(stage.layers) for stage in plan.stages))]
    job = read_job([*words, "--micro-batch-size", "2", "--global-batch-size", "64"], plan.world_size)
    small: Plan = dataclasses.replace(plan, model=job.plan.model, sequence_length=32, precision="fp32", predicted=None)
    save_plan(small, tmp_path / "plan.json")
    run = "--train-iters 3 --lr 1e-3 --eval-iters 0 --num-workers 0 --mock-data --tokenizer-type NullTokenizer"
    said = arguments_of(layout_values(small, 0))
    written = argument_file([*words, *run.split()], small, [], plan_file="plan.json", in_file=said)
    (tmp_path / "megatron_args.txt").write_text(written.text)
    start = [f"@{tmp_path / 'megatron_args.txt'}", "--log-json", str(tmp_path / "steps.jsonl")]
    ended = command(str(PROGRAM), "--nproc-per-node", str(plan.world_size), *start, folder=tmp_path)
    assert ended.status == 0, ended.err
    losses = [json.loads(line)["loss"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and all(4.0 < loss < 7.0 for loss in losses)
