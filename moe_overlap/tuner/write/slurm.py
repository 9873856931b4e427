"""`launch.sbatch`: the Slurm script of a run in one file; settings that depend on the cluster are at its top.

It starts `pretrain_moe.py` with the argument file in the script's folder, or Megatron-LM's `pretrain_gpt.py` with the flags
written into the script, by torchrun on every node, with or without a container. It has no absolute path: the argument file is in
the script's folder; the program and the user's relative paths start from the folder of submission. launch.sh, which the scripts
of examples/slurm source, restarts an interrupted job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.shell_script import VARIABLE
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.write.argument_file import Target, WrittenFlags, flag_lines

SCRIPT, ARGUMENTS = "launch.sbatch", "megatron_args.txt"
"""Names of the two files; both are in one folder."""
WRITTEN_BY = "# Written by tools/autotune.py."
"""The line that marks a script as written by this tool."""
MAX_CONNECTIONS, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"
DATA = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path", "--mock-data")
"""Flags that name the training data."""
AFTER_HOPPER = ("Blackwell",)
"""Architectures whose kernels start in stream order without CUDA_DEVICE_MAX_CONNECTIONS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The resources that a job requests.

    Attributes:
        gpu_option: the option by which the cluster counts GPUs; the script has the other form as a comment.
        image: container image for pyxis; None runs without one, or in the container that CONTAINER names.
    """

    name: str
    nodes: int
    gpus_per_node: int
    cpus_per_gpu: int = 8
    time_limit: str = "24:00:00"
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    image: str | None = None


def job_on(cluster: Cluster, name: str) -> SlurmJob:
    """The job that fills a cluster.

    Raises:
        ConfigError: its nodes differ in their number of GPUs, which one Slurm job cannot request.
    """
    sizes = sorted({group.gpus_per_node for group in cluster.groups})
    if len(sizes) > 1:
        shown = " and ".join(map(str, sizes))
        rule = "one Slurm job requests the same number of GPUs on every node"
        raise ConfigError(f"{cluster.name} gpus_per_node", shown, rule, "write the script by hand (examples/slurm)")
    word = re.sub(r"[^\w.-]+", "-", name).strip("-") or "moe"
    return SlurmJob(name=word, nodes=sum(group.nodes for group in cluster.groups), gpus_per_node=sizes[0])


def run_environment(
    plan: Plan, flags: Mapping[str, tuple[str, ...]], architecture: str, target: Target
) -> dict[str, str]:
    """Environment variables that Megatron-LM requires, so that collectives of tensor and context ranks start in program order.

    Source: `validate_args` of Megatron-LM; Blackwell and later need none.
    """
    stage = plan.stages[0]
    if target != "megatron-lm" or architecture in AFTER_HOPPER or stage.tensor * stage.context == 1:
        return {}
    # The overlap of all-to-alls and FSDP need several streams to run at once; with them the parser accepts any value.
    several = {"--overlap-moe-expert-parallel-comm", "--use-megatron-fsdp"} & flags.keys()
    return {MAX_CONNECTIONS: "32" if several else "1"}


def arguments_to_add(flags: Mapping[str, tuple[str, ...]], target: Target) -> str:
    """The arguments that a user must append to `sbatch`, in capitals for the values; empty if the flags are complete.

    Megatron-LM has no default tokenizer; this runtime's is bytes. A value that is a shell variable counts as missing: the user
    repeats the flag, and the later value counts.
    """
    unsaid = {name for name, values in flags.items() if any(map(VARIABLE.search, values))}
    flags = {name: values for name, values in flags.items() if name not in unsaid}
    options = {
        "--lr LR": ("--lr",),
        "--train-iters N": ("--train-iters", "--train-samples"),
        "--data-path PREFIX": DATA,
    }
    if target == "megatron-lm":
        options["--tokenizer-type TYPE --tokenizer-model PATH"] = ("--tokenizer-type",)
    added = [option for option, names in options.items() if not any(name in flags for name in names)]
    listed = " ".join(added).split()
    # The script's settings RUN and LOAD stand for --save and --load.
    added += [f"{name} VALUE" for name in sorted(unsaid.difference(listed, ("--save", "--load")))]
    return " ".join(added)


def slurm_script(
    job: SlurmJob, target: Target, written: WrittenFlags, environment: Mapping[str, str] | None = None
) -> str:
    """The text of launch.sbatch.

    Args:
        written: the flags; `moe-overlap` reads them from the argument file in the script's folder.
        environment: environment variables of every rank.
    """
    lines = [*_options(job, arguments_to_add(written.flags, target)), "", *_settings(job, target, written), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    # This project's program sets it itself. Upstream refuses it beside graphs without a further variable.
    if target == "megatron-lm" and not any("cuda-graph" in name for name in written.flags):
        lines.append(
            f'export {ALLOCATOR}="${{{ALLOCATOR}-expandable_segments:True}}" # less memory lost between tensors'
        )
    lines += ["# export NCCL_SOCKET_IFNAME=eth0   # the network of the rendezvous, if nodes have several", ""]
    lines += _inline_flags(written) if target == "megatron-lm" else _argument_file_lines()
    if "--save-interval" not in written.flags:
        lines += ['set -- --save-interval "${SAVE_INTERVAL:-500}" "$@" # steps from one checkpoint to the next', ""]
    body = resources.files(__package__).joinpath("launch.sh").read_text(encoding="utf-8")
    return "\n".join(lines) + "\n" + body


def _options(job: SlurmJob, added: str) -> list[str]:
    count = job.gpus_per_node
    gpu_lines = [f"#SBATCH --gpus-per-node={count}", f"#SBATCH --gres=gpu:{count}"]
    if job.gpu_option == "gres":
        gpu_lines.reverse()
    return [
        "#!/usr/bin/env bash",
        f"{WRITTEN_BY} Submit it from the folder of the program, where relative paths of the flags start:",
        f"#   sbatch FOLDER/{SCRIPT} {f'{added} ' if added else ''}[further flags]",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        gpu_lines[0],
        f"#{gpu_lines[1]}   (instead of the line above, if the cluster requires it)",
        f"#SBATCH --cpus-per-task={job.cpus_per_gpu * count}",
        "#SBATCH --mem=0",
        "#SBATCH --exclusive",
        f"#SBATCH --time={job.time_limit}",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
    ]


def _settings(job: SlurmJob, target: Target, written: WrittenFlags) -> list[str]:
    program = "Megatron-LM/pretrain_gpt.py" if target == "megatron-lm" else "pretrain_moe.py"
    image = shlex.quote(job.image) if job.image else ""
    paths = (written.flags.get(name, ()) for name in ("--save", "--load"))
    saved, begins = ("" if any(map(VARIABLE.search, values)) else shlex.join(values) for values in paths)
    settings = {
        "RUN": (
            saved or "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID",
            "checkpoints: saved here, and loaded by a restart",
        ),
        "LOAD": (begins, "checkpoint to begin with while RUN has none; empty: begin at step 0"),
        **({"FIRST": (" ".join(written.first), "flags used only when LOAD is loaded")} if written.first else {}),
        "PROGRAM": (program, "relative to the folder of submission"),
        "PYTHON": ("python3", "the interpreter that has the packages, such as .venv/bin/python"),
        "GPUS": (str(job.gpus_per_node), "ranks per node, if --gres requests the GPUs"),
        "CONTAINER_IMAGE": (image, "image for pyxis; empty: no image"),
        "CONTAINER": ("", "such as: apptainer exec --nv --bind $PWD moe.sif"),
        "RESTARTS": ("2", "how often torchrun restarts the ranks after a failure"),
    }
    width = max(len(f"{name}=${{{name}:-{value}}}") for name, (value, _) in settings.items())
    return [f"{f'{name}=${{{name}:-{value}}}':<{width}} # {why}" for name, (value, why) in settings.items()]


def _argument_file_lines() -> list[str]:
    """Lines that pass the argument file from the script's folder."""
    name = re.escape(SCRIPT)
    return [
        "# sbatch runs a copy of this script; the argument file is in the folder of the original.",
        f"original=$(scontrol show job \"$SLURM_JOB_ID\" | sed -n 's/^ *Command=\\(.*{name}\\).*/\\1/p')",
        f'set -- "@$(dirname "$original")/{ARGUMENTS}" "$@"',
        "",
    ]


def _inline_flags(written: WrittenFlags) -> list[str]:
    """Lines with the flags as an array; --save and --load are left out, because RUN and LOAD set them."""
    flags = {name: values for name, values in written.flags.items() if name not in ("--save", "--load")}
    lines = [f"    {line}".rstrip() for line in flag_lines(flags, {})]
    return ["flags=(", *lines[1:], ")", 'set -- "${flags[@]}" "$@"', ""]
