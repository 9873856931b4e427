"""The arguments for a job of the tools that predict and tune: its flags and its machines."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megatron.training.cli.arguments import ALIASES, COMMAND_FLAGS, expand_files, parse, script_gpus
from megatron.training.cli.flags.table import config_flags
from megatron.training.cli.rules.model import sizes_are_given
from megatron.training.cli.rules.parallel import MOST_PROCESSES
from megatron.training.cli.validation import validate
from moe_overlap.commands.help_topics import topic
from moe_overlap.commands.listings import ListGpus, ListModels
from moe_overlap.describe.cluster import Cluster, load_cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.expert_load import NATURAL, NATURAL_LOAD
from moe_overlap.describe.files import whole_number
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.describe.readers.predicted_flags import AFTER_THE_TABLE, grouped, read, without
from moe_overlap.describe.readers.shell_script import script_variables
from moe_overlap.describe.readers.upstream_flags import DROPPED, load_upstream_flags
from moe_overlap.plan.plan import Precision
from moe_overlap.tuner.cost.memory_errors import require_margin

USUAL = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--micro-batch-size",
    "1",
)
USUAL_SENTENCE = (
    "ZeRO-1 with overlapped reductions and gathers, micro-batches of 1, and for experts all-to-all dispatch and grouped "
    "products; --megatron-args sets others"
)
"""A sentence on the flags above and those that --model adds for experts."""
PRECISIONS = tuple(name for name in get_args(Precision) if name != "fp32")
"""Precisions that a flag of training asks for, and so --precision."""
PRECISIONS_OF_DTYPES = {"bfloat16": ("--bf16",), "float16": ("--fp16",), "float32": ()}
"""`torch_dtype` of a config.json -> flags of the precision."""
PRECISE = ("--bf16", "--fp16", "--fp8-", "--fp4-")
"""Prefixes of flags that set the precision."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
PRICES = "what seconds and bytes are computed from"
DISPATCHER, MOE = ("--moe-token-dispatcher-type", "alltoall"), ("--moe-grouped-gemm",)


def known_flags() -> frozenset[str]:
    """Every flag of the training that has an answer: this fork's, upstream's, older spellings and dropped ones."""
    fields = {name for flag in config_flags() for name in (*flag.names, flag.off) if name is not None}
    return frozenset({*fields, *load_upstream_flags(), *ALIASES, *DROPPED, *AFTER_THE_TABLE})


def on_standard_error(text: str) -> None:
    """Print a line immediately, separate from the answer."""
    print(text, file=sys.stderr, flush=True)


class EachOnce:
    """Prints a line about captures when the layout changes that is captured, not each time that one is awaited."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, text: str) -> None:
        layout = text.partition(" (")[0]
        if layout != self._shown:
            on_standard_error(text)
        self._shown = layout


class _Once(argparse.Action):
    """An argument that may be given only once, because a second one would silently replace the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        if earlier is not None:
            raise argparse.ArgumentError(self, f"was given before as {earlier}; write the other flags behind it")
        setattr(namespace, self.dest, values)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for `job_flags` and `cluster_of`."""
    job = topic(parser, "job", "what is trained")
    job.add_argument("--megatron-args", metavar="FILE", action=_Once, help="flags of the run, or its shell script")
    job.add_argument(
        "--model",
        metavar="NAME",
        help="a shipped model (--list-models), a model file or a Hugging Face config.json; its flags come first",
    )
    job.add_argument("--list-models", action=ListModels, help="print the shipped models and stop")
    job.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a variable of the shell script; any flag of the training may follow as well: the last one counts",
    )
    job.add_argument(
        "--ignore-unknown", action="store_true", help="go without flags of the file that nothing here knows, and say so"
    )
    job.add_argument("--global-batch-size", metavar="B", type=int, help="instead of the value in the flags")
    job.add_argument("--seq-length", metavar="S", type=int, help="instead of the value in the flags")
    machines = topic(parser, "machines", "what it runs on")
    machines.add_argument("--cluster", metavar="FILE", help="the machines (examples/clusters)")
    machines.add_argument("--gpu", help="type of GPU, in place of --cluster; --list-gpus prints the known ones")
    machines.add_argument("--num-gpus", metavar="N", help="number of GPUs; default: as in the script")
    machines.add_argument("--list-gpus", action=ListGpus, help="print the known types of GPU and stop")


def add_margin_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for `margin_of`."""
    topic(parser, "prices", PRICES).add_argument(
        "--memory-margin",
        metavar="QUANTILE",
        type=float,
        help="a plan fits where this quantile of its peak of memory is within the capacity (0.95)",
    )


