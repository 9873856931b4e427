"""Kinds of layers: layers of one kind run the same operators, and one of them is captured. No torch."""

from __future__ import annotations

from moe_overlap.describe.model import ModelDescription


def layer_kinds(model: ModelDescription) -> tuple[str, ...]:
    """Kind of every decoder layer."""
    return tuple("moe" if is_moe else "dense" for is_moe in model.moe_layers)
