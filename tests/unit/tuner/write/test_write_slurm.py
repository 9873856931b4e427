"""`launch.sbatch`: what it asks Slurm for, what torchrun is started with, and that it is a shell script."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_overlap.describe.cluster import Cluster, load_cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.write.argument_file import Target, argument_file
from moe_overlap.tuner.write.slurm import SlurmJob, arguments_to_add, job_on, run_environment, slurm_script
from tests.unit.tuner.write.test_write_argument_file import MIXTRAL, mixtral

ROOT = Path(__file__).resolve().parents[4]
JOB = SlurmJob(name="mixtral-8x7b", nodes=8, gpus_per_node=8)
SAVES_AND_FAILS = "[[ -d kept ]] && exit 0; mkdir -p kept/step-000002; exit 1"
STANDS_FOR = {
    "scontrol": 'if [[ $2 == hostnames ]]; then printf "n0\\nn1\\n"; else echo "   Command=$COMMAND"; fi',
    "srun": 'printf "%s\\n" "$@" > "$SEEN"',
}
"""Programs of Slurm: one command each."""


def words_of_srun(script: str, tmp_path: Path, is_to_end_well: bool = True, **environment: str) -> list[str]:
    """The words that a script starts srun with, on two nodes of a cluster that does not exist."""
    folder = tmp_path / "tuned folder"
    folder.mkdir()
    path = folder / "launch.sbatch"
    path.write_text(script)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in STANDS_FOR.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{command}\n")
        (programs / name).chmod(0o755)
    seen = tmp_path / "seen"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "m", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_GPUS_ON_NODE": "16"}
    about = {"COMMAND": f"{path} --seed 3", "SEEN": str(seen), "PATH": f"{programs}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", str(path), "--seed", "3"], env={**os.environ, **job, **about, **environment}, cwd=tmp_path, check=False
    )
    assert (ended.returncode == 0) == is_to_end_well
    return seen.read_text().splitlines()


@pytest.mark.parametrize("target", ["moe-overlap", "megatron-lm"])
@pytest.mark.parametrize("image", [None, "nvcr.io/nvidia/nemo:25.11 'odd"])
def test_the_script_is_bash(target: Target, image: str | None, tmp_path: Path) -> None:
    plan, arguments = mixtral()
    written = argument_file([*MIXTRAL, "--data-path", "it's a path"], plan, arguments, target)
    text = slurm_script(dataclasses.replace(JOB, image=image), target, written, {"A": "b c"})
    (tmp_path / "launch.sbatch").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "launch.sbatch")], check=True)
    assert str(ROOT) not in text and "/root" not in text


@pytest.mark.parametrize(
    ("target", "flags", "user", "told"),
    [
        ("megatron-lm", [], None, "expandable_segments:True"),
        ("megatron-lm", [], "max_split_size_mb:64", "max_split_size_mb:64"),
        ("megatron-lm", ["--cuda-graph-impl", "local"], None, ""),
        ("moe-overlap", [], None, ""),
    ],
)
def test_memory_in_growing_segments(target: Target, flags: list[str], user: str | None, told: str) -> None:
    plan, arguments = mixtral()
    text = slurm_script(JOB, target, argument_file([*MIXTRAL, *flags], plan, arguments, target))
    exports = "\n".join(line for line in text.splitlines() if line.startswith("export PYTORCH"))
    variables = {} if user is None else {"PYTORCH_CUDA_ALLOC_CONF": user}
    script = f'{exports}\nprintf %s "$PYTORCH_CUDA_ALLOC_CONF"'
    ran = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert ran.stdout == told


def test_what_it_asks_slurm_for() -> None:
    plan, arguments = mixtral()
    written = argument_file(MIXTRAL, plan, arguments)
    lines = slurm_script(JOB, "moe-overlap", written).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert options[:5] == [
        "--job-name=mixtral-8x7b",
        "--nodes=8",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
    ]
    assert "--requeue" in options and "--signal=B:USR1@300" in options
    assert any(line.startswith("##SBATCH --gres=gpu:8 ") for line in lines)
    by_gres = slurm_script(dataclasses.replace(JOB, gpu_option="gres"), "moe-overlap", written).splitlines()
    assert "#SBATCH --gres=gpu:8" in by_gres and any(line.startswith("##SBATCH --gpus-per-node=8 ") for line in by_gres)


def test_the_script_names_what_the_flags_do_not_say() -> None:
    plan, arguments = mixtral()
    text = slurm_script(JOB, "moe-overlap", argument_file(MIXTRAL, plan, arguments))
    said = arguments_to_add(argument_file(MIXTRAL, plan, arguments).flags, "moe-overlap")
    assert "--data-path PREFIX" in said and f"#   sbatch FOLDER/launch.sbatch {said} [further flags]\n" in text
    assert arguments_to_add({}, "moe-overlap") == "--lr LR --train-iters N --data-path PREFIX"
    there = {"--lr": ("1e-4",), "--train-iters": ("10",), "--data-path": ("text",)}
    assert arguments_to_add({"--lr": ("1e-4",), "--train-samples": ("9",), "--mock-data": ()}, "moe-overlap") == ""
    assert arguments_to_add({**there, "--tokenizer-type": ("NullTokenizer",)}, "megatron-lm") == ""
    assert arguments_to_add(there, "megatron-lm").startswith("--tokenizer-type TYPE")


def test_what_a_shell_script_takes_from_outside_is_still_to_be_said() -> None:
    plan, arguments = mixtral()
    outside = ["--data-path", "${3}", "--tokenizer-model", "${2}", "--tensorboard-dir", "${1}/tensorboard"]
    written = argument_file([*MIXTRAL, *outside, "--save", "${1}", "--load", "${1}"], plan, arguments, "megatron-lm")
    added = arguments_to_add(written.flags, "megatron-lm")
    assert "--data-path PREFIX" in added and "--tensorboard-dir VALUE" in added and "--save" not in added
    assert "--tokenizer-model" in added and added.count("--tokenizer-model") == 1
    lines = slurm_script(JOB, "megatron-lm", written).splitlines()
    assert any(line.startswith("RUN=${RUN:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}") for line in lines)
    assert any(line.startswith("LOAD=${LOAD:-} ") for line in lines)


def test_torchrun_gets_the_file_beside_the_script(tmp_path: Path) -> None:
    plan, arguments = mixtral()
    text = slurm_script(JOB, "moe-overlap", argument_file(MIXTRAL, plan, arguments))
    words = words_of_srun(text, tmp_path)
    assert words[:2] == ["--kill-on-bad-exit=1", "bash"]
    assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--nproc-per-node") + 1] == "8"
    assert words[words.index("--rdzv-endpoint") + 1] == "n0:20007"
    program = words.index("pretrain_moe.py")
    file = f"@{tmp_path}/tuned folder/megatron_args.txt"
    assert words[program + 1] == "--save-interval" and words[program + 3 : program + 5] == [file, "--seed"]
    assert words[-5:] == ["10", "--save", "runs/m-7", "--load", "runs/m-7"]


FAILS_ONCE = """
for word; do [[ $before == --load ]] && load=$word; [[ $before == --max-restarts ]] && restarts=$word; before=$word; done
echo "$load $restarts" >> "$SEEN"
[[ $(wc -l < "$SEEN") -le ${FAILURES:-0} ]] && { [[ $SAVES ]] && mkdir -p "$SAVES/step-000002"; exit 1; } || exit 0
"""
"""A step that says what it loads and how often torchrun starts it again, and fails so often, having saved or not."""


@pytest.mark.parametrize(
    ("failures", "saves", "seen"),
    [
        (0, "", ["base 0"]),
        (1, "", ["base 0", "base 0"]),
        (1, "kept", ["base 0", "kept 1"]),
        (9, "", ["base 0"] * 3),
    ],
)
def test_a_users_checkpoint_is_where_the_run_begins_and_its_own_is_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, saves: str, seen: list[str]
) -> None:
    """torchrun would start ranks again with the user's --load, from the first step."""
    monkeypatch.setitem(STANDS_FOR, "srun", FAILS_ONCE)
    plan, arguments = mixtral()
    written = argument_file([*MIXTRAL, "--load", "base", "--save", "kept", "--save-interval", "100"], plan, arguments)
    said = words_of_srun(
        slurm_script(JOB, "moe-overlap", written),
        tmp_path,
        is_to_end_well=failures < 9,
        FAILURES=f"{failures}",
        SAVES=saves,
    )
    assert said == seen


