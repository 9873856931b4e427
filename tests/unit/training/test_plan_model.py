"""A plan of another model is refused, by training and by predictions; one of the same model under another name is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import plan_from_flags
from megatron.training.plan_model import is_described
from moe_overlap.commands.predict import main as predict
from moe_overlap.commands.train import main as train
from moe_overlap.job import read_job
from moe_overlap.plan.plan import Named
from moe_overlap.plan.serialize import save_plan

MODELS = Path(__file__).parents[3] / "examples" / "models"
MIXTRAL = ("--model", str(MODELS / "tiny-mixtral-8x7b.json"))
PHI = ("--model", str(MODELS / "tiny-phi-3.5-moe.json"))
LENGTH = ("--lr", "1e-3", "--train-iters", "5", "--dry-run")


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = str(tmp_path / "plan.json")
    save_plan(read_job([*MIXTRAL, "--global-batch-size", "16", "--use-distributed-optimizer"], 4).plan, path)
    return path


def test_a_plan_of_another_model_is_refused(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        f"error: {plan} model.name tiny-mixtral-8x7b: the flags describe tiny-phi-3.5-moe; "
        "search a plan for this model\n"
    )
    gpus = ("--gpu", "H100", "--num-gpus", "4")
    assert train([*PHI, "--plan", plan, *LENGTH]) == 2
    assert capsys.readouterr().err == line
    assert predict([*PHI, *gpus, "--plan", plan]) == 2
    assert capsys.readouterr().err == line
    assert train([*MIXTRAL, "--plan", plan, *LENGTH]) == 0


def test_name_and_vocabulary_may_differ(plan: str, tmp_path: Path) -> None:
    """The written flags of a search name the run after their file; the tokenizer tells the rows of the embedding."""
    flags = tmp_path / "megatron_args.txt"
    flags.write_text((MODELS.parent / "tiny-mixtral-8x7b.args").read_text())
    words = [f"@{flags}", "--plan", plan]
    assert with_plan(parse([*words, "--vocab-size", "150000"]), 4).name == "megatron_args"
    flags.write_text(flags.read_text() + "\n--hidden-size 256 --kv-channels 64\n")
    assert train([*words, *LENGTH]) == 2


def test_a_detail_of_a_model_of_the_same_name_may_differ(plan: str) -> None:
    assert with_plan(parse([*MIXTRAL, "--qk-layernorm", "--plan", plan]), 4).config.model.qk_layernorm


def test_the_hash_is_of_the_description() -> None:
    config = parse([*MIXTRAL, "--global-batch-size", "16"]).config
    model = describe_model(config, 100_000, "tiny")
    of_model = plan_from_flags(config, model, 1)
    assert is_described(of_model, dataclasses.replace(model, name="other", vocab_size=1), 128)
    assert not is_described(of_model, dataclasses.replace(model, hidden_size=64), 128)
    by_hand = dataclasses.replace(of_model, model=Named(name="tiny", sha256="0" * 64))
    assert not is_described(by_hand, model, 128)