def margin_of(arguments: argparse.Namespace) -> float | None:
    """The quantile of `--memory-margin`; ConfigError if it is no valid quantile."""
    margin: float | None = arguments.memory_margin
    require_margin(margin)
    return margin


def add_routing_arguments(prices: argparse._ArgumentGroup) -> None:
    """Add the options for `expert_load_of`."""
    prices.add_argument("--expert-load", metavar="FILE", help="recorded by --log-expert-load; default balanced routing")
    prices.add_argument(
        "--routing",
        metavar="HOW",
        help=f"balanced (default); {NATURAL}: the busiest expert rank is assumed to have {NATURAL_LOAD} times the mean; "
        "or FILE, as recorded",
    )


def expert_load_of(arguments: argparse.Namespace) -> str | None:
    """The value of `api.Options.expert_load`; ConfigError if the command line has two."""
    load: str | None = arguments.expert_load
    routing: str | None = arguments.routing
    if routing is not None and load is not None:
        raise ConfigError("--routing", routing, "stands beside --expert-load", "use one of them")
    if load == NATURAL:
        # A file with this name would be taken for the choice of --routing.
        raise ConfigError("--expert-load", load, "is the word of --routing", "write --routing natural, or ./natural")
    if routing in (None, "balanced"):
        return load
    rule = f"is neither balanced nor {NATURAL}, nor a file of --log-expert-load"
    require(routing == NATURAL or Path(routing).is_file(), "--routing", routing, rule, "correct it")
    return routing


def folder_of_answer(arguments: argparse.Namespace) -> Path | None:
    """The folder of --output; None if the answer is only printed."""
    return None if arguments.output is None else Path(arguments.output)


