"""`tools/predict.py`: what it prints, its one-line errors, and that torch stays out where layouts are cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_overlap.api as api
import moe_overlap.results as results
from moe_overlap.commands.autotune import main as tune_main
from moe_overlap.commands.predict import main
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.job import read_job
from moe_overlap.plan.serialize import save_plan
from tests.unit.tuner.cost.test_cost_predict import by_hand

ROOT = Path(__file__).resolve().parents[3]
JOB = ["--megatron-args", str(ROOT / "examples" / "mixtral-8x7b.args")]
H100 = ["--gpu", "H100", "--num-gpus", "64"]
KEYS = "step_seconds tokens_per_second_per_gpu model_tflops_per_gpu mfu fits extrapolating breakdown stages not_modelled".split()


@pytest.fixture
def hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)


@pytest.mark.usefixtures("hand_made")
def test_json_has_the_keys_that_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *H100, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(KEYS) <= set(answer)
    assert sum(answer["breakdown"].values()) == pytest.approx(answer["step_seconds"])
    assert all(name.endswith("_seconds") for name in answer["breakdown"])
    for stage in answer["stages"]:
        assert sum(stage["peak_bytes_by_category"].values()) == stage["peak_bytes"]
        assert {"stable_seconds", "first_seconds", "last_seconds"} <= set(stage)


@pytest.mark.usefixtures("hand_made")
def test_what_is_not_modelled_and_what_is_assumed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--moe-paged-stash --optimizer muon --use-megatron-fsdp --ckpt-format fsdp_dtensor"
    (tmp_path / "newer.args").write_text(f"@{ROOT / 'examples' / 'mixtral-8x7b.args'} {flags}")
    job = ["--megatron-args", str(tmp_path / "newer.args")]
    assert main([*job, *H100]) == 0
    short = capsys.readouterr().out
    assert "\nbeware      not modelled: --moe-paged-stash (--verbose says what each changes)\n" in short
    assert "\nbeware      assumed: --optimizer muon: one moment as in" in short
    assert main([*job, *H100, "--verbose"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "\n".join(said).startswith(short)
    assert [line[:74] for line in said if line.startswith("not modelled: ")] == [
        "not modelled: --moe-paged-stash: keeps the experts' activations in pages: "
    ]
    assert [line[:43] for line in said if line.startswith("assumed: ")] == [
        "assumed: --optimizer muon: one moment as in"
    ]
    assert main([*job, *H100, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer["not_modelled_effects"]) == answer["not_modelled"] == ["--moe-paged-stash"]
    assert len(answer["assumed"]) == 1


@pytest.mark.usefixtures("hand_made")
@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (
            "--overlap-moe-expert-parallel-comm",
            "--overlap-moe-expert-parallel-comm: needs virtual stages in a pipeline of 4 stages; "
            "add --num-virtual-stages-per-pipeline-rank 2 or drop it",
        ),
        (
            "--cpu-offloading-num-layers 4",
            "--cpu-offloading-num-layers 4: does not work in a pipeline; "
            "use --fine-grained-activation-offloading or drop it",
        ),
        (
            "--use-megatron-fsdp",
            "--pipeline-model-parallel-size 4: --use-megatron-fsdp does not support pipelines; use 1, or drop it "
            "(and 1 more: --verbose)",
        ),
    ],
)
def test_what_nobody_runs_is_answered_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, rule: str
) -> None:
    (tmp_path / "none.args").write_text(f"@{ROOT / 'examples' / 'mixtral-8x7b.args'} {flags}")
    job = ["--megatron-args", str(tmp_path / "none.args"), *H100]
    assert main(job) == 0
    said = capsys.readouterr().out
    assert f"\nbeware      Megatron-LM with megatron-core 0.16.1 does not run this: {rule}\n" in said
    assert main([*job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_run"][0] == rule.removesuffix(" (and 1 more: --verbose)")
    assert main([*job, "--verbose"]) == 0
    assert f"\nnot run: {rule.removesuffix(' (and 1 more: --verbose)')}\n" in f"{capsys.readouterr().out}"
    # Virtual stages are what the overlap needs, and this fork's own is not Megatron-LM's to refuse.
    runs = "--overlap-moe-expert-parallel-comm --num-virtual-stages-per-pipeline-rank 2"
    (tmp_path / "none.args").write_text(f"@{ROOT / 'examples' / 'mixtral-8x7b.args'} {runs}")
    assert main([*job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_run"] == []


@pytest.mark.usefixtures("hand_made")
def test_a_layer_of_a_config_that_nothing_computes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
    config |= {"model_type": "olmoe", "num_key_value_heads": 4, "max_position_embeddings": 256, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 8, "num_experts_per_tok": 2}))
    words = ["--model", str(tmp_path / "config.json"), "--gpu", "H100", "--num-gpus", "8"]
    (tmp_path / "job.args").write_text("--bf16 --global-batch-size 8 --micro-batch-size 1 --use-distributed-optimizer")
    assert main([*words, "--megatron-args", str(tmp_path / "job.args"), "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    # The only sentence that the short answer shows is on what no figure includes.
    assert assumed[0].startswith("not modelled: ") and "q_norm and k_norm are over all heads" in assumed[0]
    assert any(text.startswith("samples of 256 tokens, as a config.json says none") for text in assumed)
    # A plan is to be run: its search refuses the model.
    assert tune_main([*words, "--global-batch-size", "8", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "q_norm and k_norm" in error and "tools/predict.py" in error


@pytest.mark.usefixtures("hand_made")
def test_a_model_bears_the_name_of_its_folder_or_of_the_flags_file(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
    config |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512}
    file, job, trace = (tmp_path / name for name in ("tiny-mixtral/config.json", "night.args", "trace.json"))
    file.parent.mkdir()
    file.write_text(json.dumps(config | {"num_key_value_heads": 4, "max_position_embeddings": 256}))
    job.write_text("--bf16 --micro-batch-size 1 --use-distributed-optimizer")
    words = ["--model", str(file), *H100, "--global-batch-size", "64", "--trace", str(trace)]
    for further, name in (([], "tiny-mixtral"), (["--megatron-args", str(job)], "night")):
        assert main([*words, *further]) == 0
        assert f'"name": "{name}"' in trace.read_text()


@pytest.mark.usefixtures("hand_made")
def test_routing_is_balanced_natural_or_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(ExpertLoad(1, 1, 0, 800, (100,) * 8, (0,) * 8, 1.0).to_line() + "\n")
    told = {}
    for word in ("", "balanced", str(file), "natural"):
        assert main([*JOB, *H100, *(["--routing", word] if word else []), "--json"]) == 0
        told[word] = json.loads(capsys.readouterr().out)
    assert told[""] == told["balanced"] == told[str(file)]
    assert told["natural"]["step_seconds"] > told[""]["step_seconds"]
    assert any("1.1 times the mean of rows" in text for text in told["natural"]["assumed"])


@pytest.mark.usefixtures("hand_made")
def test_a_cluster_file_says_the_same_as_its_shorthand(capsys: pytest.CaptureFixture[str]) -> None:
    main([*JOB, *H100])
    short = capsys.readouterr().out
    main([*JOB, "--cluster", str(ROOT / "examples" / "clusters" / "h100.json")])
    assert capsys.readouterr().out == short
    assert short.startswith(
        "plan        64 GPUs = 4 pipeline stages × TP 2 × DP 8; experts over EP 8 × 2 replicas; 32 micro-batches of 1 sample; "
        "ZeRO-1; no recomputation\nstep        "
    )
    assert "MFU" in short and len(short.splitlines()) <= 10
    # 500,000 steps of 256 samples of 4,096 tokens.
    assert "\ntraining    524 B tokens in " in short
    main([*JOB, *H100, "--verbose", "--train-tokens", "1T"])
    long = capsys.readouterr().out
    for words, tokens in ((["--train-tokens", "1T"], 1e12), ([], 500_000 * 256 * 4096)):
        main([*JOB, *H100, *words, "--json"])
        values = json.loads(capsys.readouterr().out)
        assert values["train_tokens"] == tokens
        rate = values["tokens_per_second_per_gpu"]
        assert values["train_seconds"] == pytest.approx(tokens / rate / 64)
        assert values["train_gpu_hours"] == pytest.approx(tokens / rate / 3600)
    assert "\ntraining    1 T tokens in " in long and "\n\nstep          " in long and "peak GiB" in long


@pytest.mark.usefixtures("hand_made")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*JOB, "--gpu", "H1000", "--num-gpus", "8"], "--gpu H1000: unknown GPU; did you mean H100 or H800?"),
        ([*JOB, "--gpu", "H100"], "--num-gpus: is missing, and the flags are no script that says it; add --num-gpus N"),
        ([*JOB, "--gpu", "H1000"], "--gpu H1000: "),
        ([*JOB, *H100, "--cluster", "x.json"], "--cluster x.json: stands beside --gpu"),
        ([*JOB, "--gpu", "H100", "--num-gpus", "24"], "world size 24"),
        ([*JOB, "--gpu", "H100", "--num-gpus", "9" * 5000], "…: must be a whole number from 1; give for example 64"),
        ([*JOB, *H100, "--software", "latest"], "--software latest: is no release"),
        ([*JOB, *H100, "--train-tokens", "many"], "--train-tokens many: is no number of tokens"),
        (["--megatron-args", "none.args", *H100], "cannot read none.args"),
        ([*JOB, *H100, "--model", "none.json"], "--model none.json: cannot be read"),
        ([*JOB, *H100, "--plan", "none.json"], "error: --plan none.json: cannot be read"),
        ([*JOB, *H100, "--expert-load", "none"], "error: --expert-load none: cannot be read"),
        ([*JOB, *H100, "--routing", "none"], "error: --routing none: is neither balanced nor natural, nor a file"),
        (
            [*JOB, *H100, "--routing", "natural", "--expert-load", "f"],
            "error: --routing natural: stands beside --expert-",
        ),
        ([*JOB, *H100, "--expert-load", "natural"], "error: --expert-load natural: is the word of --routing; write"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert message in said


@pytest.mark.usefixtures("hand_made")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-gpus", "32"], "world size 32: {plan} is for 64 processes; use 64"),
        (["--num-gpus", "128"], "world size 128: {plan} is for 64 processes; use 64"),
        (["--global-batch-size", "128"], "--global-batch-size 128: --plan {plan} decides it, and says 256"),
        (["--seq-length", "2048"], "--seq-length 2048: --plan {plan} decides it, and says 4096"),
        (["--precision", "fp8"], "--precision fp8: --plan {plan} decides it, and says bf16"),
    ],
)
def test_a_plan_is_for_its_own_gpus_batch_length_and_precision(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    save_plan(read_job([f"@{ROOT}/examples/mixtral-8x7b.args"], 64).plan, plan)
    same = ["--global-batch-size", "256", "--seq-length", "4096", "--precision", "bf16"]
    assert main([*JOB, *H100, "--plan", str(plan), *same]) == 0
    capsys.readouterr()
    assert main([*JOB, *H100, "--plan", str(plan), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message.format(plan=plan)}") and said.count("\n") == 1


@pytest.mark.slow
def test_torch_is_imported_once_for_a_layout(tmp_path: Path) -> None:
    """The first prediction captures, in another process; a second one reads the cache; a spoiled file is captured again."""
    script = (
        "import sys; from moe_overlap.commands.predict import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    job = ["--megatron-args", "examples/tiny-mixtral-8x7b.args", "--gpu", "H100", "--num-gpus", "2", "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *job]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)

    first = run()
    files = list(tmp_path.rglob("*.json"))
    assert files
    second = run()
    assert first.stdout == second.stdout
    assert second.stdout.rstrip().endswith("False")
    files[0].write_text(files[0].read_text()[:-100])
    third = run()
    assert third.stdout == first.stdout
    assert "warning" in third.stderr


def test_the_package_offers_predict() -> None:
    import moe_overlap

    assert moe_overlap.predict is results.predict
    with pytest.raises(AttributeError, match="no attribute 'predictions'"):
        _ = moe_overlap.predictions
