"""The tables of axes against arithmetic: parts are computed, joined and compared with the whole, for every way to cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_overlap.plan.operators import parse_operator
from moe_overlap.tuner.search.layer.partition_axes import LETTERS, Axis, AxisProblem, Form, rows_of, solve

Array = NDArray[np.float64]
PARTS = 2
B, S, H, E, C = 2, 4, 8, 2, 6


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True)) * weight


def attend(q: Array, k: Array, v: Array) -> Array:
    """Causal."""
    scores = q @ k.swapaxes(-1, -2)
    scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def attention(qkv: Array) -> Array:
    q, k, v = np.split(np.concatenate([qkv, qkv[..., ::-1], qkv + 1], -1), 3, -1)
    return attend(q, k, v)


def loss(logits: Array) -> Array:
    return np.log(np.exp(logits).sum(-1)) - logits[..., 0]


KINDS: dict[str, tuple[Callable[..., Array], tuple[str, ...], str]] = {
    "norm": (norm, ("bsh", "?"), "bsh"),
    "product": (lambda x, w: x @ w, ("bsh", "?h"), "bsh"),
    "attention": (attention, ("bsh",), "bsh"),
    "latent attention": (lambda q, kv: attend(q, kv, kv * 2), ("bsh", "bsh"), "bsh"),
    "activation": (np.tanh, ("bsh",), "bsh"),
    "sum": (lambda x, y: x + y, ("bsh", "bsh"), "bsh"),
    "scale": (lambda x, y: x * y[..., :1], ("bsh", "bs?"), "bsh"),
    "join": (lambda x, y: np.concatenate([x, y], -1), ("bsh", "bsh"), "bsh"),
    "experts' product": (lambda x, w: x @ w, ("ECh", "E?h"), "ECh"),
    "experts' activation": (np.tanh, ("ECh",), "ECh"),
    "loss per token": (loss, ("bs?",), "bs"),
}
"""Operation, the letters of its inputs' dimensions and of its output's; `?` is an axis that tables do not name."""
SIZES = {"b": B, "s": S, "h": H, "?": H, "E": E, "C": C}


def works(kind: str, cut: tuple[str, ...], inputs: list[Array]) -> str:
    """Letter of the axis along which parts join to the whole; empty where they do along none."""
    function, letters, out = KINDS[kind]
    pieces = [
        np.split(x, PARTS, dims.index(letter)) if letter != "-" else [x] * PARTS
        for x, dims, letter in zip(inputs, letters, cut, strict=True)
    ]
    whole = function(*inputs)
    try:
        parts = [function(*part) for part in zip(*pieces, strict=True)]
    except ValueError:  # parts that do not fit to each other
        return ""
    for place, letter in enumerate(out):
        joined = np.concatenate(parts, place)
        if joined.shape == whole.shape and np.allclose(joined, whole):
            return letter
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_ways_to_cut(kind: str) -> None:
    """All of them, and no other."""
    draw = np.random.default_rng(0)
    _, letters, _ = KINDS[kind]
    inputs = [draw.normal(size=[SIZES[letter] for letter in dims]) for dims in letters]
    found = set()
    for cut in itertools.product(*(sorted({*dims, "-"}) for dims in letters)):
        if set(cut) != {"-"} and (joins := works(kind, cut, inputs)):
            assert "?" not in (*cut, joins)
            found.add((*(LETTERS[letter] for letter in cut), LETTERS[joins]))
    whole = (Axis.WHOLE,) * (len(letters) + 1)
    irregular = {row for row in rows_of(kind) if Axis.IRREGULAR in row}
    assert found == {*rows_of(kind)} - {whole} - irregular


@pytest.mark.parametrize(
    ("name", "tensor", "axes"),
    [
        ("L0.attention", "a.L0", "b"),
        ("L0.mlp", "h.L1", "bs"),
        ("L0.moe.gate", "a.L0", "b"),
        ("L0.moe.gate", "rows.L0", "i"),
        ("L0.moe.gate", "weights.L0", "b"),
        ("L0.moe.count", "splits.L0", "i"),
        ("L0.moe.dispatch", "received.L0", "iC"),
        ("L0.moe.shared", "shared.L0", "bs"),
        ("L0.moe.experts", "computed.L0", "iCE"),
        ("L0.moe.combine", "returned.L0", "iC"),
        ("L0.moe.merge", "returned.L0", "i"),
        ("L0.moe.merge", "h.L1", "b"),
        ("mtp0.project", "h.mtp0", "bs"),
        ("embedding", "embedding:embedded", "bsh"),
        ("head.norm", "head.norm:left", "bs"),
        ("head.loss", "head.loss:loss", ""),
    ],
)
def test_what_operators_take_and_leave(name: str, tensor: str, axes: str) -> None:
    """Whatever else comes in; with latent attention the same."""
    for form in (Form(shared=True), Form(latent=True, compressed=True, shared=True)):
        assert ways(name, tensor, form) == {LETTERS[letter] for letter in axes}


def ways(name: str, tensor: str, form: Form) -> set[Axis]:
    """How a tensor of an operator can be cut."""
    problem = AxisProblem(AxisProblem.of([parse_operator(name)], form).operations, frozenset())
    variable = next(one for _, variables in problem.operations for one in variables if one[0] == tensor)
    return {axis for axis in Axis if solve(problem, (variable, axis)) is not None}


def test_tensor_parallel_ranks_leave_the_batch_only() -> None:
    for name, tensor in (("L0.mlp", "h.L1"), ("L0.moe.shared", "shared.L0"), ("mtp0.project", "h.mtp0")):
        assert ways(name, tensor, Form(gathers=True)) == {Axis.BATCH}


def test_gates_of_all_tokens_read_them_whole() -> None:
    for gate, whole in (("topk", False), ("batch_prioritized", True)):
        problem = AxisProblem.of([parse_operator("L0.moe.gate")], Form(gates={0: gate}))
        answer = solve(problem)
        assert answer is not None and answer.axes["L0.moe.gate:scores", ""] == (Axis.WHOLE if whole else Axis.BATCH)
        assert answer.axes["rows.L0", ""] == Axis.IRREGULAR
