"""A package that a flag needs and the machine lacks: one line before the run, one line in a dry run."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.packages import packages_of, require_importable_libraries, require_packages
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
    config = parse([*JOB.split(), "--wandb-project", ""]).config
    require_packages(config)
    assert packages_of(config) == ()


def test_flags_about_curves_that_nobody_draws_are_listed() -> None:
    out = io.StringIO()
    flags = "--wandb-exp-name x --log-timers-to-tensorboard --moe-per-layer-logging"
    dry_run(parse([*JOB.split(), *flags.split()]), None, out)
    assert "  counts with --wandb-project only\n" in out.getvalue() and "--wandb-exp-name" in out.getvalue()
    assert "  there is neither --tensorboard-dir nor --wandb-project\n" in out.getvalue()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "raise OSError('libcuda.so.1: cannot open shared object file')",
            "libcuda.so.1: cannot open shared object file",
        ),
        ("raise ImportError('undefined symbol: _ZN3c10\\nmore')", "undefined symbol: _ZN3c10"),
        ("assert False", "AssertionError"),
    ],
)
def test_a_library_that_is_installed_and_broken_is_one_line(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an image for GPUs on a machine without a driver has it; megatron-core would end with a traceback."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("transformer_engine", "transformer_engine.pytorch")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        with pytest.raises(ConfigError) as caught:
            require_importable_libraries()
    finally:
        # Later tests must not see it.
        for name in names:
            sys.modules.pop(name, None)
    fix = "build it for this torch and driver, or pip uninstall transformer-engine"
    assert str(caught.value) == f"transformer_engine: is installed and cannot be imported: {reason}; {fix}"
