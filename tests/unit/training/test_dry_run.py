"""Tests of the dry run: what it prints, that it needs no torch, and its answers to the argument lists of real jobs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.launch import _require_inputs
from moe_overlap.commands.train import main
from moe_overlap.describe.errors import ConfigError
from tests.spawn import HANGS_SECONDS

ROOT = Path(__file__).resolve().parents[3]
LISTS = {
    entry["name"]: entry["arguments"] for entry in json.loads((ROOT / "tests/golden/argument_lists.json").read_text())
}
ANSWERS = {
    "mixtral_8x7b_tp1pp4ep8vpp8_release": "",
    "deepseek_proxy_fsdp_ep2_fsdp2": "--use-megatron-fsdp: not supported: this fork shards optimizer states alone",
    "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer": "",
    "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel": "",
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer": "",
    "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph": "",
}


def printed(words: list[str], world_size: int | None = None) -> str:
    """The text of a dry run."""
    out = io.StringIO()
    dry_run(parse(words), world_size, out)
    return out.getvalue()


@pytest.mark.parametrize("name", ANSWERS)
def test_argument_lists_are_accepted_or_refused_with_a_reason(name: str) -> None:
    if ANSWERS[name]:
        with pytest.raises(ConfigError) as refused:
            printed(LISTS[name])
        assert str(refused.value).startswith(ANSWERS[name])
    else:
        text = printed(LISTS[name])
        assert "flags without effect" in text
        assert "  --data-path         ${DATA_PATH}" in text or "mixtral" in name
        assert "  --vocab-file        ${DATA_PATH}" in text or "  --tokenizer-model   ${DATA_PATH}" in text


def test_a_real_job_after_its_tokenizer_is_replaced() -> None:
    text = printed(
        [*LISTS["mixtral_8x7b_tp1pp4ep8vpp8_release"], "--vocab-size", "32000", "--tokenizer-type", "NullTokenizer"]
    )
    assert "8 experts top-2, 46.7 B parameters (12.9 B active, 262.1 M embedding)" in text
    assert "32 processes: TP 2, PP 4, virtual stages 8, EP 8, ETP 1, DP 4 with ZeRO-1" in text
    assert "  3      24-31           3-3 7-7" in text
    assert "--tokenizer-model   ${DATA_PATH}" not in text


def test_layout_on_a_given_world_and_its_errors() -> None:
    words = [f"@{ROOT}/examples/tiny-mixtral-8x7b.args"]
    assert "4 processes: EP 2, DP 4 with ZeRO-1, micro-batch 4, global batch 16 in 1 micro-batches" in printed(words, 4)
    with pytest.raises(
        ConfigError, match=r"^--world-size 3: not a multiple of ETP × EP × PP = 1 × 2 × 1; use a multiple"
    ):
        printed(words, 3)


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    words = [
        f"@{ROOT}/examples/tiny-mixtral-8x7b.args",
        "--data-path",
        f"{tmp_path}/none",
        "--load",
        f"{tmp_path}/gone",
    ]
    text = printed(words)
    assert f"--data-path         {tmp_path}/none.idx does not exist" in text
    assert f"--load              {tmp_path}/gone does not exist: training would start afresh" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["@examples/deepseek-v3.args", "--dry-run"],
        ["--model", "examples/models/mixtral-8x7b.json", "--dry-run"],
        ["--num-layer", "3"],
    ],
)
def test_torch_is_not_imported(words: list[str]) -> None:
    code = (
        "import sys, pretrain_moe\n"
        "try:\n    pretrain_moe.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'megatron.core'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_SECONDS
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"@{ROOT}/examples/tiny-mixtral-8x7b.args", "--plan", "nofile.json", "--dry-run"]) == 2
    assert "--plan nofile.json: cannot be read: No such file or directory" in capsys.readouterr().err


def test_outputs_that_cannot_be_written_are_listed(tmp_path: Path) -> None:
    """What can be written is looked at without a trace."""
    tiny, file = f"@{ROOT}/examples/tiny-mixtral-8x7b.args", tmp_path / "file"
    file.write_text("")
    text = printed([tiny, "--save", f"{file}/saved", "--log-json", f"{tmp_path}/new/er/log"])
    head, _, stops = text.partition("a start here stops at")
    assert head and f"--save {file}/saved: cannot be written: Not a directory; " in stops and "--log-json" not in stops
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_without_a_tokenizer_ends_a_dry_run_and_a_start(tmp_path: Path) -> None:
    words = [f"@{ROOT}/examples/tiny-mixtral-8x7b.args", "--tokenizer-type", "HuggingFaceTokenizer"]
    with pytest.raises(
        ConfigError, match=f"^--tokenizer-model {tmp_path}: holds no tokenizer's file; give the folder that"
    ):
        printed([*words, "--tokenizer-model", str(tmp_path)])
    with pytest.raises(ConfigError, match="holds no tokenizer's file"):
        _require_inputs(parse([*words, "--tokenizer-model", str(tmp_path)]).config)
    assert "/gone does not exist" in printed([*words, "--tokenizer-model", f"{tmp_path}/gone"])


def test_a_learning_rate_that_nobody_trains_with_is_told() -> None:
    """SGD's reach 1; beyond, an exponent often lacks its minus."""
    words = [f"@{ROOT}/examples/tiny-mixtral-8x7b.args", "--decoupled-lr"]
    for rates, told in ((("3e4", "1e-3"), "--lr 30000"), (("1e-3", "3e3"), "--decoupled-lr 3000"), (("1", "1"), None)):
        lines = [line for line in printed([*words, rates[1], "--lr", rates[0]]).splitlines() if "beware" in line]
        rest = "is far above the rates of published trainings, such as 3e-4: is the minus of its exponent missing?"
        assert lines == ([] if told is None else [f"beware        {told} {rest}"])


def test_micro_batches_in_flight_are_said() -> None:
    words = [*LISTS["gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel"], "--moe-token-dispatcher-type", "irregular"]
    assert "in flight" not in printed(words)
    text = printed([*words, "--moe-overlap-micro-batches", "2"])
    assert (
        "activations of at most 3, 1 micro-batches (stages 0, 1), plus those of the layers being computed; "
        "2, 1 without --moe-overlap-micro-batches" in text
    )


def test_a_gate_that_nobody_named_is_said() -> None:
    words = [f"@{ROOT}/examples/tiny-mixtral-8x7b.args", "--moe-token-dispatcher-type", "irregular"]
    partitions = ["--moe-overlap-partitions", "2"]
    line = "gate          topk, without --moe-gate: where no token is dropped it decides as megatron-core's router does"
    assert line in printed([*words, *partitions])
    assert "\ngate " not in printed(words) and "\ngate " not in printed([*words, *partitions, "--moe-gate", "topk"])


def test_an_environment_that_leaves_no_overlap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most scripts for Megatron-LM export one hardware queue, which all streams of a list would share."""
    words = [f"@{ROOT}/examples/tiny-mixtral-8x7b.args", "--moe-token-dispatcher-type", "irregular"]
    overlapped = [*words, "--moe-overlap-partitions", "2"]
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert "\nbeware" not in printed(overlapped)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "\nbeware        CUDA_DEVICE_MAX_CONNECTIONS=1 makes the streams of a GPU wait" in printed(overlapped)
    assert "\nbeware" not in printed(words)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert "\nbeware" not in printed(overlapped)
