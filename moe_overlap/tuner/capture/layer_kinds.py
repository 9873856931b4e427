"""Kinds of layers: layers of one kind run the same operators, and one of them is captured. No torch."""

from __future__ import annotations

from moe_overlap.describe.model import ModelDescription


def layer_kinds(model: ModelDescription) -> tuple[str, ...]:
    """Kind of every decoder layer."""
    windows = model.windows or (None,) * model.num_layers
    return tuple(
        ("moe" if is_moe else "dense") + (f".window{window}" if window is not None else "")
        for is_moe, window in zip(model.moe_layers, windows, strict=True)
    )
