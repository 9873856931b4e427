"""Stand-ins for the fused kernels of Transformer Engine: they read, write and save the same tensors, and compute nothing.

Every kernel is reported to the recorder under its name in `kernels.py`; outputs are tensors of the right size without values.

First the all-to-alls of the flex dispatcher, DeepEP and HybridEP. Both send a token once to every rank that holds some of its
experts. DeepEP returns the received rows, and a permutation copies them for the experts; HybridEP writes each expert's rows
itself. Routing is balanced: a rank receives as much as it sends. Then norms, products, attention, rotary positions,
permutations.

Legend of the all-to-alls: T tokens, R rows sent or received, N rows of this rank's experts, H hidden size, K choices of a token,
E experts of the group, L experts of this rank, P ranks of the group.
Legend of the rest: S this rank's tokens, B samples, H heads, G key/value heads, D head width; T rows, E experts; M rows, N
columns, K width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.describe.model import expected_places
from moe_overlap.tuner.capture.graph import COPIES_PER
from moe_overlap.tuner.capture.record import Recorder
from moe_overlap.tuner.capture.stand_ins import StandInCounts


def sent_rows(tokens: int, choices: int, ranks: int) -> int:
    """Number of rows that a rank sends, including those to itself."""
    rows = tokens * round(COPIES_PER * expected_places(choices, ranks))
    assert rows % COPIES_PER == 0, "the sample batch makes no whole rows"
    return rows // COPIES_PER


@dataclass(frozen=True, slots=True)
class Route:
    """One dispatch of tokens; megatron-core calls it the handle, and passes it to the combine.

    Attributes:
        library: deepep or hybridep, as in the table of kernels.
        tokens, sent: T and R.
        received: number of received rows: R for DeepEP, N for HybridEP.
        plan: the tensor that the library computes from the routing map.
        score_shape: shape of the scores that travel with the rows: per token, and per received row.
    """

    recorder: Recorder
    library: str
    group: Any
    tokens: int
    sent: int
    received: int
    plan: Tensor
    score_shape: tuple[tuple[int, ...], tuple[int, ...]]

    def dispatch(self, x_TH: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Record the dispatch: tokens travel to the ranks of their experts."""
        return self._exchange("dispatch", x_TH, scores, self.received, self.score_shape[1])

    def combine(self, x_RH: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Record the combine: rows travel back and are summed for each token."""
        return self._exchange("combine", x_RH, scores, self.tokens, self.score_shape[0])

    def _exchange(
        self, name: str, x: Tensor, scores: Tensor | None, rows: int, score_shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        def exchanged(rows_in: Tensor, _plan: Tensor, scores_in: Tensor | None) -> tuple[Tensor, ...]:
            out = rows_in.new_empty(rows, rows_in.shape[1])
            return (out,) if scores_in is None else (out, scores_in.new_empty(score_shape))

        row_bytes = x.shape[1] * x.element_size()
        row_bytes += 0 if scores is None else scores.element_size() * (scores.numel() // scores.shape[0])
        out, *out_scores = self.recorder.kernel(
            f"{self.library}.{name}", exchanged, x, self.plan, scores, sent=(self.group, self.sent * row_bytes)
        )
        return out, out_scores[0] if out_scores else None


class Dispatch(torch.autograd.Function):
    """The dispatch of rows and scores; keeps the plan only for its backward pass."""

    @staticmethod
    def forward(ctx: Any, route: Route, x_TH: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the received rows and their scores."""
        ctx.route = route
        out, out_scores = route.dispatch(x_TH, scores)
        assert out_scores is not None
        return out, out_scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Send the gradients back."""
        return None, *ctx.route.combine(*gradients)


class Combine(torch.autograd.Function):
    """The combine of rows from the experts; keeps the plan only for its backward pass."""

    @staticmethod
    def forward(ctx: Any, route: Route, x_RH: Tensor) -> Tensor:
        """Return the combined rows [T, H]."""
        ctx.route = route
        return route.combine(x_RH, None)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the rows."""
        return None, ctx.route.dispatch(gradients[0], None)[0]


class Multihot(torch.autograd.Function):
    """Scores of a row's choices as scores of this rank's experts; keeps the choices."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, choices_RK: Tensor, scores_RK: Tensor, experts: int
    ) -> tuple[Tensor, Tensor]:
        """Return the routing map [R, L] and the scores."""

        def spread(choices: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            shape = (choices.shape[0], experts)
            return torch.empty(shape, dtype=torch.bool), scores.new_empty(shape)

        ctx.recorder = recorder
        ctx.save_for_backward(choices_RK)
        chosen_RL, spread_RL = recorder.kernel("deepep.multihot", spread, choices_RK, scores_RK)
        ctx.mark_non_differentiable(chosen_RL)
        return chosen_RL, spread_RL

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the scores of the choices."""
        (choices_RK,) = ctx.saved_tensors

        def gathered(gradient: Tensor, choices: Tensor) -> Tensor:
            return gradient.new_empty(choices.shape)

        return None, None, ctx.recorder.kernel("deepep.multihot", gathered, gradients[1], choices_RK), None


def flex_functions(recorder: Recorder) -> dict[str, Any]:
    """The libraries' functions, by their names in megatron-core's token_dispatcher.py."""

    def rows_of_experts(experts: int, tokens: int) -> int:
        assert recorder.rows_of_map is not None, "there are no experts"
        return recorder.rows_of_map(experts, tokens)

    def fused_dispatch(x_TH: Tensor, choices_TK: Tensor, scores_TK: Tensor, experts: int, group: Any, **_: Any) -> Any:
        (tokens, choices), ranks = choices_TK.shape, group.size()
        sent = sent_rows(tokens, choices, ranks)

        def planned(chosen: Tensor) -> tuple[Tensor, Tensor]:
            # Whether each token goes to each rank, its place there, and the source of each received row.
            return torch.empty(tokens * ranks * 5 + sent * 4, dtype=torch.uint8), chosen.new_empty(sent, choices)

        plan, received_RK = recorder.kernel("deepep.layout", planned, choices_TK)
        shapes = ((tokens, choices), (sent, choices))
        route = Route(recorder, "deepep", group, tokens, sent, sent, plan, shapes)
        rows_RH, scores_RK = Dispatch.apply(route, x_TH, scores_TK)
        local = experts // ranks
        counts = StandInCounts([rows_of_experts(experts, tokens) // local] * local)
        return rows_RH, received_RK, scores_RK, counts, route

    def fused_combine(x_RH: Tensor, group: Any, route: Route, **_: Any) -> tuple[Tensor, None]:
        return Combine.apply(route, x_RH), None

    def hybrid_ep_dispatch(
        *, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **_: Any
    ) -> Any:
        (tokens, experts), ranks = routing_map.shape, group.size()
        received = rows_of_experts(experts, tokens)
        sent = sent_rows(tokens, max(1, received // tokens), ranks)
        whole_map = routing_map.new_empty(tokens * ranks, experts)
        dist.all_gather_into_tensor(whole_map, routing_map.contiguous(), group=group)

        def planned(_map: Tensor) -> Tensor:
            # Every token's place on every rank, and the rows of this rank's experts.
            return torch.empty(tokens * ranks * (4 + num_local_experts), dtype=torch.uint8)

        plan = recorder.kernel("hybridep.layout", planned, whole_map)
        route = Route(recorder, "hybridep", group, tokens, sent, received, plan, ((tokens, experts), (received,)))
        rows_NH, scores_N = Dispatch.apply(route, x, probs)
        counts = StandInCounts([received // num_local_experts] * num_local_experts)
        return rows_NH, scores_N, None, counts, route

    def hybrid_ep_combine(*, x: Tensor, handle: Route, **_: Any) -> Tensor:
        return Combine.apply(handle, x)  # type: ignore[no-any-return]

    return {
        "fused_dispatch": fused_dispatch,
        "fused_combine": fused_combine,
        "set_deepep_num_sms": lambda count: None,
        "hybrid_ep_dispatch": hybrid_ep_dispatch,
        "hybrid_ep_combine": hybrid_ep_combine,
    }


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
    """A product with a sharded weight, optionally after a norm; the product itself adds the weight's gradient to `main_grad`.

    The normed input is saved, under sequence parallelism only this rank's part: it is gathered again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, linear: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *norm: Tensor
    ) -> Tensor:
        """Communicate, multiply, communicate.

        Args:
            linear: its settings: `norm_weights`, `splits` (`columns`, `rows` or nothing), `sequence_parallel`, `tp_group`.
            norm: weight, and bias if there is one, of the norm before it.
        """
        statistics: tuple[Tensor, ...] = ()
        normed = x
        if norm:
            normed, *saved = recorder.kernel("te.norm", _norm, x, norm[0], norm[1] if len(norm) > 1 else None)
            statistics = tuple(saved)
        gathered = _gather(normed, linear) if linear.splits == "columns" and linear.sequence_parallel else normed
        out = torch.mm(gathered.view(-1, gathered.shape[-1]), weight.t())
        if bias is not None:
            out = recorder.kernel("te.add_bias", lambda o, b: torch.empty_like(o), out, bias)
        out = out.view(*gathered.shape[:-1], -1)
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
        gathered = _gather(normed, linear) if linear.splits == "columns" and linear.sequence_parallel else normed
        dy_MN, gathered_MK = dy.reshape(-1, dy.shape[-1]), gathered.reshape(-1, gathered.shape[-1])
        dx = torch.mm(dy_MN, weight).view(gathered.shape)
        if linear.splits == "columns":
            dx = _scatter(dx, linear) if linear.sequence_parallel else _sum(dx, linear)
        ctx.recorder.kernel("te.weight_gradient", _nothing, dy_MN, gathered_MK, written=(ctx.main_gradient,))
        del gathered, gathered_MK
        dbias = dy_MN.sum(0) if ctx.bias else None
        dnorm: tuple[Any, ...] = ()
        if ctx.norms:
            dx, *dweights = _norm_backward(ctx.recorder, dx, *of_norm, has_bias=ctx.norms == 2)
            dnorm = tuple(dweights[: ctx.norms])
        return None, None, dx, None, dbias, *dnorm


def _nothing(*_: Tensor) -> None:
    """Return nothing: the kernel writes in place."""


def _gather(part: Tensor, linear: Any) -> Tensor:
    if linear.tp_size == 1:
        return part
    gathered = part.new_empty((part.shape[0] * linear.tp_size, *part.shape[1:]))
    dist.all_gather_into_tensor(gathered, part.contiguous(), group=linear.tp_group)
    return gathered


def _scatter(sequence: Tensor, linear: Any) -> Tensor:
    if linear.tp_size == 1:
        return sequence
    part = sequence.new_empty((sequence.shape[0] // linear.tp_size, *sequence.shape[1:]))
    dist.reduce_scatter_tensor(part, sequence.contiguous(), group=linear.tp_group)
    return part


def _sum(value: Tensor, linear: Any) -> Tensor:
    if linear.tp_size > 1:
        dist.all_reduce(value, group=linear.tp_group)
    return value


class GroupedLinear(torch.autograd.Function):
    """The products of all experts as one kernel; it keeps its input."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x_TK: Tensor, experts: int, *parameters: Tensor) -> Tensor:
        """Rows of every expert times its weight, transposed, and its bias added.

        Args:
            parameters: a weight [N, K] of each expert, then a bias [N] of each if they have biases.
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

    Keys and values that are slices of one product are copied, and the product is not saved: Transformer Engine
    (`get_qkv_layout`) accepts slices only if queries, keys and values have one shape and are in one tensor.

    Under context parallelism the keys and values of all ranks are gathered, which moves the same bytes as a ring.
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, core: Any, q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
        """Return the attention output [S, B, H · D of the values]."""
        shape = _attention_shape(core, q_SBHD, k_SBGD, v_SBGD)
        if len({x.untyped_storage()._cdata for x in (q_SBHD, k_SBGD, v_SBGD)}) > 1:
            q_SBHD, k_SBGD, v_SBGD = q_SBHD.contiguous(), k_SBGD.contiguous(), v_SBGD.contiguous()
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
        """Gradients of queries, keys and values; those of the queries are accumulated in fp32."""
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
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


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
        """Return keys and values, each contiguous."""
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
        """Return the moved rows, `rows` of them, and their scores."""
        ctx.recorder, ctx.rows = recorder, x_TH.shape[0]
        ctx.score_shape = None if scores is None else scores.shape
        ctx.save_for_backward(row_map)
        moved, moved_scores = _move(recorder, x_TH, scores, row_map, rows, None)
        return moved, moved_scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Move the gradients back to the source rows."""
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
