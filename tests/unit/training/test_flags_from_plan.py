"""Flags and plans say the same: plan → flags → plan is the identity, and --plan completes flags or is refused by field."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import plan_from_flags, plan_of_run
from megatron.training.plan_values import arguments_of, layout_values, says_recomputation
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Recompute, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import content_sha256, save_plan
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words
from tests.unit.training.flags_from_plan import flags_from_plan

FACTS = (
    "--hidden-size 512 --ffn-hidden-size 512 --num-attention-heads 8 --max-position-embeddings 512 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 "
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


def drawn_recompute(draw: random.Random, sizes: list[list[int]]) -> list[Recompute]:
    """The same recomputation on every stage."""
    depths = [depth for chunks in sizes for depth in chunks if depth]
    kind = draw.choice(("none", "none", "selective", "full", "uniform"))
    if kind == "selective":
        modules = tuple(draw.sample(("core_attn", "mlp", "moe"), draw.randint(1, 3)))
        return [Recompute(layers=max(1, *chunks), granularity="selective", modules=modules) for chunks in sizes]
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
        gate=draw.choice(("topk", "hash")) if partitions > 1 else draw.choice((None, "topk")),
        dispatcher="irregular",
        defer=draw.random() < 0.5,
        max_deferred_bytes=draw.choice((1, 12_345, 1 << 30, 1 << 40)),
        micro_batches=pairs,
        sends_late=pairs > 1 and draw.random() < 0.5,
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
    recompute = drawn_recompute(draw, sizes)
    chunks = layer_ranges(sizes)
    built = []
    for index in range(stages):
        own = list(range(index * size, (index + 1) * size))
        if by_replica:
            firsts = [(replica * stages + index) * shared for replica in range(ranks["data"])]
            own = [first + place for first in firsts for place in range(shared)]
        stage = StagePlan(
            chunks=chunks[index],
            devices=Devices(mesh=(1, size), ranks=tuple(own)),
            gradient_accumulation_steps=micro_batches,
            zero_level=1,
            recompute=recompute[index],
            offload=Offload(),
            **ranks,
        )
        built.append(stage)
    overlap = drawn_words(draw, built[0], virtual) if any(model.moe_layers) else OverlapWords()
    if stages == 1:
        overlap = dataclasses.replace(overlap, sends_late=False)
    if overlap.partitions * overlap.capacity_chunks * overlap.micro_batches > 1 or overlap.defer:
        pieces, (gathers, once) = draw.choice((0, 4, 4000)), draw.choices((False, True), k=2)
        for index, stage in enumerate(built):
            travelling = StageOverlap(
                gradient_chunk_bytes=pieces,
                reduce_at_once=once and pieces > 0,
                overlap_param_gather=gathers and pieces > 0,
            )
            chunked = dataclasses.replace(stage, overlap=travelling)
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


def layer_ranges(sizes: list[list[int]]) -> list[tuple[tuple[int, int], ...]]:
    """Layer ranges of every stage's chunks: chunk 0 of every stage, then chunk 1, …"""
    ranges: list[list[tuple[int, int]]] = [[] for _ in sizes]
    first = 0
    for chunk in range(len(sizes[0])):
        for stage, counts in enumerate(sizes):
            ranges[stage].append((first, first + counts[chunk]))
            first += counts[chunk]
    return [tuple(chunks) for chunks in ranges]


def test_plan_to_flags_to_plan_is_the_identity() -> None:
    """Through the real command line; and the flags pass every rule, as the plan does."""
    for seed in SEEDS:
        plan, model = drawn_plan(seed)
        validate_plan(plan, model)
        arguments = arguments_of(flags_from_plan(plan, model))
        # A plan says 8 bits; that the scales are not delayed ones, which overlap does not take, is a setting of training.
        recipe = ["--fp8-recipe", "tensorwise"] if plan.precision == "fp8" else []
        config = parse([*facts_of(plan, model), *arguments, *recipe]).config
        validate(config, plan.world_size)
        assert describe_model(config, 257) == model, seed
        assert plan_from_flags(config, model, plan.world_size) == plan, (seed, arguments)


def two_layers(**changes: Any) -> tuple[Plan, ModelDescription]:
    """Two ranks with two experts' ranks, two MoE layers, two partitions of each."""
    words = f"{FACTS} --num-layers 2 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --bf16"
    words += " --expert-model-parallel-size 2 --moe-token-dispatcher-type irregular --moe-overlap-partitions 2"
    words += " --defer-weight-gradients --overlap-grad-reduce --ddp-bucket-size 1000"
    config = parse(words.split()).config
    model = describe_model(config, 257)
    plan = plan_from_flags(config, model, 2)
    stage = dataclasses.replace(plan.stages[0], **changes)
    return dataclasses.replace(plan, stages=(stage,)), model


