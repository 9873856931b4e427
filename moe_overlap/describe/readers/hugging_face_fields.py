"""The fields of a Hugging Face config.json, and its rotary positions as flags. Standard library only.

`Fields` records which fields are read, and refuses a config with an unread field unless that is known to change nothing. All
families describe rotary positions in the same way: plain, linear, Llama 3's or YaRN.

Source: modeling_rope_utils.py of transformers 4.57.6; rotary_pos_embedding.py and yarn_rotary_pos_embedding.py of
megatron-core 0.16.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import MOST_LAYERS

REQUIRED: Any = object()
"""Marks a required field, in place of a default."""
PREDICT = "tools/predict.py answers without it"
"""The fix for a field that no layer of megatron-core supports."""

_NO_MATHEMATICS = frozenset(
    # Names, versions and classes; tokens; what a program returns; generation; storage and speed.
    "model_type architectures auto_map _name_or_path name_or_path transformers_version tokenizer_class _commit_hash "
    "torch_dtype dtype torchscript use_bfloat16 quantization_config use_cache pretraining_tp ep_size "
    "_attn_implementation _attn_implementation_autoset attn_implementation _experts_implementation "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix "
    "return_dict output_attentions output_hidden_states output_router_logits task_specific_params problem_type "
    "finetuning_task id2label label2id num_labels summary_type summary_use_proj summary_activation summary_first_dropout "
    "summary_proj_to_labels classifier_dropout is_decoder is_encoder_decoder tie_encoder_decoder "
    "cross_attention_hidden_size chunk_size_feed_forward tf_legacy_loss "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p "
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens n_ctx "
    "initial_context_length reorder_and_upcast_attn experts_per_token for_llm_compressor".split()
)
"""Fields that do not change the model, whatever their value.

`output_router_logits` decides whether Hugging Face adds the balancing loss; here its coefficient does. `pretraining_tp` and
`reorder_and_upcast_attn` change the order of sums. `initial_context_length` and `experts_per_token` repeat other fields.
"""

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of an unread field that switch off whatever it is called."""


