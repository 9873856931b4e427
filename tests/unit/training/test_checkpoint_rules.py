"""Tests of the checkpoint rules: what a checkpoint must share with the run that loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.training.checkpoint import folder as cf
from megatron.training.checkpoint.folder import Stored
from megatron.training.cli.config import CheckpointConfig, Config, ModelConfig, MoEConfig, OptimizerConfig
from megatron.training.cli.rules.checkpoint import (
    Differences,
    missing_note,
    model_fingerprint,
    require_fit,
    require_parts,
    require_same_fingerprint,
    schedule_to_load,
    start_of,
)
from moe_overlap.describe.errors import ConfigError

MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)
CONFIG = Config(model=MODEL, moe=MoEConfig(num_experts=8))
ADAM = {"name": "adam", "precision": "bf16", "steps": 5}
SCHEDULE: dict[str, Any] = {
    "max_lr": 1e-3,
    "min_lr": 0.0,
    "lr_warmup_steps": 0,
    "num_steps": 40,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 400,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 400,
}


def stored(**mark: Any) -> Stored:
    return Stored(Path("runs/a/step-000005"), 5, 1, mark)


def save(folder: Path, step: int) -> None:
    cf.publish(cf.open_temporary(folder, step), folder, step, {"files": {}})


def start(*, load: Path, **flags: Any) -> tuple[str, str, bool] | None:
    found = start_of(CheckpointConfig(load=str(load), **flags))
    return found and (found.flag, f"{found.stored.path.parent.name}/{found.stored.step}", found.weights_alone)


def test_a_run_starts_from_load_or_else_from_pretrained_weights(tmp_path: Path) -> None:
    load, other = tmp_path / "load", tmp_path / "other"
    assert start(load=load) is None
    with pytest.raises(ConfigError, match=f"^--pretrained-checkpoint {other}: holds no checkpoint"):
        start(load=load, pretrained_checkpoint=str(other))
    save(other, 9)
    for must_exist in (False, True):
        flags = {"pretrained_checkpoint": str(other), "exit_on_missing_checkpoint": must_exist}
        assert start(load=load, **flags) == ("--pretrained-checkpoint", "other/9", True)
    with pytest.raises(ConfigError, match=f"^--pretrained-checkpoint {other}/step-000009: is one checkpoint, not"):
        start(load=load, pretrained_checkpoint=str(other / "step-000009"))
    save(load, 4)
    assert start(load=load, pretrained_checkpoint=str(other)) == ("--load", "load/4", False)
    assert start(load=load, finetune=True) == ("--load", "load/4", True)


def test_the_later_of_a_passing_and_a_lasting_save_is_loaded(tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    for flags, folder in (({}, tmp_path / "non_persistent"), ({"non_persistent_global_ckpt_dir": str(apart)}, apart)):
        save(folder, 5)
        assert start(load=tmp_path, non_persistent_ckpt_type="global", **flags) == ("--load", f"{folder.name}/5", False)
    save(tmp_path, 4)
    assert start(load=tmp_path) == ("--load", f"{tmp_path.name}/4", False)
    assert start(load=tmp_path, non_persistent_ckpt_type="global") == ("--load", "non_persistent/5", False)
    assert start(load=tmp_path, non_persistent_ckpt_type="global", ckpt_step=4) == (
        "--load",
        f"{tmp_path.name}/4",
        False,
    )
    save(tmp_path, 6)
    assert start(load=tmp_path, non_persistent_ckpt_type="global") == ("--load", f"{tmp_path.name}/6", False)


def test_a_default_equals_its_value_written_out() -> None:
    written = replace(MODEL, kv_channels=16, num_query_groups=3)
    other = Config(model=written, moe=MoEConfig(num_experts=8, moe_layer_freq=(1, 1, 1, 1)))
    assert model_fingerprint(other, 257) == model_fingerprint(CONFIG, 257)
    require_same_fingerprint(
        stored(fingerprint=model_fingerprint(other, 257)), "runs/a", model_fingerprint(CONFIG, 257)
    )


def test_flags_that_no_shape_shows_are_named() -> None:
    other = Config(model=replace(MODEL, rotary_interleaved=True, kv_channels=16, num_attention_heads=2), moe=CONFIG.moe)
    with pytest.raises(ConfigError) as caught:
        require_same_fingerprint(
            stored(fingerprint=model_fingerprint(CONFIG, 257)), "runs/a", model_fingerprint(other, 257)
        )
    assert str(caught.value) == (
        "--load runs/a: step 5 was saved with --num-attention-heads 4, this run has 2"
        " (also different: --num-query-groups; --rotary-interleaved); give the flags of the saved model"
    )


ABSENT = tuple(f"k{i} [2] is not in the checkpoint" for i in range(9))
EXTRA = ("e [3] is only in the checkpoint",)


def fit(strictness: str | None, **found: tuple[str, ...]) -> tuple[str, ...] | str:
    try:
        return require_fit(stored(), "runs/a", Differences(**found), strictness)
    except ConfigError as error:
        return str(error)


def test_differences_are_named_up_to_three() -> None:
    assert fit(None) == ()
    assert fit(None, absent=ABSENT, extra=EXTRA) == (
        "--load runs/a: step 5 is of another model (k0 [2] is not in the checkpoint; k1 [2] is not in the checkpoint;"
        " k2 [2] is not in the checkpoint; and 7 more); give the flags of the saved model, or load what fits with"
        " --dist-ckpt-strictness log_all"
    )


@pytest.mark.parametrize(
    ("strictness", "absent_is", "extra_is"),
    [
        (None, "wrong", "wrong"),
        ("raise_all", "wrong", "wrong"),
        ("raise_unexpected", "wrong", "accepted"),
        ("assume_ok_unexpected", "wrong", "accepted"),
        ("log_all", "told", "told"),
        ("log_unexpected", "told", "accepted"),
        ("ignore_all", "accepted", "accepted"),
    ],
)
def test_strictness(strictness: str | None, absent_is: str, extra_is: str) -> None:
    for found, outcome in (({"absent": ABSENT[:1]}, absent_is), ({"extra": EXTRA}, extra_is)):
        seen = fit(strictness, **found)
        if outcome == "wrong":
            assert isinstance(seen, str) and "is of another model (" in seen
        else:
            (phrase,) = next(iter(found.values()))
            assert seen == ((f"{phrase} (--dist-ckpt-strictness {strictness})",) if outcome == "told" else ())
    shapes = fit(strictness, shapes=("k is [2] in the checkpoint, [3] here",), extra=EXTRA)
    assert isinstance(shapes, str) and shapes.endswith("; give the flags of the saved model")


@pytest.mark.parametrize(
    ("saved", "asked", "random_states", "words"),
    [
        (None, ADAM, False, "holds no optimizer state (saved with --no-save-optim); add --no-load-optim or --finetune"),
        (
            ADAM | {"name": "sgd"},
            ADAM,
            False,
            "is of sgd, this run uses adam; correct --optimizer or add --no-load-optim",
        ),
        (
            ADAM | {"precision": "fp32"},
            ADAM,
            False,
            "is of fp32, this run uses bf16; correct --bf16 or add --no-load-optim",
        ),
        (
            ADAM | {"precision": "fp16"},
            ADAM,
            False,
            "is of fp16, this run uses bf16; correct --fp16 or add --no-load-optim",
        ),
        (ADAM, ADAM, True, "holds no random-number states (saved with --no-save-rng); add --no-load-rng"),
    ],
)
def test_missing_parts(saved: Any, asked: Any, random_states: bool, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_parts(stored(optimizer=saved, random_states=False), "runs/a", asked, random_states)
    assert str(caught.value).startswith("--load runs/a: ") and str(caught.value).endswith(words)
    require_parts(stored(optimizer=saved, random_states=False), "runs/a", None, False)


def test_a_longer_run_needs_to_say_whose_decay_holds() -> None:
    longer = SCHEDULE | {"num_steps": 0, "lr_decay_steps": 800, "wd_incr_steps": 800}
    with pytest.raises(ConfigError) as caught:
        schedule_to_load(stored(scheduler=SCHEDULE), "runs/a", longer, OptimizerConfig())
    assert str(caught.value) == (
        "--load runs/a: step 5 was saved with a learning-rate decay (in samples; by default the length of the run) of 400,"
        " this run has 800; add --override-opt-param-scheduler for this run's, or --use-checkpoint-opt-param-scheduler for the"
        " saved one"
    )
    for flags in (
        OptimizerConfig(override_opt_param_scheduler=True),
        OptimizerConfig(use_checkpoint_opt_param_scheduler=True),
    ):
        assert schedule_to_load(stored(scheduler=SCHEDULE), "runs/a", longer, flags)["num_steps"] == 40


def test_lengths_that_a_constant_schedule_does_not_use_may_differ() -> None:
    constant = SCHEDULE | {"lr_decay_style": "constant"}
    longer = constant | {"num_steps": 0, "lr_decay_steps": 800, "wd_incr_steps": 800}
    loaded = schedule_to_load(stored(scheduler=constant), "runs/a", longer, OptimizerConfig())
    assert loaded == longer | {"num_steps": 40}


def test_a_load_that_holds_no_checkpoint_is_said(tmp_path: Path) -> None:
    load, other = tmp_path / "load", tmp_path / "other"

    def note(**flags: Any) -> str | None:
        config = CheckpointConfig(load=str(load), **flags)
        return missing_note(config, start_of(config))

    head = f"nothing from --load {load}, which holds no checkpoint: "
    assert note() == f"{head}the run begins at step 0"
    save(other, 9)
    assert note(pretrained_checkpoint=str(other)) == f"{head}--pretrained-checkpoint {other} is loaded"
    save(load, 3)
    assert note() is None and note(pretrained_checkpoint=str(other)) is None
    assert missing_note(CheckpointConfig(), None) is None
