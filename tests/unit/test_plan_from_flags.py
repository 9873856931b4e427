"""The plan that flags describe."""

from __future__ import annotations

from megatron.training.arguments import parse
from megatron.training.describe import describe_model, padded_vocab_size, smallest_world
from megatron.training.plan_from_flags import plan_from_flags
from megatron.training.stages import stage_chunks, stage_layers
from megatron.training.validation import validate
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.validate import validate_plan

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8 --global-batch-size 8"
)


def plan_of(flags: str, world_size: int) -> Plan:
    """The validated plan of some flags."""
    config = parse(f"{BASE} {flags}".split()).config
    validate(config, world_size)
    model = describe_model(config, 257)
    plan = plan_from_flags(config, model, world_size)
    validate_plan(plan, model)
    refuse_unsupported(plan)
    return plan


def test_stages_own_neighbouring_ranks() -> None:
    plan = plan_of("--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --bf16", 8)
    assert [stage.devices.ranks for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [stage.chunks for stage in plan.stages] == [((0, 4),), ((4, 8),)]
    assert [(s.data, s.expert, s.expert_data, s.gradient_accumulation_steps) for s in plan.stages] == [(4, 2, 2, 2)] * 2
    assert (plan.precision, plan.pipeline_schedule, plan.loss_stage) == ("bf16", "1f1b", 1)


def test_virtual_stages_are_chunks() -> None:
    plan = plan_of("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 2)
    assert [stage.chunks for stage in plan.stages] == [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    assert plan.pipeline_schedule == "interleaved-1f1b"


def test_unequal_stages() -> None:
    plan = plan_of("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", 3)
    assert [stage.chunks for stage in plan.stages] == [((0, 2),), ((2, 5),), ((5, 8),)]
    assert stage_chunks([[1, 1], [2, 2], [1, 1]]) == [((0, 1), (4, 5)), ((1, 3), (5, 7)), ((3, 4), (7, 8))]


def test_recompute() -> None:
    block = plan_of("--recompute-granularity full --recompute-method block --recompute-num-layers 3", 1)
    assert (block.stages[0].recompute.granularity, block.stages[0].recompute.layers) == ("full", 3)
    chosen = plan_of("--recompute-granularity selective --recompute-modules moe", 1)
    assert (chosen.stages[0].recompute.modules, chosen.stages[0].recompute.layers) == (("moe",), 8)


def test_derived_sizes() -> None:
    config = parse([*BASE.split(), "--swiglu", "--moe-layer-freq", "2", "--tensor-model-parallel-size", "2"]).config
    model = describe_model(config, 257)
    assert model.ffn_hidden_size == 128  # 8/3 · 64 = 170, down to a multiple of 64
    assert model.moe_layers == (True, False) * 4
    assert model.vocab_size == padded_vocab_size(257, 128, 2) == 512
    assert (model.num_query_groups, model.kv_channels) == (4, 16)
    assert stage_layers(config) == (8,)


def test_smallest_world() -> None:
    flags = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    assert smallest_world(parse(f"{BASE} {flags} --pipeline-model-parallel-size 4".split()).config) == 32
    flags = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8"
    assert smallest_world(parse(f"{BASE} {flags}".split()).config) == 16
