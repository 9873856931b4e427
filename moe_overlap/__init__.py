"""MoE training with overlapped communication, on megatron-core, and the tuner that plans it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_overlap.predicting import predict

__all__ = ["predict"]


def __getattr__(name: str) -> Any:
    """`from moe_overlap import predict`; what it needs is imported when it is asked for."""
    if name == "predict":
        from moe_overlap.predicting import predict

        return predict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
