"""The call behind a key: torch's operator on tensors of the key's sizes.

The key of a memory-bound operator gives the elements written and the bytes moved; the difference determines the operands' shapes
(a smaller second operand is broadcast, a reduction reads more than it writes, …).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from moe_overlap.tuner.profile.database import Database, OperatorKey

Call = Callable[[], object]
FLUSHED_BYTES = 256 << 20
"""Bytes written between calls on a GPU, more than its second-level cache holds."""
BATCHES = 10


def call_seconds(call: Call, device: str, budget_seconds: float) -> float:
    """Seconds of one call.

    On a CPU the minimum over several batches of each batch's mean: other load on the machine only adds to it. Operands stay as
    warm as in a training step. On a GPU the median over single calls between events, with the cache flushed before each.

    Args:
        budget_seconds: about how long to measure.
    """
    return _cuda_seconds(call, budget_seconds) if device == "cuda" else _host_seconds(call, budget_seconds)


def _host_seconds(call: Call, budget_seconds: float) -> float:
    call()
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(1, int(budget_seconds / BATCHES / once))
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def _cuda_seconds(call: Call, budget_seconds: float) -> float:
    """Seconds of one call on a GPU. Not executed on hardware yet."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end_time = time.perf_counter() + budget_seconds
    while len(times) < 5 or (time.perf_counter() < end_time and len(times) < 200):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


INDEX_BYTES = 8
ROW = 128
"""Elements of a row if the key does not give them."""


def call_of(key: OperatorKey, device: str) -> Call:
    """The call to time, for a key that `can_be_measured`."""
    dtype: torch.dtype = getattr(torch, key.dtype)
    if key.kind == "gemm":
        return _product(key, dtype, device)
    if key.kind == "grouped_gemm":
        return _grouped_product(key, dtype, device)
    if key.kind == "attention":
        return _attention(key, dtype, device)
    return BUILDERS[key.kind](key, dtype, device)


