"""The dynamic loss scale of fp16 in a checkpoint: its value, and how far it is from moving again."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler


def scaler_state(optimizer: Any) -> dict[str, float] | None:
    """JSON numbers, equal on every rank; None where the scale is constant or there is none.

    Args:
        optimizer: megatron-core's chained optimizers; the first one's scaler counts (moe_overlap/runtime/optimizer.py).
    """
    scaler = optimizer.chained_optimizers[0].grad_scaler
    if not isinstance(scaler, DynamicGradScaler):
        return None
    return {name: float(value) for name, value in scaler.state_dict().items()}


def restore_scaler(optimizer: Any, state: dict[str, float] | None) -> None:
    """Take over a saved scale; one that is constant now, or was when the run was saved, stays as the flags have it.

    A window that is shorter than it was may be over: it ends at the next step, as megatron-core waits for equality.
    """
    scaler = optimizer.chained_optimizers[0].grad_scaler
    if state is None or not isinstance(scaler, DynamicGradScaler):
        return
    scaler.load_state_dict(
        {
            "scale": torch.full_like(scaler.scale, state["scale"]),
            "growth_tracker": int(min(state["growth_tracker"], scaler.growth_interval - 1)),
            "hysteresis_tracker": int(min(state["hysteresis_tracker"], scaler.hysteresis)),
        }
    )
