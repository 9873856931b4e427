"""The model of a plan, compared with the model that flags describe.

A plan records the name of its model and a hash of the whole description (`ModelDescription`). Both may differ between a search
and a run of its plan, though the model is the same: a run is named after its own file of flags, and the embedding's rows depend
on the tokenizer and on the padding for tensor ranks. So a plan is refused only if its name differs and its hash belongs to no
description that equals the flags' up to name and embedding rows. Flags that change a detail of a model of the same name, such as
an expert bias or a norm, keep its plans. Flags without a file have no name to compare.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from megatron.training.cli.config import Config
from megatron.training.cli.sizes import describe_model
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan

NAMELESS = "model"
"""The name of a run whose flags are not from a file."""
MOST_ROWS = 1 << 20
"""Largest number of embedding rows that a plan's hash is tried for: four times the largest vocabulary in use."""


def require_model_of_flags(plan: Plan, source: str, config: Config, name: str) -> None:
    """Raise ConfigError if a plan belongs to another model than flags that are not validated yet; flags without a model pass."""
    model = config.model
    if None in (model.num_layers, model.hidden_size, model.num_attention_heads) or model.num_attention_heads == 0:
        return
    require_model(plan, source, describe_model(config, 1, name), model.make_vocab_size_divisible_by)


def require_model(plan: Plan, source: str, model: ModelDescription, rows_multiple: int) -> None:
    """Raise ConfigError if a plan belongs to another model than the described one.

    Args:
        rows_multiple: the embedding's rows are a multiple of it (--make-vocab-size-divisible-by).
    """
    described, planned = (name.partition(".")[0] for name in (model.name, plan.model.name))
    if described in (NAMELESS, planned) or is_described(plan, model, rows_multiple):
        return
    rule = f"the flags describe {model.name}"
    raise ConfigError(f"{source} model.name", plan.model.name, rule, "search a plan for this model")


def is_described(plan: Plan, model: ModelDescription, rows_multiple: int) -> bool:
    """Whether a plan's hash fits the description under the plan's name, with some number of rows of the embedding."""
    named = dataclasses.asdict(dataclasses.replace(model, name=plan.model.name, vocab_size=-1))
    before, after = json.dumps(named, sort_keys=True).split('"vocab_size": -1')
    for rows in range(rows_multiple, MOST_ROWS + 1, rows_multiple) if rows_multiple > 0 else ():
        if hashlib.sha256(f'{before}"vocab_size": {rows}{after}'.encode()).hexdigest() == plan.model.sha256:
            return True
    return False
