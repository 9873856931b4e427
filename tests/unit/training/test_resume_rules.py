"""What a resumed run may not change in silence: flags that no tensor shows, batch size, seed, and the text itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint.folder import Stored
from megatron.training.cli.arguments import config_to_flags, parse
from megatron.training.cli.config import Config
from megatron.training.cli.rules.resume import FUNCTION, TRAINING, changes, require_same_run
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import Blend, DataSource, dataset_digest
from moe_overlap.describe.errors import ConfigError

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --num-experts 4
    --position-embedding-type rope --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --train-iters 5
"""
FACTS = {"samples_per_step": 8, "data": "abc"}


def config(more: str = "") -> Config:
    return parse(f"{FLAGS} {more}".split()).config


def stored(**mark: Any) -> Stored:
    return Stored(Path("runs/a/step-000005"), 5, 1, {"arguments": config_to_flags(config()), "run": FACTS, **mark})


def answer(more: str = "", facts: dict[str, Any] | None = None, weights_alone: bool = False) -> str:
    try:
        return "; ".join(require_same_run(stored(), "runs/a", config(more), facts or FACTS, weights_alone))
    except ConfigError as error:
        return str(error)


def test_the_same_run_and_what_may_change() -> None:
    assert answer() == ""
    assert answer("--train-iters 50 --lr 1 --micro-batch-size 2 --expert-model-parallel-size 2 --save x --bf16") == ""


@pytest.mark.parametrize(
    ("more", "name", "values"),
    [
        ("--rotary-base 500000", "--rotary-base", (10000, 500000)),
        ("--norm-epsilon 1e-6", "--norm-epsilon", (1e-05, 1e-06)),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax", (False, True)),
        ("--moe-router-topk 1 --moe-router-pre-softmax", "--moe-router-topk", (2, 1)),
        ("--seq-length 16", "--seq-length", (32, 16)),
        ("--adam-beta2 0.95", "--adam-beta2", (0.999, 0.95)),
        ("--seed 7", "--seed", (1234, 7)),
        ("--split 9,1", "--split", ("none", "9,1")),
        ("--dataloader-type cyclic", "--dataloader-type", ("none", "cyclic")),
    ],
)
def test_a_changed_flag_is_named(more: str, name: str, values: tuple[Any, Any]) -> None:
    line = answer(more)
    assert line.startswith(f"--load runs/a: step 5 was saved with {name} {values[0]}, this run has {values[1]}")
    assert line.endswith("; give the saved values, or add --resume-with-changes")
    assert f"{name} {values[0]} became {values[1]}" in answer(f"{more} --resume-with-changes")


def test_what_no_flag_shows_is_named() -> None:
    assert "was saved with --global-batch-size 8, this run has 16;" in answer(facts={**FACTS, "samples_per_step": 16})
    line = answer("--seed 7", facts={**FACTS, "data": "xyz"})
    assert "with --seed 1234, this run has 7 (also different: other data; a digest of);" in line
    assert "other data; a digest of abc became xyz" in answer("--resume-with-changes", facts={**FACTS, "data": "xyz"})


def test_new_training_with_old_weights_chooses_its_data_and_not_its_function() -> None:
    assert (
        answer("--seed 7 --split 9,1 --adam-beta1 0.8", {"samples_per_step": 1, "data": ""}, weights_alone=True) == ""
    )
    assert "--rotary-base 10000, this run has 5000" in answer("--rotary-base 5000", weights_alone=True)


def test_saves_that_cannot_be_compared_say_so() -> None:
    for arguments, words in (
        (None, "carries no arguments"),
        (["--colour", "red"], "--colour is none that this version"),
    ):
        (line,) = require_same_run(stored(arguments=arguments), "runs/a", config(), FACTS, weights_alone=False)
        assert words in line


def test_every_field_exists() -> None:
    for path in (*FUNCTION, *TRAINING):
        group, field = path.split(".")
        assert field in {entry.name for entry in dataclasses.fields(getattr(config(), group))}, path
    assert changes(config(), config(), {}, FACTS, weights_alone=False) == {}


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    for name, tokens in (("a", [1, 2, 3]), ("moved", [1, 2, 3]), ("b", [1, 2, 4]), ("c", [1, 2])):
        with indexed_dataset(str(tmp_path / name), 300) as writer:
            writer.add_document(tokens)

    def digest(*names: str, weights: tuple[float, ...] | None = None) -> str:
        return dataset_digest(DataSource(whole=Blend(tuple(str(tmp_path / name) for name in names), weights)))

    assert digest("a") == digest("moved")
    several = [digest(name) for name in "abc"] + [digest("a", "b", weights=w) for w in (None, (1.0, 2.0))]
    assert len(set(several)) == 5
