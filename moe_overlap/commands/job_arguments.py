"""The arguments that describe a job to the tools that predict and tune: its flags and its machines."""

from __future__ import annotations

import argparse

from megatron.training.cli.arguments import script_gpus
from moe_overlap.describe.cluster import Cluster, load_cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.model_file import read_model

USUAL = (
    "--bf16",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--micro-batch-size",
    "1",
)
MOE = ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `words_of` and `cluster_of` read."""
    parser.add_argument("--megatron-args", metavar="FILE", help="flags of the run, or its shell script")
    parser.add_argument("--model", metavar="FILE", help="model file (examples/models); its flags come first")
    parser.add_argument("--cluster", metavar="FILE", help="the machines (examples/clusters)")
    parser.add_argument("--gpu", help="type of GPU, in place of --cluster")
    parser.add_argument("--num-gpus", type=int, help="how many of them; default those of the script")


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The machines that a command line names; ConfigError where it names none, or two."""
    if arguments.cluster is not None:
        if arguments.gpu is not None or arguments.num_gpus is not None:
            raise ConfigError("--cluster", arguments.cluster, "stands beside --gpu or --num-gpus", "use one of them")
        return load_cluster(arguments.cluster)
    if arguments.num_gpus is None and arguments.gpu is not None and arguments.megatron_args is not None:
        arguments.num_gpus = script_gpus([f"@{arguments.megatron_args}"])
    if arguments.gpu is None or arguments.num_gpus is None:
        raise ConfigError(
            "--gpu", arguments.gpu or "", "the machines are unknown", "add --gpu and --num-gpus, or --cluster"
        )
    return shipped_cluster(arguments.gpu, arguments.num_gpus)


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Flags of the model file, then those of the argument file, then those of the tool's own options: later ones win.

    Raises:
        ConfigError: neither file is given, or the model file is none.
    """
    if arguments.model is None and arguments.megatron_args is None:
        raise ConfigError("--megatron-args", "", "nothing says what is trained", "add --megatron-args or --model")
    words = [] if arguments.model is None else _model_words(arguments.model, arguments.megatron_args is None)
    words += [f"@{arguments.megatron_args}"] if arguments.megatron_args is not None else []
    for option in ("global_batch_size", "seq_length"):
        value = getattr(arguments, option, None)
        words += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    return words


def _model_words(path: str, alone: bool) -> list[str]:
    """The flags of a model file.

    Args:
        alone: no flags of a run stand beside it: it gets what nearly every run sets, as a config.json says nothing of training.
    """
    described = read_model(path)
    usual = [*USUAL, *(MOE if "num-experts" in described.flags else ())] if alone else []
    return [*usual, *described.arguments]
