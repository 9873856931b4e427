"""`--dry-run`: check a command line and print the run it describes, without weights, process group or torch."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megatron.training.cli.arguments import ParsedArguments
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import config_flags, flag_texts
from megatron.training.cli.flags.without_effect import idle_flags, reads_vocab_file
from megatron.training.cli.fused_gradients import kernels_line
from megatron.training.cli.packages import is_installed, packages_of
from megatron.training.cli.sizes import (
    ParallelLayout,
    batch_sizes,
    describe_model,
    known_vocab_size,
    parallel_layout,
    smallest_world,
)
from megatron.training.cli.start import StartMachine, few_queues, obstacles, this_machine
from megatron.training.cli.validation import validate
from megatron.training.data.sources import ARGS, PER_SPLIT_ARGS, data_source, tokenizer_files
from megatron.training.data.tokenizers import MODEL_TYPES, require_readable
from megatron.training.plan_flags import gate_of_run, plan_of_run
from megatron.training.report.outputs import refused_places
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription, ParameterCount, Share, model_parameters, rank_parameters
from moe_overlap.plan.lowering.pipeline_order import most_in_flight, pipeline_blocks
from moe_overlap.plan.overlap import NO_OVERLAP
from moe_overlap.plan.plan import Plan, states_of_stages

HIGHEST_RATE = 1.0
"""Learning rate beyond which a dry run asks: rates of Adam end near 1e-2, those of SGD near 1."""
_WIDTH = 120
_COLUMN = 14


def dry_run(parsed: ParsedArguments, world_size: int | None, out: TextIO) -> None:
    """Check a command line and print the run: the model, the ranks, and what this machine lacks for it.

    Args:
        parsed: result of `parse`.
        world_size: number of processes; None takes the smallest that the parallel sizes allow.
    Raises:
        ConfigError: the error the run would give.
    """
    config = parsed.config
    validate(config, None)
    world = world_size or smallest_world(config)
    held = parsed.layout_world or world
    try:
        validate(config, held)
    except ConfigError as error:
        if error.subject != "world size" or world_size is None:
            raise
        raise ConfigError("--world-size", error.value, error.rule, error.fix.replace("start", "use")) from None
    require_readable(config.data.tokenizer_type, tokenizer_files(config.data))
    vocabulary = known_vocab_size(config)
    model = describe_model(config, vocabulary or 0, parsed.name)
    layout, machine = parallel_layout(config, held), this_machine()
    plan = plan_of_run(config, model, world)
    lines = [
        _line("model", model_line(model)),
        *(_line("not the same", note) for note in parsed.model_notes),
        *(
            []
            if vocabulary
            else [_line("vocabulary", "unknown without the tokenizer: word embeddings are not counted")]
        ),
        _line("layout", planned_layout_line(plan, config)),
        *([_line("in flight", in_flight_line(plan))] if plan.has_pairs else []),
        *([_line("gate", gate_line(gate))] if (gate := gate_of_run(config, plan)) != config.overlap.moe_gate else []),
        _line("kernels", kernels_line(config, plan, machine)),
        *(_line(subject, text) for subject, text in parsed.remarks),
        *(_line("beware", text) for text in (few_queues(plan, os.environ), *high_rates(config)) if text),
        "",
        "flags that differ from the defaults",
        *_changed_flags(config),
        *_without_effect(parsed),
        "",
        "parameters per rank",
        *_parameter_table(model, plan),
        *_lacking(config, layout, machine),
        *_obstacles(parsed, machine),
    ]
    print("\n".join(lines), file=out)


def high_rates(config: Config) -> Iterator[str]:
    """Lines on learning rates that no transformer is trained with: often exponents without their minus."""
    for flag, rate in (("--lr", config.optimizer.lr), ("--decoupled-lr", config.optimizer.decoupled_lr)):
        if rate is not None and rate > HIGHEST_RATE:
            known = "is far above the rates of published trainings, such as 3e-4"
            yield f"{flag} {rate:g} {known}: is the minus of its exponent missing?"


def model_line(model: ModelDescription) -> str:
    """`tiny: 4 layers, hidden 256, 8 experts top-2, 14.2 M parameters (5.1 M active, 0.1 M embedding)`."""
    count = model_parameters(model)
    experts = f"{model.num_experts} experts top-{model.router_topk}, " if model.num_experts else ""
    parts = f"{quantity(count.active)} active, {quantity(count.embedding)} embedding"
    ahead = f" and {model.mtp_layers} for prediction" if model.mtp_layers else ""
    sizes = f"{model.num_layers} layers{ahead}, hidden {model.hidden_size}, {experts}"
    return f"{model.name}: {sizes}{quantity(count.total)} parameters ({parts})"


def layout_line(layout: ParallelLayout, config: Config, zero: str = "ZeRO-1") -> str:
    """`2 processes: EP 2, DP 2 with ZeRO-1, micro-batch 4, global batch 16 in 2 micro-batches, 300 steps`."""
    sizes = [
        f"{name} {size}"
        for name, size in (
            ("TP", layout.tensor),
            ("CP", layout.context),
            ("PP", layout.pipeline),
            ("virtual stages", layout.virtual),
            ("EP", layout.expert),
            ("ETP", layout.expert_tensor),
        )
        if size > 1 or (name == "ETP" and config.moe.num_experts is not None and layout.tensor > 1)
    ]
    processes = f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}"
    smallest = batch_sizes(config, layout.data).sizes[0]
    grown = f"{smallest} to " if smallest != layout.global_batch_size else ""
    batches = f"global batch {grown}{layout.global_batch_size} in {layout.micro_batches} micro-batches"
    training = config.training
    lengths = [f"{training.train_samples} samples"] if training.train_samples else []
    lengths += [f"{training.train_iters} steps"] if training.train_iters else []
    names = ", ".join([*sizes, f"DP {layout.data} with {zero}"])
    return ", ".join([f"{processes}: {names}", f"micro-batch {layout.micro_batch_size}", batches, *lengths])


def planned_layout_line(plan: Plan, config: Config) -> str:
    """The same for a plan; for stages of different shape `3 processes in 2 unlike stages: DP 2, micro-batch 1 × 8 | TP 1, …`."""
    zero = " and ".join(states_of_stages(plan))
    if not plan.transfers:
        return layout_line(parallel_layout(config, plan.world_size), config, zero)
    stages = []
    for stage in plan.stages:
        sizes = {"TP": stage.tensor, "CP": stage.context, "EP": stage.expert}
        sizes |= {"ETP": stage.expert_tensor} if stage.expert_tensor != stage.tensor else {}
        named = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "ETP")
        batch = f"micro-batch {stage.micro_batch_size} × {stage.gradient_accumulation_steps}"
        stages.append(f"{named} DP {stage.data}, {batch}".strip())
    processes = f"{plan.world_size} processes in {len(stages)} stages of unlike shape, with {zero}"
    return f"{processes}: {' | '.join(stages)}; global batch {plan.global_batch_size}"


def in_flight_line(plan: Plan) -> str:
    """Memory of micro-batch pairs: `activations of at most 3, 1 micro-batches (stages 0, 1), plus …; 2, 1 without …`.

    In an interleaved pipeline the pass of a chunk counts as a part of a micro-batch.
    """

    def in_flight(of: Plan, stage: int) -> str:
        layers = [end - first for first, end in of.stages[stage].chunks]
        return f"{most_in_flight(pipeline_blocks(of, stage), layers):.3g}"

    without = dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, overlap=NO_OVERLAP) for s in plan.stages))
    stages = range(len(plan.stages))
    paired, before = (", ".join(in_flight(either, stage) for stage in stages) for either in (plan, without))
    of_stages = f" (stages {', '.join(map(str, stages))})" if len(stages) > 1 else ""
    held = f"{paired} micro-batches{of_stages}, plus those of the layers being computed"
    return f"activations of at most {held}; {before} without --moe-overlap-micro-batches"


def gate_line(gate: str | None) -> str:
    """`topk, without --moe-gate: …`: the default gate of partitions."""
    return f"{gate}, without --moe-gate: where no token is dropped it decides as megatron-core's router does"


def quantity(number: int) -> str:
    """`14.2 M`: a number of parameters with three digits."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return str(number)


