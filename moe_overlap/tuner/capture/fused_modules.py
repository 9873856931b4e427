"""Stand-ins for Transformer Engine's modules in megatron-core's specs: parameters, and the kernels of `fused_functions.py`.

Transformer Engine itself is not needed; nothing here computes. `FusedSpecs` has the interface of megatron-core's provider of
Transformer Engine's modules, so megatron-core decides where each of them is used. `fused_kernels` then puts megatron-core into
the state that it has on a GPU with Transformer Engine: its specs, its fusions, and the functions that torch compiles as one
kernel each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts as moe_experts
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

import megatron.training.model.build as model_builder
from megatron.training.model import stage_config
from megatron.training.model.layers.attention import SdpaAttention
from megatron.training.model.layers.local_modules import TorchNorm, repair_imports, transformer_engine_is_installed
from moe_overlap.tuner.capture.fused_functions import (
    Attention,
    GroupedLinear,
    LatentKeyRotary,
    LatentQueryRotary,
    Linear,
    MoveRows,
    Multihot,
    Norm,
    Rotary,
    flex_functions,
)
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.stand_ins import replaced


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
        """No norm before the product."""
        return ()

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias if the caller adds it."""
        bias = None if self.skip_bias_add else self.bias
        out = Linear.apply(self.recorder, self, x, self.weight, bias, *self.norm_weights())
        return out, self.bias if self.skip_bias_add else None


class FusedNormLinear(FusedColumnLinear):
    """A norm and columns split over the tensor-parallel ranks."""

    def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.norm = TorchNorm(config, input_size)

    def norm_weights(self) -> tuple[Tensor, ...]:
        """Weights of the norm before the product."""
        return tuple(self.norm.parameters())