def token_count(text: str, flag: str = "--train-tokens") -> float:
    """A number of tokens: `1e12`, `300B` or `15T`.

    Raises:
        ConfigError: not a positive number.
    """
    unit = _UNITS.get(text[-1:].upper(), 1.0)
    try:
        tokens = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        tokens = 0.0
    if not 0 < tokens < float("inf"):
        raise ConfigError(flag, text, "is no number of tokens", "write for example 300B or 1e12")
    return tokens


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The machines of a command line; ConfigError if it has none, or two descriptions."""
    if arguments.cluster is not None:
        if arguments.gpu is not None or arguments.num_gpus is not None:
            raise ConfigError("--cluster", arguments.cluster, "stands beside --gpu or --num-gpus", "use one of them")
        return load_cluster(arguments.cluster)
    if arguments.num_gpus is None and arguments.gpu is not None and arguments.megatron_args is not None:
        counted = script_gpus([f"@{arguments.megatron_args}"], script_variables(arguments.set))
        arguments.num_gpus = None if counted is None else str(counted)
    if arguments.gpu is None:
        raise ConfigError("--gpu", "", "the machines are unknown", "add --gpu and --num-gpus, or --cluster")
    if arguments.num_gpus is None:
        shipped_cluster(arguments.gpu, 1)  # An unknown GPU is reported first.
        raise ConfigError("--num-gpus", "", "is missing, and the flags are no script that says it", "add --num-gpus N")
    if "," in arguments.num_gpus:
        rule = "only a search of plans (tools/autotune.py) compares numbers of GPUs"
        raise ConfigError("--num-gpus", arguments.num_gpus, rule, "give one number")
    return shipped_cluster(arguments.gpu, _count(arguments.num_gpus, arguments.num_gpus))


def clusters_of(arguments: argparse.Namespace) -> list[Cluster]:
    """The machines for every number in `--num-gpus`, the smallest first.

    Raises:
        ConfigError: as `cluster_of`; or a number occurs twice.
    """
    text = arguments.num_gpus
    if arguments.cluster is not None or arguments.gpu is None or "," not in (text or ""):
        return [cluster_of(arguments)]
    counts = sorted(_count(part, text) for part in text.split(","))
    for first, second in itertools.pairwise(counts):
        if first == second:
            raise ConfigError("--num-gpus", text, f"{first} is given twice", "give every number once")
    return [shipped_cluster(arguments.gpu, count) for count in counts]


def _count(part: str, text: str) -> int:
    """One of the numbers in the text of `--num-gpus`."""
    count = whole_number(part)
    if not count:
        rule = "must be a whole number from 1" if part == text else f"{part or 'nothing'} is no number of GPUs"
        raise ConfigError("--num-gpus", text, rule, "give for example 64, or 32,64,128 to tools/autotune.py")
    require(count <= MOST_PROCESSES, "--num-gpus", text, f"{count} are more than {MOST_PROCESSES:,}", "give fewer")
    return count


def job_flags(arguments: argparse.Namespace, is_predicted: bool = False, chooses_dispatcher: bool = False) -> list[str]:
    """The flags of a job: from the model file, the argument file, and the tool's own options; later ones override earlier ones.

    Args:
        is_predicted: whether the job is only predicted: unsupported features of the model may become notes (`notes_of`).
        chooses_dispatcher: whether to leave the dispatcher open if no file sets it.
    Raises:
        ConfigError: no model is described, or the model file is not one.
    """
    run_flags = _run_flags(arguments)
    has_file = arguments.model is not None or arguments.megatron_args is not None
    if not has_file and "--num-layers" not in grouped(list(expand_files(run_flags))):
        raise ConfigError("--megatron-args", "", "nothing says what is trained", "add --megatron-args or --model")
    flags = []
    if arguments.model is not None:
        of_experts = MOE if chooses_dispatcher else (*DISPATCHER, *MOE)
        usual = (USUAL, of_experts) if arguments.megatron_args is None else ((), ())
        flags = _model_flags(arguments.model, run_flags, usual, arguments.precision, is_predicted)
    flags += run_flags
    for option in ("global_batch_size", "seq_length"):
        value = getattr(arguments, option, None)
        flags += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    return flags


def check_flags(flags: Sequence[str], num_gpus: int | None, has_precision: bool = False) -> None:
    """Check the flags of a job before the cost model is loaded, which takes seconds; the job is read again with all rules.

    Args:
        num_gpus: None for a search, which decides the layout: no rule that depends on one is checked.
        has_precision: whether --precision replaces the precision of the flags.
    Raises:
        ConfigError: a mistake in the flags.
    """
    parsed = parse(read(list(expand_files(flags))).arguments)
    if num_gpus is None:
        sizes_are_given(parsed.config)
    elif parsed.config.overlap.plan is None and not has_precision:
        validate(parsed.config, num_gpus)


def _run_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of the run: those of the argument file, then those on the command line, which override them.

    A --model of the command line replaces the file's; --ignore-unknown leaves out flags that nothing here knows.

    Raises:
        ConfigError: the file cannot be read, or --ignore-unknown has none.
    """
    is_used = arguments.megatron_args is not None or not arguments.ignore_unknown
    require(is_used, "--ignore-unknown", "", "is about the file of --megatron-args, and there is none", "drop it")
    expanded = _file_flags(arguments)
    dropped = {"--model"} & grouped(expanded).keys() if arguments.model is not None else set()
    dropped |= _unknown_flags(expanded) if arguments.ignore_unknown else set()
    # A file that is taken as it is keeps its name, which is that of the model.
    is_as_it_is = arguments.megatron_args is not None and not dropped and not arguments.set
    flags = [f"@{arguments.megatron_args}"] if is_as_it_is else without(expanded, dropped)
    return [*flags, *arguments.training_flags]


