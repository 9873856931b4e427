"""Rotary positions of a Hugging Face config.json as flags: plain, linear, Llama 3's and YaRN. Standard library only.

Source: modeling_rope_utils.py of transformers 4.57.6; rotary_pos_embedding.py and yarn_rotary_pos_embedding.py of
megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_overlap.describe.hugging_face_fields import Fields, is_whole

LONGEST = 4096
"""Tokens of a sample, where a config.json says only how many positions the model covers."""


def longest_training_sequence(positions: int) -> int:
    """--seq-length of a model that covers `positions`: a config.json does not say it, a later flag does."""
    return min(positions, LONGEST)


def rotary_flags(
    fields: Fields, base: float, scaling: Mapping[str, Any] | None = None, latent: bool = False
) -> dict[str, Any]:
    """The flags of a family's rotary positions.

    Args:
        base: default of rope_theta.
        scaling: default of rope_scaling.
        latent: the model has latent attention, which scales by YaRN only.
    Raises:
        ConfigError: a scaling that megatron-core has not, or not with these constants.
    """
    rope = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    if rope is None:
        is_given = {"rope_parameters", "rope_scaling"} & set(fields.values)
        rope = Fields({} if is_given else scaling or {}, f"{fields.where} rope_scaling")
    theta = rope.number("rope_theta", None)
    theta = fields.number("rope_theta", base) if theta is None else theta
    if not is_whole(theta):
        raise fields.error("rope_theta", theta, "megatron-core has whole bases", "round it")
    kind = rope.get("rope_type", rope.get("type", "default"))
    forms = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    known = ("default", "yarn") if latent else tuple(forms)
    if kind not in known:
        rule = "this scaling of rotary positions is not in megatron-core"
        raise rope.error("rope_type", kind, rule, f"known here are {', '.join(known)}")
    flags = forms[kind](rope, fields.whole("max_position_embeddings"), latent)
    rope.finish()
    return {"position-embedding-type": "rope", "rotary-base": int(theta)} | flags


def _plain(rope: Fields, positions: int, latent: bool) -> dict[str, Any]:
    return {"rope-type": "rope"} if latent else {}


def _linear(rope: Fields, positions: int, latent: bool) -> dict[str, Any]:
    factor = rope.number("factor")
    if not is_whole(factor):
        raise rope.error("factor", factor, "megatron-core interpolates by whole factors", "round it")
    return {"rotary-seq-len-interpolation-factor": int(factor)}


def _llama3(rope: Fields, positions: int, latent: bool) -> dict[str, Any]:
    constants = (("low_freq_factor", 1.0), ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192))
    for name, value in constants:
        rope.get(name)
        rope.only(name, value, (value,), "megatron-core has this number built in")
    return {"use-rope-scaling": True, "rope-scaling-factor": rope.number("factor")}


def _yarn(rope: Fields, positions: int, latent: bool) -> dict[str, Any]:
    """YaRN. Both attention temperatures count together; without them it is 0.1 · ln(factor) + 1, megatron-core's default.

    Latent attention has its other constants built in.
    """
    flags: dict[str, Any] = {"rotary-scaling-factor": rope.number("factor")}
    flags |= {} if latent else {"position-embedding-type": "yarn"}
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
        if value != usual and latent:
            raise rope.error(name, value, "megatron-core's latent attention has another constant", f"only {usual} fits")
        flags |= {flag: value} if value != usual else {}
    rounded = rope.switch("truncate", True)
    if latent and not rounded:
        raise rope.error("truncate", "false", "megatron-core's latent attention rounds", "only true fits")
    return flags | ({} if rounded else {"no-yarn-correction-range-round-to-int": True})
