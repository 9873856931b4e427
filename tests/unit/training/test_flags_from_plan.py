"""Flags and plans say the same: plan → flags → plan is the identity, and --plan completes a command line or is refused by field."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import (
    arguments_of,
    content_sha256,
    flags_from_plan,
    plan_from_flags,
    plan_of_run,
)
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Recompute, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import save_plan
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words

FACTS = (
    "--hidden-size 512 --ffn-hidden-size 512 --num-attention-heads 8 --max-position-embeddings 512 --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 "
    "--moe-ffn-hidden-size 512"
)
"""The model, and nothing that a plan decides."""
SEEDS = range(300)


def facts_of(plan: Plan, model: ModelDescription) -> list[str]:
    """The flags of the model of a plan."""
    layers = "[" + ",".join(str(int(is_moe)) for is_moe in model.moe_layers) + "]"
    return [*FACTS.split(), "--num-layers", str(model.num_layers), "--moe-layer-freq", layers]


def drawn_layout(draw: random.Random) -> dict[str, Any]:
    """Numbers of ranks of a stage."""
    tensor, context = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2))
    data = draw.choice((1, 2, 3, 4))
    divisors = [number for number in (1, 2, 4, 8) if tensor * context * data % number == 0]
    expert = draw.choice(divisors)
    shared = [number for number in (1, tensor) if tensor * context * data % (expert * number) == 0]
    return {
        "tensor": tensor,
        "context": context,
        "data": data,
        "expert": expert,
        "expert_tensor": draw.choice(shared),
        "micro_batch_size": draw.choice((1, 2, 4, 6)),
    }


def drawn_sizes(draw: random.Random, stages: int, virtual: int) -> list[list[int]]:
    """Layers of every chunk: even, uneven at the ends, or any."""
    kind = draw.choice(("even", "ends", "any"))
    each = draw.randint(1, 3)
    sizes = [[each] * virtual for _ in range(stages)]
    if kind == "ends":
        sizes[0] = [draw.randint(1, 4)] * virtual
        sizes[-1] = [draw.randint(1, 4)] * virtual
    if kind == "any":
        sizes = [[draw.randint(1, 3) for _ in range(virtual)] for _ in range(stages)]
        if stages > 1:  # The embedding and the loss may stand alone.
            sizes[0][0], sizes[-1][-1] = draw.choice((0, 1, 2)), draw.choice((0, 1, 2))
    return sizes


def drawn_recompute(draw: random.Random, sizes: list[list[int]], with_norms: bool) -> list[Recompute]:
    """The same recomputation on every stage."""
    depths = [depth for chunks in sizes for depth in chunks if depth]
    kind = draw.choice(("none", "none", "selective", "full", "uniform"))
    if kind == "selective":
        names = ["core_attn", "mlp", "moe", *(["layernorm"] if with_norms else [])]
        modules = tuple(draw.sample(names, draw.randint(1, len(names))))
        return [Recompute(layers=max(1, *chunks, 0), granularity="selective", modules=modules) for chunks in sizes]
    if kind == "full":
        return [Recompute(layers=draw.randint(1, min(depths)), granularity="full")] * len(sizes)
    if kind == "uniform":
        fits = [number for number in (1, 2, 3, 4) if all(depth % number == 0 for depth in depths)]
        return [Recompute(layers=draw.choice(fits), granularity="uniform")] * len(sizes)
    return [Recompute()] * len(sizes)


def drawn_words(draw: random.Random, stage: StagePlan, virtual: int) -> OverlapWords:
    """An overlap that flags can say on this stage; often none."""
    if stage.expert * stage.expert_tensor == 1 or draw.random() < 0.3:
        return OverlapWords()
    partitions = draw.choice([number for number in (1, 2, 3) if stage.micro_batch_size % number == 0])
    chunks = draw.choice((1, 2, 4, 8)) if partitions == 1 and stage.recompute.granularity == "none" else 1
    pairs = 2 if virtual == chunks == 1 and stage.gradient_accumulation_steps > 1 and draw.random() < 0.4 else 1
    return OverlapWords(
        partitions=partitions,
        range_word=draw.choice(("experts", "after", "around")),
        capacity_chunks=chunks,
        gate=draw.choice(("topk", "random")) if partitions > 1 else draw.choice((None, "topk")),
        dispatcher="irregular",
        defer=draw.random() < 0.5,
        max_deferred_bytes=draw.choice((1, 12_345, 1 << 30, 1 << 40)),
        micro_batches=pairs,
    )


def drawn_plan(seed: int) -> tuple[Plan, ModelDescription]:
    """A valid plan with stages of one shape and one overlap for all layers, and its model."""
    draw = random.Random(seed)
    stages = draw.choice((1, 1, 2, 3, 4))
    virtual = draw.choice((1, 2, 3)) if stages > 1 else 1
    sizes, ranks = drawn_sizes(draw, stages, virtual), drawn_layout(draw)
    count = sum(map(sum, sizes)) or 1
    if not sum(map(sum, sizes)):
        sizes[0][0] = 1
    moe = "[" + ",".join(draw.choice(("1", "1", "0")) for _ in range(count)) + "]"
    words = f"{FACTS} --num-layers {count} --moe-layer-freq {moe} --seq-length 512"
    words += f" --tensor-model-parallel-size {ranks['tensor']} --micro-batch-size 1"
    model = describe_model(parse(words.split()).config, 257)
    size = ranks["tensor"] * ranks["context"] * ranks["data"]
    by_replica = stages > 1 and ranks["tensor"] * ranks["context"] == ranks["expert"] * ranks["expert_tensor"]
    by_replica = by_replica and draw.random() < 0.5
    shared = ranks["tensor"] * ranks["context"]
    micro_batches = draw.choice((1, 2, 3)) * (stages if virtual > 1 else 1)
    recompute = drawn_recompute(draw, sizes, with_norms=False)
    firsts = iter_firsts(sizes)
    built = []
    for index in range(stages):
        own = range(index * size, (index + 1) * size)
        if by_replica:
            own = [  # type: ignore[assignment]
                replica * shared * stages + index * shared + place
                for replica in range(ranks["data"])
                for place in range(shared)
            ]
        stage = StagePlan(
            chunks=firsts[index],
            devices=Devices(mesh=(1, size), ranks=tuple(own)),
            gradient_accumulation_steps=micro_batches,
            zero_level=1,
            recompute=recompute[index],
            offload=Offload(),
            **ranks,
        )
        built.append(stage)
    overlap = drawn_words(draw, built[0], virtual) if any(model.moe_layers) else OverlapWords()
    if overlap.partitions * overlap.capacity_chunks * overlap.micro_batches > 1 or overlap.defer:
        pieces = draw.choice((0, 4, 4000))
        for index, stage in enumerate(built):
            chunked = dataclasses.replace(stage, overlap=StageOverlap(gradient_chunk_bytes=pieces))
            ends = {"holds_embedding": index == 0, "holds_head": index == stages - 1}
            built[index] = dataclasses.replace(chunked, overlap=overlap_from_words(overlap, chunked, model, **ends))
    world = size * stages
    plan = Plan(
        model=Named(name=model.name, sha256=content_sha256(dataclasses.asdict(model))),
        cluster=Named(name=f"{world}-processes", sha256=content_sha256({"processes": world})),
        sequence_length=draw.choice((256, 512)),
        global_batch_size=micro_batches * ranks["micro_batch_size"] * ranks["data"],
        precision=draw.choice(("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")),
        pipeline_schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        embedding_stage=0,
        mtp_stage=None,
        loss_stage=stages - 1,
        stages=tuple(built),
        transfers=(),
        predicted=None,
    )
    return plan, model


def iter_firsts(sizes: list[list[int]]) -> list[tuple[tuple[int, int], ...]]:
    """Layer ranges of every stage's chunks: chunk 0 of every stage, then chunk 1, …"""
    ranges: list[list[tuple[int, int]]] = [[] for _ in sizes]
    first = 0
    for chunk in range(len(sizes[0])):
        for stage, counts in enumerate(sizes):
            ranges[stage].append((first, first + counts[chunk]))
            first += counts[chunk]
    return [tuple(chunks) for chunks in ranges]


def test_plan_to_flags_to_plan_is_the_identity(tmp_path: Path) -> None:
    """Through the real command line; and the flags pass every rule, as the plan does."""
    drawn = 0
    for seed in SEEDS:
        plan, model = drawn_plan(seed)
        validate_plan(plan, model)
        arguments = arguments_of(flags_from_plan(plan, model))
        config = parse([*facts_of(plan, model), *arguments]).config
        validate(config, plan.world_size)
        assert describe_model(config, 257) == model, seed
        assert plan_from_flags(config, model, plan.world_size) == plan, (seed, arguments)
        drawn += 1
    assert drawn >= 200