class FusedRowLinear(RowParallelLinear):
    """Rows split over the tensor-parallel ranks."""

    recorder: Recorder
    splits = "rows"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp_size = 1 if self.explicit_expert_comm else self.tp_group.size()

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias if the caller adds it."""
        bias = None if self.skip_bias_add else self.bias
        out = Linear.apply(self.recorder, self, x, self.weight, bias)
        return out, self.bias if self.skip_bias_add else None


class FusedWholeLinear(torch.nn.Module):
    """A weight that every tensor-parallel rank holds completely; each multiplies its part of the sequence."""

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
    """The same linear layer of every expert on this rank, as one kernel."""

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
        """The products, and the biases if the caller adds them."""
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
    """The modules of megatron-core's specs, each bound to the recorder.

    Args:
        recorder: records the kernels.
        tensor_group: for linears that get no group from megatron-core.
    """

    def __init__(self, recorder: Recorder, tensor_group: Any) -> None:
        def bound(module: type) -> type:
            return type(module.__name__, (module,), {"recorder": recorder, "tensor_group": tensor_group})

        self.norm = bound(FusedNorm)
        self.duplicated = bound(FusedWholeLinear)
        self._columns, self._norm_columns, self._rows = map(bound, (FusedColumnLinear, FusedNormLinear, FusedRowLinear))
        self._attention = bound(FusedAttention)
        self._grouped = MLPSubmodules(linear_fc1=bound(FusedGroupedColumns), linear_fc2=bound(FusedGroupedRows))

    def __call__(self) -> FusedSpecs:
        """megatron-core makes an instance where it needs one."""
        return self

    def linear(self) -> type:
        """A linear whose weight is not split."""
        return self.duplicated

    def column_parallel_linear(self) -> type:
        """Columns split."""
        return self._columns

    def row_parallel_linear(self) -> type:
        """Rows split."""
        return self._rows

    def fuse_layernorm_and_linear(self) -> bool:
        """True: one module holds both, and megatron-core asks for it."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """A norm and columns split."""
        return self._norm_columns

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """A norm without product."""
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


@contextlib.contextmanager
def fused_kernels(recorder: Recorder, tensor_group: Any) -> Iterator[None]:
    """Build and run models inside the block as if Transformer Engine were installed.

    Args:
        tensor_group: for linears that get no group from megatron-core.
    """
    if not transformer_engine_is_installed():
        repair_imports()
    specs = FusedSpecs(recorder, tensor_group)
    stock_config, stock_moe = stage_config.transformer_config, stage_config._moe_fields
    replacements: list[tuple[Any, str, Any]] = [
        (gpt_layer_specs, "TESpecProvider", specs),
        (multi_latent_attention, "TELinear", specs.duplicated),
        (transformer_engine, "TENorm", specs.norm),
        (transformer_engine, "TEColumnParallelLinear", specs.column_parallel_linear()),
        (model_builder, "uses_transformer_engine", lambda: True),
        (model_builder, "transformer_engine_is_installed", lambda: True),
        (model_builder, "_block_norm", lambda: specs.norm),
        (model_builder, "transformer_config", lambda *args: with_fusions(stock_config(*args))),
        (stage_config, "_moe_fields", lambda *args: stock_moe(*args) | {"moe_grouped_gemm": True}),
        (layers, "fused_weight_gradient_mlp_cuda", _weight_gradients(recorder)),
        (torch.nn.functional, "dropout", _dropout),
        (rope_utils, "fused_apply_rotary_pos_emb", _rotary(recorder)),
        (YarnRotaryEmbedding, "get_cached_cos_sin", _angles),
        *((multi_latent_attention, name, value) for name, value in _latent_rotary(recorder).items()),
        *((moe_utils, name, value) for name, value in _moe_functions(recorder).items()),
        *((token_dispatcher, name, value) for name, value in flex_functions(recorder).items()),
        (token_dispatcher._DeepepManager, "_indices_to_multihot", _multihot(recorder)),
        *_compiled(recorder),
    ]
    with replaced(replacements):
        yield


def with_fusions(tc: Any) -> Any:
    """The fusions that upstream turns on with Transformer Engine; its own checks would require the library."""
    changed = tc.activation_func_clamp_value is not None or tc.glu_linear_offset != 0
    gated_silu = tc.gated_linear_unit and tc.activation_func is torch.nn.functional.silu and not changed
    gated_quick = tc.gated_linear_unit and tc.activation_func.__name__ == "quick_gelu"
    if gated_quick:
        # megatron-core tests for the identity of this function, which is replaced here.
        tc.activation_func = moe_experts.quick_gelu
    gelu = tc.activation_func is torch.nn.functional.gelu and not tc.num_moe_experts
    tc.bias_activation_fusion = gated_silu or gated_quick or (gelu and (tc.gated_linear_unit or tc.add_bias_linear))
    tc.bias_dropout_fusion = not (tc.num_moe_experts and tc.add_bias_linear)
    tc.apply_rope_fusion = not tc.multi_latent_attention or tc.rope_type == "yarn"
    tc.moe_permute_fusion = True
    return tc


def accumulate_in_products(model: Any) -> None:
    """Make the output layer, megatron-core's own class, add its weight gradient in the product, as the fused linears do."""
    model.output_layer.gradient_accumulation_fusion = True


