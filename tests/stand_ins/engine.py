"""A package with the interface of Transformer Engine 2.20, installed before megatron-core is imported.

megatron-core's own modules, specs and quantization contexts then run on the CPU. Signatures, and when weights are quantized, are
those that the wheel's Python sources state; an argument that they do not know is a TypeError. Numbers are torch's. In a context
of a recipe the operands of a product are rounded to 8 bits by the recipe's blocks, and the product itself runs in the weights'
type: nothing here shows what a kernel computes. Linears hold no shares of tensor ranks.

`Log` keeps what the package has seen: contexts, calls of modules, and for which of them a weight was quantized.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.stand_ins.engine_recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.transformer_engine_stand_in import WeightGradStore, left_in_place_of_a_sum

VERSION = "2.20.2"


@dataclass(frozen=True)
class Call:
    """A call of a module, and the context that it stands in.

    Attributes:
        recipe: class name of the recipe of the context around it; None outside of one.
        depth: contexts that it stands in.
        quantizes: whether it quantized its weights anew.
        phase: "forward", or with the recomputation of it announced: "first", "again".
    """

    kind: str
    recipe: str | None
    depth: int
    quantizes: bool
    phase: str


class Log:
    """The contexts, calls and products that the package has seen."""

    entered: ClassVar[list[tuple[str, str, object]]] = []
    """Recipe, format and group of every context."""
    calls: ClassVar[list[Call]] = []
    built: ClassVar[list[bool]] = []
    """For every product that was built: whether its weights were asked for in 8 bits."""

    @classmethod
    def clear(cls) -> None:
        """Forget."""
        cls.entered.clear()
        cls.calls.clear()
        cls.built.clear()


class FP8GlobalStateManager:
    """The contexts of this process."""

    contexts: ClassVar[list[Any]] = []
    phases: ClassVar[list[str]] = []
    weights_in_8_bits = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether the innermost context quantizes."""
        return bool(cls.contexts) and cls.contexts[-1] is not None

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """The recipe of the innermost context."""
        return cls.contexts[-1] if cls.contexts else None


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Products inside are computed by the recipe."""
    assert not calibrating and not _graph and (fp8_recipe is not None or not enabled)
    if enabled:
        Log.entered.append((type(fp8_recipe).__name__, fp8_recipe.fp8_format.name, fp8_group))
    FP8GlobalStateManager.contexts.append(fp8_recipe if enabled else None)
    try:
        yield
    finally:
        FP8GlobalStateManager.contexts.pop()


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Products built inside hold their weights in 8 bits; here they are noted, and hold them as ever."""
    FP8GlobalStateManager.weights_in_8_bits = enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.weights_in_8_bits = False


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """The first or the second pass of what is computed twice."""
    assert activation_recompute
    FP8GlobalStateManager.phases.append("again" if recompute_phase else "first")
    try:
        yield
    finally:
        FP8GlobalStateManager.phases.pop()


def rounded(x: Tensor, recipe: Any, backward: bool = False) -> Tensor:
    """A tensor by way of the 8-bit type, by the recipe's scales."""
    to = recipe.fp8_format.value[backward]
    block = {Float8CurrentScaling: None, Float8BlockScaling: 128, MXFP8BlockScaling: 32}[type(recipe)]
    rows = x.reshape(1, -1) if block is None else x.reshape(-1, min(block, x.shape[-1]))
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30).float()
    scale = torch.finfo(to).max / largest
    if block == 32:
        scale = torch.exp2(scale.log2().floor())
    return ((rows.float() * scale).to(to).float() / scale).to(x.dtype).view_as(x)


class _Rounded(torch.autograd.Function):
    """An operand: rounded forward, its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: Any) -> Tensor:
        return rounded(x, recipe)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _RoundedGradient(torch.autograd.Function):
    """A result, whose gradient is rounded before the products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, recipe: Any) -> Tensor:
        ctx.recipe = recipe
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return rounded(gradient, ctx.recipe, backward=True), None


