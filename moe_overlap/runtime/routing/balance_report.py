"""The balancing losses of a step, for its log.

megatron-core's routers and our gates add the losses of every micro-batch to one tracker of the process, layer by layer.
megatron-core's own reduction cannot be used: gloo has no mean over ranks, and a stage without experts would miss a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from moe_overlap.describe.model import ModelDescription
from moe_overlap.runtime.groups import StageGroups
from moe_overlap.runtime.routing.balance import LOGGED_NAMES, Z_LOSS


def forget_balance_losses() -> None:
    """Empty the tracker, which is sized by the first model that writes to it."""
    get_moe_layer_wise_logging_tracker().clear()


def mean_balance_losses(
    config: Any, model: ModelDescription, groups: StageGroups, micro_batches: int, device: torch.device
) -> dict[str, dict[int, float]]:
    """Means over micro-batches and replicas since the tracker was emptied, without coefficients; upstream's names and scales.

    Collective, where the model has such losses.

    Args:
        config: the chunks' TransformerConfig, which names the losses in the same order on every rank.
        micro_batches: number of micro-batches of a data-parallel rank.
    Returns:
        Loss by name and number of the MoE layer; prediction layers follow the decoder's.
    """
    shares = _shares(config, groups)
    if not shares:
        return {}
    tracker, width = get_moe_layer_wise_logging_tracker(), model.num_layers + model.mtp_layers
    sums = torch.zeros(len(shares), width, dtype=torch.double, device=device)
    for row, name in zip(sums, shares, strict=True):
        if name in tracker:
            # This stage's replicas and micro-batches: other stages may have other numbers of them.
            row += tracker[name]["values"] / (micro_batches * shares[name])
    # Over all ranks: a layer stands on one stage, and the others add nothing to it.
    dist.all_reduce(sums, group=groups.world)
    layers = [number for number, is_moe in enumerate(model.moe_layers) if is_moe]
    # A prediction layer is built like the decoder's last.
    layers += range(model.num_layers, width) if model.moe_layers[-1] else ()
    means = sums.tolist()
    return {name: {layer: row[layer] for layer in layers} for name, row in zip(shares, means, strict=True)}


def _shares(config: Any, groups: StageGroups) -> Mapping[str, int]:
    """The losses that a run has, and how many times the sum over a stage's ranks holds each of them."""
    if not config.num_moe_experts:
        return {}
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(kinds, coefficients, strict=True) if isinstance(kinds, list) else [(kinds, coefficients)]
    collection = groups.collection
    replicas = collection.dp_cp.size() // collection.cp.size()
    # Ranks that share a sequence have a part of its loss each; all replicas together have one loss for all their samples.
    times = {"aux_loss": replicas, "seq_aux_loss": replicas, "global_aux_loss": 1}
    shares = {LOGGED_NAMES[kind]: times[kind] for kind, coefficient in pairs if kind in times and coefficient > 0}
    if config.moe_z_loss_coeff is not None:
        shares[Z_LOSS] = collection.tp.size() * collection.dp_cp.size()
    return shares
