"""The plan that flags describe."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model, padded_vocab_size, smallest_world, stage_chunks, stage_counts
from megatron.training.cli.validation import validate
from megatron.training.plan_flags import gate_of_run, plan_from_flags, plan_of_run
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import save_plan

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


IRREGULAR = "--expert-model-parallel-size 2 --micro-batch-size 2 --moe-gate topk --moe-token-dispatcher-type irregular"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


BLOCK = "full --recompute-method block --recompute-num-layers 2"


@pytest.mark.parametrize(
    ("layout", "again"),
    [
        ("Et|ttt|tt|ttL", "selective"),
        ("Ett|ttt|tt|tL", "selective --recompute-modules moe"),
        ("E|t*4|t*4|L", "selective"),
        ("E|t*4|t*4|L", BLOCK),
    ],
)
def test_a_plan_that_flags_made_recomputes_as_they_say(tmp_path: Path, layout: str, again: str) -> None:
    words = (
        f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout {layout} --recompute-granularity {again}"
    )
    plan, path = plan_of(words, 4), tmp_path / "plan.json"
    save_plan(plan, path)
    config = parse(f"{BASE} {words} --plan {path}".split()).config
    validate(config, 4)
    assert plan_of_run(config, describe_model(config, 257), 4).stages == plan.stages


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            f"{IRREGULAR} --hidden-dropout 0",
            "--attention-dropout 0.1: its masks would depend on how the micro-batch is cut; use 0",
        ),
        (
            f"{IRREGULAR} {NO_DROPOUT} --moe-token-dispatcher-type alltoall",
            "--moe-token-dispatcher-type alltoall: cut.json exchanges tokens by the irregular dispatcher; use irregular",
        ),
        (
            f"{IRREGULAR} {NO_DROPOUT} --overlap-grad-reduce",
            "--overlap-grad-reduce: cut.json reduces gradients at the end of the step (gradient_chunk_bytes 0); drop it",
        ),
    ],
)
def test_what_a_plan_cuts_is_held_against_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(plan_of(f"{IRREGULAR} {NO_DROPOUT} --moe-overlap-partitions 2", 2), Path("cut.json"))
    assert disagreement(flags) == line


def disagreement(flags: str) -> str:
    """What is wrong with flags beside the plan of cut.json."""
    config = parse(f"{BASE} {flags} --plan cut.json".split()).config
    validate(config, 2)
    with pytest.raises(ConfigError) as caught:
        plan_of_run(config, describe_model(config, 257), 2)
    return str(caught.value)


def test_a_gather_that_a_plan_lacks_is_held_against_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reduced = f"{IRREGULAR} {NO_DROPOUT} --overlap-grad-reduce"
    save_plan(plan_of(f"{reduced} --moe-overlap-partitions 2", 2), Path("cut.json"))
    rule = "cut.json gathers weights at the end of the step (overlap_param_gather false)"
    assert disagreement(f"{reduced} --overlap-param-gather") == f"--overlap-param-gather: {rule}; drop it"
    rule = "cut.json reduces gradients in gaps (reduce_at_once false)"
    flag = "--moe-overlap-grad-reduce at-once"
    assert disagreement(f"{reduced} {flag}") == f"{flag}: {rule}; drop it"
    flag, rule = "--moe-overlap-forward-send late", "cut.json sends early (sends_late false)"
    assert disagreement(f"{reduced} {flag}") == f"{flag}: {rule}; drop it"


UNNAMED = IRREGULAR.replace("--moe-gate topk ", "")
CAPACITY = "--moe-expert-capacity-factor 1 --moe-token-drop-policy position"


@pytest.mark.parametrize(
    "more", ["--moe-overlap-micro-batches 2", "--defer-weight-gradients --moe-overlap-range after"]
)
def test_partitions_without_capacity_take_the_topk_gate(tmp_path: Path, more: str) -> None:
    overlap = f"{NO_DROPOUT} --moe-overlap-partitions 2 {more}"
    named, plan = plan_of(f"{IRREGULAR} {overlap}", 2), plan_of(f"{UNNAMED} {overlap}", 2)
    assert plan == named and plan.stages[0].overlap.layers[0].gate == "topk"
    config = parse(f"{BASE} {UNNAMED} {overlap}".split()).config
    assert gate_of_run(config, plan) == "topk"
    save_plan(plan, tmp_path / "plan.json")
    by_file = parse(f"{BASE} {UNNAMED} {NO_DROPOUT} --plan {tmp_path / 'plan.json'}".split()).config
    validate(by_file, 2)
    assert plan_of_run(by_file, describe_model(by_file, 257), 2).stages == plan.stages


def test_without_partitions_megatron_core_keeps_its_router() -> None:
    config = parse(f"{BASE} {UNNAMED} --defer-weight-gradients".split()).config
    plan = plan_of_run(config, describe_model(config, 257), 2)
    assert {layer.gate for layer in plan.stages[0].overlap.layers} == {None} and gate_of_run(config, plan) is None


@pytest.mark.parametrize(
    ("gate", "flags", "line"),
    [
        ("topk", CAPACITY, "gate topk: the flags say None; make the flags and the plan agree"),
        ("hash", "", "gate hash: the flags say None; make the flags and the plan agree"),
        ("topk", "--moe-router-force-load-balancing", "drop the flag or use --moe-gate random"),
    ],
)
def test_a_plan_names_no_gate_that_flags_must_name(tmp_path: Path, gate: str, flags: str, line: str) -> None:
    no_losses = "--moe-aux-loss-coeff 0"
    named = IRREGULAR.replace("topk", gate)
    path = tmp_path / "plan.json"
    save_plan(plan_of(f"{named} {no_losses} {NO_DROPOUT} --moe-overlap-partitions 2", 2), path)
    config = parse(f"{BASE} {UNNAMED} {no_losses} {NO_DROPOUT} {flags} --plan {path}".split()).config
    validate(config, 2)
    with pytest.raises(ConfigError, match=line):
        plan_of_run(config, describe_model(config, 257), 2)


PAIRS = f"{BASE} --expert-model-parallel-size 2 --moe-token-dispatcher-type irregular --moe-overlap-micro-batches 2"
GROWING = PAIRS.replace("--train-iters 5", "--train-samples 40")


def test_every_batch_of_a_run_holds_the_micro_batches_that_are_interleaved(tmp_path: Path) -> None:
    """Two data-parallel ranks, micro-batch 1: two micro-batches are 4 samples."""
    line = "2: a step of 2 samples has 1 micro-batch on each data-parallel rank; use batches of 4 samples or more"
    overlapping = parse(PAIRS.split()).config
    model = describe_model(overlapping, 257)
    path = tmp_path / "plan.json"
    save_plan(plan_of_run(overlapping, model, 2), path)
    by_file = GROWING.replace("--moe-overlap-micro-batches 2", f"--plan {path}")
    for words, subject in ((GROWING, "--moe-overlap-micro-batches"), (by_file, f"{path} micro_batches_in_flight")):
        fitting, short = (parse(f"{words} --rampup-batch-size {first} 2 20".split()).config for first in (4, 2))
        validate(short, 2)
        assert plan_of_run(fitting, model, 2).global_batch_size == 8
        with pytest.raises(ConfigError) as refused:
            plan_of_run(short, model, 2)
        assert str(refused.value) == f"{subject} {line}"


def test_batches_of_evaluations_hold_them_too() -> None:
    config = parse(f"{PAIRS} --eval-global-batch-size 2".split()).config
    with pytest.raises(ConfigError, match="a step of 2 samples has 1 micro-batch"):
        plan_of_run(config, describe_model(config, 257), 2)


def test_derived_sizes() -> None:
    config = parse([*BASE.split(), "--swiglu", "--moe-layer-freq", "2", "--tensor-model-parallel-size", "2"]).config
    model = describe_model(config, 257)
    assert model.ffn_hidden_size == 128  # 8/3 · 64 = 170, down to a multiple of 64
    assert model.moe_layers == (True, False) * 4
    assert model.vocab_size == padded_vocab_size(257, 128, 2) == 512
    assert (model.num_query_groups, model.kv_channels) == (4, 16)
    assert stage_counts(config) == [8]


def test_smallest_world() -> None:
    flags = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    assert smallest_world(parse(f"{BASE} {flags} --pipeline-model-parallel-size 4".split()).config) == 32
    flags = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8"
    assert smallest_world(parse(f"{BASE} {flags}".split()).config) == 16


def test_weights_are_gathered_under_the_passes_of_lists_where_the_flag_says_so() -> None:
    listed = "--expert-model-parallel-size 2 --moe-token-dispatcher-type irregular --defer-weight-gradients"
    gathered = "--overlap-grad-reduce --overlap-param-gather"
    for words, expected in (
        (listed, False),
        (f"{listed} --overlap-grad-reduce", False),
        (f"{listed} {gathered}", True),
        (gathered, False),  # megatron-core's own hooks
    ):
        assert [stage.overlap.overlap_param_gather for stage in plan_of(words, 2).stages] == [expected]


def test_gradient_pieces_are_asked_for_in_parameters() -> None:
    overlapped = "--expert-model-parallel-size 2 --moe-token-dispatcher-type irregular --defer-weight-gradients"
    for words, expected in (
        (overlapped, 0),
        (f"{overlapped} --overlap-grad-reduce --ddp-bucket-size 5000", 20_000),
        (f"{overlapped} --overlap-grad-reduce", 160_000_000),
        ("--overlap-grad-reduce --ddp-bucket-size 5000", 0),
    ):
        assert [stage.overlap.gradient_chunk_bytes for stage in plan_of(words, 2).stages] == [expected]
