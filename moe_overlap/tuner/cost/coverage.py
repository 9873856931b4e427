"""Traits of runs beside GPU, precision and release, and those that no calibration run on an architecture had.

A prediction of a run with a trait that no measured step of its architecture had reaches beyond what the constants were fitted to,
and says so; its interval is wider (`expected_error.py`). `tuner/calibrate/fit` writes the traits of the calibration rows to
constants.json.
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
"""By ZeRO level; that of the distributed optimizer, 1, is nothing special."""


def traits(plan: Plan, features: Features, is_moe: bool) -> tuple[str, ...]:
    """The traits of a run, each as the end of a sentence about models."""
    kind, stages = "MoE models" if is_moe else "dense models", plan.stages
    found = [GRAPHS[features.graphs]]
    found += sorted({SHARDED[stage.zero_level] for stage in stages if stage.zero_level in SHARDED})
    if any(stage.offload != Offload() for stage in stages):
        found.append("with states in host memory")
    if any(stage.recompute.granularity in ("full", "uniform") for stage in stages):
        found.append("that compute whole layers again")
    if features.listed_graphs and any(stage.overlap.is_listed for stage in stages):
        found.append("whose instruction lists are replayed as CUDA graphs")
    if is_moe and features.overlap_experts:
        found.append("with all-to-alls beside another micro-batch")
    return tuple(f"{kind} {trait}" for trait in found)


def uncovered(known: Traits, architecture: str, of_run: tuple[str, ...]) -> tuple[str, ...]:
    """Why a run reaches beyond the calibration runs. That none at all is known on an architecture is said elsewhere."""
    if architecture not in known:
        return ()
    return tuple(
        f"no calibration run of {trait} on {architecture}" for trait in of_run if trait not in known[architecture]
    )
