"""fp16, fp8 and fp4 on the command line: what goes together, each refusal with its line, and what a start on the CPU says."""

from __future__ import annotations

import io

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.flags.without_effect import idle_flags
from megatron.training.cli.start import StartMachine, obstacles, this_machine
from megatron.training.cli.validation import validate
from moe_overlap.describe.errors import ConfigError

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8 --moe-token-dispatcher-type alltoall "
)
TP8 = "--tensor-model-parallel-size 8 --sequence-parallel --num-attention-heads 8"
LATENT = "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16"
TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
MXFP8 = "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"
NVFP4 = "--bf16 --fp4-format e2m1"
CHANGE = "change the size or the ranks"

REFUSED = {
    "--fp16 --bf16": "--fp16: --bf16 chooses another type; drop one of the two flags",
    "--fp8-format hybrid --fp4-format e2m1": (
        "--fp4-format e2m1: --fp8-format chooses another; drop one of the two flags"
    ),
    "--fp16 --grad-reduce-in-bf16": (
        "--grad-reduce-in-bf16: gradients are reduced in bf16 where they are bf16; drop the flag"
    ),
    "--fp16 --loss-scale 0": "--loss-scale 0.0: must be positive and finite; use for example 65536",
    "--fp16 --min-loss-scale 8 --initial-loss-scale 4": (
        "--min-loss-scale 8.0: is above --initial-loss-scale 4; use 4 or less"
    ),
    "--fp16 --hysteresis 0": "--hysteresis 0: must be at least 1; use 1 or more",
    "--fp16 --loss-scale-window 1.5": "--loss-scale-window 1.5: counts steps; use 2",
    f"{TENSORWISE} --fp8-amax-history-len 0": "--fp8-amax-history-len 0: must be at least 1; use 1 or more",
    "--fp8-format hybrid --fp8-recipe custom": (
        "--fp8-recipe custom: needs the quantizers' factory; add --fp8-quantizer-factory PACKAGE.MODULE.FUNCTION"
    ),
    "--fp4-format e2m1 --fp4-recipe custom": (
        "--fp4-recipe custom: needs the quantizers' factory; add --fp4-quantizer-factory PACKAGE.MODULE.FUNCTION"
    ),
    f"{MXFP8} --reuse-grad-buf-for-mxfp8-param-ag": (
        "--reuse-grad-buf-for-mxfp8-param-ag: gathers mxfp8 weights through the gradient buffer; "
        "add --fp8-recipe mxfp8 --fp8-param-gather"
    ),
    "--fp8-format hybrid --first-last-layers-bf16": (
        "--first-last-layers-bf16: delayed scaling has no layers in bf16; use another --fp8-recipe"
    ),
    "--fp8-format hybrid --recompute-granularity selective --recompute-modules moe_act layernorm": (
        "--recompute-modules moe_act layernorm: delayed scaling does not recompute them; use another --fp8-recipe"
    ),
    f"{TENSORWISE} --first-last-layers-bf16 --num-layers-at-end-in-bf16 3 --pipeline-model-parallel-size 2": (
        "--num-layers-at-end-in-bf16 3: a stage has 2 layers; use 0 to 2"
    ),
    "--moe-router-padding-for-fp8": (
        "--moe-router-padding-for-fp8: pads rows for fp8 or fp4; add --fp8-format or --fp4-format, or drop the flag"
    ),
    f"{TENSORWISE} --moe-router-padding-for-quantization --moe-token-dispatcher-type allgather": (
        "--moe-router-padding-for-quantization: the allgather dispatcher does not pad; use --moe-token-dispatcher-type alltoall"
    ),
    f"{TENSORWISE} --hidden-size 72": f"--fp8-format hybrid: --hidden-size = 72 is not divisible by 16; {CHANGE}",
    f"{MXFP8} --hidden-size 80": f"--fp8-format e4m3: --hidden-size = 80 is not divisible by 32; {CHANGE}",
    f"{NVFP4} --hidden-size 80": f"--fp4-format e2m1: --hidden-size = 80 is not divisible by 32; {CHANGE}",
    f"{TENSORWISE} --ffn-hidden-size 40 --moe-ffn-hidden-size 64 --moe-layer-freq 2": (
        f"--fp8-format hybrid: the MLP's width on a rank = 40 is not divisible by 16; {CHANGE}"
    ),
    f"{TENSORWISE} {TP8}": f"--fp8-format hybrid: the heads' width on a rank = 8 is not divisible by 16; {CHANGE}",
    f"{TENSORWISE} {LATENT}": f"--fp8-format hybrid: --kv-lora-rank = 24 is not divisible by 16; {CHANGE}",
    f"{TENSORWISE} --moe-ffn-hidden-size 24": (
        f"--fp8-format hybrid: an expert's width on a rank = 24 is not divisible by 16; {CHANGE}"
    ),
    f"{TENSORWISE} --moe-shared-expert-intermediate-size 24": (
        f"--fp8-format hybrid: the shared experts' width on a rank = 24 is not divisible by 16; {CHANGE}"
    ),
    f"{TENSORWISE} --seq-length 60": (
        f"--fp8-format hybrid: the tokens of a micro-batch on a rank = 120 is not divisible by 16; {CHANGE}"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(parse(f"{BASE} {words}".split()).config, None)
    assert str(refused.value) == REFUSED[words]


@pytest.mark.parametrize(
    "words",
    [
        "--fp16 --loss-scale 128",
        "--fp16 --initial-loss-scale 65536 --min-loss-scale 1 --loss-scale-window 500 --hysteresis 4",
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
        f"{TENSORWISE} --first-last-layers-bf16 --moe-router-padding-for-quantization",
        f"{MXFP8} --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag",
        NVFP4,
        # A width that no layer has, as all of them are MoE.
        f"{TENSORWISE} --ffn-hidden-size 40 --moe-ffn-hidden-size 64",
        # Without --fp16 and --fp8-format their settings mean nothing.
        "--loss-scale-window 1.5 --fp8-recipe custom",
    ],
)
def test_accepted(words: str) -> None:
    out = io.StringIO()
    dry_run(parse(f"{BASE} {words}".split()), None, out)
    assert out.getvalue().startswith("model ")


def test_fp8_is_refused_on_the_cpu_by_its_flag_and_fp16_starts() -> None:
    cpu = StartMachine(cuda=False, packages=frozenset())
    for words, flag in ((TENSORWISE, "--fp8-format hybrid"), (NVFP4, "--fp4-format e2m1")):
        (obstacle,) = obstacles(parse(f"{BASE} {words}".split()), cpu)
        assert str(obstacle).startswith(f"{flag}: needs Transformer Engine on a GPU: this machine lacks a GPU and ")
    assert obstacles(parse(f"{BASE} --fp16".split()), cpu) == []


def test_delayed_scaling_starts_on_one_stage_only() -> None:
    gpu = StartMachine(cuda=True, packages=frozenset({"transformer_engine"}))
    two = f"{BASE} --pipeline-model-parallel-size 2 --fp8-format hybrid"
    assert obstacles(parse(f"{BASE} --fp8-format hybrid".split()), gpu) == []
    assert obstacles(parse(f"{two} --bf16 --fp8-recipe tensorwise".split()), gpu) == []
    (obstacle,) = obstacles(parse(two.split()), gpu)
    rule = "its scales are not reduced over the ranks of one stage alone"
    fix = "use tensorwise, blockwise or mxfp8; --dry-run accepts it"
    assert str(obstacle) == f"--fp8-recipe delayed: {rule}; {fix}"


def test_weight_gradients_in_16_bits_are_refused_and_not_ignored() -> None:
    gpu = StartMachine(cuda=True, packages=frozenset({"transformer_engine"}))
    (obstacle,) = obstacles(parse(f"{BASE} {TENSORWISE} --no-fp8-wgrad".split()), gpu)
    rule = "Transformer Engine computes weight gradients in 8 bits all the same"
    assert str(obstacle) == f"--no-fp8-wgrad: {rule}; drop the flag; --dry-run accepts it"


def test_settings_of_scales_that_no_recipe_reads_are_listed() -> None:
    settings = "--fp8-interval 4 --fp8-margin 1 --fp8-amax-history-len 16 --fp8-amax-compute-algo max"
    delayed = dict(idle_flags(parse(f"{BASE} --bf16 --fp8-format hybrid {settings}".split())))
    assert delayed.keys() == {"--fp8-interval"}
    others = idle_flags(parse(f"{BASE} {TENSORWISE} {settings}".split()))
    assert {flag for flag, _ in others} == set(settings.split()[::2])


def test_overlap_in_8_bits_is_looked_at_anywhere_and_starts_where_the_library_is() -> None:
    words = f"{MXFP8} --expert-model-parallel-size 2 --moe-token-dispatcher-type irregular --defer-weight-gradients"
    parsed, out = parse(f"{BASE} {words}".split()), io.StringIO()
    dry_run(parsed, 2, out)
    missing = "--fp8-format e4m3: needs Transformer Engine on a GPU: this machine lacks a GPU and transformer_engine"
    assert missing in " ".join(out.getvalue().split())
    assert obstacles(parsed, StartMachine(cuda=True, packages=frozenset({"transformer_engine"}))) == []
    (obstacle,) = obstacles(parsed, StartMachine(cuda=True, packages=frozenset()))
    assert str(obstacle).startswith(
        "--fp8-format e4m3: needs Transformer Engine on a GPU: this machine lacks transformer_engine;"
    )


def test_flags_that_fp32_scores_make_idle_are_listed() -> None:
    words = "--fp16 --fp16-lm-cross-entropy --attention-softmax-in-fp32 --apply-query-key-layer-scaling"
    listed = dict(idle_flags(parse(f"{BASE} {words}".split())))
    assert {"--fp16-lm-cross-entropy", "--attention-softmax-in-fp32", "--apply-query-key-layer-scaling"} <= set(listed)
    assert dict(idle_flags(parse(f"{BASE} --loss-scale 4".split())))["--loss-scale"] == "counts with --fp16 only"


def test_a_gpu_without_a_c_compiler_is_told_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse(BASE.split())
    (obstacle,) = obstacles(parsed, StartMachine(cuda=True, packages=frozenset(), compiler=False))
    assert str(obstacle).startswith("C compiler: none is found, and torch compiles ") and "apt install gcc" in str(
        obstacle
    )
    assert obstacles(parsed, StartMachine(cuda=False, packages=frozenset(), compiler=False)) == []
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    assert not this_machine().compiler
    monkeypatch.setenv("CC", "icx")
    assert this_machine().compiler
