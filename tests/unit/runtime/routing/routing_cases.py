"""Small gates in a group of one process, and micro-batches routed whole or in partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training.model.layers.local_modules import repair_imports, transformer_engine_is_installed
from moe_overlap.runtime.routing.gate import Gate
from moe_overlap.runtime.routing.gates import GATES
from moe_overlap.runtime.routing.state import RoutingState

EXPERTS, HIDDEN = 8, 16
SWITCH = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
TRAIT = {"topk": {}, "switch": SWITCH, "batch_prioritized": {}, "random": {}, "hash": {}, "expert_choice": {}}
PARTITIONABLE = ("topk", "switch", "random", "hash")


def groups() -> ProcessGroupCollection:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not transformer_engine_is_installed():
        repair_imports()
    world = dist.group.WORLD
    return ProcessGroupCollection(tp=world, cp=world, tp_cp=world, tp_dp_cp=world)


def config(**fields: Any) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS}
    pre_softmax = fields.get("moe_router_topk") == 1 and fields.get("moe_router_score_function") != "sigmoid"
    plain = {"moe_ffn_hidden_size": 32, "add_bias_linear": False, "moe_router_pre_softmax": pre_softmax}
    return TransformerConfig(**(sizes | plain | fields))


def gate(name: str, **fields: Any) -> Gate:
    """A gate with integer weights: logits of integer inputs are exact, however they are cut."""
    made = GATES[name](config=config(**(TRAIT[name] | fields)), pg_collection=groups())
    made.set_layer_number(1)
    generator = torch.Generator().manual_seed(5)
    made.weight.data = torch.randint(-3, 4, made.weight.shape, generator=generator).to(made.weight.dtype)
    return made


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cuts(samples: int, partitions: int) -> list[int]:
    """Sizes of the partitions, the last one uneven."""
    size = -(-samples // partitions)
    sizes = [max(0, min(size, samples - index * size)) for index in range(partitions)]
    assert sum(sizes) == samples
    return sizes


@dataclass(frozen=True)
class Routed:
    """Probabilities and map [S, B, E] of a whole micro-batch, and the state after it."""

    probs: torch.Tensor
    map: torch.Tensor
    state: RoutingState


def route(gate: Gate, logits: torch.Tensor, sizes: Sequence[int], **begin: Any) -> Routed:
    """Route logits [S, B, E] in partitions of `sizes` samples."""
    state = gate.begin(*logits.shape[:2], len(sizes), **begin)
    parts = [gate.route_logits(part, state, p) for p, part in enumerate(logits.split(list(sizes), dim=1))]
    return together(parts, sizes, state)


def together(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sizes: Sequence[int], state: RoutingState) -> Routed:
    shaped = [[x.reshape(state.sequence, size, EXPERTS) for x in part] for part, size in zip(parts, sizes, strict=True)]
    return Routed(*(torch.cat([part[i] for part in shaped], dim=1) for i in range(2)), state)


@contextmanager
def loss_scale(value: float) -> Iterator[None]:
    """The scale of the balancing losses, which megatron-core keeps for the whole process."""
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(value)
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = before
