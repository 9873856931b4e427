"""Modules for a machine without Transformer Engine, CPU or GPU: norms that know sequence parallelism, repaired linears.

The core attention stands in `sdpa_attention.py`. The classes plug into megatron-core's layer specs. `repair_imports()` mends
the places where megatron-core 0.16.1 takes Transformer Engine for granted.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

# Legend: S sequence (a norm sees this rank's part), B batch, E hidden size, I and O input and output width.


def transformer_engine_is_installed() -> bool:
    """Whether Transformer Engine can be imported; it is not imported here."""
    return importlib.util.find_spec("transformer_engine") is not None


def repair_imports() -> None:
    """Give names that megatron-core leaves undefined without Transformer Engine the value it tests for.

    moe/moe_utils.py:1192 reads `te_general_gemm` (router gating); multi_latent_attention.py:184 believes in `TELinear`;
    tensor_parallel/random.py:588 asks Transformer Engine whether fp8 is on (recomputed norms), as it takes False for a recipe;
    moe/moe_layer.py:171 has no other projection for experts in a latent space than Transformer Engine's.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_layer, moe_utils

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    random.fp8_autocast = lambda **_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    moe_layer.TELinear, moe_layer.HAVE_TE = LatentProjection, True


class TorchNorm(torch.nn.Module):
    """LayerNorm or RMSNorm by torch, with the mark that makes megatron-core reduce its gradients under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.rms_norm = config.normalization == "RMSNorm"
        self.weight_offset = 1 if config.layernorm_zero_centered_gamma else 0
        names = ("weight",) if self.rms_norm else ("weight", "bias")
        for name in names:
            fill = torch.ones if name == "weight" and not self.weight_offset else torch.zeros
            parameter = torch.nn.Parameter(
                fill(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, x_SBE: Tensor) -> Tensor:
        """Normalise the last axis; the shape stays."""
        shape = self.weight.shape
        weight = self.weight + self.weight_offset if self.weight_offset else self.weight
        if self.rms_norm:
            return F.rms_norm(x_SBE, shape, weight, self.eps)
        return F.layer_norm(x_SBE, shape, weight, self.bias, self.eps)


class ExpertOutput(RowParallelLinear):
    """An expert's second product, with two repairs of what megatron-core does to its bias.

    Where nobody shares the expert, the result passes a no-op reduction, and autograd then forbids the in-place bias of
    mlp.py:247: that reduction is left out, as it is under expert parallelism. Under sequence parallelism the bias is marked
    to be summed over the tensor-parallel ranks, which hold other experts: its own replicas are summed by DDP.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = self.is_expert
        if self.bias is not None:
            self.bias.sequence_parallel = False


class LatentProjection(torch.nn.Module):
    """A linear that every tensor-parallel rank holds whole, between the tokens and experts in a latent space.

    The constructor is that of Transformer Engine's as megatron-core calls it (`parallel_mode="duplicated"`).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **fixed: Any,
    ) -> None:
        super().__init__()
        where = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **where))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(output_size, **where)) if bias else None)
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)
        for parameter in self.parameters():
            # Each rank sees its part of the sequence: megatron-core sums these gradients over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_SBI: Tensor) -> tuple[Tensor, None]:
        """[…, I] -> […, O], and no bias left to add."""
        return F.linear(x_SBI, self.weight, self.bias), None


class LatentSelfAttention(MLASelfAttention):
    """Latent attention whose down projections answer as Transformer Engine's do: full width, this rank's part of the sequence.

    megatron-core gathers the split ones over `parallel_state`'s group, and drops what other ranks' heads contribute to the
    gradient of the rotary key (multi_latent_attention.py:594, :607). In full width it takes its right path. With more than
    one tensor-parallel rank that path needs sequence parallelism. The direct projection of queries (no --q-lora-rank) gets the
    group that megatron-core forgets to hand it (:393).
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any
    ) -> None:
        direct = ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        submodules = replace(submodules, linear_q_proj=direct)
        super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)
        if self.tp_group.size() > 1:
            for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                if hasattr(self, name):
                    getattr(self, name).register_forward_hook(self._in_full_width)

    def _in_full_width(self, _module: Any, _inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        gathered = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        return scatter_to_sequence_parallel_region(gathered, group=self.tp_group), None
