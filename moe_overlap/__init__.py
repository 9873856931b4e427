"""MoE training with overlapped communication, on megatron-core, and the tuner that plans it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_overlap.overlap_tuning import tune_overlap as tune
    from moe_overlap.predicting import predict

__all__ = ["predict", "tune"]
__version__ = "0.1.0"
VERSION_LINE = f"megatron-moe-overlap {__version__}"
"""What `--version` prints."""


def __getattr__(name: str) -> Any:
    """`from moe_overlap import tune, predict`; what they need is imported when they are asked for."""
    if name == "predict":
        from moe_overlap.predicting import predict

        return predict
    if name == "tune":
        from moe_overlap.overlap_tuning import tune_overlap

        return tune_overlap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
