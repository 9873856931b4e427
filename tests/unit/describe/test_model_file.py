"""`--model NAME`: our model files and config.json alike, flags beside them, and the errors of both."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from moe_overlap.commands import predict
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.model_file import read_model

ROOT = Path(__file__).resolve().parents[3]
TINY = str(ROOT / "examples" / "models" / "tiny-mixtral-8x7b.json")
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "max_position_embeddings": 8192, "vocab_size": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


def written(tmp_path: Path, text: str, name: str = "config.json") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_model_file_is_its_argument_file() -> None:
    by_model, by_words = parse(["--model", TINY]), parse([f"@{ROOT}/examples/tiny-mixtral-8x7b.args"])
    assert (by_model.config, by_model.name, by_model.flag_names) == (
        by_words.config,
        by_words.name,
        by_words.flag_names,
    )
    assert parse([f"--model={TINY}"]).config == by_model.config


def test_flags_beside_the_file_win_wherever_they_stand(tmp_path: Path) -> None:
    job = written(tmp_path, "--num-layers 6\n--disable-bias-linear\n", "job.args")
    for words in (["--num-layers", "6", "--model", TINY], ["--model", TINY, "--num-layers", "6"]):
        assert parse(words).config.model.num_layers == 6
    parsed = parse([f"@{job}", "--model", TINY])
    assert (parsed.config.model.num_layers, parsed.config.model.hidden_size) == (6, 128)
    assert parsed.name == "tiny-mixtral-8x7b"
    llama = written(tmp_path, json.dumps(LLAMA))
    assert parse(["--model", TINY, "--model", llama]).config.moe.num_experts is None  # the later file alone counts


def test_the_length_of_samples_is_shown_and_can_be_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(LLAMA))
    assert parse(["--model", path]).config.model.seq_length == 4096
    assert parse(["--model", path, "--seq-length", "8192"]).config.model.seq_length == 8192
    short = written(tmp_path, json.dumps(LLAMA | {"max_position_embeddings": 512}))
    assert parse(["--model", short]).config.model.seq_length == 512


def test_a_dry_run_shows_the_model_and_what_training_still_needs(tmp_path: Path) -> None:
    folder = tmp_path / "Some-Llama"
    folder.mkdir()
    path = written(folder, json.dumps(LLAMA))
    out = io.StringIO()
    words = "--dry-run --micro-batch-size 1 --global-batch-size 8".split()
    dry_run(parse(["--model", path, *words]), None, out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("model         Some-Llama: 2 layers, hidden 64, ")
    assert lines[1].endswith("micro-batch 1, global batch 8 in 8 micro-batches")
    assert lines[-2:] == [
        "  --lr: training needs it; add for example --lr 3e-4",
        "  --train-iters: training needs a length; add --train-iters N",
    ]


def test_a_dry_run_says_where_megatron_core_differs(tmp_path: Path) -> None:
    mixtral = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2, "router_aux_loss_coef": 0.02}
    out = io.StringIO()
    dry_run(parse(["--model", written(tmp_path, json.dumps(mixtral)), "--micro-batch-size", "1"]), None, out)
    assert out.getvalue().splitlines()[1].startswith("not the same  megatron-core has a balancing loss per layer")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"_name_or_path": "mistralai/Mixtral-8x7B-v0.1"}, "Mixtral-8x7B-v0.1"),
        ({"_name_or_path": ""}, "folder"),
        ({}, "folder"),
    ],
)
def test_names(values: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert read_model(written(tmp_path / "folder", json.dumps(LLAMA | values))).name == name
    if name == "folder":
        assert read_model(written(tmp_path, json.dumps(LLAMA | values), "llama-x.json")).name == "llama-x"


WRONG = [
    ('{"model_type": "llama"', "--model F: is no JSON: line 1: Expecting ',' delimiter; correct the file"),
    (
        "[1]",
        "--model F: has neither flags nor a model_type; give a file like examples/models/mixtral-8x7b.json or a Hugging",
    ),
    ("{}", "--model F: has neither flags nor a model_type"),
    ('"flags"', "--model F: has neither flags nor a model_type"),
    ('{"flags": []}', "F flags []: must be an object of flag name to value"),
    ('{"flags": {}, "layers": 2}', "F layers: unknown field; a model file has name, source and flags"),
    ('{"flags": {"swiglu": false}}', "F flags.swiglu False: a switch is true; remove what is off"),
    ('{"flags": {"split": {"a": 1}}}', "F flags.split {'a': 1}: must be a word, a number or true"),
    ('{"flags": {"split": null}}', "F flags.split None: must be a word, a number or true"),
    ('{"flags": {"num-layer": 2}}', "--num-layer: unknown flag; did you mean --num-layers?"),
    ('{"flags": {"num-layers": "two"}}', "--num-layers two: must be a whole number"),
    ('{"model_type": "llama"}', "F hidden_size: the field is missing; take the config.json of the published model"),
    ("[" * 100_000, "--model F: is no JSON: "),
]


@pytest.mark.parametrize(("text", "line"), WRONG, ids=range(len(WRONG)))
def test_wrong_files_are_answered_by_one_line(text: str, line: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        parse(["--model", path])
    assert str(caught.value).startswith(line.replace("F", path, 1) if "F" in line else line)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, rule in (
        ("missing.json", "cannot be read: No such file or directory; correct the path"),
        (str(tmp_path), f"is a folder; give a file, such as {tmp_path}/config.json"),
        (str(tmp_path / "binary"), "cannot be read: not UTF-8 text; correct the file"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse(["--model", path])
        assert str(caught.value) == f"--model {path}: {rule}"
    with pytest.raises(ConfigError, match="--model: needs a value"):
        parse(["--model"])


def test_a_shipped_model_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    by_path = parse(["--model", str(ROOT / "examples/models/qwen3-30b-a3b.json")])
    for name in ("qwen3-30b-a3b", "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"):
        assert parse(["--model", name]) == by_path
    with pytest.raises(SystemExit) as ended:
        predict.main(["--list-models"])
    assert ended.value.code == 0 and "mixtral-8x7b" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", "did you mean mixtral-8x7b? Else give"),
        ("deepseekv3", "did you mean deepseek-v3 or deepseek-v3-mtp? Else give"),
        ("gpt-oss", "did you mean gpt-oss-120b? Else give"),
        ("unheard-of", "--list-models prints the shipped ones; or give"),
    ],
)
def test_an_unknown_name_is_answered_with_the_near_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(name)
    assert str(caught.value).startswith(
        f"--model {name}: is neither a file nor a shipped model; {near} the path of its"
    )


def test_a_path_is_never_the_shipped_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORGANISATION/NAME is the name of a published model, unless a folder has the name of the organisation."""
    monkeypatch.chdir(tmp_path)
    assert read_model("data/mixtral-8x7b") == read_model("mixtral-8x7b")
    (tmp_path / "data").mkdir()
    for path in (
        "./mixtral-8x7b",
        "/data/mixtral-8x7b",
        "../mixtral-8x7b",
        "~/mixtral-8x7b",
        "a/b/mixtral-8x7b",
        "data/mixtral-8x7b",
    ):
        with pytest.raises(ConfigError, match=f"--model {path}: cannot be read: No such file or directory"):
            read_model(path)


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, json.dumps(LLAMA), "mixtral-8x7b")
    assert read_model("mixtral-8x7b").flags["num-layers"] == 2
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model("nowhere/mixtral.json")
