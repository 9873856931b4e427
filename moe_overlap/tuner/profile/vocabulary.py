"""Names of torch's operators, bound by bytes, that `measure/operators.py` can time; a test holds it to this list."""

from __future__ import annotations

from moe_overlap.tuner.profile.keys import PRODUCTS, OperatorKey

_MAKING = ("zeros", "zeros_like", "new_zeros", "ones_like", "arange")
_COMPARING = ("bitwise_or", "ge", "lt")
_COPYING = ("clone", "cat", "_to_copy", "copy_")
_INDEXING = ("index_select", "index", "index_put_", "gather", "scatter", "masked_select")
_ADDING = ("add", "sub", "mul", "add_", "sub_", "mul_", "sum")
_FLOATING = (
    *("neg", "exp", "cos", "sin", "rsqrt", "log", "silu", "gelu", "pow", "rsub", "slice_backward"),
    *("div", "div_", "silu_backward", "mean", "max", "_softmax", "_softmax_backward_data", "topk"),
    *("masked_scatter", "embedding", "index_add", "scatter_add_", "embedding_dense_backward"),
)
_ANY_FORMAT = (*_MAKING, *_COPYING, *_INDEXING)
BOUND_BY_BYTES = (*_ANY_FORMAT, *_COMPARING, *_ADDING, *_FLOATING)
FORMATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32")


def can_be_measured(key: OperatorKey) -> bool:
    """Whether `measure/operators.py` has a call for a key."""
    if key.kind in PRODUCTS:
        return key.dtype in FORMATS
    if key.dtype in FORMATS:
        return key.kind in (*_ANY_FORMAT, *_ADDING, *_FLOATING)
    return key.kind in (*_ANY_FORMAT, *_COMPARING) or (key.kind in _ADDING and key.dtype in INTEGERS)
