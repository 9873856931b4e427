"""Flags of Megatron-LM that are left out of a run with this fork's overlap, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moe_overlap.plan.capabilities import GRAPHS_FLAG

SENT = "layers that overlap send their rows by this fork's irregular dispatcher"
OVERLAPPED = "this fork overlaps all-to-alls by its own instruction lists"
REPLACED: Mapping[str, str] = MappingProxyType(
    {
        "--overlap-moe-expert-parallel-comm": OVERLAPPED,
        "--delay-wgrad-compute": "this fork defers weight gradients by its own instruction lists",
        "--moe-shared-expert-overlap": OVERLAPPED,
    }
)
"""Flag -> how this runtime achieves the same."""
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        **REPLACED,
        "--moe-enable-deepep": SENT,
        "--moe-flex-dispatcher-backend": SENT,
        "--moe-deepep-num-sms": SENT,
        "--moe-hybridep-num-sms": SENT,
        GRAPHS_FLAG: "captures the operators of instruction lists, and nothing is overlapped",
    }
)
"""Flag -> why it is left out."""