def test_flags_of_a_users_checkpoint_are_of_the_start_that_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--no-load-optim would lose the moments that the run itself has saved."""
    monkeypatch.setitem(
        STANDS_FOR,
        "srun",
        'echo "${@: -2} $*" | grep -o "^--load [a-z]*\\|--no-load-[a-z]*" >> "$SEEN"; ' + SAVES_AND_FAILS,
    )
    plan, arguments = mixtral()
    words = [*MIXTRAL, "--data-path", "text", "--load", "base", "--save", "kept", "--no-load-optim", "--no-load-rng"]
    for target in ("moe-overlap", "megatron-lm"):
        written = argument_file(words, plan, arguments, target)
        assert written.first == ("--no-load-optim", "--no-load-rng") and not {*written.first} & written.flags.keys()
        assert {name for name, _ in written.left_out} >= {*written.first}
    said = words_of_srun(slurm_script(JOB, "megatron-lm", written), tmp_path)
    assert said == ["--load base", "--no-load-optim", "--no-load-rng", "--load kept"]


def test_a_later_start_begins_with_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STANDS_FOR, "srun", FAILS_ONCE)
    plan, arguments = mixtral()
    (tmp_path / "kept" / "step-000500").mkdir(parents=True)
    written = argument_file([*MIXTRAL, "--load", "base", "--save", "kept"], plan, arguments)
    assert words_of_srun(slurm_script(JOB, "moe-overlap", written), tmp_path, SAVES="") == ["kept 2"]


@pytest.mark.parametrize("word", ["--load", "--save=elsewhere"])
def test_what_the_script_says_is_not_said_beside_it(tmp_path: Path, word: str) -> None:
    """The script's own --save and --load stand behind all others, which would be lost without a word."""
    plan, arguments = mixtral()
    written = argument_file([*MIXTRAL, "--data-path", "text", "--load", "base"], plan, arguments, "megatron-lm")
    text = slurm_script(JOB, "megatron-lm", written)
    assert "--load base" not in text.split("set -euo pipefail")[0] and "LOAD=${LOAD:-base}" in text
    again = text.replace('set -- "${flags[@]}" "$@"', f'set -- "${{flags[@]}}" "$@" {word}')
    (tmp_path / "seen").write_text("")
    assert words_of_srun(again, tmp_path, is_to_end_well=False) == []