def _product(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    """x · Wᵀ forward, g · W backward, gᵀ · x for the weight: operands have a linear layer's memory layout."""
    m, n, k = key.shape
    if key.direction == "forward":
        first, second = _filled((m, k), dtype, device), _filled((n, k), dtype, device).t()
    elif key.direction == "backward":
        first, second = _filled((m, k), dtype, device), _filled((k, n), dtype, device)
    else:
        first, second = _filled((k, m), dtype, device).t(), _filled((k, n), dtype, device)
    return lambda: torch.mm(first, second)


def _grouped_product(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    """One product per group, of equally many rows; one kernel for all on a GPU (not executed on hardware yet)."""
    groups, rows, n, k = key.shape
    rows_each = max(1, rows // groups)
    if key.direction == "weight_gradient":
        first, second = (
            _filled((groups, rows_each, n), dtype, device).mT,
            _filled((groups, rows_each, k), dtype, device),
        )
    else:
        first, second = _filled((groups, rows_each, k), dtype, device), _filled((groups, k, n), dtype, device)
    if device == "cuda":
        return lambda: torch.bmm(first, second)
    pairs = list(zip(first, second, strict=True))
    return lambda: [torch.mm(x, weight) for x, weight in pairs]


def _attention(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    """Causal attention. For backward only the backward pass is timed; a window is measured as the whole causal square."""
    batch, heads, kv_heads, queries, keys, qk, v, _ = key.shape
    needs_gradient = key.direction != "forward"
    query = _filled((batch, heads, queries, qk), dtype, device).requires_grad_(needs_gradient)
    keyed = _filled((batch, kv_heads, keys, qk), dtype, device).requires_grad_(needs_gradient)
    value = _filled((batch, kv_heads, keys, v), dtype, device).requires_grad_(needs_gradient)

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keyed, value, is_causal=queries == keys, enable_gqa=heads != kv_heads
        )

    if not needs_gradient:
        return forward
    result = forward()
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, (query, keyed, value), gradient, retain_graph=True)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if dtype == torch.bool:
        return torch.arange(_count(shape), device=device).remainder(2).bool().view(shape)
    if not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.rand(shape, dtype=torch.float32, device=device).add_(0.5).to(dtype)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _read_elements(key: OperatorKey, dtype: torch.dtype) -> int:
    """Number of elements of the operands, if they have the result's format."""
    written, moved = key.shape
    return max(1, round(moved / dtype.itemsize) - written)


Build = Callable[[OperatorKey, torch.dtype, str], Call]


def _unary(function: Callable[[Tensor], object]) -> Build:
    """An elementwise operator of one operand."""

    def build(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
        operand = _filled((key.shape[0],), dtype, device)
        return lambda: function(operand)

    return build


def _binary(function: Callable[[Tensor, Tensor], object]) -> Build:
    """An elementwise operator of two operands; if it moves too few bytes for two of full size, the second is broadcast."""

    def build(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
        written = key.shape[0]
        other = min(written, max(1, _read_elements(key, dtype) - written))
        while written % other:
            other -= 1
        first = _filled((written // other, other), dtype, device)
        second = _filled((other,), dtype, device) if other < written else _filled((1, written), dtype, device)
        return lambda: function(first, second)

    return build


def _reduced(function: Callable[[Tensor, int], object]) -> Build:
    """A reduction over the last dimension; over the first for few sums of many rows, as for a norm's weight."""

    def build(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
        written = key.shape[0]
        width = max(1, _read_elements(key, dtype) // written)
        columns = key.direction == "backward" and width > written > 1
        operand = _filled((width, written) if columns else (written, width), dtype, device)
        return lambda: function(operand, 0 if columns else -1)

    return build


def _rows(key: OperatorKey, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and their width, if the operator reads indices besides as many elements as it writes."""
    written, moved = key.shape
    indices = (moved - 2 * written * dtype.itemsize) // INDEX_BYTES
    width = max(1, written // indices) if indices > 0 else min(ROW, written)
    return max(1, written // width), width


def _by_rows(function: Callable[[Tensor, Tensor, Tensor], object]) -> Build:
    """An operator that picks, writes or adds rows by an index each; its arguments are the rows, the indices and other rows."""

    def build(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
        count, width = _rows(key, dtype)
        operand = _filled((count, width), dtype, device)
        index = torch.randperm(count, device=device)
        other = _filled((count, width), dtype, device)
        return lambda: function(operand, index, other)

    return build


def _softmax(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    operand = _filled((max(1, key.shape[0] // 8), min(8, key.shape[0])), dtype, device)
    if key.kind == "_softmax":
        return lambda: torch.softmax(operand, -1)
    result = torch.softmax(operand, -1)
    return lambda: torch._softmax_backward_data(operand, result, -1, dtype)


def _topk(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    """The two largest of every row; values and indices are written."""
    written, moved = key.shape
    rows = max(1, written // 4)
    read = moved / dtype.itemsize - written / 2 * (1 + INDEX_BYTES / dtype.itemsize)
    operand = _filled((rows, max(2, round(read / rows))), dtype, device)
    return lambda: torch.topk(operand, 2, dim=-1)


def _joined(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    count = max(1, key.shape[0] // 4)
    parts = [_filled((count,), dtype, device) for _ in range(4)]
    return lambda: torch.cat(parts)


def _picked(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    operand = _filled((2 * key.shape[0],), dtype, device)
    mask = _filled((2 * key.shape[0],), torch.bool, device)
    return lambda: operand[mask]


def _spread(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    """Masked writing of half the elements."""
    operand, mask = _filled((key.shape[0],), dtype, device), _filled((key.shape[0],), torch.bool, device)
    return lambda: operand.masked_fill(mask, 0)


def _zeros(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    return lambda: torch.zeros(key.shape[0], dtype=dtype, device=device)


def _converted(key: OperatorKey, dtype: torch.dtype, device: str) -> Call:
    """A copy in another format: from 4 bytes per element, or to another format of 4 bytes."""
    operand = _filled((key.shape[0],), torch.int32 if dtype == torch.float32 else torch.float32, device)
    return lambda: operand.to(dtype)


def _along_rows(rows: Tensor, index: Tensor) -> Tensor:
    return index[:, None].expand(-1, rows.shape[1])


BUILDERS: dict[str, Build] = {
    **{name: _unary(getattr(torch, name)) for name in ("neg", "exp", "cos", "sin", "rsqrt", "log", "clone")},
    "silu": _unary(torch.nn.functional.silu),
    "gelu": _unary(torch.nn.functional.gelu),
    "pow": _unary(lambda x: x.pow(2)),
    "rsub": _unary(lambda x: 1 - x),
    "slice_backward": _unary(lambda x: torch.zeros_like(x).copy_(x)),
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "bitwise_or": _binary(lambda x, y: x | y),
    "ge": _binary(torch.ge),
    "lt": _binary(torch.lt),
    "add_": _binary(lambda x, y: x.add_(y)),
    "sub_": _binary(lambda x, y: x.sub_(y)),
    "mul_": _binary(lambda x, y: x.mul_(y)),
    "div_": _binary(lambda x, y: x.div_(y)),
    "copy_": _binary(lambda x, y: x.copy_(y)),
    "silu_backward": _binary(torch.ops.aten.silu_backward),
    "sum": _reduced(lambda x, dim: x.sum(dim)),
    "mean": _reduced(lambda x, dim: x.mean(dim)),
    "max": _reduced(lambda x, dim: x.max(dim)),
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax,
    "topk": _topk,
    "cat": _joined,
    "masked_select": _picked,
    "masked_scatter": _spread,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "ones_like", "arange"), _zeros),
    "_to_copy": _converted,
    "index_select": _by_rows(lambda x, index, _: x.index_select(0, index)),
    "embedding": _by_rows(lambda x, index, _: torch.nn.functional.embedding(index, x)),
    "index": _by_rows(lambda x, index, _: x[index]),
    "index_put_": _by_rows(lambda x, index, other: x.index_put_((index,), other)),
    "index_add": _by_rows(lambda x, index, other: torch.index_add(x, 0, index, other)),
    "gather": _by_rows(lambda x, index, _: x.gather(0, _along_rows(x, index))),
    "scatter": _by_rows(lambda x, index, other: x.scatter(0, _along_rows(x, index), other)),
    "scatter_add_": _by_rows(lambda x, index, other: x.scatter_add_(0, _along_rows(x, index), other)),
    "embedding_dense_backward": _by_rows(lambda x, index, other: torch.zeros_like(x).index_add_(0, index, other)),
}


def measure_operators(
    database: Database,
    keys: Sequence[OperatorKey],
    seconds_each: float,
    measured: Callable[[OperatorKey], None] = lambda key: None,
) -> int:
    """Time every key that the database lacks, and store each at once.

    Args:
        seconds_each: approximate time for one key.
        keys: of kinds that `can_be_measured`.
        measured: called after each key, timed now or before.
    Returns:
        Number of timed keys.
    """
    device, count = database.device, 0
    if device.kind == "cpu":
        torch.set_num_threads(device.threads)
    for key in keys:
        if key not in database.operators:
            call = call_of(key, device.kind)
            database.add_operator(key, call_seconds(call, device.kind, seconds_each))
            count += 1
        measured(key)
    return count
