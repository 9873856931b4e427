"""The arguments that describe a job to the tools that predict and tune: its flags and its machines."""

from __future__ import annotations

import argparse

from moe_overlap.describe.cluster import Cluster, load_cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `words_of` and `cluster_of` read."""
    parser.add_argument("--megatron-args", metavar="FILE", required=True, help="flags of the run, or its shell script")
    parser.add_argument("--model", metavar="FILE", help="model file (examples/models); its flags come first")
    parser.add_argument("--cluster", metavar="FILE", help="the machines (examples/clusters)")
    parser.add_argument("--gpu", help="type of GPU, in place of --cluster")
    parser.add_argument("--num-gpus", type=int, help="how many of them")


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The machines that a command line names; ConfigError where it names none, or two."""
    if arguments.cluster is not None:
        if arguments.gpu is not None or arguments.num_gpus is not None:
            raise ConfigError("--cluster", arguments.cluster, "stands beside --gpu or --num-gpus", "use one of them")
        return load_cluster(arguments.cluster)
    if arguments.gpu is None or arguments.num_gpus is None:
        raise ConfigError(
            "--gpu", arguments.gpu or "", "the machines are unknown", "add --gpu and --num-gpus, or --cluster"
        )
    return shipped_cluster(arguments.gpu, arguments.num_gpus)


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Flags of the model file, then those of the argument file: later ones win."""
    return [*(_model_words(arguments.model) if arguments.model else []), f"@{arguments.megatron_args}"]


def _model_words(path: str) -> list[str]:
    try:
        flags = bounded_json(path)["flags"]
    except (Unreadable, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--model", path, f"is no model file ({error})", "see examples/models") from None
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *(map(str, value if isinstance(value, list) else [] if value is True else [value]))]
    return words
