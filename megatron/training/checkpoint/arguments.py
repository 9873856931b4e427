"""`--use-checkpoint-args`: takes flags from a checkpoint, which stores the arguments of its run as JSON. No torch.

From the checkpoint come all flags of the groups "model" and "mixture of experts", the vocabulary, and on request the tokenizer
and the parallel sizes. If the command line contradicts, the same side wins as in upstream, and the run reports it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.training.cli.arguments import ParsedArguments, parse
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import Flag, config_flags, flag_texts, spelling
from megatron.training.cli.rules.checkpoint import Start, start_of
from moe_overlap.describe.errors import ConfigError

ASKED = "--use-checkpoint-args"
GROUPS = ("model", "moe")
VOCABULARY = ("data.vocab_size", "data.tiktoken_pattern", "data.tiktoken_num_special_tokens")
TOKENIZER = ("data.tokenizer_type", "data.tokenizer_model", "data.vocab_file", "data.merge_file")
PARALLEL = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.num_virtual_stages_per_pipeline_rank",
    "parallel.num_layers_per_virtual_pipeline_stage",
    "parallel.expert_model_parallel_size",
)
CHECKPOINT_WINS = frozenset(
    f"model.{name}"
    for name in (
        "num_query_groups group_query_attention position_embedding_type rotary_base rotary_percent rotary_interleaved "
        "add_bias_linear add_qkv_bias squared_relu swiglu untie_embeddings_and_output_weights "
        "layernorm_zero_centered_gamma normalization apply_query_key_layer_scaling attention_dropout hidden_dropout"
    ).split()
) | frozenset(
    f"moe.{name}"
    for name in (
        "num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax "
        "moe_shared_expert_intermediate_size moe_router_load_balancing_type moe_aux_loss_coeff "
        "moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor"
    ).split()
)
"""Fields that upstream takes from the checkpoint even if the command line differs; so are tokenizer and parallel sizes."""


def with_checkpoint_arguments(parsed: ParsedArguments) -> ParsedArguments:
    """The command line completed by the arguments of the checkpoint it starts from, if --use-checkpoint-args is set.

    Raises:
        ConfigError: no folder is named, or the checkpoint has no arguments.
    """
    flags = parsed.config.checkpoint
    if not flags.use_checkpoint_args:
        return parsed
    if flags.load is None and flags.pretrained_checkpoint is None:
        raise ConfigError(ASKED, "", "there is no checkpoint to take them from", "add --load FOLDER")
    start = start_of(flags)
    if start is None:
        line = f"{flags.load} holds no checkpoint: the command line alone counts"
        return dataclasses.replace(parsed, remarks=(*parsed.remarks, ("arguments", line)))
    config, overruled = _merged(parsed, _saved_config(start))
    remarks = [("arguments", f"of {start.stored.path}"), *(("arguments", line) for line in overruled)]
    # --plan may not overrule parallel sizes that the user wants from the checkpoint.
    written = frozenset(spelling(path) for path in PARALLEL) if flags.use_mp_args_from_checkpoint_args else frozenset()
    return dataclasses.replace(
        parsed, config=config, remarks=(*parsed.remarks, *remarks), flag_names=parsed.flag_names | written
    )


def _saved_config(start: Start) -> Config:
    arguments = start.stored.mark.get("arguments")
    if arguments is None:
        rule = f"step {start.stored.step} carries no arguments: an older version saved it"
        raise ConfigError(start.flag, start.folder, rule, f"drop {ASKED} and give the model's flags")
    return parse(arguments).config


def _merged(parsed: ParsedArguments, saved: Config) -> tuple[Config, list[str]]:
    """The configuration, and a line for each contradiction."""
    values: dict[str, dict[str, Any]] = {}
    remarks = []
    for flag in _checkpoint_flags(parsed.config):
        path = f"{flag.group}.{flag.field}"
        written, stored = (getattr(getattr(config, flag.group), flag.field) for config in (parsed.config, saved))
        is_written = not parsed.flag_names.isdisjoint((*flag.names, *([flag.off] if flag.off else [])))
        # Parallel sizes and tokenizer are only among the wanted flags if
        # another flag requests them: then the checkpoint wins.
        keeps = is_written and path not in CHECKPOINT_WINS and flag.group != "parallel" and path not in TOKENIZER
        if is_written and written != stored:
            written_text, stored_text = _shown(flag, written), _shown(flag, stored)
            kept_line = f"{written_text} of the command line holds, not {stored_text}"
            remarks.append(kept_line if keeps else f"{stored_text} holds, not {written_text}")
        if not keeps:
            values.setdefault(flag.group, {})[flag.field] = stored
    groups = {group: dataclasses.replace(getattr(parsed.config, group), **new) for group, new in values.items()}
    return dataclasses.replace(parsed.config, **groups), remarks


def _checkpoint_flags(config: Config) -> Iterator[Flag]:
    paths: Sequence[str] = VOCABULARY
    paths = (*paths, *TOKENIZER) if config.checkpoint.use_tokenizer_model_from_checkpoint_args else paths
    paths = (*paths, *PARALLEL) if config.checkpoint.use_mp_args_from_checkpoint_args else paths
    for flag in config_flags():
        if flag.group in GROUPS or f"{flag.group}.{flag.field}" in paths:
            yield flag


def _shown(flag: Flag, value: Any) -> str:
    """The arguments that set a value, or `no --flag` for its absence."""
    if value is None or (flag.kind == "switch" and value == flag.default):
        return f"no {flag.off if value else flag.names[0]}"
    return " ".join(flag_texts(flag, value))