def missing_files(config: Config) -> list[tuple[str, str]]:
    """Flags whose file or folder does not exist, with its path: training raises an error, a dry run lists them."""
    data, missing = config.data, []
    arguments = ((ARGS, data.data_args_path), (PER_SPLIT_ARGS, data.per_split_data_args_path))
    if all(path is None or Path(path).is_file() for _, path in arguments):
        for prefix in data_source(data).prefixes:
            missing += [("--data-path", prefix + end) for end in (".idx", ".bin") if not Path(prefix + end).is_file()]
    for flag, path in (
        *arguments,
        ("--tokenizer-model", data.tokenizer_model if data.tokenizer_type in MODEL_TYPES else None),
        ("--vocab-file", data.vocab_file if reads_vocab_file(data) else None),
        ("--merge-file", data.merge_file if data.tokenizer_type == "GPT2BPETokenizer" else None),
        ("--load", config.checkpoint.load),
        ("--pretrained-checkpoint", config.checkpoint.pretrained_checkpoint),
    ):
        if path is not None and not Path(path).exists():
            missing.append((flag, path))
    return missing


def _line(head: str, text: str) -> str:
    return f"{head:<{_COLUMN}}{text}"


def _wrapped(head: str, texts: list[str]) -> list[str]:
    """Lines with the texts in a second column, none of them broken."""
    glued = " ".join(text.replace(" ", "\0") for text in texts)
    lines = textwrap.wrap(glued, _WIDTH - _COLUMN - 2, break_long_words=False, break_on_hyphens=False)
    lines = [line.replace(" ", "  ").replace("\0", " ") for line in lines]
    return [f"  {head if index == 0 else '':<{_COLUMN - 2}}{line}" for index, line in enumerate(lines)]


