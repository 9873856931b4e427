"""A plan builds what runs: `--plan FILE` beside the model trains as the flags that say the plan do, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.commands.compare import compare_losses
from moe_overlap.plan.serialize import save_plan
from tests.end_to_end.program import alone
from tests.ranks import Ranks
from tests.spawn import run

STEPS = 3
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 32 --hidden-dropout 0 --attention-dropout 0"
)
TRAINING = f"--lr 1e-2 --train-iters {STEPS} --num-workers 0 --log-interval 1 --eval-iters 0 --mock-data"
DECIDED = {
    "expert ranks, recomputed": (
        "--moe-token-dispatcher-type alltoall",
        "--expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --bf16",
    ),
    "pipeline of unequal stages, recomputed": (
        "--moe-token-dispatcher-type alltoall",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|L --recompute-granularity selective "
        "--recompute-modules moe --seq-length 32 --micro-batch-size 2 --global-batch-size 8",
    ),
    "overlapped": (
        "",
        "--moe-token-dispatcher-type irregular --expert-model-parallel-size 2 --moe-overlap-partitions 2 "
        "--defer-weight-gradients --max-deferred-bytes 100000 --recompute-granularity selective --recompute-modules moe "
        "--seq-length 32 --micro-batch-size 2 --global-batch-size 8",
    ),
}
"""Name -> the flags that say what no plan says, and the flags that the plan says, too."""


STARTED = "overlapped"
"""Its runs go through the program's own entry point; the others assemble their run in a group that is there."""


def train(words: list[str]) -> None:
    """Train in this rank of a group that is there."""
    import torch.distributed as dist

    from moe_overlap.commands.train import assemble

    parsed = with_plan(parse(words), dist.get_world_size())
    validate(parsed.config, dist.get_world_size())
    assemble(parsed, dist.get_rank()).run()


@pytest.mark.parametrize("kind", DECIDED)
def test_a_run_from_the_plan_alone_has_the_losses_of_the_flags(tmp_path: Path, kind: str) -> None:
    facts, decided = DECIDED[kind]
    words = [*MODEL.split(), *TRAINING.split(), *facts.split()]
    config = parse([*words, *decided.split()]).config
    path = tmp_path / "plan.json"
    save_plan(plan_from_flags(config, describe_model(config, 257), 2), path)
    by_flags, by_plan = ([*words, *decided.split()], [*words, "--plan", str(path)])
    logs = [tmp_path / "flags.jsonl", tmp_path / "plan.jsonl"]
    for command, log in zip((by_flags, by_plan), logs, strict=True):
        if kind == STARTED:
            ended = Ranks([*command, "--log-json", str(log)], tmp_path / log.stem).wait()
            assert [rank.status for rank in ended] == [0, 0], ended[0].err
        else:
            run(2, train, [*command, "--log-json", str(log)])
    assert len([json.loads(line) for line in logs[1].read_text().splitlines()]) == STEPS
    assert compare_losses(["--bitwise", *map(str, logs)]) == 0


def test_a_dry_run_of_the_plan_prints_what_that_of_the_flags_prints(tmp_path: Path) -> None:
    facts, decided = DECIDED["expert ranks, recomputed"]
    words = [*MODEL.split(), *TRAINING.split(), *facts.split(), "--dry-run"]
    config = parse([*words, *decided.split()]).config
    path = tmp_path / "plan.json"
    save_plan(plan_from_flags(config, describe_model(config, 257), 2), path)
    pages = [alone([*words, *more]) for more in (decided.split(), ["--plan", str(path)])]
    assert [page.status for page in pages] == [0, 0], pages
    by_flags, by_plan = (page.out.splitlines() for page in pages)
    assert [line for line in by_plan if not line.strip().endswith(f"--plan {path}")] == by_flags
