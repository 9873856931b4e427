"""Print a plan as aligned text; with --list, the instructions of one rank."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.commands.job_arguments import job_flags, name_of
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_json
from moe_overlap.describe.model import ModelDescription, model_parameters
from moe_overlap.describe.shipped import model_path
from moe_overlap.describe.version import VERSION_LINE
from moe_overlap.job import model_of_plan
from moe_overlap.plan.instructions import format_list
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.plan.sizes import GRADIENT_BYTES
from moe_overlap.report.plan import format_plan


@interruptible
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = Parser(description=__doc__)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("file", metavar="FILE", help="a plan.json")
    parser.add_argument("--rank", type=int, default=0, help="rank whose list is printed (default 0)")
    parser.add_argument(
        "--list", action="store_true", help="print the instruction list; needs --model or --megatron-args"
    )
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="the model: a config.json, a file of examples/models, or its description; checks the plan against it, too",
    )
    parser.add_argument(
        "--megatron-args",
        metavar="FILE",
        help="the model by its flags, such as those that were written beside the plan",
    )
    chosen = parser.parse_args(arguments)
    try:
        plan = load_plan(chosen.file)
        model = model_of(chosen, plan)
        validate_plan(plan, model, chosen.file)
        if not chosen.list:
            text = format_plan(plan)
        elif model is None:
            raise ConfigError("--list", "", "the list depends on the model's layers", "add --model or --megatron-args")
        elif not 0 <= chosen.rank < plan.world_size:
            raise ConfigError("--rank", chosen.rank, f"the plan has {plan.world_size} ranks", "name one of them")
        else:
            _require_listable(plan, model)
            text = format_list(lower(plan, model, chosen.rank))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return 0


MOST_LISTED = 50_000
"""Most layer passes (micro-batches times layers) that are listed; more would take minutes and gigabytes."""


MOST_PIECES = 5_000
"""Most buckets of gradients that are listed."""


def _require_listable(plan: Plan, model: ModelDescription) -> None:
    micro_batches = max(stage.gradient_accumulation_steps for stage in plan.stages)
    if micro_batches * model.num_layers > MOST_LISTED:
        rule = f"{micro_batches} micro-batches pass {model.num_layers} layers: more than {MOST_LISTED} passes are not listed"
        raise ConfigError(
            "--list", "", rule, "lower gradient_accumulation_steps and global_batch_size: the pattern repeats"
        )

    smallest = min((stage.overlap.gradient_chunk_bytes or math.inf for stage in plan.stages), default=math.inf)
    if GRADIENT_BYTES * model_parameters(model).total > smallest * MOST_PIECES:
        rule = f"gradient_chunk_bytes of {smallest} cuts the gradients into more than {MOST_PIECES} pieces"
        raise ConfigError("--list", "", rule, "raise it, or write 0")


def model_of(chosen: argparse.Namespace, plan: Plan) -> ModelDescription | None:
    """The model of the command line, from flags or from a description with all fields; None if it has none.

    Raises:
        ConfigError: a file has another format, or the plan is for another model.
    """
    if chosen.model is None and chosen.megatron_args is None:
        return None
    if chosen.megatron_args is None and (described := load_model(chosen.model)) is not None:
        return described
    files = {"model": chosen.model, "megatron_args": chosen.megatron_args}
    options = argparse.Namespace(**files, precision=plan.precision, set=[], training_flags=[], ignore_unknown=False)
    return model_of_plan(job_flags(options, is_predicted=True), plan, chosen.file, name_of(options))


def load_model(path: str) -> ModelDescription | None:
    """The description in a JSON file with the fields of ModelDescription; None for a model file or a config.json."""
    try:
        values = bounded_json(model_path(path, "--model"))
    except Unreadable as error:
        raise ConfigError(path, "", str(error), "name a model") from error
    if isinstance(values, dict) and ("num_layers" not in values or "model_type" in values):
        return None
    model = read_record(ModelDescription, values, path)
    for name, value in dataclasses.asdict(model).items():
        if type(value) in (int, float) and value < 0:
            raise ConfigError(f"{path} {name}", value, "must not be negative", "correct the value")
    for name, entries in (("moe_layers", model.moe_layers), ("windows", model.windows)):
        count = model.num_layers + model.mtp_layers
        if len(entries) not in (model.num_layers, count):
            rule = f"names {len(entries)} layers, the model has {count}"
            raise ConfigError(f"{path} {name}", "", rule, "give an entry for each layer")
    return model
