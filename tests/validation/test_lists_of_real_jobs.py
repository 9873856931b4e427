"""`predict.py` answers for the argument lists and the recipes of real jobs, whatever release of Megatron-LM they are for."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import moe_overlap.api as api
from moe_overlap.commands.predict import main
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import effect_of
from moe_overlap.tuner.calibrate.fit.rows import DATA
from tests.unit.tuner.cost.test_cost_predict import by_hand

ROOT = Path(__file__).resolve().parents[2]
LISTS: dict[str, list[str]] = {
    entry["name"]: entry["arguments"] for entry in json.loads((ROOT / "tests/golden/argument_lists.json").read_text())
}
VOCABULARIES = {"deepseek-v3": 129280, "qwen3-30b-a3b": 151936}
"""Recipes train on mock data, so their arguments name no tokenizer."""


@cache
def recipes() -> dict[str, tuple[list[str], str, int]]:
    """Arguments of Megatron-LM's MoE recipes, with their type and number of GPUs."""
    with (DATA / "moe_recipes.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {
        f"recipe {number}": (recipe_words(row), row["gpu"], int(row["n_gpus"])) for number, row in enumerate(rows, 1)
    }


def recipe_words(row: dict[str, str]) -> list[str]:
    words = ["--vocab-size", str(VOCABULARIES[row["model"]]), "--lr", "1e-4", "--train-iters", "10"]
    for name, value in json.loads(row["flags_json"])["args"].items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [] if value is False else [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def smallest(words: list[str]) -> int:
    """The fewest GPUs of whole nodes that a list runs on."""
    for gpus in (8, 16, 32, 64, 128, 256):
        try:
            api.read_job(words, gpus)
        except ConfigError as error:
            if error.subject != "world size":
                raise
        else:
            return gpus
    raise AssertionError("no world fits")


def answers(folder: Path, words: list[str], gpu: str, gpus: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The answer of the command for a list, as JSON."""
    folder.joinpath("list.args").write_text(" ".join(f"'{word}'" for word in words))
    status = main(["--megatron-args", str(folder / "list.args"), "--gpu", gpu, "--num-gpus", str(gpus), "--json"])
    said = capsys.readouterr()
    assert status == 0, said.err
    answer: dict[str, Any] = json.loads(said.out)
    assert answer["step_seconds"] > 0 and all(stage["peak_bytes"] > 0 for stage in answer["stages"])
    assert all(answer["not_modelled_effects"][flag] == effect_of(flag) != "" for flag in answer["not_modelled"])
    return answer


SAMPLE = (
    "deepseek_proxy_fsdp_ep2_fsdp2",
    "gpt3_15b_8t_release",
    "gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances",
    "gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
    "gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon",
    "mixtral_8x7b_tp1pp4ep8vpp8_release",
)


def test_every_list_and_recipe_is_understood() -> None:
    assert len(LISTS) == 88 and len(recipes()) == 8
    for words in LISTS.values():
        smallest(words)
    for words, _, gpus in recipes().values():
        job = api.read_job(words, gpus)
        assert job.assumed == ()


def test_a_sample_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With graphs written by hand, which have neither windows nor prediction layers."""
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    for name in SAMPLE:
        words = [*LISTS[name], "--recompute-granularity", "full", "--recompute-method", "uniform"]
        words += ["--recompute-num-layers", "1", "--mtp-num-layers", "0"]
        answer = answers(tmp_path, words, "H100", smallest(words), capsys)
        assert ("--optimizer" in " ".join(answer["assumed"])) == ("muon" in name)
        assert any(text.startswith("a vocabulary of ") for text in answer["assumed"]) == ("--vocab-size" not in words)


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.sweep)])
def test_every_list_and_recipe_is_answered(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From captured graphs: the first run captures some 50 layouts, which takes minutes; later ones read them."""
    # Changes that would make a list fit ask for captures of their own, and are tested elsewhere.
    monkeypatch.setattr(api, "cheapest_change", lambda *_: (None, ()))
    lists, of_makers = [*LISTS.values()][::every], [*recipes().values()][::every]
    answered = [answers(tmp_path, words, "H100", smallest(words), capsys) for words in lists]
    answered += [answers(tmp_path, words, gpu, gpus, capsys) for words, gpu, gpus in of_makers]
    assert all(not answer["not_modelled"] or answer["not_modelled_effects"] for answer in answered)
