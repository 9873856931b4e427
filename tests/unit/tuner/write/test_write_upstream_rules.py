"""Tests of unmodified Megatron-LM's rules: one by one, on real jobs' lists, and plans held against the same rules."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path

import pytest

from megatron.training.plan_values import arguments_of, layout_values
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.overlap import NO_OVERLAP, StageOverlap
from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.tuner.write.upstream_rules import is_upstream_plan, upstream_errors, upstream_plan_errors
from moe_overlap.tuner.write.upstream_values import (
    LAYERS_ARE_CUT,
    Values,
    default_value,
    parser_errors,
    state_arguments,
    values_of,
    values_of_plan,
)
from tests.unit.training.test_flags_from_plan import drawn_plan, facts_of

ROOT = Path(__file__).resolve().parents[4]
JOB = shlex.split((ROOT / "examples/mixtral-8x7b.args").read_text(), comments=True)
"""TP 2, PP 4, EP 8, ETP 1 on 64 GPUs."""
DEEP = shlex.split((ROOT / "examples/deepseek-v3.args").read_text(), comments=True)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-scope"
OVERLAP = "--overlap-moe-expert-parallel-comm"
OVERLAPPED = f"{OVERLAP} --num-virtual-stages-per-pipeline-rank 2"
NARROW = "--fp8-format hybrid --fp8-recipe"
ONE, TWO = "--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 2"
ALONE = "--tensor-model-parallel-size 1"
FINE = "--fine-grained-activation-offloading"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


def complaints(words: list[str], world: int = 64) -> list[str]:
    flags = grouped(words)
    return [str(error) for error in (*parser_errors(flags), *upstream_errors(values_of(flags), world))]


def without(words: list[str], *flags: str) -> list[str]:
    """The words without some flags and their values."""
    return [word for name, texts in grouped(words).items() if name not in flags for word in (name, *texts)]


@pytest.mark.parametrize("words", [JOB, [*JOB, *OVERLAPPED.split()], [*JOB, f"{OVERLAPPED} --delay-wgrad-compute"]])
def test_what_upstream_runs_has_no_complaint(words: list[str]) -> None:
    assert complaints(" ".join(words).split()) == []


CASES = [
    # divisibility
    ("--tensor-model-parallel-size 3", "world size 64: not a multiple of TP × PP × CP = 3 × 4 × 1"),
    ("--pipeline-model-parallel-size 3", "world size 64: not a multiple of TP"),
    ("--expert-tensor-parallel-size 4", "world size 64: not a multiple of ETP × EP × PP = 4 × 8 × 4"),
    ("--global-batch-size 100", "--global-batch-size 100: not a multiple of micro-batch × data-parallel = 1 × 8"),
    ("--tensor-model-parallel-size 16 --num-query-groups 12", "12 query groups are neither"),
    ("--num-attention-heads 31", "--tensor-model-parallel-size 2: 31 heads are not divisible by it"),
    ("--ffn-hidden-size 14335", "--ffn-hidden-size 14335 is not divisible"),
    ("--moe-ffn-hidden-size 33 --expert-tensor-parallel-size 2", "experts' width 33"),
    ("--moe-shared-expert-intermediate-size 33", "--moe-shared-expert-intermediate-size 33"),
    ("--context-parallel-size 2 --seq-length 4098", "--context-parallel-size 2 cuts it into 4 pieces"),
    ("--seq-length 4095", "--sequence-parallel splits it over 2 ranks"),
    ("--seq-length 65536", "--max-position-embeddings is 32768"),
    ("--num-layers 31", "--pipeline-model-parallel-size 4: 31 layers do not divide over 4 stages"),
    ("--use-tp-pp-dp-mapping", "stages are neighbours only if TP × CP = 2 equals ETP × EP = 8"),
    # the pipeline
    ("--num-virtual-stages-per-pipeline-rank 3", "--num-virtual-stages-per-pipeline-rank 3: a stage has 8 layers"),
    ("--num-layers-per-virtual-pipeline-stage 3", "--num-layers-per-virtual-pipeline-stage 3: a stage has 8 layers"),
    (f"--num-virtual-stages-per-pipeline-rank 2 {ONE}", "interleaved chunks need 2 stages"),
    ("--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24", "use 32 or more"),
    (
        "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 4",
        "--num-virtual-stages-per-pipeline-rank 2: conflicts with --num-layers-per-virtual-pipeline-stage",
    ),
    (
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Et*8|(t*8|)*2t*8L",
        "--pipeline-model-parallel-layout Et*8|(t*8|)*2t*8L: conflicts with --num-virtual-stages-per-pipeline-rank",
    ),
    ("--pipeline-model-parallel-layout Et*8|(t*8|)*2t*7L", "holds 31 of 32 layers"),
    ("--pipeline-model-parallel-layout Et*16|t*16L", "names 2 chunks for 4 stages"),
    ("--pipeline-model-parallel-layout t*8|(t*8|)*2t*8L", "must begin with the one embedding E"),
    (
        "--pipeline-model-parallel-layout Et*8|(t*8|)*2t*8L --decoder-first-pipeline-num-layers 8",
        "--decoder-first-pipeline-num-layers: conflicts with --pipeline-model-parallel-layout",
    ),
    ("--decoder-first-pipeline-num-layers 6", "26 layers do not divide over 3 stages"),
    (
        "--decoder-first-pipeline-num-layers 8 --num-layers-per-virtual-pipeline-stage 4",
        "need the number of virtual stages",
    ),
    (
        "--decoder-first-pipeline-num-layers 8 --account-for-loss-in-pipeline-split",
        "conflicts with --decoder-first-pipeline-num-layers",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        "interleaved chunks without overlapped transfers need 3 stages",
    ),
    # sequence parallelism
    ("--tp-comm-overlap --tensor-model-parallel-size 1", "--tp-comm-overlap: needs sequence parallelism"),
    ("--distribute-saved-activations", "--distribute-saved-activations: sequence parallelism already splits"),
    # experts and dispatchers
    ("--num-experts 12", "--expert-model-parallel-size 8: 12 experts are not divisible by it"),
    ("--fp16", "--expert-model-parallel-size 8: expert parallelism does not train in fp16"),
    (
        "--moe-token-dispatcher-type flex --expert-model-parallel-size 1",
        "flex: needs several expert ranks",
    ),
    ("--moe-enable-deepep", "--moe-enable-deepep: needs --moe-token-dispatcher-type flex"),
    ("--moe-token-dispatcher-type flex --moe-pad-expert-input-to-capacity", "DeepEP cannot pad"),
    (f"--moe-token-dispatcher-type allgather --moe-router-padding-for-fp8 {NARROW} mxfp8", "cannot pad"),
    (
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --moe-token-dispatcher-type flex",
        "--moe-shared-expert-overlap: needs the alltoall dispatcher",
    ),
    ("--moe-token-dispatcher-type irregular", "irregular: is no choice of Megatron-LM"),
    # recomputation and offloading
    ("--recompute-granularity full", "--recompute-granularity full: needs a method"),
    ("--recompute-granularity full --recompute-method block", "needs a number of layers"),
    ("--recompute-granularity selective --recompute-num-layers 1", "needs --recompute-granularity full"),
    ("--recompute-granularity selective --recompute-modules moe_act", "moe_act: needs grouped products"),
    ("--recompute-granularity selective --recompute-modules mla_up_proj", "needs --multi-latent-attention"),
    ("--recompute-granularity selective --recompute-modules router", "router: cannot be recomputed"),
    (f"--recompute-granularity selective --recompute-modules layernorm {NARROW} delayed", "under delayed scaling"),
    ("--cpu-offloading-num-layers 4", "--cpu-offloading-num-layers 4: does not work in a pipeline"),
    (f"--cpu-offloading-num-layers 32 {ONE}", "--cpu-offloading-num-layers 32: must be between 1 and 31"),
    (f"--cpu-offloading-num-layers 4 --recompute-activations {ONE}", "does not go with recomputation"),
    ("--fine-grained-activation-offloading", "needs the modules to offload"),
    ("--fine-grained-activation-offloading --offload-modules attn_proj", "attn_proj: can be offloaded only together"),
    ("--optimizer-cpu-offload", "--optimizer-cpu-offload: needs the precision-aware optimizer"),
    # sharding and precision
    ("--use-megatron-fsdp", "--ckpt-format torch_dist: --use-megatron-fsdp needs fsdp_dtensor"),
    (
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor",
        "--pipeline-model-parallel-size 4: --use-megatron-fsdp does not support",
    ),
    ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16: types other than fp32 need --use-precision-aware-optimizer"),
    ("--use-precision-aware-optimizer --optimizer sgd", "--use-precision-aware-optimizer: supports Adam only"),
    (f"{NARROW} mxfp8 --fp4-format e2m1", "--fp4-format e2m1: conflicts with --fp8-format"),
    ("--fp8-param-gather", "--fp8-param-gather: needs --fp8-format"),
    # overlap
    (OVERLAP, "needs virtual stages in a pipeline of 4 stages"),
    (f"{OVERLAPPED} --expert-model-parallel-size 1", "needs several expert ranks"),
    (f"{OVERLAPPED} --moe-token-dispatcher-type allgather", "cannot overlap allgather"),
    (f"{OVERLAPPED} --recompute-granularity full --recompute-method block --recompute-num-layers 1", "full"),
    (f"{OVERLAPPED} --moe-shared-expert-overlap", "already overlaps shared experts"),
    (f"{OVERLAPPED} --mtp-num-layers 2", "supports one prediction layer, not 2"),
    (f"{OVERLAP} {ONE} --mtp-num-layers 1", "needs a pipeline if there is a prediction layer"),
    (f"{OVERLAPPED} --cuda-graph-impl local", "supports CUDA graphs of Transformer Engine only"),
    ("--delay-wgrad-compute", "needs --overlap-moe-expert-parallel-comm"),
    (f"{OVERLAPPED} --delay-wgrad-compute --transformer-impl local", "needs Transformer Engine"),
    ("--ep-overlap-early-attn-memory-release", "needs --overlap-moe-expert-parallel-comm"),
    ("--overlap-param-gather-with-optimizer-step", "an interleaved pipeline"),
    ("--defer-embedding-wgrad-compute --no-gradient-accumulation-fusion", "needs fused gradient accumulation"),
    ("--mtp-num-layers 1 --position-embedding-type learned_absolute", "need rotary positions, or none"),
    # CUDA graphs
    (
        f"{GRAPHS} attn --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "cannot capture full",
    ),
    (f"{GRAPHS} moe", "experts can be captured only if their rows are padded"),
    (f"{GRAPHS} moe_preprocess", "moe_preprocess: needs moe_router"),
    (f"{GRAPHS} moe_router --recompute-granularity selective --recompute-modules moe", "inside the recomputed module"),
    # and every further refusal
    ("--overlap-p2p-communication-warmup-flush", "needs overlapped transfers of an interleaved pipeline"),
    ("--pipeline-model-parallel-layout Et*8|(t*8|)*2t*8mL", "must have 0 prediction layers m"),
    (
        "--mtp-num-layers 2 --pipeline-model-parallel-layout Et*8|(t*8|)*2t*8mL",
        "must have 2 prediction layers m after the layers t",
    ),
    (f"--mtp-num-layers 2 {TWO} --pipeline-model-parallel-layout Et*16|t*16m|m|L", "must be in one chunk, the last"),
    (f"--cpu-offloading-num-layers 4 {ONE} --cuda-graph-impl local", "does not go with CUDA graphs"),
    (f"--cpu-offloading-num-layers 4 {ONE} {FINE} --offload-modules core_attn", "does not go with --cpu-offloading"),
    (
        f"{SELECTIVE} shared_experts --moe-shared-expert-overlap",
        "shared_experts: conflicts with --moe-shared-expert-overlap",
    ),
    (
        f"--optimizer-cpu-offload --fp8-param-gather {NARROW} mxfp8",
        "needs delayed scaling if the optimizer is offloaded",
    ),
    ("--optimizer muon", "--optimizer muon: cannot be sharded over replicas"),
    ("--ckpt-format fsdp_dtensor", "--ckpt-format fsdp_dtensor: needs --use-megatron-fsdp"),
    ("--use-torch-fsdp2", "does not go with --pipeline-model-parallel-size 4"),
    ("--use-torch-fsdp2", "does not go with --use-distributed-optimizer"),
    ("--use-torch-fsdp2", "add --no-gradient-accumulation-fusion"),
    ("--use-torch-fsdp2 --ckpt-format torch", "needs the format torch_dist or torch_dcp"),
    ("--fp4-param-gather", "--fp4-param-gather: needs --fp4-format"),
    ("--moe-router-padding-for-quantization", "needs fp8 or fp4"),
    (f"{OVERLAPPED} --delay-wgrad-compute --moe-use-legacy-grouped-gemm", "does not go with --moe-use-legacy"),
    (f"--defer-embedding-wgrad-compute {ONE}", "needs a pipeline of several stages"),
    (f"{GRAPHS} full_iteration", "full_iteration: needs --cuda-graph-impl local"),
    (f"{GRAPHS} moe moe_router", "moe: already contains moe_router"),
    (f"--distribute-saved-activations {ALONE}", "needs full recomputation and several tensor ranks"),
    # the parser
    ("--log-json losses.jsonl", "--log-json: Megatron-LM has no such flag"),
    ("--num-layers many", "--num-layers many: must be a whole number"),
    ("--sequence-parallel 2", "--sequence-parallel 2: takes no value"),
]


@pytest.mark.parametrize(("changed", "message"), CASES, ids=[case[1][:40] for case in CASES])
def test_every_rule_names_what_is_wrong(changed: str, message: str) -> None:
    said = complaints([*JOB, *changed.split()])
    assert any(message in line for line in said), said


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("--sequence-parallel", "experts with tensor parallelism need sequence parallelism"),
        ("--use-distributed-optimizer", "--overlap-param-gather: needs sharded optimizer states"),
        ("--overlap-grad-reduce", "--overlap-param-gather: needs --overlap-grad-reduce"),
        ("--num-experts", "--expert-model-parallel-size 8: the model has no experts"),
        ("--bf16", "--moe-grouped-gemm: grouped products need bf16"),
        ("--bf16", "--overlap-moe-expert-parallel-comm: needs bf16 or fp16"),
        ("--disable-bias-linear", "--expert-tensor-parallel-size 2: experts with biases cannot be split"),
        ("--use-distributed-optimizer", "--use-precision-aware-optimizer: needs sharded optimizer states"),
        ("--use-distributed-optimizer", "--fp8-param-gather: needs sharded optimizer states"),
        ("--untie-embeddings-and-output-weights", "--use-torch-fsdp2: does not support tied embeddings"),
    ],
)
def test_what_is_missing_is_named(missing: str, message: str) -> None:
    given = f"{OVERLAPPED} --moe-grouped-gemm --use-precision-aware-optimizer --fp8-format hybrid --fp8-param-gather"
    given += " --expert-tensor-parallel-size 2"
    # torch's FSDP gathers fp8 weights as well, so it stands beside the one rule of its own.
    given += " --use-torch-fsdp2" if "fsdp2" in message else ""
    words = [*JOB, *given.split()]
    complete, lacking = complaints(words), complaints(without(words, missing))
    assert any(message in line for line in lacking) and not any(message in line for line in complete)


def test_a_layout_counts_its_chunks_as_virtual_stages() -> None:
    """A layout of eight chunks on four stages has what the overlap needs."""
    layout = "Et*4|(t*4|)*6t*4L"
    assert complaints([*JOB, OVERLAP, "--pipeline-model-parallel-layout", layout]) == []
    assert complaints([*JOB, OVERLAP, "--pipeline-model-parallel-layout", "Et*8|(t*8|)*2t*8L"]) != []


OF_ANOTHER_RELEASE = {
    "--step-batch-size-schedule": "one text to the parser; the list has it as several",
    "--use-torch-fsdp2": "ties weights and trains fp16 on newer releases",
    "--moe-grouped-gemm": "the two lists train in fp32, for which newer releases have grouped products",
    "--optimizer": "newer releases shard muon",
}


def test_lists_of_real_jobs_have_no_complaint() -> None:
    """Upstream's own jobs, at the smallest world of their sizes, pass but for what newer releases allow."""
    lists = json.loads((ROOT / "tests/golden/argument_lists.json").read_text())
    refused = {}
    for entry in lists:
        flags = grouped(entry["arguments"])
        values = values_of(flags)
        tensor, context, stages, expert = (
            int(str(values.get(f"--{axis}-parallel-size", 1)))
            for axis in ("tensor-model", "context", "pipeline-model", "expert-model")
        )
        sharing = int(str(values.get("--expert-tensor-parallel-size", tensor)))
        world = stages * math.lcm(tensor * context, sharing * expert)
        errors = [*parser_errors(flags), *upstream_errors(values, world)]
        refused.update({f"{entry['name']}: {e.subject}": e.subject for e in errors})
    assert len(lists) == 88
    assert set(refused.values()) == set(OF_ANOTHER_RELEASE)
    assert len(refused) == 8