def test_a_plan_completes_what_was_not_written(tmp_path: Path) -> None:
    """Every drawn plan that is executed gives, beside the model alone, the stages that its flags give."""
    path, completed = tmp_path / "plan.json", 0
    for seed in range(60):
        plan, model = drawn_plan(seed)
        if plan.precision not in ("fp32", "bf16", "fp16"):
            continue
        save_plan(plan, path)
        gates = {layer.gate for stage in plan.stages for layer in stage.overlap.layers} - {None}
        named = ["--moe-gate", str(gates.pop())] if gates else []
        for dry in ([], ["--dry-run"]):
            parsed = with_plan(parse([*facts_of(plan, model), *named, "--plan", str(path), *dry]), plan.world_size)
            validate(parsed.config, plan.world_size)
            assert parsed.world_size == (plan.world_size if dry else None)
            assert plan_of_run(parsed.config, model, plan.world_size) == plan
            assert {**flags_of(parsed.config), "overlap.plan": None}.items() >= layout_values(plan, 0).items()
        completed += 1
    assert completed >= 20


def flags_of(config: Config) -> dict[str, Any]:
    """Every field of a configuration."""
    return {
        f"{group}.{name}": value
        for group, fields in dataclasses.asdict(config).items()
        for name, value in fields.items()
    }


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("--tensor-model-parallel-size 4", "stages[0].tensor 1: --tensor-model-parallel-size says 4"),
        ("--pipeline-model-parallel-size 2", "stages (1 entries): --pipeline-model-parallel-size says 2"),
        ("--context-parallel-size 2", "stages[0].context 1: --context-parallel-size says 2"),
        ("--expert-model-parallel-size 1", "stages[0].expert 2: --expert-model-parallel-size says 1"),
        ("--expert-tensor-parallel-size 2", "stages[0].expert_tensor 1: --expert-tensor-parallel-size says 2"),
        ("--micro-batch-size 1", "stages[0].micro_batch_size 2: --micro-batch-size says 1"),
        ("--global-batch-size 16", "global_batch_size 8: --global-batch-size says 16"),
        ("--seq-length 32", "sequence_length 64: --seq-length says 32"),
        ("--fp16", "precision bf16: --fp16 says fp16"),
        ("--fp8-format hybrid --bf16", "precision bf16: --fp8-format says fp8"),
        (
            "--recompute-granularity selective",
            "stages[0].recompute.granularity full: --recompute-granularity says selective",
        ),
        ("--recompute-method uniform", "stages[0].recompute.granularity full: --recompute-method says uniform"),
        ("--recompute-num-layers 2", "stages[0].recompute.layers 1: --recompute-num-layers says 2"),
    ],
)
def test_a_written_flag_that_disagrees_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plan, model = two_layers(recompute=Recompute(layers=1, granularity="full"))
    save_plan(plan, "p.json")
    words = [*facts_of(plan, model), *written.split(), "--plan", "p.json"]
    for dry in ([], ["--dry-run"]):
        with pytest.raises(ConfigError) as refused:
            with_plan(parse([*words, *dry]), 2)
        assert str(refused.value) == f"p.json {line}; drop the flag or correct the plan"


def test_flags_say_nothing_of_stages_that_recompute_unlike_numbers_of_layers(tmp_path: Path) -> None:
    """The file does; a flag of recomputation beside it is held against every stage."""
    (_, model), path = two_layers(), tmp_path / "p.json"
    words = f"{' '.join(facts_of(two_layers()[0], model))} --num-layers 5 --moe-layer-freq 1 --seq-length 64"
    layout = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --micro-batch-size 2 --global-batch-size 8"
    config = parse(f"{words} {layout}".split()).config
    model = describe_model(config, 256, model.name)
    plan = plan_from_flags(config, model, 2)
    again = dataclasses.replace(plan.stages[0], recompute=Recompute(layers=2, granularity="full"))
    plan = dataclasses.replace(plan, stages=(again, plan.stages[1]))
    save_plan(plan, path)
    words = [*words.split(), "--plan", str(path)]
    parsed = with_plan(parse(words), 2)
    assert parsed.config.parallel.recompute_granularity is None and not says_recomputation(plan)
    assert plan_of_run(parsed.config, model, 2).stages == plan.stages
    for written, line in (
        ("--recompute-granularity full", "stages[1].recompute.granularity none: --recompute-granularity says full"),
        ("--recompute-num-layers 1", "stages[0].recompute.layers 2: --recompute-num-layers says 1"),
    ):
        with pytest.raises(ConfigError) as refused:
            with_plan(parse([*words, *written.split()]), 2)
        assert str(refused.value) == f"{path} {line}; drop the flag or correct the plan"


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("--ddp-bucket-size 500", "gradient_chunk_bytes 4000: --ddp-bucket-size says 500 parameters of 4 bytes"),
        ("--max-deferred-bytes 5", "max_deferred_bytes 1073741824: --max-deferred-bytes says 5"),
    ],
)
def test_bytes_of_an_overlap_are_held_against_the_flags(tmp_path: Path, written: str, line: str) -> None:
    path = tmp_path / "p.json"
    plan, model = two_layers()
    save_plan(plan, path)
    parsed = with_plan(parse([*facts_of(plan, model), *written.split(), "--plan", str(path)]), 2)
    with pytest.raises(ConfigError) as refused:
        plan_of_run(parsed.config, model, 2)
    assert str(refused.value) == f"{path} stages[0].overlap.{line}; drop the flag or correct the plan"


