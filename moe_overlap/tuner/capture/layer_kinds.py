"""Kinds of layers: layers of one kind run the same operators, and one of them is captured. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from moe_overlap.describe.model import ModelDescription


def layer_kinds(model: ModelDescription) -> tuple[str, ...]:
    """Kind of every decoder layer."""
    return _kinds(model.moe_layers, _windows(model)[: model.num_layers])


def prediction_kinds(model: ModelDescription) -> tuple[str, ...]:
    """Kind of every multi-token-prediction layer: it holds a layer like the decoder's last, windows count on behind those."""
    inside = model.moe_layers[-1:] * model.mtp_layers
    return tuple(f"mtp.{kind}" for kind in _kinds(inside, _windows(model)[model.num_layers :]))


def _windows(model: ModelDescription) -> tuple[int | None, ...]:
    return model.windows or (None,) * (model.num_layers + model.mtp_layers)


def _kinds(moe_layers: Iterable[bool], windows: Iterable[int | None]) -> tuple[str, ...]:
    return tuple(
        ("moe" if is_moe else "dense") + (f".window{window}" if window is not None else "")
        for is_moe, window in zip(moe_layers, windows, strict=True)
    )
