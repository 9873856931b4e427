"""`launch.sbatch`: the Slurm script of a run, whole in one file, with the settings that a cluster may want changed at its top.

It starts `pretrain_moe.py` with the flags of the file beside it, or Megatron-LM's `pretrain_gpt.py` with its flags written out;
torchrun on every node, bare or in a container. No path in it is absolute: the flags lie beside the script, the program and the
user's own relative paths are found from the folder where the job is submitted. What makes an interrupted job go on by itself is
launch.sh, which examples/slurm sources.
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
"""Names of the files, which lie in one folder."""
WRITTEN_BY = "# Written by tools/autotune.py."
"""The words by which a script is known as one of an answer."""
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DATA = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path", "--mock-data")
"""Flags that say what is read."""
AFTER_HOPPER = ("Blackwell",)
"""Architectures whose kernels start in the order of their streams without that setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The resources that a job asks its cluster for.

    Attributes:
        gpu_option: how the cluster counts GPUs; the other form stands beside it as a comment.
        image: container of pyxis; None runs bare, or in what CONTAINER names.
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
        ConfigError: its nodes differ in their number of GPUs, which one Slurm job cannot ask for.
    """
    sizes = sorted({group.gpus_per_node for group in cluster.groups})
    if len(sizes) > 1:
        shown = " and ".join(map(str, sizes))
        rule = "one Slurm job asks for as many GPUs on every node"
        raise ConfigError(f"{cluster.name} gpus_per_node", shown, rule, "write the script by hand (examples/slurm)")
    word = re.sub(r"[^\w.-]+", "-", name).strip("-") or "moe"
    return SlurmJob(name=word, nodes=sum(group.nodes for group in cluster.groups), gpus_per_node=sizes[0])


def run_environment(
    plan: Plan, flags: Mapping[str, tuple[str, ...]], architecture: str, target: Target
) -> dict[str, str]:
    """Environment that Megatron-LM insists on: collectives of tensor and context ranks keep their place among kernels.

    Source: `validate_args` of Megatron-LM; Blackwell and later do without.
    """
    stage = plan.stages[0]
    if target != "megatron-lm" or architecture in AFTER_HOPPER or stage.tensor * stage.context == 1:
        return {}
    # Its overlap of all-to-alls and FSDP need kernels of several streams at once; the parser then takes either.
    several = {"--overlap-moe-expert-parallel-comm", "--use-megatron-fsdp"} & flags.keys()
    return {MAX_CONNECTIONS: "32" if several else "1"}


def words_to_add(flags: Mapping[str, tuple[str, ...]], target: Target) -> str:
    """The arguments that a job of these flags still needs, as appended to `sbatch`; capitals stand for the user's values.

    Megatron-LM has no default tokenizer; this runtime has bytes. A value that a shell script takes from outside is none: its flag
    is said again behind it, and the later one counts.
    """
    unsaid = {name for name, values in flags.items() if any(map(VARIABLE.search, values))}
    flags = {name: values for name, values in flags.items() if name not in unsaid}
    wanted = {
        "--lr LR": ("--lr",),
        "--train-iters N": ("--train-iters", "--train-samples"),
        "--data-path PREFIX": DATA,
    }
    if target == "megatron-lm":
        wanted["--tokenizer-type TYPE --tokenizer-model FILE"] = ("--tokenizer-type",)
    added = [words for words, names in wanted.items() if not any(name in flags for name in names)]
    known = " ".join(added).split()
    # Where a run saves and loads, the script says.
    added += [f"{name} VALUE" for name in sorted(unsaid.difference(known, ("--save", "--load")))]
    return " ".join(added)


def slurm_script(
    job: SlurmJob, target: Target, written: WrittenFlags, environment: Mapping[str, str] | None = None
) -> str:
    """The text of launch.sbatch.

    Args:
        written: the flags; `moe-overlap` reads them from the file beside the script.
        environment: variables of every rank.
    """
    lines = [*_options(job, words_to_add(written.flags, target)), "", *_settings(job, target, written), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    lines += ["# export NCCL_SOCKET_IFNAME=eth0   # the network of the first contact, where nodes have several", ""]
    lines += _inline(written) if target == "megatron-lm" else _beside()
    if "--save-interval" not in written.flags:
        lines += ['set -- --save-interval "${SAVE_INTERVAL:-500}" "$@" # steps from one checkpoint to the next', ""]
    body = resources.files(__package__).joinpath("launch.sh").read_text(encoding="utf-8")
    return "\n".join(lines) + "\n" + body


def _options(job: SlurmJob, added: str) -> list[str]:
    count = job.gpus_per_node
    asked = [f"#SBATCH --gpus-per-node={count}", f"#SBATCH --gres=gpu:{count}"]
    if job.gpu_option == "gres":
        asked.reverse()
    return [
        "#!/usr/bin/env bash",
        f"{WRITTEN_BY} Submit it from the folder where the program lies and the flags' relative paths hold:",
        f"#   sbatch FOLDER/{SCRIPT} {f'{added} ' if added else ''}[further flags]",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        asked[0],
        f"#{asked[1]}   (in place of the line above, where the cluster wants it so)",
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
    said = (written.flags.get(name, ()) for name in ("--save", "--load"))
    saved, begins = ("" if any(map(VARIABLE.search, values)) else shlex.join(values) for values in said)
    settings = {
        "RUN": (
            saved or "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID",
            "checkpoints: saved here, loaded when the job starts again",
        ),
        "LOAD": (begins, "where a run begins that has saved nothing; empty: at step 0"),
        **({"FIRST": (" ".join(written.first), "flags of the start alone that loads it")} if written.first else {}),
        "PROGRAM": (program, "from the folder of submission"),
        "PYTHON": ("python3", "the interpreter that has the packages, such as .venv/bin/python"),
        "GPUS": (str(job.gpus_per_node), "ranks of a node, where --gres asks for its GPUs"),
        "CONTAINER_IMAGE": (image, "with pyxis; empty runs without"),
        "CONTAINER": ("", "such as: apptainer exec --nv --bind $PWD moe.sif"),
        "RESTARTS": ("2", "how often torchrun starts the ranks again after one has failed"),
    }
    width = max(len(f"{name}=${{{name}:-{value}}}") for name, (value, _) in settings.items())
    return [f"{f'{name}=${{{name}:-{value}}}':<{width}} # {why}" for name, (value, why) in settings.items()]


def _beside() -> list[str]:
    """The flags of the file in the script's own folder."""
    name = re.escape(SCRIPT)
    return [
        "# sbatch runs a copy of this script; the flags lie beside the original.",
        f"original=$(scontrol show job \"$SLURM_JOB_ID\" | sed -n 's/^ *Command=\\(.*{name}\\).*/\\1/p')",
        f'set -- "@$(dirname "$original")/{ARGUMENTS}" "$@"',
        "",
    ]


def _inline(written: WrittenFlags) -> list[str]:
    """The flags as an array of the script, which says itself where the run saves and what it loads."""
    kept = {name: values for name, values in written.flags.items() if name not in ("--save", "--load")}
    flags = [f"    {line}".rstrip() for line in flag_lines(kept, {})]
    return ["flags=(", *flags[1:], ")", 'set -- "${flags[@]}" "$@"', ""]
