"""MoE training with overlapped communication, on megatron-core, and the tuner that plans it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_overlap.describe.version import __version__ as __version__

if TYPE_CHECKING:
    from moe_overlap.describe.cluster import Cluster
    from moe_overlap.describe.errors import ConfigError
    from moe_overlap.results import predict, tune

__all__ = ["Cluster", "ConfigError", "predict", "tune"]


def __getattr__(name: str) -> Any:
    """`from moe_overlap import tune, predict, Cluster, ConfigError`; what they need is imported when they are asked for."""
    if name in __all__:
        from moe_overlap import results

        return getattr(results, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
