"""Argument lists of real Mixtral and DeepSeek jobs, made small by later flags as a user would, train 20 steps on two CPU ranks.

The lists stand in tests/golden/argument_lists.json as upstream's tests start them. `OVERRIDES` is the table of what makes each
small. Switches that a CPU refuses and later flags cannot take back (FSDP, fp8, a layout of 16 layers) are left
out (`LEFT_OUT`), with the values that belong to them.
"""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.validation import validate
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.tokenizers import ByteTokenizer
from tests.end_to_end.program import ROOT
from tests.spawn import run

pytestmark = pytest.mark.slow

LISTS: dict[str, list[str]] = {
    entry["name"]: entry["arguments"] for entry in json.loads((ROOT / "tests/golden/argument_lists.json").read_text())
}
SMALL = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 5e-3 --min-lr 0 --num-workers 0 --eval-iters 1 --log-interval 20 "
    "--tokenizer-type ByteTokenizer --data-path F/text --data-cache-path F/cache --tensorboard-dir F/board "
)
BY_SAMPLES = "--train-samples 80 --lr-decay-samples 80 --lr-warmup-samples 8 --load F/empty --save F/NAME "
BY_STEPS = "--train-iters 20 --lr-decay-iters 20 --load F/empty --save F/NAME "
OVERRIDES = {
    "mixtral_8x7b_tp1pp4ep8vpp8_release": (
        f"{SMALL} {BY_SAMPLES} --num-query-groups 2 --num-layers 4 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 1"
    ),
    "mixtral_8x22b_tp2pp8ep8vpp1_release": (
        f"{SMALL} {BY_SAMPLES} --num-query-groups 2 --num-layers 4 "
        "--pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ),
    "deepseek_proxy_fsdp_ep2_fsdp2": (
        f"{SMALL} --train-iters 20 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --q-lora-rank 32 "
        "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16 "
        "--ckpt-format torch_dist --save F/NAME"
    ),
    "gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel": (
        f"{SMALL} {BY_STEPS} --num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
        "--expert-model-parallel-size 1 --expert-tensor-parallel-size 2 --moe-router-pre-softmax"
    ),
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph_1node": (
        f"{SMALL} {BY_STEPS} --num-layers 4 --moe-layer-freq ([0]*2+[1]*2) --moe-ffn-hidden-size 64 "
        "--moe-shared-expert-intermediate-size 64 --tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 "
        "--recompute-modules layernorm shared_experts"
    ),
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental": (
        f"{SMALL} {BY_STEPS} --num-layers 4 --moe-layer-freq ([0]*1+[1]*3) --num-experts 8 --moe-ffn-hidden-size 64 "
        "--moe-shared-expert-intermediate-size 64 --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16 --make-vocab-size-divisible-by 128 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 2 "
        "--recompute-modules layernorm mla_up_proj mlp"
    ),
}
LEFT_OUT = {
    "--use-megatron-fsdp": 0,
    "--data-parallel-sharding-strategy": 1,
    "--outer-dp-sharding-strategy": 1,
    "--fp8-format": 1,
    "--fp8-recipe": 1,
    "--fp8-param-gather": 0,
    "--first-last-layers-bf16": 0,
    "--pipeline-model-parallel-layout": 1,
    "--wandb-project": 1,
}
"""Flags that the CPU refuses, this fork does not execute yet, or a package must be installed for -> their number of values."""


def without_refused(words: list[str]) -> list[str]:
    """The words less those of LEFT_OUT."""
    kept, position = [], 0
    while position < len(words):
        if words[position] in LEFT_OUT:
            position += LEFT_OUT[words[position]]
        else:
            kept.append(words[position])
        position += 1
    return kept


def train_lists(folder: str) -> dict[str, list[float]]:
    """On each rank: name of the list -> losses."""
    import torch.distributed as dist

    from moe_overlap.commands import train as pretrain_moe

    losses = {}
    for name, overrides in OVERRIDES.items():
        path = Path(folder) / f"{name}.jsonl"
        later = overrides.replace("F/", f"{folder}/").replace("NAME", name).split()
        parsed = parse([*without_refused(LISTS[name]), *later, "--log-json", str(path)])
        validate(parsed.config, 2)
        loop = pretrain_moe.assemble(parsed, dist.get_rank())
        loop.run()
        dist.barrier()
        losses[name] = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lists")
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")))
    with indexed_dataset(str(folder / "text"), ByteTokenizer().vocab_size) as writer:
        for start in range(0, len(text), 500):
            writer.add_document(list(text[start : start + 500]))
    first, _ = run(2, train_lists, str(folder))
    assert isinstance(first, dict)
    assert sorted(path.name for path in folder.glob("*/step-000020")) == ["step-000020"] * len(OVERRIDES)
    return first


@pytest.mark.parametrize("name", OVERRIDES)
def test_twenty_steps(trained: dict[str, list[float]], name: str) -> None:
    losses = trained[name]
    assert len(losses) == 20 and all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) / 4 < sum(losses[:2]) / 2 - 1.0
