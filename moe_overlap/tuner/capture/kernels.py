"""The one table of kernel costs: operators whose cost is more than moved bytes, and kernels that torch does not know.

An operator of torch that is not listed reads its inputs and writes its outputs once. A custom kernel (of another library, or a
stand-in for one of Transformer Engine's) must be listed: its cost class, how its shape follows from its arguments, its FLOPs,
and what it saves for the backward pass. No torch here: arguments are anything with a `shape`.

Legend: M rows, N columns, K inner width, E groups; B samples, S tokens, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_overlap.tuner.capture.expression import Expression, smallest
from moe_overlap.tuner.capture.graph import CostClass

Shape = tuple[int, ...]
ShapeOf = Callable[[Sequence[Any], Sequence[Any]], Shape]
"""Tensor arguments, outputs -> the shape of an `Op`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An entry of the table.

    Attributes:
        cost_class: its cost curve in the cost model.
        shape: computes the shape of its `Op`; None: the number of elements written.
        products: for an attention kernel, products of query and key width, and of value width, per pair of tokens.
        saves: the tensors saved for its backward kernel, as text for readers; empty for torch's own operators.
    """

    cost_class: CostClass
    shape: ShapeOf | None = None
    products: tuple[int, int] = (1, 1)
    saves: str = ""


class UnregisteredKernelError(LookupError):
    """The model runs a kernel that is not in the table."""

    def __init__(self, name: str, place: str) -> None:
        super().__init__(
            f"kernel {name} in {place or 'the model'} is not registered; "
            "add its cost to moe_overlap/tuner/capture/kernels.py"
        )


def _product(first: int, second: int) -> ShapeOf:
    """[M, K] times [K, N], at these positions among the tensor arguments."""
    return lambda tensors, outputs: (
        (*tensors[first].shape, tensors[second].shape[1])[0:3:2] + (tensors[first].shape[1],)
    )


def _batched_product(first: int, second: int) -> ShapeOf:
    """[E, M, K] times [E, K, N]: E groups, E · M rows in all."""

    def shape(tensors: Sequence[Any], outputs: Sequence[Any]) -> Shape:
        groups, rows, inner = tensors[first].shape
        return (groups, groups * rows, tensors[second].shape[2], inner)

    return shape


def _grouped_product(tensors: Sequence[Any], outputs: Sequence[Any]) -> Shape:
    """Rows [M, K] times weights [E, K, N], or rows [M, K] transposed times rows [M, N] (weight gradients, E groups)."""
    first, second = tensors[0].shape, tensors[1].shape
    if len(second) == 3:
        return (second[0], first[0], second[2], second[1])
    return (outputs[0].shape[0], first[1], second[1], first[0])


def _attention(tensors: Sequence[Any], outputs: Sequence[Any]) -> Shape:
    """Query, key, value [B, H | G, S, D] in this order among the tensors."""
    query, key, value = (tensor.shape for tensor in tensors[:3])
    return (query[0], query[1], key[1], query[2], key[2], query[3], value[3], 0)


def _attention_backward(tensors: Sequence[Any], outputs: Sequence[Any]) -> Shape:
    """The gradient comes first."""
    return _attention(tensors[1:], outputs)


def _weight_gradient(tensors: Sequence[Any], outputs: Sequence[Any]) -> Shape:
    """Gradient [M, N] and input [M, K] give [N, K]."""
    gradient, rows = tensors[0].shape, tensors[1].shape
    return (gradient[1], rows[1], gradient[0])


KERNELS: dict[str, Kernel] = {
    "mm": Kernel(cost_class="gemm", shape=_product(0, 1)),
    "addmm": Kernel(cost_class="gemm", shape=_product(1, 2)),
    "bmm": Kernel(cost_class="grouped_gemm", shape=_batched_product(0, 1)),
    "baddbmm": Kernel(cost_class="grouped_gemm", shape=_batched_product(1, 2)),
    "_grouped_mm": Kernel(cost_class="grouped_gemm", shape=_grouped_product),
    "_scaled_dot_product_flash_attention_for_cpu": Kernel(cost_class="attention", shape=_attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Kernel(
        cost_class="attention", shape=_attention_backward, products=(3, 2)
    ),
    # Stand-ins for Transformer Engine's kernels (fused_functions.py).
    "te.norm": Kernel(cost_class="memory", saves="input, one or two statistics per row in fp32"),
    "te.norm_backward": Kernel(cost_class="memory"),
    "te.add_bias": Kernel(cost_class="memory"),
    "te.weight_gradient": Kernel(cost_class="gemm", shape=_weight_gradient),
    "te.grouped_gemm": Kernel(cost_class="grouped_gemm", saves="rows in, weights"),
    "te.grouped_weight_gradient": Kernel(cost_class="grouped_gemm"),
    "te.attention": Kernel(cost_class="attention", saves="query, key, value, output, log-sums in fp32"),
    "te.attention_backward": Kernel(cost_class="attention", products=(3, 2)),
    "te.rotary": Kernel(cost_class="memory", saves="the table"),
    "latent.rotary_queries": Kernel(cost_class="memory", saves="the table"),
    "latent.rotary_keys": Kernel(cost_class="memory", saves="the table"),
    "te.move_rows": Kernel(cost_class="memory", saves="the map of rows"),
    "te.row_map": Kernel(cost_class="memory"),
    "te.general_gemm": Kernel(cost_class="gemm"),
    "te.bias_gradients": Kernel(cost_class="memory"),
    # Stand-ins for the all-to-alls of the flex dispatcher (fused_functions.py).
    "deepep.layout": Kernel(cost_class="memory"),
    "deepep.dispatch": Kernel(cost_class="collective", saves="places of tokens and rows"),
    "deepep.combine": Kernel(cost_class="collective", saves="places of tokens and rows"),
    "deepep.multihot": Kernel(cost_class="memory", saves="choices of the received rows"),
    "hybridep.layout": Kernel(cost_class="memory"),
    "hybridep.dispatch": Kernel(cost_class="collective", saves="places of tokens, rows of the experts"),
    "hybridep.combine": Kernel(cost_class="collective", saves="places of tokens, rows of the experts"),
}
"""Operator of torch, or registered kernel -> its cost."""

FORWARD_ONLY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_")
"""Operators that take memory and write nothing."""
GATHERS = ("index_select", "gather", "embedding", "index", "masked_select")
"""Operators that read only the part of their first argument that they return."""


def flops(kernel: str, shape: Sequence[Expression]) -> Expression:
    """Multiplications and additions of a kernel of this shape; 0 if memory or links bound it.

    Attention is causal: half of the square of query and key tokens, less if a window cuts it.
    """
    entry = KERNELS.get(kernel)
    if entry is None or entry.cost_class in ("memory", "collective"):
        return Expression()
    if entry.cost_class == "gemm":
        m, n, k = shape
        return 2 * m * n * k
    if entry.cost_class == "grouped_gemm":
        _, rows, n, k = shape
        return 2 * rows * n * k
    batch, heads, _, query, key, width, value_width, window = shape
    visible = key if not window.terms else smallest(key, window)
    # Row i of the whole sequence sees min(i, window) keys; a rank of a context-parallel group has its share of the rows.
    pairs = (visible * key - visible * visible / 2) * _share(query, key)
    first, second = entry.products
    return 2 * batch * heads * pairs * (first * width + second * value_width)


def _share(query: Expression, key: Expression) -> Expression:
    """Query tokens over key tokens, a constant."""
    ((monomial, part),) = query.terms
    # Without a kernel of their own, sinks are among the keys: s + 1 of them.
    return Expression.of(part / dict(key.terms)[monomial])