def test_a_plan_is_for_a_number_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    plan, model = two_layers()
    save_plan(plan, path)
    words = [*facts_of(plan, model), "--plan", str(path)]
    for arguments, world, line in (
        (words, 4, f"world size 4: {path} is for 2 processes; start 2"),
        ([*words, "--dry-run", "--world-size", "4"], None, f"--world-size 4: {path} is for 2 processes; use 2"),
    ):
        with pytest.raises(ConfigError) as refused:
            with_plan(parse(arguments), world)
        assert str(refused.value) == line


def test_sizes_of_a_model_file_give_way_to_the_plan(tmp_path: Path) -> None:
    """A Hugging Face config.json has no sample length: --model takes its number of positions, which nobody wrote."""
    model = Path(__file__).resolve().parents[3] / "examples/models/tiny-mixtral-8x7b.json"
    words = ["--model", str(model), "--micro-batch-size", "1"]
    config = parse(words).config
    shorter = dataclasses.replace(config, model=dataclasses.replace(config.model, seq_length=32))
    plan = plan_from_flags(shorter, describe_model(shorter, 257), 2)
    save_plan(plan, tmp_path / "p.json")
    completed = with_plan(parse([*words, "--plan", str(tmp_path / "p.json")]), 2)
    assert completed.config.model.seq_length == 32


OVERLAPS = ("--moe-overlap-partitions 2", "--defer-weight-gradients", "--moe-overlap-capacity-chunks 2")
NARROW = f"""{FACTS} --num-layers 2 --seq-length 64 --micro-batch-size 2 --bf16 --expert-model-parallel-size 2
    --moe-token-dispatcher-type irregular"""


def test_overlap_in_4_bits_is_refused(tmp_path: Path) -> None:
    words = f"{NARROW} --fp4-format e2m1"
    alone = parse(words.split()).config
    model = describe_model(alone, 257)
    plan_of_run(alone, model, 2)
    rule = "layers that overlap are not executed in 4 bits: their products would run in the weights' type"
    for overlap in OVERLAPS:
        config = parse(f"{words} {overlap}".split()).config
        validate(config, 2)
        with pytest.raises(ConfigError) as refused:
            plan_of_run(config, model, 2)
        assert str(refused.value) == f"--fp4-format e2m1: {rule}; drop it or {overlap.split()[0]}"
        plan = plan_from_flags(config, model, 2)  # It can be predicted.
        validate_plan(plan, model)
        path = tmp_path / "p.json"
        save_plan(plan, path)
        for dry in ([], ["--dry-run"]):
            with pytest.raises(ConfigError) as refused:
                with_plan(parse([*facts_of(plan, model), "--plan", str(path), *dry]), 2)
            assert str(refused.value) == f"{path} precision nvfp4: {rule}; use bf16 or overlap nothing"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_overlap_in_8_bits_takes_recipes_of_single_tensors(tmp_path: Path, overlap: str) -> None:
    why, path = overlap.split()[0], tmp_path / "p.json"
    for form, recipe in (("hybrid", "tensorwise"), ("e4m3", "blockwise"), ("e4m3", "mxfp8"), ("hybrid", "delayed")):
        said = ["--fp8-format", form, "--fp8-recipe", recipe, "--moe-gate", "topk"]
        config = parse([*f"{NARROW} {overlap}".split(), *said]).config
        model = describe_model(config, 257)
        plan = plan_from_flags(config, model, 2)
        save_plan(plan, path)
        # The recipe is a setting of training, which no plan holds.
        by_plan = with_plan(parse([*NARROW.split(), *said, "--plan", str(path)]), 2).config
        if recipe != "delayed":
            validate(config, 2)
            validate(by_plan, 2)
            assert plan_of_run(config, model, 2) == plan == plan_of_run(by_plan, model, 2)
            continue
        rule = "cuts passes into operators, and the scales of this recipe may be those of whole passes"
        with pytest.raises(ConfigError) as refused:
            validate(config, 2)
        assert str(refused.value) == f"--fp8-recipe delayed: {why} {rule}; use tensorwise, blockwise or mxfp8"
        with pytest.raises(ConfigError) as refused:
            plan_of_run(by_plan, model, 2)
        assert str(refused.value) == f"--fp8-recipe delayed: {path} {rule}; use tensorwise, blockwise or mxfp8"


def test_partitions_of_too_few_tokens_for_8_bits_are_refused() -> None:
    config = parse(f"{NARROW} {OVERLAPS[0]} --fp8-format e4m3 --fp8-recipe mxfp8 --seq-length 48".split()).config
    validate(config, 2)
    with pytest.raises(ConfigError) as refused:
        plan_of_run(config, describe_model(config, 257), 2)
    rule = "a partition has 48 tokens on a rank, and products in mxfp8 take 32 at a time"
    assert str(refused.value) == f"--moe-overlap-partitions 2: {rule}; cut into fewer, or use a larger micro-batch"