class _Product(torch.autograd.Function):
    """x · Wᵀ of one or several weights; the weights' gradients in the backward pass, or left in the module's store.

    A module that fuses adds them to the main gradients itself; those of its first call in a step overwrite them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        splits: Sequence[int],
        is_first: bool,
        x: Tensor,
        operands: list[Tensor],
        *weights: Tensor,
    ) -> Tensor:
        ctx.module, ctx.splits, ctx.is_first, ctx.operands = module, list(splits), is_first, operands
        ctx.save_for_backward(x)
        parts = x.split(ctx.splits) if splits else (x,)
        return torch.cat([part.matmul(weight.t()) for part, weight in zip(parts, operands, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        module, is_first = ctx.module, ctx.is_first
        dys, xs = (gradient.split(ctx.splits), x.split(ctx.splits)) if ctx.splits else ((gradient,), (x,))
        dx = torch.cat([dy.matmul(weight) for dy, weight in zip(dys, ctx.operands, strict=True)])

        def weight_gradients() -> list[Tensor | None]:
            rows = (
                (dy.reshape(-1, dy.shape[-1]), part.reshape(-1, part.shape[-1]))
                for dy, part in zip(dys, xs, strict=True)
            )
            gradients = [dy.t().matmul(part) for dy, part in rows]
            if not module.fuse_wgrad_accumulation:
                return list(gradients)
            for weight, dw in zip(module.weights(), gradients, strict=True):
                weight.main_grad.copy_(dw) if is_first else weight.main_grad.add_(dw)
            return list(gradients)

        found: list[Tensor | None] = [torch.full_like(w, torch.nan) if ctx.splits else None for w in module.weights()]
        if module.wgrad_store.delay_wgrad_compute():
            module.wgrad_store.context.put(weight_gradients)
        else:
            found = weight_gradients()
        if module.fuse_wgrad_accumulation:
            found = [left_in_place_of_a_sum(weight) for weight in module.weights()]
        return (None, None, None, dx, None, *found)


class _Products(torch.nn.Module):
    """Weights [O, I], one per product, and their copies in 8 bits.

    `is_first_microbatch` as the library reads it: None quantizes the weights at every call; True quantizes them and keeps the
    copies; False takes the copies that are kept, however the weights have changed since.
    """

    def __init__(self, names: Sequence[str], shape: tuple[int, int], options: dict[str, Any]) -> None:
        super().__init__()
        assert options["tp_size"] == 1 and not options["bias"]
        delay = options["delay_wgrad_compute"]
        if "save_original_input" in options:
            self.save_original_input = options["save_original_input"]
        self.fuse_wgrad_accumulation = options["fuse_wgrad_accumulation"]
        self.wgrad_store = WeightGradStore(delay)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.copies: list[Tensor] | None = None
        Log.built.append(FP8GlobalStateManager.weights_in_8_bits)
        tracker, tracked = options["get_rng_state_tracker"], options.get("rng_tracker_name")
        for name in names:
            weight = torch.nn.Parameter(torch.empty(*shape, dtype=options["params_dtype"]))
            fork = contextlib.nullcontext()
            if tracker is not None:
                fork = tracker().fork(tracked) if tracked else tracker().fork()
            with fork:
                options["init_method"](weight)
            if delay:
                weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
            self.register_parameter(name, weight)
        self.names = list(names)

    def weights(self) -> list[Any]:
        """One for each product."""
        return [getattr(self, name) for name in self.names]

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Any) -> None:
        """Take a hook that is called when gradients are there."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward pass."""
        if not self.wgrad_store.delay_wgrad_compute():
            return
        assert self.wgrad_store.context is not None
        if self.wgrad_store.context.empty():
            raise RuntimeError("Pop empty queue.")
        for weight, gradient in zip(self.weights(), self.wgrad_store.context.get()(), strict=True):
            if not self.fuse_wgrad_accumulation:
                weight.grad = gradient
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def product(self, x: Tensor, splits: Sequence[int], is_first_microbatch: bool | None) -> Tensor:
        """x · Wᵀ by the innermost context."""
        weights, is_first = self.weights(), is_first_microbatch is True
        state = FP8GlobalStateManager
        recipe = state.get_fp8_recipe()
        quantizes = recipe is not None and (is_first_microbatch is not False or self.copies is None)
        phase = state.phases[-1] if state.phases else "forward"
        name = type(recipe).__name__ if recipe is not None else None
        Log.calls.append(Call(type(self).__name__, name, len(state.contexts), quantizes, phase))
        if recipe is None or isinstance(recipe, DelayedScaling):
            return _Product.apply(self, splits, is_first, x, [weight.detach() for weight in weights], *weights)
        rows = x.reshape(-1, x.shape[-1]).shape[0]
        block = 32 if isinstance(recipe, MXFP8BlockScaling) else 16
        assert all(size % block == 0 for size in (*(splits or [rows]), *weights[0].shape)), (
            splits or rows,
            weights[0].shape,
        )
        copies = self.copies
        if quantizes:
            copies = [rounded(weight.detach(), recipe) for weight in weights]
            self.copies = copies if is_first_microbatch is not None else None
        y = _Product.apply(self, splits, is_first, _Rounded.apply(x, recipe), copies, *weights)
        return _RoundedGradient.apply(y, recipe)


