"""Errors whose fix works: all mistakes of a kind at once, and the other flag that makes the wished value work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.cli.validation import validate
from moe_overlap.commands import autotune, predict
from moe_overlap.commands.job_arguments import job_flags
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.shell_script import script_flags

SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --vocab-size 512"


def refused(words: str, world: int = 4) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(parse(f"{SIZES} --micro-batch-size 1 --global-batch-size 8 {words}".split()).config, world)
    return caught.value


@pytest.mark.parametrize(
    ("layers", "virtual", "ways"),
    [
        (
            30,
            1,
            [
                "--decoder-last-pipeline-num-layers 6",
                "--account-for-embedding-in-pipeline-split --account-for-loss-in-",
            ],
        ),
        (
            46,
            1,
            [
                "--decoder-last-pipeline-num-layers 10",
                "--account-for-embedding-in-pipeline-split --account-for-loss-in-",
            ],
        ),
        (47, 1, ["--decoder-last-pipeline-num-layers 11", "--account-for-loss-in-pipeline-split"]),
        (
            46,
            2,
            [
                "--decoder-last-pipeline-num-layers 10",
                "--account-for-embedding-in-pipeline-split --account-for-loss-in-",
            ],
        ),
        (45, 1, ["--decoder-last-pipeline-num-layers 12"]),
    ],
)
def test_layers_that_the_stages_do_not_divide(layers: int, virtual: int, ways: list[str]) -> None:
    """Each way that the fix names makes the wished number of stages valid."""
    words = f"--num-layers {layers} --pipeline-model-parallel-size 4"
    words += f" --num-virtual-stages-per-pipeline-rank {virtual}" if virtual > 1 else ""
    fix = refused(words).fix
    assert fix.endswith("--pipeline-model-parallel-layout") and ", or keep 4 by " in fix
    named = re.split(r", | or ", fix.partition("keep 4 by ")[2])[:-1]
    assert len(named) == len(ways)
    for way, beginning in zip(named, ways, strict=True):
        assert way.startswith(beginning)
        validate(parse(f"{SIZES} --micro-batch-size 1 --global-batch-size 8 {words} {way}".split()).config, 4)


def test_fewer_layers_than_stages_have_no_other_way() -> None:
    assert refused("--num-layers 3 --pipeline-model-parallel-size 4").fix == "use 1 or 3"


def test_the_depth_of_one_stage_names_depths_that_fit() -> None:
    words = "--num-layers 46 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers"
    error = refused(f"{words} 12")
    assert error.fix == "use 10 or 13"
    validate(parse(f"{SIZES} --micro-batch-size 1 --global-batch-size 8 {words} 13".split()).config, 4)


def test_a_batch_that_does_not_divide_names_both_flags() -> None:
    error = refused("--num-layers 4 --global-batch-size 7 --micro-batch-size 2", 1)
    assert str(error).endswith("use 1 or 7, or --global-batch-size 6 or 8")


def test_all_missing_sizes_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(parse(["--hidden-size", "64"]).config, 1)
    assert str(caught.value) == (
        "--num-layers, --num-attention-heads, --seq-length, --max-position-embeddings: the model needs them; "
        "add them, or --model NAME for a shipped model or a config.json"
    )


UNKNOWN = "--num-layers 4 --alpha-norm --beta-path /t --tokenizer-typo x --gamma 1"


def test_unknown_flags_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(UNKNOWN.split())
    without = "predict and tune without them by --ignore-unknown of tools/predict.py and tools/autotune.py"
    assert str(caught.value) == (
        "--alpha-norm, --beta-path, --tokenizer-typo, --gamma: unknown flags; did you mean --data-path for --beta-path or "
        f"--tokenizer-type for --tokenizer-typo? Else {without}"
    )
    with pytest.raises(ConfigError) as caught:
        parse(["--num-layers", "4", "--gpu", "H100", "--gamma", "1"])
    assert (
        str(caught.value)
        == f"--gpu, --gamma: unknown flags; for --gpu tools/predict.py has it; see --help, or {without}"
    )
    with pytest.raises(ConfigError, match=r"^a, b: a word that belongs to no flag \(after --bf16\)"):
        parse(["--num-layers", "4", "--bf16", "a", "--fp16", "b"])
    # The word is also the value of an earlier flag, and the flag before it has a value that begins with a dash.
    with pytest.raises(ConfigError, match=r"^4: a word that belongs to no flag \(after --window-size\)"):
        parse(["--num-layers", "4", "--window-size", "-1,0", "4"])
    with pytest.raises(ConfigError, match="--megatron-args: unknown flag; write @FILE for the flags in it"):
        parse(["--megatron-args", "a.args"])


def test_a_prediction_goes_without_unknown_flags_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left keeps its values, those among them that are empty; a search takes the flag as well."""
    (tmp_path / "job.args").write_text(f"{SIZES} --micro-batch-size 1 --global-batch-size 8 {UNKNOWN} --save '' --bf16")
    words = ["--megatron-args", str(tmp_path / "job.args"), "--gpu", "H100", "--num-gpus", "8"]
    assert predict.main(words) == 2
    assert "--alpha-norm, --beta-path" in capsys.readouterr().err
    assert predict.main([*words, "--ignore-unknown"]) == 0
    assert "without --alpha-norm, --beta-path, --gamma, --tokenizer-typo, which nothing" in capsys.readouterr().out
    arguments = autotune._parser().parse_args([*words, "--ignore-unknown"])
    assert job_flags(arguments)[-5:] == ["--num-layers", "4", "--save", "", "--bf16"]


