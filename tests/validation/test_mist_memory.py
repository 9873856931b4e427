"""Memory of a GPT layer against the expressions that Mist's tracer wrote for its own model (data/mist_layer_memory.json).

Mist's GPT keeps what ours keeps, without a fused attention kernel. Its Llama is left out: Mist turns queries and keys in place,
megatron-core keeps the turned copies beside the projection that the values are a view of, two hidden states more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_overlap.predicting import joined, read_job, stage_requests
from moe_overlap.tuner.capture.cache import cached_captures
from moe_overlap.tuner.cost.features import Features
from moe_overlap.tuner.cost.memory import part_bytes
from moe_overlap.tuner.cost.operators import tabulate
from tests.validation.rows import DATA, models

SIZES = ("1.3b", "22b")
TENSOR = (1, 2)


def mist(size: str, quantity: str, b: int, tp: int) -> float:
    """Bytes of one layer."""
    content = json.loads((DATA / "mist_layer_memory.json").read_text(encoding="utf-8"))
    name = next(name for name in content if name.startswith(f"gpt2-{size}_"))
    return float(eval(content[name]["block_layer"][quantity], {"__builtins__": {}, "Max": max}, {"b": b, "tp": tp}))


def flags(size: str, tensor: int) -> list[str]:
    facts = models()[f"mist-gpt-{size}"]
    return f"""--num-layers {facts["layers"]} --hidden-size {facts["hidden"]} --num-attention-heads {facts["heads"]}
        --ffn-hidden-size {facts["ffn"]} --seq-length 2048 --max-position-embeddings 2048 --vocab-size {facts["vocab"]}
        --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-4 --bf16 --attention-dropout 0
        --hidden-dropout 0 --tensor-model-parallel-size {tensor}""".split()


@pytest.mark.slow
def test_a_gpt_layer_keeps_what_mist_says(tmp_path: Path) -> None:
    jobs = {(size, tensor): read_job(flags(size, tensor), 2 * tensor) for size in SIZES for tensor in TENSOR}
    asked = [stage_requests(job.config, job.model, job.plan)[0][0] for job in jobs.values()]
    for ((size, tensor), job), captured in zip(jobs.items(), cached_captures(asked, tmp_path), strict=True):
        graph = joined([captured], job.model)
        for b in (1, 2, 4):
            table = tabulate(graph.part("dense", samples=b), b, 2048)
            found = part_bytes(table, b, 2048, 2.0, Features(flash=False))
            assert found.saved == pytest.approx(mist(size, "saved_no_ckpt", b, tensor), rel=1e-3)
            assert 2 * found.dense_parameters == pytest.approx(mist(size, "grads", b, tensor), rel=1e-3)
