"""Layers, embedding and head, to the byte, against what Mist's tracer says of its own models (data/mist_layer_memory.json).

Every difference stands here as bytes, for all b and tp:
- Mist's Llama turns queries and keys in place and keeps the projection; megatron-core keeps the turned copies, and Transformer
  Engine a copy of the values, so that the projection goes: as many bytes. Its norms keep a mean that RMSNorm has not, and it
  counts random states.
- GPT is captured with a fused attention kernel, which keeps a sum for each row of scores; Mist's without one keeps none.
- A recomputed layer of ours counts its own input while its backward pass runs; Mist counts it with the layer below.
- Embedding: products of weight gradients are counted here, and added by Mist elsewhere; with one sample a transposition copies
  nothing. Head: megatron-core's last norm belongs to it, and its loss keeps exponentials in fp32, Mist's in fp16.

Not compared: the word table with tp > 1, which Mist replicates and does not pad; peaks of the head (a loss in fp16, in another
order) and of GPT's layers, recomputed or not (unfused attention in Mist's order, and one buffer of scores for all layers; ours
counts what one pass has at most, up to 10 % less); `saved_ckpt` of embedding and head, which nothing here recomputes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.api import read_job
from moe_overlap.tuner.calibrate.fit.rows import models
from moe_overlap.tuner.capture.cache import CaptureFiles, joined, stage_requests
from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart
from moe_overlap.tuner.cost.hardware import Features
from moe_overlap.tuner.cost.memory import part_bytes
from moe_overlap.tuner.cost.operators import tabulate
from tests.unit.tuner.cost.part_memory import peak_bytes

DATA = Path(__file__).resolve().parent / "data"
S = 2048
CASES = [("gpt", size, 1) for size in ("1.3b", "2.7b", "7b", "13b", "22b")] + [
    ("llama", size, 1) for size in ("1.3b", "7b")
]
CASES += [("gpt", "22b", 2), ("llama", "1.3b", 2)]
QUANTITIES = (
    *("weights", "grads", "opt_states", "output", "saved_no_ckpt", "saved_ckpt"),
    *("fwd_peak_no_ckpt", "fwd_peak_ckpt", "bwd_peak"),
)
RECOMPUTED_CASE = ("1.3b", 2)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


@cache
def expressions() -> dict[str, dict[str, dict[str, str]]]:
    content: dict[str, dict[str, dict[str, str]]] = json.loads(
        (DATA / "mist_layer_memory.json").read_text(encoding="utf-8")
    )
    return content


def mist(family: str, size: str, part: str, quantity: str, b: int, tp: int) -> float:
    """Bytes of `block_layer`, `pre_layer` or `post_layer`."""
    name = next(name for name in expressions() if name.startswith(f"{family.replace('gpt', 'gpt2')}-{size}_"))
    return float(eval(expressions()[name][part][quantity], {"__builtins__": {}, "Max": max}, {"b": b, "tp": tp}))


def flags(family: str, size: str, tensor: int) -> list[str]:
    facts = models()[f"mist-gpt-{size}"]
    ffn = -(-facts["hidden"] * 8 // 3 // 256) * 256 if family == "llama" else facts["ffn"]
    words = f"""--num-layers {facts["layers"]} --hidden-size {facts["hidden"]} --num-attention-heads {facts["heads"]}
        --ffn-hidden-size {ffn} --seq-length {S} --max-position-embeddings {S} --vocab-size {facts["vocab"]}
        --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-4 --fp16 --attention-dropout 0 --hidden-dropout 0
        --disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size {tensor}""".split()
    if family == "llama":
        words += RECOMPUTED if (size, tensor) == RECOMPUTED_CASE else []
        return [*words, *"--position-embedding-type rope --normalization RMSNorm --swiglu".split()]
    return [*words, "--position-embedding-type", "none"]


def test_every_size_of_the_file_is_compared() -> None:
    sizes = {tuple(name.split("_")[0].replace("gpt2", "gpt").split("-")) for name in expressions()}
    assert sizes == {(family, size) for family, size, _ in CASES}


@pytest.mark.slow
def test_layers_embedding_and_head_are_mists_to_the_byte(tmp_path: Path) -> None:
    jobs = [read_job(flags(*case), 2 * case[2]) for case in CASES]
    asked = [stage_requests(job.config, job.model, job.plan)[0] for job in jobs]
    found = iter(CaptureFiles(tmp_path).captures([request for several in asked for request in several]))
    for case, job, several in zip(CASES, jobs, asked, strict=True):
        graph = joined([next(found) for _ in several], job.model)
        for b in (1, 2, 4):
            check_layer(case, graph.part("dense", samples=b), b)
            if case == ("llama", *RECOMPUTED_CASE):
                check_recomputed(case, graph.part("dense", "full", samples=b), b)
            if case[2] == 1:
                check_ends(case, graph, b)


def measures(part: CapturedPart, b: int) -> dict[str, float]:
    bytes_ = part_bytes(tabulate(part, b, S), b, S, 2.0, Features())
    return {
        "parameters": 2 * bytes_.dense_parameters,
        "saved": bytes_.saved,
        "forward": float(peak_bytes(part, "forward", b, S)),
        "backward": float(peak_bytes(part, "backward", b, S)),
        "output": float(evaluate([part.storages[index].bytes for index in part.outputs], b, S).sum()),
    }


def facts_of(case: tuple[str, str, int], b: int) -> tuple[dict[str, Any], float, float]:
    """Sizes of the model, hidden states of a micro-batch, and what a layer of ours keeps more than Mist's."""
    family, size, tp = case
    facts = models()[f"mist-gpt-{size}"]
    hidden = 2.0 * S * facts["hidden"] * b
    if family == "llama":
        return facts, hidden, -2 * 4 * S * b - 16
    return facts, hidden, 4 * S * facts["heads"] * b / tp - 4