class Linear(_Products):
    """transformer_engine.pytorch.Linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(["weight"], (out_features, in_features), locals())

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        """[…, I] -> […, O]."""
        return self.product(inp, [], is_first_microbatch)


class GroupedLinear(_Products):
    """transformer_engine.pytorch.GroupedLinear."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__([f"weight{index}" for index in range(num_gemms)], (out_features, in_features), locals())
        self.num_gemms = num_gemms

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Any = None,
        dgrad_out: Any = None,
    ) -> Tensor:
        """[T, I] -> [T, O]."""
        assert sum(m_splits) == inp.shape[0]
        return self.product(inp, m_splits, is_first_microbatch)


class LayerNormLinear(_Products):
    """transformer_engine.pytorch.LayerNormLinear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(["weight"], (out_features, in_features), locals())
        assert normalization == "RMSNorm" and not zero_centered_gamma
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        """[…, I] -> […, O] of the normed input."""
        normed = F.rms_norm(inp, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return self.product(normed, [], is_first_microbatch)


class RMSNorm(torch.nn.Module):
    """transformer_engine.pytorch.RMSNorm."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert normalized_shape is None and hidden_size is not None and set(kwargs) <= {"device"}
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(input, self.weight.shape, self.weight, self.eps)


class DotProductAttention(torch.nn.Module):
    """transformer_engine.pytorch.DotProductAttention: causal, whole heads, no dropout."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attn_mask_type == "causal" and not attention_dropout

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        """[S, B, heads, channels] -> [S, B, heads · channels]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(*query_layer.shape[:2], -1)


class Fp8Padding(torch.nn.Module):
    """Pads the rows of each product to whole blocks of the recipe of the first call."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """Padded rows, and how many each product has."""
        if self.align_size is None:
            self.align_size = 32 if isinstance(FP8GlobalStateManager.get_fp8_recipe(), MXFP8BlockScaling) else 16
        sizes = [-(-rows // self.align_size) * self.align_size for rows in m_splits]
        parts = zip(inp.split(m_splits), m_splits, sizes, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, size - rows)) for part, rows, size in parts]), sizes


class Fp8Unpadding(torch.nn.Module):
    """Takes the padding out again."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """The rows that are no padding."""
        if self.align_size is None:
            self.align_size = 32 if isinstance(FP8GlobalStateManager.get_fp8_recipe(), MXFP8BlockScaling) else 16
        sizes = [-(-rows // self.align_size) * self.align_size for rows in m_splits]
        return torch.cat([part[:rows] for part, rows in zip(inp.split(sizes), m_splits, strict=True)])


class _Named:
    """A class that megatron-core asks for by name alone."""


class QuantizedTensor(torch.Tensor):
    """The base of weights in 8 bits; no weight here is one."""


def contents() -> dict[str, dict[str, Any]]:
    """The package: path of a module in it -> its names."""
    tracker = type("CudaRNGStatesTracker", (), {})
    fp8 = {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": fp8_autocast}
    recipes = (Format, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
    modules = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention, Fp8Padding, Fp8Unpadding)
    return {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": {recipe.__name__: recipe for recipe in recipes},
        "pytorch": {module.__name__: module for module in modules}
        | {"fp8_autocast": fp8_autocast, "fp8_model_init": fp8_model_init, "LayerNorm": _Named},
        "pytorch.fp8": fp8,
        "pytorch.distributed": {
            "activation_recompute_forward": activation_recompute_forward,
            "CudaRNGStatesTracker": tracker,
        },
        "pytorch.tensor": {"QuantizedTensor": QuantizedTensor},
        "pytorch.router": dict.fromkeys(
            ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
        ),
        "pytorch.ops": dict.fromkeys(("Sequential", "FusibleOperation"), _Named),
    }


def install() -> None:
    """Install the package in this process. Before megatron-core is imported, which asks for it once."""
    assert "megatron.core" not in sys.modules, "megatron-core has been imported without Transformer Engine"
    for path, content in contents().items():
        name = f"transformer_engine.{path}".rstrip(".")
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[], __spec__=ModuleSpec(name, None, is_package=True))
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
