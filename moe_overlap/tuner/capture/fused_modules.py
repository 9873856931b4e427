"""Modules in place of Transformer Engine's, for megatron-core's own specs: parameters, and the kernels of `fused_functions.py`.

Transformer Engine itself is not needed; nothing here computes. `FusedSpecs` has the interface of megatron-core's provider of
Transformer Engine's modules, so megatron-core decides which of them stands where.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

from megatron.training.layers.sdpa_attention import SdpaAttention
from megatron.training.layers.without_te import TorchNorm
from moe_overlap.tuner.capture.fused_functions import Attention, GroupedLinear, Linear, Norm
from moe_overlap.tuner.capture.record import Recorder


class FusedNorm(TorchNorm):
    """A norm in one kernel."""

    recorder: Recorder

    def forward(self, x_SBE: Tensor) -> Tensor:
        """Normalise the last axis."""
        bias = None if self.rms_norm else self.bias
        return Norm.apply(self.recorder, x_SBE, self.weight, bias)  # type: ignore[no-any-return]


class FusedColumnLinear(ColumnParallelLinear):
    """Columns split over the tensor-parallel ranks."""

    recorder: Recorder
    tensor_group: Any
    splits = "columns"

    def __init__(self, *args: Any, tp_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, tp_group=tp_group or self.tensor_group, **kwargs)
        self.tp_size = 1 if self.explicit_expert_comm else self.tp_group.size()

    def norm_weights(self) -> tuple[Tensor, ...]:
        """No norm in front."""
        return ()

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias where the caller adds it."""
        bias = None if self.skip_bias_add else self.bias
        out = Linear.apply(self.recorder, self, x, self.weight, bias, *self.norm_weights())
        return out, self.bias if self.skip_bias_add else None


class FusedNormLinear(FusedColumnLinear):
    """A norm and columns split over the tensor-parallel ranks."""

    def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.norm = TorchNorm(config, input_size)

    def norm_weights(self) -> tuple[Tensor, ...]:
        """Of the norm in front."""
        return tuple(self.norm.parameters())


class FusedRowLinear(RowParallelLinear):
    """Rows split over the tensor-parallel ranks."""

    recorder: Recorder
    splits = "rows"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp_size = 1 if self.explicit_expert_comm else self.tp_group.size()

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias where the caller adds it."""
        bias = None if self.skip_bias_add else self.bias
        out = Linear.apply(self.recorder, self, x, self.weight, bias)
        return out, self.bias if self.skip_bias_add else None


class FusedWholeLinear(torch.nn.Module):
    """A weight that every tensor-parallel rank has whole; each multiplies its part of the sequence."""

    recorder: Recorder
    splits = ""
    tp_size = 1

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str, config: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias, "split weights have classes of their own"
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The product."""
        return Linear.apply(self.recorder, self, x, self.weight, None), None


class FusedGroupedLinear(torch.nn.Module):
    """The same linear of every expert on this rank."""

    recorder: Recorder
    splits: str

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        shards = pg_collection.expt_tp.size()
        rows, columns = (
            (output_size // shards, input_size) if self.splits == "columns" else (output_size, input_size // shards)
        )
        self.skip_bias_add = skip_bias_add
        for expert in range(num_gemms):
            self._hold(f"weight{expert}", (rows, columns), config)
            if bias:
                self._hold(f"bias{expert}", (rows,), config)
        self.weights = [getattr(self, f"weight{expert}") for expert in range(num_gemms)]
        self.biases = [getattr(self, f"bias{expert}") for expert in range(num_gemms)] if bias else []

    def _hold(self, name: str, shape: tuple[int, ...], config: Any) -> None:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
        setattr(self, name, parameter)

    def forward(self, x_TK: Tensor, _tokens_per_expert: list[int]) -> tuple[Tensor, Any]:
        """The products, and the biases where the caller adds them."""
        added = [] if self.skip_bias_add else self.biases
        out = GroupedLinear.apply(self.recorder, x_TK, len(self.weights), *self.weights, *added)
        return out, self.biases if self.biases and not added else None


class FusedGroupedColumns(FusedGroupedLinear):
    """The first product of the experts."""

    splits = "columns"


class FusedGroupedRows(FusedGroupedLinear):
    """The second product of the experts."""

    splits = "rows"


class FusedAttention(SdpaAttention):
    """Core attention in one kernel. Attention dropout draws inside the kernel and keeps nothing."""

    recorder: Recorder

    def forward(self, query_SBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend within each sample."""
        return Attention.apply(self.recorder, self, query_SBHD, key_SBGD, value_SBGD)  # type: ignore[no-any-return]


class FusedSpecs:
    """Which module megatron-core's specs use for what; each bound to the recorder.

    Args:
        recorder: hears of the kernels.
        tensor_group: for linears that megatron-core hands no group.
    """

    def __init__(self, recorder: Recorder, tensor_group: Any) -> None:
        def bound(module: type) -> type:
            return type(module.__name__, (module,), {"recorder": recorder, "tensor_group": tensor_group})

        self.norm = bound(FusedNorm)
        self.whole = bound(FusedWholeLinear)
        self._columns, self._norm_columns, self._rows = map(bound, (FusedColumnLinear, FusedNormLinear, FusedRowLinear))
        self._attention = bound(FusedAttention)
        self._grouped = MLPSubmodules(linear_fc1=bound(FusedGroupedColumns), linear_fc2=bound(FusedGroupedRows))

    def __call__(self) -> FusedSpecs:
        """megatron-core makes an instance where it needs one."""
        return self

    def linear(self) -> type:
        """A linear with a whole weight."""
        return self.whole

    def column_parallel_linear(self) -> type:
        """Columns split."""
        return self._columns

    def row_parallel_linear(self) -> type:
        """Rows split."""
        return self._rows

    def fuse_layernorm_and_linear(self) -> bool:
        """One module for both."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """A norm and columns split."""
        return self._norm_columns

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """A norm alone."""
        return self.norm

    def core_attention(self) -> type:
        """Flash attention."""
        return self._attention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        """The experts."""
        if moe_use_grouped_gemm:
            return TEGroupedMLP, self._grouped
        return SequentialMLP, MLPSubmodules(linear_fc1=self._columns, linear_fc2=self._rows)

    def activation_func(self) -> None:
        """The fused activations of megatron-core are used."""
        return