def plain(plan: Plan) -> Plan:
    """A plan without overlap, which Megatron-LM has no list for."""
    stages = tuple(dataclasses.replace(stage, overlap=NO_OVERLAP) for stage in plan.stages)
    return dataclasses.replace(plan, stages=stages)


def test_a_plan_and_the_flags_that_say_it_have_the_same_values() -> None:
    """`values_of_plan` is what the parser makes of the plan's own flags, for drawn plans; how layers are cut is one text."""
    ends = {f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last")}
    cut = {LAYERS_ARE_CUT, "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout", *ends}
    for seed in range(150):
        plan = plain(drawn_plan(seed)[0])
        flags = grouped([*arguments_of(layout_values(plan, 0)), *state_arguments(plan)])
        assert parser_errors(flags) == []
        written, planned = values_of(flags), values_of_plan(plan)
        for flag in planned.keys() - cut:
            # A flag that is not written has upstream's default; that of ETP is TP.
            default = plan.stages[0].tensor if flag == "--expert-tensor-parallel-size" else default_value(flag)
            assert written.get(flag, default) == planned[flag], (seed, flag)


def settings(plan: Plan, seed: int) -> Values:
    return values_of(grouped([*facts_of(plan, drawn_plan(seed)[1]), "--moe-token-dispatcher-type", "alltoall"]))


def test_a_plan_breaks_the_rules_that_its_flags_break() -> None:
    """Twins: the rules on a plan's values, and on the parsed text of its flags; both outcomes occur."""
    outcomes = set()
    for seed in range(150):
        plan, model = drawn_plan(seed)
        plan = plain(plan)
        own = [*facts_of(plan, model), "--moe-token-dispatcher-type", "alltoall"]
        written = [*own, *arguments_of(layout_values(plan, 0)), *state_arguments(plan)]
        by_flags = [str(error) for error in upstream_errors(values_of(grouped(written)), plan.world_size)]
        by_plan = [str(error) for error in upstream_plan_errors(plan, values_of(grouped(own)))]
        assert by_plan == by_flags, seed
        assert is_upstream_plan(plan, values_of(grouped(own))) == (not by_plan), seed
        outcomes.add(bool(by_plan))
    assert outcomes == {True, False}


def test_what_no_flag_says_is_refused_by_field() -> None:
    plan = plain(next(drawn_plan(seed)[0] for seed in range(150) if len(drawn_plan(seed)[0].stages) == 3))
    first, second, third = plan.stages
    own = settings(plan, 0)

    def complaint(stages: tuple[object, ...]) -> str:
        odd = dataclasses.replace(plan, stages=stages)  # type: ignore[arg-type]
        assert not is_upstream_plan(odd, own)
        return str(upstream_plan_errors(odd, own)[0])

    unlike = dataclasses.replace(second, micro_batch_size=2 * second.micro_batch_size)
    assert complaint((first, unlike, third)).startswith("plan stages[1].micro_batch_size: differs from stages[0]")
    kept = tuple(dataclasses.replace(stage, offload=Offload(weights=0.5)) for stage in plan.stages)
    assert complaint(kept).startswith("plan stages[0].offload: Megatron-LM offloads activations and the optimizer's")
    listed = dataclasses.replace(third, overlap=StageOverlap(micro_batches_in_flight=2))
    assert complaint((first, second, listed)).startswith(
        "plan stages[2].overlap: Megatron-LM does not execute instruction lists"
    )


def test_zero_2_and_offloading_become_flags() -> None:
    plan = plain(drawn_plan(3)[0])
    stages = tuple(
        dataclasses.replace(stage, zero_level=2, offload=Offload(optimizer=0.5), chunks=stage.chunks)
        for stage in plan.stages
    )
    assert " ".join(state_arguments(dataclasses.replace(plan, stages=stages))) == (
        "--use-distributed-optimizer --use-megatron-fsdp --optimizer-cpu-offload "
        "--data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor "
        "--overlap-grad-reduce --overlap-param-gather "
        "--optimizer-offload-fraction 0.5 --use-precision-aware-optimizer"
    )


def test_a_search_can_ask_for_every_plan() -> None:
    """A plan is answered by some hundred calls (0.06 ms on one core), once upstream's defaults are read."""
    plan = plain(drawn_plan(3)[0])
    own = settings(plan, 3)
    upstream_plan_errors(plan, own)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    upstream_plan_errors(plan, own)
    sys.setprofile(None)
    assert 50 < calls < 1000


def test_layers_are_counted_without_those_of_the_first_stage() -> None:
    assert complaints(DEEP, 1024) == []
    even = without(DEEP, "--decoder-first-pipeline-num-layers")
    assert complaints(even, 1024) == [
        "--decoder-last-pipeline-num-layers 2: 59 layers do not divide over 15 stages; change the stages or their layers"
    ]
    assert complaints(without(DEEP, "--num-layers"), 1024) == ["--num-layers: Megatron-LM needs it; add it"]
