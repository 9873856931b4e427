"""Closed formulas and defaults against megatron-core itself, and against published counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments import parse
from megatron.training.describe import describe_model
from megatron.training.flags import config_flags
from moe_overlap.describe.parameters import model_parameters

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {"mixtral-8x7b": (46.7e9, 12.9e9), "qwen3-30b-a3b": (30.5e9, 3.3e9), "deepseek-v3": (671e9, 37e9)}


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
    """What megatron_core_facts.py prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("megatron_core_facts.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_formulas_equal_the_models_that_megatron_core_builds(megatron_core: Any) -> None:
    assert len(megatron_core["counts"]) == 10
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_files_have_the_published_numbers(name: str) -> None:
    config = parse([f"@{ROOT}/examples/{name}.args"]).config
    assert config.data.vocab_size is not None
    count = model_parameters(describe_model(config, config.data.vocab_size))
    total, active = PUBLISHED[name]
    assert count.total == pytest.approx(total, rel=0.002)
    assert count.active == pytest.approx(active, rel=0.02)
