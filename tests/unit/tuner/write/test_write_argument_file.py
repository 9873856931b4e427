"""`megatron_args.txt`: it says the plan, keeps the user's flags, explains itself, and passes the parser it is written for."""

from __future__ import annotations

import dataclasses
import io
import shlex
from pathlib import Path

import pytest

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.sizes import describe_model, known_vocab_size
from megatron.training.plan_flags import plan_from_flags
from megatron.training.plan_values import arguments_of, layout_values
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.overlap import NO_OVERLAP
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.write.argument_file import (
    GROUPS,
    ORDER,
    REASONS,
    argument_file,
    decided_flags,
    group_of,
)
from moe_overlap.tuner.write.upstream_rules import upstream_errors, upstream_plan_errors
from moe_overlap.tuner.write.upstream_values import parser_errors, values_of
from tests.unit.training.test_flags_from_plan import drawn_plan, facts_of

ROOT = Path(__file__).resolve().parents[4]
MIXTRAL = shlex.split((ROOT / "examples/mixtral-8x7b.args").read_text(), comments=True)
OWN_WORDS = "--vocab-size 257 --moe-token-dispatcher-type alltoall --lr 1e-3 --data-path 'my text' --log-interval 7"


ALONE = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1".split()


def plan_of(words: list[str], world: int) -> tuple[Plan, ModelDescription]:
    config = parse(words).config
    vocabulary = known_vocab_size(config)
    assert vocabulary is not None
    model = describe_model(config, vocabulary)
    return plan_from_flags(config, model, world), model


def plain(plan: Plan) -> Plan:
    stages = tuple(dataclasses.replace(stage, overlap=NO_OVERLAP) for stage in plan.stages)
    return dataclasses.replace(plan, stages=stages)


def mixtral(*changed: str) -> tuple[Plan, list[str]]:
    """A plan of Mixtral on 64 GPUs, and the arguments that say it."""
    plan, _ = plan_of([*MIXTRAL, *changed], 64)
    return plan, arguments_of(layout_values(plan, 0))


def test_the_written_flags_say_the_plan(tmp_path: Path) -> None:
    """Drawn plans over flags of another layout: the file is parsed back to the plan, and says the user's settings."""
    path = tmp_path / "megatron_args.txt"
    for seed in range(60):
        plan, model = drawn_plan(seed)
        plan = plain(plan)
        others = "--tensor-model-parallel-size 16 --recompute-activations --fp16 --optimizer-cpu-offload --encoder-seq-length 9"
        words = [*facts_of(plan, model), *shlex.split(OWN_WORDS), *others.split()]
        written = argument_file(words, plan, arguments_of(layout_values(plan, 0)))
        path.write_text(written.text)
        read = list(expand_files([f"@{path}"]))
        assert read == written.arguments
        again, _ = plan_of(read, plan.world_size)
        assert again.stages == plan.stages and again.precision == plan.precision
        assert again.sequence_length == plan.sequence_length and again.global_batch_size == plan.global_batch_size
        flags = grouped(read)
        assert flags["--data-path"] == ("my text",) and flags["--log-interval"] == ("7",)
        replaced = {"--recompute-activations", "--optimizer-cpu-offload", "--encoder-seq-length"}
        assert not replaced & flags.keys() and ("--fp16" in flags) == (plan.precision == "fp16")