def _changed_flags(config: Config) -> list[str]:
    lines: list[str] = []
    groups: dict[str, list[str]] = {}
    for flag in config_flags():
        value = getattr(getattr(config, flag.group), flag.field)
        if value != flag.default:
            groups.setdefault(flag.group, []).append(" ".join(flag_texts(flag, value)))
    for group, texts in groups.items():
        lines += _wrapped(group, texts)
    return lines


def _without_effect(parsed: ParsedArguments) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in idle_flags(parsed):
        reasons.setdefault(reason, []).append(name)
    lines = ["", "flags without effect"] if reasons else []
    for reason, names in reasons.items():
        lines.append(f"  {reason}")
        lines += _wrapped("", names)
    return lines


def _parameter_table(model: ModelDescription, plan: Plan) -> list[str]:
    lines = [f"  {'stage':<7}{'ranks':<16}{'layers':<24}{'total':>10}{'active':>10}{'embedding':>11}"]
    for index, stage in enumerate(plan.stages):
        count = stage_parameters(model, plan, index)
        first, last = stage.devices.ranks[0], stage.devices.ranks[-1]
        ranks = f"{first}-{last}" if last > first else str(first)
        ranks = ranks if last - first + 1 == len(stage.devices.ranks) else f"{ranks} in part"
        layers = " ".join(f"{first}-{last - 1}" if last > first else "-" for first, last in stage.chunks)
        layers = layers if len(layers) < 24 else f"{layers[:19]} ..."
        numbers = f"{quantity(count.total):>10}{quantity(count.active):>10}{quantity(count.embedding):>11}"
        lines.append(f"  {index:<7}{ranks:<16}{layers:<24}{numbers}")
    return lines


def stage_parameters(model: ModelDescription, plan: Plan, stage: int) -> ParameterCount:
    """Parameters of each rank of a stage."""
    planned = plan.stages[stage]
    share = Share(
        chunks=planned.chunks,
        tensor=planned.tensor,
        expert=planned.expert,
        expert_tensor=planned.expert_tensor,
        first_stage=stage == plan.embedding_stage,
        last_stage=stage == plan.loss_stage,
        split_latents=this_machine().lacks("Transformer Engine") is not None,
    )
    return rank_parameters(model, share)


def _lacking(config: Config, layout: ParallelLayout, machine: StartMachine) -> list[str]:
    lines = []
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not machine.cuda:
        lines.append(("CUDA", "no GPU: training runs on the CPU, over gloo"))
    elif gpus < layout.world_size:
        lines.append(("CUDA", f"{gpus} GPUs here, {layout.world_size} processes: several machines are needed"))
    if "transformer_engine" not in machine.packages:
        lines.append(("Transformer Engine", "not installed: torch's attention and norms run instead"))
    for flag, _, package in packages_of(config):
        if not is_installed(package):
            lines.append((flag, f"needs the package {package}: pip install {package}"))
    for flag, path in missing_files(config):
        after = ": training would start afresh" if flag == "--load" else ""
        lines.append((flag, f"{path} does not exist{after}"))
    return ["", "this machine lacks", *(f"  {head:<20}{text}" for head, text in lines)] if lines else []


def _obstacles(parsed: ParsedArguments, machine: StartMachine) -> list[str]:
    stops = [f"  {obstacle}" for obstacle in (*obstacles(parsed, machine), *refused_places(parsed.config))]
    return ["", "a start here stops at", *stops] if stops else []