def _weight_gradients(recorder: Recorder) -> Any:
    """The extension that megatron-core's linears call for their weight gradients."""

    def accumulate(operand: Tensor, gradient: Tensor, main_gradient: Tensor) -> None:
        recorder.kernel("te.weight_gradient", lambda *_: None, gradient, operand, written=(main_gradient,))

    return SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """On a GPU the kernel saves a mask of one byte per element; on a CPU it saves one in the format of the input."""
    assert not inplace, "megatron-core drops in place nowhere"
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _rotary(recorder: Recorder) -> Callable[..., Tensor]:
    def rotate(x_SBHD: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
        return Rotary.apply(recorder, x_SBHD, table)  # type: ignore[no-any-return]

    return rotate


def _angles(rotary: YarnRotaryEmbedding, tokens: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stand in for both tables of angles: they have one size, and nothing reads their values here."""
    table, _scale = rotary.forward(tokens)
    return table, table


def _latent_rotary(recorder: Recorder) -> dict[str, Any]:
    """megatron-core's own kernels for latent attention with YaRN positions, by their names there."""

    def queries(q_SBHD: Tensor, cosines: Tensor, _sines: Tensor, _width: int, rotated: int, *_: Any) -> Tensor:
        return LatentQueryRotary.apply(recorder, q_SBHD, cosines, rotated)  # type: ignore[no-any-return]

    def keys(
        kv_SBHD: Tensor,
        shared: Tensor,
        cosines: Tensor,
        _sines: Tensor,
        _rotated: int,
        _width: int,
        values: int,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        return LatentKeyRotary.apply(recorder, kv_SBHD, shared, cosines, values)  # type: ignore[no-any-return]

    return {"fused_apply_mla_rope_for_q": queries, "fused_apply_mla_rope_for_kv": keys}


def _multihot(recorder: Recorder) -> Callable[..., tuple[Tensor, Tensor]]:
    def multihot(manager: Any, choices: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return Multihot.apply(recorder, choices, scores, manager.num_local_experts)  # type: ignore[no-any-return]

    return multihot


def _moe_functions(recorder: Recorder) -> dict[str, Any]:
    """Transformer Engine's functions, by their names in megatron-core's moe_utils.py."""

    def row_map(shape: tuple[int, ...], *of: Tensor) -> Tensor:
        return recorder.kernel("te.row_map", lambda *_: torch.empty(shape, dtype=torch.int32), *of)  # type: ignore[no-any-return]

    def routed(routing_map: Tensor, num_out_tokens: Any) -> tuple[Tensor, int]:
        """The map of rows of a routing map [tokens, experts], and the number of rows it selects, if megatron-core knows it."""
        tokens, experts = routing_map.shape
        assert recorder.rows_of_map is not None, "there are no experts"
        count = num_out_tokens if isinstance(num_out_tokens, int) else recorder.rows_of_map(experts, tokens)
        return row_map((tokens, 2 * experts + 1), routing_map), count

    def permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: Any) -> tuple[Tensor, Tensor]:
        rows, count = routed(routing_map, num_out_tokens)
        return MoveRows.apply(recorder, tokens, None, rows, count)[0], rows

    def permute_with_probs(
        tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, count = routed(routing_map, num_out_tokens)
        return *MoveRows.apply(recorder, tokens, probs, rows, count), rows

    def unpermute(permuted: Tensor, rows: Tensor, merging_probs: Any = None, restore_shape: Any = None) -> Tensor:
        assert merging_probs is None, "the experts apply the scores"
        return MoveRows.apply(recorder, permuted, None, rows, restore_shape[0])[0]  # type: ignore[no-any-return]

    def sort_chunks(rows_TH: Tensor, *_: Any) -> Tensor:
        rows = row_map((rows_TH.shape[0],))
        return MoveRows.apply(recorder, rows_TH, None, rows, rows_TH.shape[0])[0]  # type: ignore[no-any-return]

    def sort_chunks_with_probs(rows_TH: Tensor, probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        rows = row_map((rows_TH.shape[0],))
        return MoveRows.apply(recorder, rows_TH, probs, rows, rows_TH.shape[0])  # type: ignore[no-any-return]

    def general_gemm(
        first: Tensor, second: Tensor, dtype: torch.dtype, layout: str, bias: Any = None, grad: bool = False
    ) -> tuple[Tensor]:
        """`TN`: second times first, transposed; `NN`: second times first; `NT`: second, transposed, times first."""
        sizes = {
            "TN": (second.shape[0], first.shape[0], first.shape[-1]),
            "NN": (second.shape[0], first.shape[1], first.shape[0]),
            "NT": (second.shape[1], first.shape[1], first.shape[0]),
        }[layout]
        out = recorder.kernel(
            "te.general_gemm", lambda *_: torch.empty(sizes[:2], dtype=dtype), first, second, shape=sizes
        )
        return (out,)

    return {
        "HAVE_TE": True,
        "fused_permute": permute,
        "fused_permute_with_probs": permute_with_probs,
        "fused_unpermute": unpermute,
        "fused_sort_chunks_by_index": sort_chunks,
        "fused_sort_chunks_by_index_with_probs": sort_chunks_with_probs,
        "te_general_gemm": general_gemm,
    }


def _compiled(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Every function of megatron-core that torch compiles on a GPU, in every module or class that refers to it."""
    functions: list[tuple[Any, str, Any]] = []
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core")]
    classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    # One wrapper per function: megatron-core compares functions.
    kernels: dict[Any, Callable[..., Any]] = {}
    for owner in dict.fromkeys([*modules, *classes]):
        for name, value in list(vars(owner).items()):
            if inspect.isfunction(value) and getattr(value, "is_compiled_on_cuda", False):
                functions.append((owner, name, kernels.setdefault(value, _as_one_kernel(value, recorder))))
    return functions


def _as_one_kernel(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    name = f"compiled.{function.__name__}"

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return recorder.kernel(name, functools.partial(function, **kwargs), *args, compiled=True)

    return run
