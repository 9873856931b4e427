"""A package that a flag needs and the machine lacks: one line before the run, one line in a dry run."""

from __future__ import annotations

import importlib.util
import io

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.packages import require_packages
from moe_overlap.describe.errors import ConfigError

JOB = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
JOB += "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --vocab-size 500"
CASES = {
    "--wandb-project moe": "wandb",
    "--tensorboard-dir runs": "tensorboard",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model folder": "transformers",
}


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("flags", CASES)
def test_a_missing_package_is_named(flags: str, nothing_installed: None) -> None:
    parsed = parse([*JOB.split(), *flags.split()])
    words = flags.split()
    with pytest.raises(ConfigError, match=f"^{words[0]} {words[1]}: needs the package {CASES[flags]}; pip install"):
        require_packages(parsed.config)
    out = io.StringIO()
    dry_run(parsed, None, out)
    assert f"needs the package {CASES[flags]}: pip install {CASES[flags]}" in out.getvalue()


def test_a_plain_run_needs_none(nothing_installed: None) -> None:
    require_packages(parse([*JOB.split(), "--wandb-project", ""]).config)


def test_flags_about_curves_that_nobody_draws_are_listed() -> None:
    out = io.StringIO()
    flags = "--wandb-exp-name x --log-timers-to-tensorboard --moe-per-layer-logging"
    dry_run(parse([*JOB.split(), *flags.split()]), None, out)
    assert "  counts with --wandb-project only\n" in out.getvalue() and "--wandb-exp-name" in out.getvalue()
    assert "  there is neither --tensorboard-dir nor --wandb-project\n" in out.getvalue()