@pytest.mark.parametrize("target", ["moe-overlap", "megatron-lm"])
def test_weights_alone_are_taken_once(target: Target) -> None:
    """--finetune beside a run's own checkpoints would begin at step 0 whenever the job starts again."""
    plan, arguments = mixtral()
    words = [*MIXTRAL, "--data-path", "text", "--load", "base", "--finetune", "--no-load-optim"]
    written = argument_file(words, plan, arguments, target)
    assert written.flags["--pretrained-checkpoint"] == ("base",) and written.first == ()
    assert not {"--load", "--finetune", "--no-load-optim"} & written.flags.keys()
    assert {name for name, _ in written.left_out} >= {"--load", "--finetune", "--no-load-optim"}


def test_upstream_gets_its_flags_inline_in_a_container(tmp_path: Path) -> None:
    plan, arguments = mixtral()
    written = argument_file([*MIXTRAL, "--data-path", "my text"], plan, arguments, "megatron-lm")
    words = words_of_srun(
        slurm_script(dataclasses.replace(JOB, image="nemo:25.11"), "megatron-lm", written),
        tmp_path,
        CONTAINER_MOUNTS="/data:/data",
        SLURM_GPUS_PER_NODE="h100:4",
    )
    assert words[1:4] == [
        "--container-image=nemo:25.11",
        f"--container-workdir={tmp_path}",
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data",
    ]
    assert words[words.index("--nproc-per-node") + 1] == "4"
    program = words.index("Megatron-LM/pretrain_gpt.py")
    assert words[program + 1 : program + 3] == ["--save-interval", "500"]
    assert words[program + 3 : program + 3 + len(written.arguments)] == written.arguments
    assert "my text" in words


def test_the_environment_that_upstream_insists_on() -> None:
    plan, _ = mixtral()
    overlapped = {"--overlap-moe-expert-parallel-comm": ()}
    assert run_environment(plan, {}, "Hopper", "megatron-lm") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert run_environment(plan, overlapped, "Hopper", "megatron-lm") == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert run_environment(plan, {}, "Blackwell", "megatron-lm") == {}
    assert run_environment(plan, {}, "Hopper", "moe-overlap") == {}
    alone, _ = mixtral("--tensor-model-parallel-size", "1")
    assert run_environment(alone, {}, "Hopper", "megatron-lm") == {}
    context, _ = mixtral(*"--tensor-model-parallel-size 1 --context-parallel-size 2".split())
    assert run_environment(context, {}, "Hopper", "megatron-lm") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_a_job_fills_its_cluster() -> None:
    assert job_on(shipped_cluster("H100", 64), "mixtral 8x7b/é") == dataclasses.replace(JOB, name="mixtral-8x7b-é")
    cluster = load_cluster(ROOT / "examples/clusters/h100.json")
    unlike = dataclasses.replace(cluster.groups[0], gpus_per_node=4)
    with pytest.raises(ConfigError, match="H100 gpus_per_node 4 and 8: one Slurm job requests the same number of GPUs"):
        job_on(Cluster(name="H100", groups=(*cluster.groups, unlike)), "m")


def test_the_examples_end_like_a_written_script() -> None:
    """launch.sh is said once: the examples source it, a written script holds it."""
    for name in ("single_node", "multi_node"):
        text = (ROOT / f"examples/slurm/{name}.sbatch").read_text()
        source = shlex.split(text.splitlines()[-1])
        assert source[0] == "source" and (ROOT / source[1]).is_file()