def test_a_plan_beside_its_file_of_flags_is_found_in_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("")
    for words in ("--plan plan.json", "--plan=plan.json"):
        (tmp_path / "job.args").write_text(words)
        assert [*expand_files([f"@{tmp_path / 'job.args'}"])] == ["--plan", str(tmp_path / "plan.json")]


def test_a_choice_of_many_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="HFTokenizer: unknown choice; did you mean HuggingFaceTokenizer?"):
        parse(["--tokenizer-type", "HFTokenizer"])


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "\nprimus-cli direct -- train pretrain --config a.yaml",
            "line 2: starts primus-cli, which takes the experiment in a YAML",
        ),
        ("flagscale train a", "line 1: starts flagscale, which takes the configuration in YAML files"),
        (
            "torchrun t.py --config-name=x a.b=4",
            "line 1: starts t.py with Hydra's settings (a.b=c), not with flags of Megatron-LM",
        ),
        ("python t.py model.num_layers=4 trainer.devices=8", "line 1: starts t.py with Hydra's settings"),
        (
            "srun -N 4 --exclusive primus-cli direct -- train",
            "line 1: starts primus-cli, which takes the experiment in a YAML",
        ),
        ("exec srun -l /opt/bin/swift sft --x y", "line 1: starts swift, which takes its own arguments"),
        ("time cp train.py /tmp", "holds no command that starts a Python program"),
        ("uv pip install ./train.py", "holds no command that starts a Python program"),
        ("echo done", "holds no command that starts a Python program"),
    ],
)
def test_other_launchers_are_named(script: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script_flags(script, {}, "x.sh")
    assert str(caught.value).startswith(f"x.sh {line}" if line.startswith("line") else f"x.sh: {line}")


def test_flags_in_another_spelling_are_read(tmp_path: Path) -> None:
    script = "megatron sft --model a/b --pipeline_model_parallel_size 2 --moe_grouped_gemm true --bf16=true --x_y false --lr 1"
    words = ("--model", "a/b", "--pipeline-model-parallel-size", "2", "--moe-grouped-gemm", "--bf16", "--lr", "1")
    assert script_flags(script, {}, "x.sh").arguments == words
    for launch in ("uv run", "uv --quiet run", "srun --job-name nemo python", "srun --partition test", "exec"):
        assert script_flags(f"{launch} train.py --x 1", {}, "x.sh").arguments == ("--x", "1")
    (tmp_path / "a.sh").write_text(script)
    # A model of the command line is in the place of the script's.
    words_of_tool = ["--megatron-args", str(tmp_path / "a.sh"), "--model", "tiny-mixtral-8x7b"]
    flags = predict.job_flags(predict._parser().parse_args(words_of_tool), is_predicted=True)
    assert parse(flags).config.parallel.pipeline_model_parallel_size == 2 and "a/b" not in flags


def test_a_yaml_file_is_named(tmp_path: Path) -> None:
    for text, kind in (("defaults:\n  - a\n", "Hydra's settings"), ("num_layers: 4\n", "a launcher's settings")):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(ConfigError, match=f"a.yaml: is a YAML file, {kind}, which are not read"):
            list(expand_files([f"@{tmp_path / 'a.yaml'}"]))