def test_a_dry_run_accepts_the_file(tmp_path: Path) -> None:
    plan, arguments = mixtral("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
    (tmp_path / "megatron_args.txt").write_text(argument_file(MIXTRAL, plan, arguments).text)
    out = io.StringIO()
    dry_run(parse([f"@{tmp_path / 'megatron_args.txt'}"]), 64, out)
    assert "64 processes: TP 2, PP 2, virtual stages 2, EP 8, ETP 1, DP 16 with ZeRO-1" in out.getvalue()


def test_what_is_written_for_megatron_lm_passes_its_rules() -> None:
    """A plan is written exactly if the search's constraint accepts it."""
    outcomes = set()
    for seed in range(60):
        plan, model = drawn_plan(seed)
        plan = plain(plan)
        words = [*facts_of(plan, model), *shlex.split(OWN_WORDS)]
        refused = upstream_plan_errors(plan, values_of(grouped(words)))
        outcomes.add(bool(refused))
        if refused:
            with pytest.raises(ConfigError) as raised:
                argument_file(words, plan, arguments_of(layout_values(plan, 0)), "megatron-lm")
            assert str(raised.value) == str(refused[0])
        else:
            written = argument_file(words, plan, arguments_of(layout_values(plan, 0)), "megatron-lm")
            read = grouped(shlex.split(written.text, comments=True))
            assert parser_errors(read) == [] and upstream_errors(values_of(read), plan.world_size) == []
    assert outcomes == {True, False}


def test_every_choice_has_its_reason_and_its_effect() -> None:
    plan, arguments = mixtral(
        *"--recompute-granularity full --recompute-method block --recompute-num-layers 2 --context-parallel-size 2".split()
    )
    effects = {"--context-parallel-size": "activations 14.8 to 7.9 GiB, step +3 %."}
    text = argument_file(MIXTRAL, plan, arguments, effects=effects, head=["Mixtral on 64 × H100"]).text
    lines = text.splitlines()
    assert lines[0] == "# Mixtral on 64 × H100"
    for flag in grouped(arguments).keys() & REASONS.keys():
        place = next(index for index, line in enumerate(lines) if line.startswith(f"{flag} ") or line == flag)
        assert lines[place - 1].startswith("#"), flag
    assert "# every sequence is split over 2 ranks; activations 14.8 to 7.9 GiB, step +3 %" in lines
    assert "# 4 stages of 16 GPUs, with 8 layers each" in lines
    assert "# the backward pass recomputes these layers completely; only their inputs are stored" in lines
    # What the user chose needs no reason.
    assert (
        lines[lines.index("--lr 0.0003") - 1].startswith("--") or lines[lines.index("--lr 0.0003") - 1] == "# training"
    )


@pytest.mark.parametrize(
    ("gpus", "batch", "words", "said"),
    [
        (1, "2", "--micro-batch-size 2", ["1 micro-batch a step", "ZeRO-1, with one replica"]),
        (
            2,
            "2",
            "--micro-batch-size 1",
            [
                "1 micro-batch a step on each of 2 replicas",
                "optimizer states are split over the replicas (ZeRO-1)",
            ],
        ),
        (1, "4", "--micro-batch-size 2", ["2 micro-batches a step", "ZeRO-1, with one replica"]),
    ],
)
def test_one_replica_and_one_micro_batch_are_said_as_such(gpus: int, batch: str, words: str, said: list[str]) -> None:
    plan, _ = plan_of([*MIXTRAL, *ALONE, "--global-batch-size", batch, *words.split()], gpus)
    values = arguments_of(layout_values(plan, 0))
    lines = argument_file(MIXTRAL, plan, values, "megatron-lm").text.splitlines()
    assert [line for line in lines if line in {f"# {text}" for text in said}] == [f"# {text}" for text in said]


def test_no_name_of_a_file_ends_its_comment() -> None:
    plan, arguments = mixtral()
    expected = shlex.split(argument_file(MIXTRAL, plan, arguments).text, comments=True)
    for name in ("x\n--lr 99\n#.args", "x\r--lr 99", "x\u2028--lr 99\u2028#"):
        written = argument_file(MIXTRAL, plan, arguments, head=[f"{name} on 64 × H100"]).text
        assert shlex.split(written, comments=True) == expected
        assert written.splitlines()[0].endswith("on 64 × H100")


def test_flags_stand_in_their_groups() -> None:
    plan, arguments = mixtral()
    text = argument_file(MIXTRAL, plan, arguments).text
    heads = [line[2:] for line in text.splitlines() if line[2:] in ORDER and line.startswith("# ")]
    assert heads == list(ORDER)
    assert {group for group, _ in GROUPS} == set(ORDER) - {"training"}
    expected = {
        "--num-layers": "model",
        "--moe-router-topk": "model",
        "--expert-model-parallel-size": "layout",
        "--recompute-modules": "memory",
        "--use-distributed-optimizer": "memory",
        "--moe-token-dispatcher-type": "communication",
        "--overlap-grad-reduce": "communication",
        "--lr": "training",
        "--bf16": "training",
    }
    assert {flag: group_of(flag) for flag in expected} == expected


def test_what_upstream_lacks_is_left_out_with_the_reason() -> None:
    plan, arguments = mixtral()
    own = [*MIXTRAL, *"--log-json losses.jsonl --moe-gate topk".split()]
    written = argument_file(own, plan, arguments, "megatron-lm")
    assert written.left_out == (
        ("--log-json", "Megatron-LM has no such flag"),
        ("--moe-gate", "Megatron-LM has no such flag"),
    )
    assert written.text.endswith(
        "# left out\n# --log-json: Megatron-LM has no such flag\n# --moe-gate: Megatron-LM has no such flag\n"
    )
    with pytest.raises(
        ConfigError, match="--moe-gate switch: Megatron-LM has no such flag, and would train another model"
    ):
        argument_file([*MIXTRAL, "--moe-gate", "switch"], plan, arguments, "megatron-lm")
    with pytest.raises(ConfigError, match="--overlap-moe-expert-parallel-comm: needs virtual stages"):
        argument_file([*MIXTRAL, "--overlap-moe-expert-parallel-comm"], plan, arguments, "megatron-lm")


def test_dropped_flags_are_listed() -> None:
    plan, arguments = mixtral()
    reason = "the instruction list places that communication itself"
    written = argument_file(MIXTRAL, plan, arguments, dropped={"--overlap-param-gather": reason, "--no-such": "x"})
    assert "--overlap-param-gather" not in written.arguments
    assert written.left_out == (("--overlap-param-gather", reason),)


def test_a_plan_lies_beside_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder can be moved: --plan is looked for beside the file; a path from the working folder still holds."""
    plan, arguments = mixtral()
    folder = tmp_path / "tuned"
    folder.mkdir()
    file = folder / "megatron_args.txt"
    file.write_text(argument_file(MIXTRAL, plan, arguments, plan_file="plan.json").text)
    assert (
        "# a layout that flags cannot express; the file is in the same folder as this one\n--plan plan.json\n"
        in file.read_text()
    )
    (folder / "plan.json").write_text("{}")
    assert grouped(list(expand_files([f"@{file}"])))["--plan"] == (str(folder / "plan.json"),)
    monkeypatch.chdir(tmp_path)
    file.write_text("--plan tuned/plan.json\n--seed 1\n")
    assert list(expand_files(["@tuned/megatron_args.txt"])) == ["--plan", "tuned/plan.json", "--seed", "1"]


def test_the_layout_in_a_plans_file_has_its_reasons_beside_the_flags() -> None:
    """`--plan plan.json` alone would leave a reader without the layout, and without why it was chosen."""
    plan, arguments = mixtral(*"--recompute-granularity full --recompute-method block --recompute-num-layers 3".split())
    effects = {"--expert-model-parallel-size": "alone -0.2 s"}
    written = argument_file(MIXTRAL, plan, (), effects=effects, plan_file="plan.json", in_file=arguments)
    before, _, behind = written.text.partition("--plan plan.json\n")
    comments = before.rpartition("# a layout that flags cannot express; the file is in the same folder as this one\n")[
        2
    ].splitlines()
    assert comments[0] == "# its layout:"
    told = {line.split()[1]: line for line in comments[1:]}
    assert told["--pipeline-model-parallel-size"].endswith(" 4: 4 stages of 16 GPUs, with 8 layers each")
    assert told["--expert-model-parallel-size"].endswith("; alone -0.2 s")
    # Some need no reason, but without them the others mislead.
    assert told["--recompute-num-layers"].endswith(" 3")
    assert "--micro-batch-size" in told and not told.keys() & set(written.arguments)
    assert list(grouped(written.arguments)) == list(grouped(shlex.split(written.text, comments=True)))
    with_flags = argument_file(MIXTRAL, plan, arguments, effects=effects).text
    assert "# its layout:" not in with_flags and "its layout" not in behind


def test_a_plan_decides_all_spellings_of_its_flags() -> None:
    decided = decided_flags(mixtral()[0])
    assert {"--recompute-activations", "--moe-layer-recompute", "--account-for-loss-in-pipeline-split"} <= decided
    assert not {"--num-layers", "--lr", "--moe-token-dispatcher-type", "--fp8-recipe"} & decided
