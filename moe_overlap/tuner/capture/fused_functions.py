"""Stand-ins for the fused kernels of Transformer Engine: what each reads, writes and keeps for its backward pass; no arithmetic.

Every kernel is announced to the recorder under its name in `kernels.py`; outputs are tensors of the right size without values.

Legend: S this rank's tokens, B samples, H heads, G key/value heads, D head width; T rows, E experts; M rows, N columns, K width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.tuner.capture.record import Recorder


class Norm(torch.autograd.Function):
    """LayerNorm or RMSNorm: keeps its input and the statistics of every row."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise the last axis."""
        out, *statistics = recorder.kernel("te.norm", _norm, x, weight, bias)
        ctx.recorder, ctx.has_bias = recorder, bias is not None
        ctx.save_for_backward(x, weight, *statistics)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of input and weights."""
        dx, dweight, dbias = _norm_backward(ctx.recorder, gradients[0], *ctx.saved_tensors, has_bias=ctx.has_bias)
        return None, dx, dweight, dbias


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    rows = x.shape[:-1].numel()
    count = 1 if bias is None else 2
    return torch.empty_like(x), *(torch.empty(rows, dtype=torch.float32) for _ in range(count))


def _norm_backward(
    recorder: Recorder, dy: Tensor, x: Tensor, weight: Tensor, *statistics: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    def gradients(*_: Tensor) -> tuple[Tensor, ...]:
        return torch.empty_like(x), torch.empty_like(weight), *([torch.empty_like(weight)] if has_bias else [])

    dx, dweight, *dbias = recorder.kernel("te.norm_backward", gradients, dy, x, weight, *statistics)
    return dx, dweight, dbias[0] if dbias else None


class Linear(torch.autograd.Function):
    """A product with a sharded weight, perhaps behind a norm; the weight's gradient is added to `main_grad` in the product.

    The normed input is kept, under sequence parallelism only this rank's part: it is gathered again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, linear: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *norm: Tensor
    ) -> Tensor:
        """Communicate, multiply, communicate.

        Args:
            linear: says how: `norm_weights`, `splits` (`columns`, `rows` or nothing), `sequence_parallel`, `tp_group`.
            norm: weight, and bias where there is one, of the norm in front.
        """
        statistics: tuple[Tensor, ...] = ()
        normed = x
        if norm:
            normed, *kept = recorder.kernel("te.norm", _norm, x, norm[0], norm[1] if len(norm) > 1 else None)
            statistics = tuple(kept)
        whole = _gather(normed, linear) if linear.splits == "columns" and linear.sequence_parallel else normed
        out = torch.mm(whole.view(-1, whole.shape[-1]), weight.t())
        if bias is not None:
            out = recorder.kernel("te.add_bias", lambda o, b: torch.empty_like(o), out, bias)
        out = out.view(*whole.shape[:-1], -1)
        if linear.splits == "rows":
            out = _scatter(out, linear) if linear.sequence_parallel else _sum(out, linear)
        ctx.recorder, ctx.linear, ctx.bias = recorder, linear, bias is not None
        ctx.norms, ctx.main_gradient = len(norm), weight.main_grad
        ctx.save_for_backward(normed, weight, *((x, norm[0], *statistics) if norm else ()))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Input gradient, weight gradient under the reduce-scatter of the input gradient, norm."""
        normed, weight, *of_norm = ctx.saved_tensors
        linear, dy = ctx.linear, gradients[0]
        if linear.splits == "rows" and linear.sequence_parallel:
            dy = _gather(dy, linear)
        whole = _gather(normed, linear) if linear.splits == "columns" and linear.sequence_parallel else normed
        dy_MN, whole_MK = dy.reshape(-1, dy.shape[-1]), whole.reshape(-1, whole.shape[-1])
        dx = torch.mm(dy_MN, weight).view(whole.shape)
        if linear.splits == "columns":
            dx = _scatter(dx, linear) if linear.sequence_parallel else _sum(dx, linear)
        ctx.recorder.kernel("te.weight_gradient", _nothing, dy_MN, whole_MK, written=(ctx.main_gradient,))
        del whole, whole_MK
        dbias = dy_MN.sum(0) if ctx.bias else None
        dnorm: tuple[Any, ...] = ()
        if ctx.norms:
            dx, *dweights = _norm_backward(ctx.recorder, dx, *of_norm, has_bias=ctx.norms == 2)
            dnorm = tuple(dweights[: ctx.norms])
        return None, None, dx, None, dbias, *dnorm


def _nothing(*_: Tensor) -> None:
    """All is written in place."""


def _gather(part: Tensor, linear: Any) -> Tensor:
    if linear.tp_size == 1:
        return part
    whole = part.new_empty((part.shape[0] * linear.tp_size, *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=linear.tp_group)
    return whole


def _scatter(whole: Tensor, linear: Any) -> Tensor:
    if linear.tp_size == 1:
        return whole
    part = whole.new_empty((whole.shape[0] // linear.tp_size, *whole.shape[1:]))
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=linear.tp_group)
    return part


def _sum(value: Tensor, linear: Any) -> Tensor:
    if linear.tp_size > 1:
        dist.all_reduce(value, group=linear.tp_group)
    return value


class GroupedLinear(torch.autograd.Function):
    """One product per expert in one kernel; keeps its input."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x_TK: Tensor, experts: int, *parameters: Tensor) -> Tensor:
        """Rows of every expert times its weight, transposed, and its bias added.

        Args:
            parameters: a weight [N, K] of each expert, then a bias [N] of each where there are biases.
        """
        weights_NK, biases_N = parameters[:experts], parameters[experts:]
        shape = (len(weights_NK), x_TK.shape[0], weights_NK[0].shape[0], x_TK.shape[1])
        out = recorder.kernel(
            "te.grouped_gemm", lambda x, *w: x.new_empty(shape[1], shape[2]), x_TK, *weights_NK, shape=shape
        )
        if biases_N:
            out = recorder.kernel("te.add_bias", lambda o, *b: torch.empty_like(o), out, *biases_N)
        ctx.recorder, ctx.main_gradients = recorder, tuple(weight.main_grad for weight in weights_NK)
        ctx.has_biases = bool(biases_N)
        ctx.save_for_backward(x_TK, *weights_NK)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Input gradients, then weight gradients."""
        x_TK, *weights_NK = ctx.saved_tensors
        dy_TN, groups = gradients[0], len(weights_NK)
        dx = ctx.recorder.kernel(
            "te.grouped_gemm",
            lambda *_: torch.empty_like(x_TK),
            dy_TN,
            *weights_NK,
            shape=(groups, x_TK.shape[0], x_TK.shape[1], dy_TN.shape[1]),
        )
        ctx.recorder.kernel(
            "te.grouped_weight_gradient",
            _nothing,
            dy_TN,
            x_TK,
            written=ctx.main_gradients,
            shape=(groups, x_TK.shape[0], dy_TN.shape[1], x_TK.shape[1]),
        )
        dbiases: tuple[Any, ...] = ()
        if ctx.has_biases:
            width = dy_TN.shape[1]
            dbiases = ctx.recorder.kernel(
                "te.bias_gradients", lambda dy: tuple(dy.new_empty(width) for _ in range(groups)), dy_TN
            )
        return None, dx, None, *(None for _ in weights_NK), *dbiases


class Attention(torch.autograd.Function):
    """Causal flash attention: keeps queries, keys, values, output and the log-sum of every row.

    Under context parallelism keys and values of all ranks pass by; they are gathered, which has the bytes of a ring.
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, core: Any, q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        """[S, B, H · D of the values]."""
        shape = _attention_shape(core, q_SBHD, k_SBGD, v_SBGD)
        keys, values = (_all_parts(x, core.context_group) for x in (k_SBGD, v_SBGD))

        def attend(q: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
            rows, samples, heads = q.shape[:3]
            return q.new_empty(rows, samples, heads * shape[6]), torch.empty(samples, heads, rows, dtype=torch.float32)

        out, row_sums = recorder.kernel("te.attention", attend, q_SBHD, keys, values, shape=shape)
        ctx.recorder, ctx.core, ctx.shape = recorder, core, shape
        ctx.save_for_backward(q_SBHD, k_SBGD, v_SBGD, out, row_sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of queries, keys and values; those of the queries are added up in fp32 on the way."""
        q, k, v, out, row_sums = ctx.saved_tensors
        group = ctx.core.context_group
        keys, values = (_all_parts(x, group) for x in (k, v))

        def gradients_of(*_: Tensor) -> tuple[Tensor, ...]:
            in_fp32 = torch.empty(q.shape, dtype=torch.float32)
            return *(torch.empty(x.shape, dtype=x.dtype) for x in (q, keys, values)), in_fp32

        dq, dk, dv, _ = ctx.recorder.kernel(
            "te.attention_backward", gradients_of, gradients[0], q, keys, values, out, row_sums, shape=ctx.shape
        )
        return None, None, dq, _own_part(dk, group), _own_part(dv, group)


def _attention_shape(core: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    parts = 1 if core.context_group is None else core.context_group.size()
    # A query sees itself and the tokens of the window before it.
    window = 0 if core.window is None else core.window + 1
    return (q.shape[1], q.shape[2], k.shape[2], q.shape[0], k.shape[0] * parts, q.shape[3], v.shape[3], window)


def _all_parts(x: Tensor, group: Any) -> Tensor:
    if group is None:
        return x
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _own_part(dx: Tensor, group: Any) -> Tensor:
    if group is None:
        return dx
    part = dx.new_empty((dx.shape[0] // group.size(), *dx.shape[1:]))
    dist.reduce_scatter_tensor(part, dx, group=group)
    return part


class Rotary(torch.autograd.Function):
    """Rotary positions in one kernel: keeps the table only."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x_SBHD: Tensor, table: Tensor) -> Tensor:
        """Rotate."""
        ctx.recorder = recorder
        ctx.save_for_backward(table)
        return recorder.kernel("te.rotary", _like_first, x_SBHD, table)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Rotate back."""
        (table,) = ctx.saved_tensors
        return None, ctx.recorder.kernel("te.rotary", _like_first, gradients[0], table), None


def _like_first(x: Tensor, *_: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


class LatentQueryRotary(torch.autograd.Function):
    """Rotary positions of latent attention's queries, turned in place: keeps the table only."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, q_SBHD: Tensor, table: Tensor, width: int) -> Tensor:
        """Rotate the last `width` columns of every head."""
        ctx.recorder, ctx.width = recorder, width
        ctx.save_for_backward(table)
        return _turned(recorder, q_SBHD, table, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Rotate back."""
        (table,) = ctx.saved_tensors
        return None, _turned(ctx.recorder, gradients[0], table, ctx.width), None, None


def _turned(recorder: Recorder, x_SBHD: Tensor, table: Tensor, width: int) -> Tensor:
    columns = x_SBHD.detach()[..., -width:]
    recorder.kernel("latent.rotary_queries", _nothing, columns, table, written=(columns,))
    return x_SBHD


class LatentKeyRotary(torch.autograd.Function):
    """Keys and values of latent attention from one product, and the rotated columns that all heads' keys share."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, kv_SBHD: Tensor, shared_SB1D: Tensor, table: Tensor, value_width: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, each in one piece."""
        ctx.recorder, ctx.shapes = recorder, (kv_SBHD.shape, shared_SB1D.shape)
        ctx.save_for_backward(table)
        *heads, width = kv_SBHD.shape

        def split(kv: Tensor, shared: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return kv.new_empty(*heads, width - value_width + shared.shape[-1]), kv.new_empty(*heads, value_width)

        return recorder.kernel("latent.rotary_keys", split, kv_SBHD, shared_SB1D, table)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of the product and of the shared columns."""
        (table,) = ctx.saved_tensors
        shapes = ctx.shapes

        def join(dk: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
            return tuple(dk.new_empty(shape) for shape in shapes)

        joined = ctx.recorder.kernel("latent.rotary_keys", join, *gradients, table)
        return None, *joined, None, None


class MoveRows(torch.autograd.Function):
    """Rows, and a score each, moved by a map of rows: permutation, its reverse, or sorting by expert. Keeps the map only."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, x_TH: Tensor, scores: Tensor | None, row_map: Tensor, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """To `rows` rows."""
        ctx.recorder, ctx.rows = recorder, x_TH.shape[0]
        ctx.score_shape = None if scores is None else scores.shape
        ctx.save_for_backward(row_map)
        moved, moved_scores = _move(recorder, x_TH, scores, row_map, rows, None)
        return moved, moved_scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Back to where they came from."""
        (row_map,) = ctx.saved_tensors
        scores = gradients[1] if ctx.score_shape is not None else None
        dx, dscores = _move(ctx.recorder, gradients[0], scores, row_map, ctx.rows, ctx.score_shape)
        return None, dx, dscores, None, None


def _move(
    recorder: Recorder, x_TH: Tensor, scores: Tensor | None, row_map: Tensor, rows: int, score_shape: Any
) -> tuple[Tensor, Tensor | None]:
    def move(x: Tensor, s: Tensor | None, _map: Tensor) -> tuple[Tensor, ...]:
        moved = x.new_empty(rows, x.shape[1])
        return (moved,) if s is None else (moved, s.new_empty(score_shape or (rows,)))

    moved, *moved_scores = recorder.kernel("te.move_rows", move, x_TH, scores, row_map)
    return moved, moved_scores[0] if moved_scores else None
