"""Example models: the argument files say what the model files say, and every one of them can be planned."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron.training.arguments import parse
from megatron.training.dry_run import dry_run
from tools.write_model_args import argument_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "models").glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_argument_file_is_generated_from_the_model_file(name: str) -> None:
    description = json.loads((EXAMPLES / "models" / f"{name}.json").read_text(encoding="utf-8"))
    assert description["name"] == name
    assert (EXAMPLES / f"{name}.args").read_text(encoding="utf-8") == argument_file(description)


@pytest.mark.parametrize("name", NAMES)
def test_model_files_describe_complete_jobs(name: str) -> None:
    parsed = parse([f"@{EXAMPLES}/{name}.args"])
    out = io.StringIO()
    dry_run(parsed, None, out)
    assert out.getvalue().startswith(f"model         {name}: ")


def test_large_models_have_small_siblings() -> None:
    large = [name for name in NAMES if not name.startswith("tiny-")]
    assert large == ["deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"]
    assert all(f"tiny-{name}" in NAMES for name in large)