class Fields:
    """The fields of one JSON object.

    Args:
        values: name -> value, as read.
        where: the file, and the path inside it, for errors.
        unbuilt: the list that `built` extends; nested objects share it.
        spelled: name -> the file's own spelling of it, for errors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        unbuilt: list[ConfigError] | None = None,
        spelled: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.values, self.where, self._spelled = values, where, spelled
        self.unbuilt: list[ConfigError] = [] if unbuilt is None else unbuilt
        self._read: set[str] = set()

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, or the default if it is absent.

        Raises:
            ConfigError: the field is absent and has no default.
        """
        self._read.add(name)
        if name not in self.values and default is REQUIRED:
            raise self.error(name, "", "the field is missing", "take the config.json of the published model")
        return self.values.get(name, default)

    def with_values(self, values: Mapping[str, Any], spelled: Mapping[str, str]) -> Fields:
        """The same object with other names or further fields; what has been read stays read."""
        fields = Fields(values, self.where, self.unbuilt, spelled)
        fields._read = set(self._read)
        return fields

    def integer(self, name: str, default: Any = REQUIRED, least: int = 1) -> Any:
        """A whole number of at least `least`; None only if that is the default."""
        value = self.get(name, default)
        if value is None and default is None:
            return None
        if not is_whole(value):
            raise self.error(name, _written(value), "must be a whole number", "correct the file")
        if value < least:
            raise self.error(name, value, f"must be at least {least}", "correct the file")
        return int(value)

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers, at most MOST_LAYERS."""
        count: int = self.integer(name)
        if count > MOST_LAYERS:
            raise self.error(name, count, f"is more than {MOST_LAYERS}", "correct the file")
        return count

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A number; None only if that is the default."""
        value = self.get(name, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, _written(value), "must be a number", "correct the file")
        return value

    def switch(self, name: str, default: Any = REQUIRED) -> bool:
        """The value of a boolean field."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, _written(value), "must be true or false", "correct the file")
        return value

    def inner(self, name: str) -> Fields | None:
        """The fields of a nested object; None if it is absent or null.

        Raises:
            ConfigError: the field is no object.
        """
        value = self.get(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, _written(value), "must be an object", "correct the file")
        return Fields(value, f"{self.where} {name}", self.unbuilt)

    def built(self, name: str, default: Any, allowed: tuple[Any, ...], rule: str) -> Any:
        """The value of a field that changes a layer's result, but neither its size nor much of its speed.

        If megatron-core has no layer for the value, the error goes to `unbuilt`: training raises it, a prediction prints it as
        a note.
        """
        value = self.get(name, default)
        if not _is_among(value, allowed):
            self.unbuilt.append(self.error(name, _shown(value), rule, PREDICT))
        return value

    def only(self, name: str, default: Any, allowed: tuple[Any, ...], rule: str) -> Any:
        """The value of a field that must be one of `allowed`.

        Raises:
            ConfigError: it is another value, which this fork cannot train.
        """
        value = self.get(name, default)
        if not _is_among(value, allowed):
            fix = f"only {' or '.join(map(_shown, allowed))} can be trained here"
            raise self.error(name, _shown(value), rule, fix)
        return value

    def error(self, name: str, value: Any, rule: str, fix: str) -> ConfigError:
        """The error about a field."""
        return ConfigError(f"{self.where} {self._spelled.get(name, name)}", value, rule, fix)

    def finish(self) -> None:
        """Check that every field has been read, is known to change nothing, or is off; all others go to `unbuilt` at once."""
        unknown = [
            name
            for name, value in self.values.items()
            if name not in self._read and name not in _NO_MATHEMATICS and value not in _OFF
        ]
        if len(unknown) == 1:
            rule, fix = "unknown field, which may change the model", "remove it if it does not"
            self.unbuilt.append(self.error(unknown[0], _shown(self.values[unknown[0]]), rule, fix))
        elif unknown:
            rule, fix = "unknown fields, which may change the model", "remove those that do not"
            names = ", ".join(self._spelled.get(name, name) for name in unknown)
            self.unbuilt.append(self.error(names, "", rule, fix))


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a JSON value is one of `allowed`; true does not equal 1."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed)


def is_whole(value: Any) -> bool:
    """Whether a JSON value is a whole number, including forms such as 5e5."""
    return (
        not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    )


def _written(value: Any) -> str:
    """A value of the wrong type as the file has it: strings in quotation marks, because "2048" would look like a number."""
    return _shown(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value)


def _shown(value: Any) -> str:
    """A value as the file has it, shortened."""
    text = {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Rotary positions

LONGEST = 4096
"""Default length of a sample: a config.json has only the number of positions of the model."""


def longest_training_sequence(positions: int) -> int:
    """Default of --seq-length for a model of a config.json with this many positions."""
    return min(positions, LONGEST)


def rotary_flags(
    fields: Fields, base: float, scaling: Mapping[str, Any] | None = None, latent: list[str] | None = None
) -> dict[str, Any]:
    """The flags of a family's rotary positions.

    Args:
        base: default of rope_theta.
        scaling: default of rope_scaling.
        latent: the notes of a model with latent attention, which supports YaRN only, with fixed constants; None for other models.
    Raises:
        ConfigError: megatron-core does not support the scaling or its constants.
    """
    rope = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    if rope is None:
        is_given = {"rope_parameters", "rope_scaling"} & set(fields.values)
        rope = Fields({} if is_given else scaling or {}, f"{fields.where} rope_scaling", fields.unbuilt)
    theta = rope.number("rope_theta", None)
    theta = fields.number("rope_theta", base) if theta is None else theta
    if not is_whole(theta):
        raise fields.error("rope_theta", theta, "megatron-core has whole bases", "round it")
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type", None)
    forms = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    supported = tuple(forms) if latent is None else ("default", "yarn")
    for multimodal in ("mrope_section", "mrope_interleaved"):
        rope.get(multimodal, None)  # Text has one dimension of positions, whatever the sections.
    if kind not in supported:
        rule = "this scaling of rotary positions is not in megatron-core"
        fix = f"known here are {', '.join(supported)}; {PREDICT}"
        rope.unbuilt.append(rope.error("rope_type", kind, rule, fix))
        for constant in rope.values:
            rope.get(constant)
        kind = "default"
    flags = forms[kind](rope, fields.integer("max_position_embeddings"), latent)
    rope.finish()
    return {"position-embedding-type": "rope", "rotary-base": int(theta)} | flags


def _plain(rope: Fields, positions: int, latent: list[str] | None) -> dict[str, Any]:
    return {} if latent is None else {"rope-type": "rope"}


def _linear(rope: Fields, positions: int, latent: list[str] | None) -> dict[str, Any]:
    factor = rope.number("factor")
    if not is_whole(factor):
        raise rope.error("factor", factor, "megatron-core interpolates by whole factors", "round it")
    return {"rotary-seq-len-interpolation-factor": int(factor)}


def _llama3(rope: Fields, positions: int, latent: list[str] | None) -> dict[str, Any]:
    constants = (("low_freq_factor", 1.0), ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192))
    for name, value in constants:
        rope.get(name)
        rope.built(name, value, (value,), f"megatron-core has {value:g} built in")
    return {"use-rope-scaling": True, "rope-scaling-factor": rope.number("factor")}


def _yarn(rope: Fields, positions: int, latent: list[str] | None) -> dict[str, Any]:
    """YaRN. The two attention temperatures are set together; the default is megatron-core's 0.1 · ln(factor) + 1."""
    flags: dict[str, Any] = {"rotary-scaling-factor": rope.number("factor")}
    flags |= {"position-embedding-type": "yarn"} if latent is None else {}
    mscale, all_dimensions = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    if mscale and all_dimensions:
        flags |= {"mscale": mscale, "mscale-all-dim": all_dimensions}
    elif all_dimensions:
        rule = "scales attention in Hugging Face's code, and not the positions"
        raise rope.error("mscale_all_dim", all_dimensions, rule, "give mscale as well")
    rope.only("attention_factor", None, (None,), "the temperature follows from mscale and mscale_all_dim")
    constants = (
        ("yarn-beta-fast", "beta_fast", 32.0),
        ("yarn-beta-slow", "beta_slow", 1.0),
        ("yarn-original-max-position-embeddings", "original_max_position_embeddings", 4096),
    )
    for flag, name, usual in constants:
        value = rope.number(name, positions if name.startswith("original") else usual)
        if value != usual and latent is not None:
            latent.append(f"megatron-core's latent attention has {name} {usual:g} built in, {rope.where} {value:g}")
        elif value != usual:
            flags[flag] = value
    rounded = rope.switch("truncate", True)
    if latent is not None and not rounded:
        raise rope.error("truncate", "false", "megatron-core's latent attention rounds", "only true fits")
    return flags | ({} if rounded else {"no-yarn-correction-range-round-to-int": True})
