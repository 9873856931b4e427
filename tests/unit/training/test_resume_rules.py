"""Tests of the resume rules: flags that no tensor shows, batch size, seed and the text itself may not change in silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint.folder import Stored
from megatron.training.cli.arguments import config_to_flags, parse
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import spelling
from megatron.training.cli.rules.checkpoint import model_fingerprint
from megatron.training.cli.rules.resume import (
    ELSEWHERE,
    FREE,
    FUNCTION,
    SCHEDULE,
    TRAINING,
    changes,
    require_same_run,
)
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import Blend, DataSource, dataset_digest
from moe_overlap.describe.errors import ConfigError

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --num-experts 4
    --position-embedding-type rope --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --train-iters 5
"""
FACTS = {"samples_per_step": 8, "data": "abc", "order": "o1"}


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
        ("--dataloader-type cyclic", "--dataloader-type", ("single", "cyclic")),
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
        answer(
            "--seed 7 --split 9,1 --adam-beta1 0.8",
            {"samples_per_step": 1, "data": "", "order": ""},
            weights_alone=True,
        )
        == ""
    )
    assert "--rotary-base 10000, this run has 5000" in answer("--rotary-base 5000", weights_alone=True)


def test_saves_that_cannot_be_compared_say_so() -> None:
    for arguments, words in (
        (None, "carries no arguments"),
        (["--colour", "red"], "--colour is none that this version"),
    ):
        (line,) = require_same_run(stored(arguments=arguments), "runs/a", config(), FACTS, weights_alone=False)
        assert words in line


def test_another_order_of_the_same_text_is_named() -> None:
    line = answer(facts={**FACTS, "order": "o2"})
    assert (
        "saved with other first samples (a run of another length reads a text in other epochs); a digest of o1" in line
    )
    assert "other first samples" not in answer("--seed 7", {**FACTS, "order": "o2"}), "the seed says it all"


def test_the_schedule_may_be_overridden() -> None:
    assert "--lr-warmup-init 0.0, this run has 0.1" in answer("--lr-warmup-init 0.1")
    assert answer("--lr-warmup-init 0.1 --override-opt-param-scheduler") == ""


def test_a_default_that_is_written_out_is_no_change() -> None:
    assert answer("--dataloader-type single --tokenizer-type ByteTokenizer --yarn-beta-fast 32") == ""


def test_saves_without_a_digest_say_so() -> None:
    for run in ({}, {"samples_per_step": 8, "data": "abc"}):
        (line,) = require_same_run(stored(run=run), "runs/a", config(), FACTS, weights_alone=False)
        assert line.startswith("its data were not compared with this run's: ")
        assert require_same_run(stored(run=run), "runs/a", config(), FACTS, weights_alone=True) == ()


def fields() -> list[str]:
    groups = dataclasses.fields(Config)
    return [
        f"{group.name}.{field.name}" for group in groups for field in dataclasses.fields(getattr(config(), group.name))
    ]


def test_every_flag_is_judged_once() -> None:
    """A new flag must say whether a resume may change it: FUNCTION, TRAINING, SCHEDULE, ELSEWHERE or FREE."""
    tables = [FUNCTION, TRAINING, SCHEDULE, *ELSEWHERE.values(), *FREE.values()]
    assert sorted(path for table in tables for path in table) == sorted(fields())


@pytest.mark.parametrize("path", [*FUNCTION, *TRAINING, *SCHEDULE])
def test_every_compared_flag_is_seen(path: str) -> None:
    group, name = path.split(".")
    before = getattr(getattr(config(), group), name)
    after = not before if isinstance(before, bool) else "another"
    section = dataclasses.replace(getattr(config(), group), **{name: after})
    saw = changes(config(), dataclasses.replace(config(), **{group: section}), {}, FACTS, weights_alone=False)
    assert list(saw) == [spelling(path)], path


OTHER_MODELS = """
    --num-layers 4; --hidden-size 64; --num-attention-heads 2; --group-query-attention; --kv-channels 16;
    --group-query-attention --num-query-groups 2; --position-embedding-type none; --rotary-percent 0.5;
    --rotary-interleaved; --normalization RMSNorm; --apply-layernorm-1p; --swiglu; --parallel-attention-mlp one-norm;
    --squared-relu; --openai-gelu; --quick-geglu; --activation-func-clamp-value 7; --glu-linear-offset 1;
    --qk-layernorm; --untie-embeddings-and-output-weights; --multi-latent-attention; --rotary-scaling-factor 40;
    --window-size 8,0; --window-size 8,0 --window-attn-skip-freq 2; --softmax-type off-by-one; --use-rope-scaling;
    --num-experts 8; --moe-layer-freq 2; --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate;
    --moe-router-score-function sigmoid
""".split(";")
"""Every field that the fingerprint answers for, but the vocabulary, which it is given."""


def test_the_fingerprint_sees_every_flag_that_is_said_to_be_its() -> None:
    (answered,) = (paths for reason, paths in ELSEWHERE.items() if "fingerprint" in reason)
    plain, changed = model_fingerprint(config(), 257), set()
    for words in OTHER_MODELS:
        other = config(words)
        assert model_fingerprint(other, 257) != plain, words
        changed |= {path for path in answered if value(other, path) != value(config(), path)}
    assert changed == {*answered} - {"data.vocab_size"}


def value(of: Config, path: str) -> Any:
    group, name = path.split(".")
    return getattr(getattr(of, group), name)


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    for name, tokens in (("a", [1, 2, 3]), ("moved", [1, 2, 3]), ("b", [1, 2, 4]), ("c", [1, 2])):
        with indexed_dataset(str(tmp_path / name), 300) as writer:
            writer.add_document(tokens)

    def digest(*names: str, weights: tuple[float, ...] | None = None) -> str:
        return dataset_digest(DataSource(all_parts=Blend(tuple(str(tmp_path / name) for name in names), weights)))

    assert digest("a") == digest("moved")
    several = [digest(name) for name in "abc"] + [digest("a", "b", weights=w) for w in (None, (1.0, 2.0))]
    assert len(set(several)) == 5
