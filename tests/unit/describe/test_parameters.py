"""Closed formulas and defaults against megatron-core itself, and against published counts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.flags.table import config_flags
from megatron.training.cli.sizes import describe_model
from moe_overlap.describe.model import (
    ModelDescription,
    Share,
    layer_parameters,
    model_parameters,
    training_flops_per_token,
)
from tests.spawn import HANGS_SECONDS

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = {
    "mixtral-8x7b": (46.7e9, 12.9e9),  # Mixtral of Experts, section 1
    "qwen3-30b-a3b": (30.5e9, 3.3e9),  # Qwen's model card
    "qwen3-235b-a22b": (235e9, 22e9),  # Qwen's model card
    "deepseek-v3": (671e9, 37e9),  # DeepSeek-V3, abstract
    "deepseek-v3-mtp": (671e9 + 11.5e9, 37e9 + 0.6e9),  # DeepSeek-V3, README_WEIGHTS.md: the module's own weights
    "qwen2-moe-2.7b --num-experts 60": (14.3e9, 2.7e9),  # Qwen1.5-MoE-A2.7B's model card; COMET has 64 experts
    "phi-3.5-moe": (41.9e9, 6.6e9),  # Phi-3.5-MoE's model card
    "gpt-oss-120b": (
        116.83e9,
        5.13e9 + 201088 * 2880,
    ),  # its model card, table 1; its active number leaves the lookup out
    # GPT-2 small and medium, which Lancet's models are with one expert; their model cards
    "gpt2-s-moe --num-experts 1 --expert-model-parallel-size 1": (124.4e6, 124.4e6),
    "gpt2-l-moe --num-experts 1 --expert-model-parallel-size 1": (354.8e6, 354.8e6),
}
"""Model file, with flags after it -> parameters in all, and those a token passes."""
MIST_SIZES = {"1.3b": 1.3e9, "2.7b": 2.6e9, "7b": 6.7e9, "13b": 13e9, "22b": 22e9}
"""Mist, table 4."""
MIST_LAYERS = {
    "mist-gpt-1.3b": 16384 + 100663296,
    "mist-gpt-2.7b": 20480 + 157286400,
    "mist-gpt-7b": 32768 + 402653184,
    "mist-gpt-13b": 40960 + 629145600,
    "mist-gpt-22b": 49152 + 905969664,
    "mist-llama-1.3b": 8192 + 102760448,
    "mist-llama-7b": 16384 + 404750336,
}
"""Bytes of a layer's weights in two-byte numbers, as Mist's own memory analysis of these models has them."""


OTHER_NAMES = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
OTHER_DEFAULTS = {
    "num_layers": "must be given; megatron-core writes 0",
    "hidden_size": "must be given; megatron-core writes 0",
    "num_attention_heads": "must be given; megatron-core writes 0",
    "num_query_groups": "counts with --group-query-attention only; None is passed without it",
    "moe_router_load_balancing_type": "a list of one",
    "moe_aux_loss_coeff": "a list of one",
    "overlap_p2p_comm": "upstream's parser turns it on; it is passed for interleaved stages only",
}


@pytest.fixture(scope="module")
def megatron_core() -> Any:
    """The facts that megatron_core_facts.py prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("megatron_core_facts.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=HANGS_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_formulas_equal_the_models_that_megatron_core_builds(megatron_core: Any) -> None:
    assert len(megatron_core["counts"]) == 16
    for name, ranks in megatron_core["counts"].items():
        for built, computed in ranks:
            assert built == computed, name


def test_defaults_equal_those_of_transformer_config(megatron_core: Any) -> None:
    defaults, different, compared = megatron_core["defaults"], set(), 0
    for flag in config_flags():
        name = OTHER_NAMES.get(flag.field, flag.field)
        if flag.group in ("model", "moe", "parallel") and name in defaults:
            compared += 1
            if str(flag.default) != defaults[name]:
                different.add(flag.field)
    assert compared > 40
    assert different == set(OTHER_DEFAULTS)


def described(name: str, *more: str) -> ModelDescription:
    """The model of an argument file."""
    config = parse([f"@{ROOT}/examples/{name}.args", *more]).config
    assert config.data.vocab_size is not None
    return describe_model(config, config.data.vocab_size)


@pytest.mark.parametrize("words", PUBLISHED)
def test_model_files_have_the_published_numbers(words: str) -> None:
    count = model_parameters(described(*words.split()))
    total, active = PUBLISHED[words]
    assert count.total == pytest.approx(total, rel=0.002)
    assert count.active == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_mist_models_have_the_sizes_in_their_names(family: str) -> None:
    """Mist counts the word embedding once, also where the output layer has weights of its own."""
    for size, expected in MIST_SIZES.items():
        model = described(f"mist-{family}-{size}")
        again = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
        assert model_parameters(model).total - again == pytest.approx(expected, rel=0.03), size


@pytest.mark.parametrize("name", MIST_LAYERS)
def test_mist_models_have_the_layers_that_mist_analysed(name: str) -> None:
    model = described(name)
    assert 2 * layer_parameters(model, 0, Share(chunks=((0, 1),))) == MIST_LAYERS[name]


SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1"
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (None,) * 4),
        ("--window-size 7,0", (8,) * 4),
        ("--window-size 7,0 --window-attn-skip-freq 2", (8, None, 8, None)),
        ("--window-size 7,0 --window-attn-skip-freq [1,1,0,1]", (8, 8, None, 8)),
        ("--window-size -1,0 --window-attn-skip-freq 2", (None,) * 4),
        ("--window-size 7,0 --window-attn-skip-freq 2 --mtp-num-layers 2", (8, None, 8, None, 8, None)),
    ],
)
def test_windows_of_the_layers(flags: str, expected: tuple[int | None, ...]) -> None:
    assert describe_model(parse(f"{SIZES} {flags}".split()).config, 64).windows == expected


def test_windows_shorten_attention() -> None:
    """Against counting the keys of every query; the formula takes half a key less for the diagonal, as the field does."""
    length = 4096

    def attention_flops(flags: str) -> float:
        model = describe_model(parse(f"{SIZES} {flags}".split()).config, 64)
        without = dataclasses.replace(model, windows=())
        return training_flops_per_token(model, length) - training_flops_per_token(without, length)

    for window, flags in ((length, ""), (256, "--window-size 255,0"), (5000, "--window-size 4999,0")):
        keys = sum(min(query + 1, window) for query in range(length)) / length
        assert attention_flops(flags) == pytest.approx(6 * 4 * 64 * keys, rel=4e-3)
    every_other = attention_flops("--window-size 255,0 --window-attn-skip-freq 2")
    assert every_other == (attention_flops("") + attention_flops("--window-size 255,0")) / 2