def _file_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of the file of --megatron-args; none without it."""
    flags = [] if arguments.megatron_args is None else [f"@{arguments.megatron_args}"]
    return list(expand_files(flags, variables=script_variables(arguments.set)))


def _unknown_flags(expanded: Sequence[str]) -> set[str]:
    """The flags that nothing here knows, which --ignore-unknown leaves out."""
    return grouped(expanded).keys() - known_flags() - COMMAND_FLAGS.keys()


def _ignored(arguments: argparse.Namespace) -> tuple[str, ...]:
    """A sentence on the unknown flags that a prediction or a search goes without."""
    unknown = _unknown_flags(_file_flags(arguments)) if arguments.ignore_unknown else ()
    return (f"without {', '.join(sorted(unknown))}, which nothing here knows",) if unknown else ()


def name_of(arguments: argparse.Namespace) -> str | None:
    """The name in the model file, or that of the argument file; None without either."""
    if arguments.model is None:
        return None if arguments.megatron_args is None else Path(arguments.megatron_args).stem
    return read_model(arguments.model, is_predicted=True).name


def notes_of(arguments: argparse.Namespace, is_predicted: bool = False) -> tuple[str, ...]:
    """Lines on properties of the model file that the flags of `job_flags` do not express."""
    return () if arguments.model is None else read_model(arguments.model, is_predicted=is_predicted).notes


def assumed_of(arguments: argparse.Namespace, is_predicted: bool = False) -> tuple[str, ...]:
    """Sentences on assumptions: natural routing; training flags and length of samples, which a model file lacks.

    Args:
        is_predicted: whether a single run is predicted; a search decides the training flags.
    """
    return (*_ignored(arguments), *_assumed_routing(arguments), *_assumed_training(arguments, is_predicted))


def _assumed_routing(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.routing != NATURAL:
        return ()
    return (
        f"busiest expert ranks with {NATURAL_LOAD} times the mean of rows; --log-expert-load of a run records what they are",
    )


def _assumed_training(arguments: argparse.Namespace, is_predicted: bool) -> tuple[str, ...]:
    if arguments.model is None or getattr(arguments, "plan", None) is not None:
        return ()
    assumed = (USUAL_SENTENCE,) if is_predicted and arguments.megatron_args is None else ()
    if arguments.seq_length is not None:
        return assumed
    described = read_model(arguments.model, is_predicted=is_predicted)
    run_flags = expand_files(_run_flags(arguments))
    if not described.is_config or any(word.partition("=")[0] == "--seq-length" for word in run_flags):
        return assumed
    tokens = described.flags["seq-length"]
    return (*assumed, f"samples of {tokens} tokens, as a config.json says none; --seq-length says another")


def _model_flags(
    path: str,
    run_flags: Sequence[str],
    usual_flags: tuple[Sequence[str], Sequence[str]],
    precision: str | None,
    is_predicted: bool,
) -> list[str]:
    """The flags of a model file.

    Args:
        run_flags: other flags of the run.
        usual_flags: flags to add because a config.json has no training flags: for every model, and for one with experts.
        precision: value of the tool's --precision.
    Raises:
        ConfigError: the file is no model file, or its `torch_dtype` is no precision of a run and no flag sets one.
    """
    described = read_model(path, is_predicted=is_predicted)
    usual = [*usual_flags[0], *(usual_flags[1] if "num-experts" in described.flags else ())]
    is_said = precision is not None or any(
        word.startswith(PRECISE) for word in (*described.arguments, *expand_files(run_flags))
    )
    if is_said or (not usual_flags[0] and described.dtype is None):
        return [*usual, *described.arguments]
    dtype = described.dtype or "bfloat16"
    if dtype not in PRECISIONS_OF_DTYPES:
        rule = f"is no precision of a run ({', '.join(PRECISIONS_OF_DTYPES)})"
        raise ConfigError(f"{path} torch_dtype", dtype, rule, "add --precision")
    return [*PRECISIONS_OF_DTYPES[dtype], *usual, *described.arguments]
