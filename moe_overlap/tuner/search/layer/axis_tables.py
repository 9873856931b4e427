"""Along which axes operations can be cut: a table for each kind.

A row says how the tensors of an operation are cut together so that the parts of its outputs, joined, are the outputs. Letters
stand for axes, `-` for a tensor that stays whole; inputs stand before the colon. Rows that leave everything whole are in every
table, the operation then runs once.

    b batch   s sequence   h hidden or a column of a weight   E expert   C capacity
    i irregular: the rows that the gate sent out for the samples of a part   x the places of such rows

What decides. The contracted axis of a product is never cut: parts would be sums. Attention needs all keys. With tensor
parallelism the tokens are gathered along the sequence, which then cannot be cut. Tokens are ordered by sample, then by place:
a gate that passes its used capacity on can take samples one after the other, but no pieces of sequences; one that looks at all
tokens stays whole, and its rows travel in parts. Exchanges keep the axis of experts, which is that of the ranks. Capacity parts
mix the samples, so that no merge can follow them. A mean over tokens needs them all. Dropout must draw by token, or is left out.

Source: Lancet, section 5.2; the irregular axis is that of figure 5c.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache


class Axis(IntEnum):
    """How a tensor is cut, what is preferred first."""

    BATCH = 0
    SEQUENCE = 1
    HIDDEN = 2
    EXPERT = 3
    CAPACITY = 4
    IRREGULAR = 5
    INDEX = 6
    WHOLE = 7


LETTERS = dict(zip("bshECix-", Axis, strict=True))
REAL = (Axis.BATCH, Axis.SEQUENCE, Axis.HIDDEN, Axis.EXPERT, Axis.CAPACITY)
"""Axes that a tensor has by itself: what exists whole can be sliced along them, and along no other."""

PREFIX_GATE, WHOLE_GATE = "gate by samples", "gate of all tokens"
TABLES = {
    "norm": "b-:b s-:s",
    "product": "b-:b s-:s -h:h",
    "lookup": "b-:b s-:s -h:h",
    "attention": "b:b",
    "latent attention": "bb:b",
    "activation": "b:b s:s h:h",
    "sum": "bb:b ss:s hh:h",
    "scale": "bb:b ss:s h-:h",
    "join": "bb:b ss:s",
    "gather": "b:b",
    # tokens, scores, used capacity : weights, places, counts, rows, used capacity
    PREFIX_GATE: "bb-:bxii-",
    WHOLE_GATE: "---:bxii-",
    "exchange of counts": "i:i",
    "exchange with counts": "ii:i C-:C",
    "exchange": "i:i C:C",
    "experts' product": "i-:i C-:C EE:E -h:h",
    "experts' activation": "i:i C:C E:E h:h",
    # rows, weights, places
    "unpermute": "ibx:b",
    "loss per token": "b:b s:s",
    "mean": "",
}
"""Operation -> its rows. `gather` is every collective over tensor-parallel ranks: gathering, scattering, reducing."""


@cache
def rows_of(operation: str) -> tuple[tuple[Axis, ...], ...]:
    """The table of an operation, the row that leaves everything whole included."""
    rows = [tuple(LETTERS[letter] for letter in row.replace(":", "")) for row in TABLES[operation].split()]
    size = len(rows[0]) if rows else 2
    whole = (Axis.WHOLE,) * size
    return tuple(dict.fromkeys([*rows, whole]))