def check_layer(case: tuple[str, str, int], part: CapturedPart, b: int) -> None:
    family, size, tp = case
    facts, hidden, more = facts_of(case, b)
    ours = measures(part, b)
    said = {name: mist(family, size, "block_layer", name, b, tp) for name in QUANTITIES}
    assert ours["parameters"] == said["grads"] == said["opt_states"] / 6
    scores = 0.0 if family == "llama" else 2.0 * facts["heads"] * S * S * b / tp
    assert said["weights"] == said["grads"] + scores
    assert ours["output"] == said["output"] == said["saved_ckpt"] == hidden
    assert ours["saved"] + scores == said["saved_no_ckpt"] + more
    if family == "llama":
        assert ours["forward"] == said["fwd_peak_no_ckpt"] + more
        assert ours["backward"] == said["bwd_peak"] + more
        return
    unfused = part_bytes(tabulate(part, b, S), b, S, 2.0, Features(flash=False))
    assert unfused.saved == ours["saved"] + scores


def check_recomputed(case: tuple[str, str, int], part: CapturedPart, b: int) -> None:
    family, size, tp = case
    _, hidden, more = facts_of(case, b)
    ours = measures(part, b)
    assert ours["saved"] == mist(family, size, "block_layer", "saved_ckpt", b, tp)
    assert ours["forward"] == mist(family, size, "block_layer", "fwd_peak_ckpt", b, tp)
    assert ours["backward"] == mist(family, size, "block_layer", "bwd_peak", b, tp) + more + hidden


def check_ends(case: tuple[str, str, int], graph: CapturedModel, b: int) -> None:
    family, size, _ = case
    facts, hidden, _ = facts_of(case, b)
    norm = 2.0 * facts["hidden"] * (1 if family == "llama" else 2)
    words, ids = 2.0 * facts["vocab"] * facts["hidden"], 8.0 * S * b

    ours = measures(graph.part("embedding", samples=b), b)
    said = {name: mist(family, size, "pre_layer", name, b, 1) for name in ("grads", "saved_no_ckpt", "output")}
    assert (ours["parameters"], ours["saved"], ours["output"] + ids) == (words, said["saved_no_ckpt"], said["output"])
    assert words == said["grads"] == mist(family, size, "pre_layer", "opt_states", b, 1) / 6
    copied = hidden if b == 1 else 0.0
    assert ours["forward"] == mist(family, size, "pre_layer", "fwd_peak_no_ckpt", b, 1) - copied
    assert ours["backward"] == mist(family, size, "pre_layer", "bwd_peak", b, 1) + words

    ours = measures(graph.part("head", samples=b), b)
    assert ours["parameters"] == mist(family, size, "post_layer", "grads", b, 1) + norm
    statistics = (6.0 if family == "llama" else 10.0) * S * b
    wider = 2.0 * S * facts["vocab"] * b
    assert ours["saved"] == mist(family, size, "post_layer", "saved_no_ckpt", b, 1) + wider + hidden + statistics
