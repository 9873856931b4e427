"""Traits of a run other than GPU, precision and release, and which of them no calibration run on its architecture had.

A prediction extrapolates if no calibration run on its architecture had one of its traits. It then names the trait and has a wider
interval (`expected_error.py`). `tuner/calibrate/fit` writes the traits of the calibration rows to constants.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_overlap.plan.plan import Offload, Plan
from moe_overlap.tuner.cost.hardware import Features, Traits

GRAPHS: Mapping[str, str] = {
    "none": "without CUDA graphs",
    "partial": "with partial CUDA graphs",
    "full": "with CUDA graphs of a whole step",
}
SHARDED: Mapping[int, str] = {
    0: "with states on every rank (ZeRO-0)",
    2: "with sharded gradients (ZeRO-2)",
    3: "with sharded parameters (ZeRO-3)",
}
"""ZeRO level -> trait; level 1, that of the distributed optimizer, has none."""


def traits(plan: Plan, features: Features, is_moe: bool) -> tuple[str, ...]:
    """The traits of a run, each as a phrase such as `MoE models without CUDA graphs`."""
    kind, stages = "MoE models" if is_moe else "dense models", plan.stages
    descriptions = [GRAPHS[features.graphs]]
    descriptions += sorted({SHARDED[stage.zero_level] for stage in stages if stage.zero_level in SHARDED})
    if any(stage.offload != Offload() for stage in stages):
        descriptions.append("with states in host memory")
    if any(stage.recompute.granularity in ("full", "uniform") for stage in stages):
        descriptions.append("that compute whole layers again")
    if features.listed_graphs and any(stage.overlap.is_listed for stage in stages):
        descriptions.append("whose instruction lists are replayed as CUDA graphs")
    if is_moe and features.overlap_experts:
        descriptions.append("with all-to-alls beside another micro-batch")
    return tuple(f"{kind} {trait}" for trait in descriptions)


def uncovered(known: Traits, architecture: str, of_run: tuple[str, ...]) -> tuple[str, ...]:
    """A reason for each trait without a calibration run; none for an architecture without any run, which has its own message."""
    if architecture not in known:
        return ()
    return tuple(
        f"no calibration run of {trait} on {architecture}" for trait in of_run if trait not in known[architecture]
    )
