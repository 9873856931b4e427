"""Small models, optimizers and batches in a group of one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.initialize import seed_everything
from megatron.training.model.build import build_model
from megatron.training.optimizer import make_optimizer, wrap_chunks
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.runtime.groups import StageGroups, build_groups
from moe_overlap.runtime.megatron_core.moe_layer import adapt_layer
from moe_overlap.runtime.spans import SpanRecorder

SEQUENCE, VOCABULARY = 16, 64
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --make-vocab-size-divisible-by 64"
)
MOE = (
    f"{SIZES} --group-query-attention --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
)
SHARED = "--moe-shared-expert-intermediate-size 24"


@dataclass(frozen=True, slots=True)
class Small:
    """The configuration, plan and groups that a model is built from."""

    config: Config
    model: ModelDescription
    plan: Plan
    groups: StageGroups

    def stock(self) -> torch.nn.Module:
        """The model of megatron-core's own layers."""
        seed_everything(self.config.training.seed, self.groups.collection)
        return build_model(self.config, self.model, self.plan, self.groups.collection, 0)[0]

    def adapted(self, recorder: SpanRecorder, adapt: Any = None) -> torch.nn.Module:
        """The model of our layers, the same weights."""
        seed_everything(self.config.training.seed, self.groups.collection)
        adapt = adapt or adapt_layer(recorder, self.groups.collection)
        return build_model(self.config, self.model, self.plan, self.groups.collection, 0, adapt)[0]

    def wrapped(self) -> tuple[Any, Any]:
        """A model of our layers in DDP, and megatron-core's optimizer of it."""
        chunks = wrap_chunks(self.config, self.plan, [self.adapted(SpanRecorder())], self.groups.collection)
        return chunks[0], make_optimizer(self.config, self.plan, chunks, self.groups.collection)


def small(flags: str) -> Small:
    """Validate flags and make the groups of this one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # megatron-core sizes what it logs by the first model of the process; a run clears it after every step.
    get_moe_layer_wise_logging_tracker().clear()
    config = parse(flags.split()).config
    validate(config, 1)
    model = describe_model(config, VOCABULARY)
    plan = plan_from_flags(config, model, 1)
    return Small(config, model, plan, _groups(dist.group.WORLD))


@lru_cache(maxsize=1)
def _groups(world: dist.ProcessGroup) -> StageGroups:
    """The groups of one process inside this default group: each joins this rank alone, whatever the plan.

    Made once: a group of gloo has three threads, and hundreds of idle ones took half of a core.
    """
    config = parse(SIZES.split()).config
    validate(config, 1)
    return build_groups(plan_from_flags(config, describe_model(config, VOCABULARY), 1))


def batch(seed: int = 0, samples: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and labels, [samples, SEQUENCE]."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (samples, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(samples, SEQUENCE)
    return text[:, :-1].contiguous(), positions, text[:, 1:].contiguous()


def loss_of(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """Mean loss of one batch."""
    tokens, positions, labels = batch(seed)
    return model(tokens, positions, None, labels=labels).float().mean()
