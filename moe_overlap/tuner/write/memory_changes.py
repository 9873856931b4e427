"""Megatron's flags of the changes that make a plan fit in memory."""

from __future__ import annotations

from moe_overlap.tuner.cost.feasibility import ChangeKind, MemoryChange

RUN_BY_MEGATRON_LM = (ChangeKind.SHARD_ALL, ChangeKind.HOST_OPTIMIZER)
"""Changes with flags that this fork's training refuses."""


def change_flags(change: MemoryChange) -> str:
    """Megatron's flags for a change."""
    again = "--recompute-granularity"
    return {
        ChangeKind.MODULES: f"{again} selective --recompute-modules {' '.join(change.modules)}",
        ChangeKind.LAYERS: f"{again} full --recompute-method block --recompute-num-layers {change.number}",
        ChangeKind.EVERY_LAYER: f"{again} full --recompute-method uniform --recompute-num-layers 1",
        ChangeKind.MICRO_BATCH: f"--micro-batch-size {change.number}",
        ChangeKind.SHARD_OPTIMIZER: "--use-distributed-optimizer",
        ChangeKind.SHARD_ALL: "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor",
        ChangeKind.HOST_OPTIMIZER: "--optimizer-cpu-offload --optimizer-offload-fraction 1.0 "
        "--use-precision-aware-optimizer",
    }[change.kind]
