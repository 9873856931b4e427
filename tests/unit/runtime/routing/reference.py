"""Slow, obvious twins of the gates, in plain Python; tests compare with them.

A token is (sample, position); all loops go sample by sample, position by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from moe_overlap.runtime.routing.state import fold

Rows = list[list[bool]]


def dropped(map_TE: Sequence[Sequence[bool]], used_E: Sequence[int], capacity: int | None) -> tuple[Rows, list[int]]:
    """Walk through the tokens; a full expert takes no more."""
    used, rows = list(used_E), []
    for choices in map_TE:
        row = []
        for expert, wants in enumerate(choices):
            fits = wants and (capacity is None or used[expert] < capacity)
            used[expert] += fits
            row.append(fits)
        rows.append(row)
    return rows, used


def slots(map_TE: Sequence[Sequence[bool]], used_E: Sequence[int]) -> list[list[int]]:
    """Slot of every routed token, -1 elsewhere."""
    used, rows = list(used_E), []
    for choices in map_TE:
        row = []
        for expert, wants in enumerate(choices):
            row.append(used[expert] if wants else -1)
            used[expert] += wants
        rows.append(row)
    return rows


def dropped_by_priority(map_TE: Sequence[Sequence[bool]], priority_T: Sequence[float], capacity: int) -> Rows:
    """The token of highest priority first."""
    order = sorted(range(len(map_TE)), key=lambda token: (-priority_T[token], token))
    kept_in_order, _ = dropped([map_TE[token] for token in order], [0] * len(map_TE[0]), capacity)
    rows: Rows = [[] for _ in order]
    for token, row in zip(order, kept_in_order, strict=True):
        rows[token] = row
    return rows


def chosen_by_experts(scores_TE: Sequence[Sequence[float]], capacity: int) -> Rows:
    """Each expert takes its best tokens."""
    rows = [[False] * len(row) for row in scores_TE]
    for expert in range(len(scores_TE[0])):
        best = sorted(range(len(scores_TE)), key=lambda token: (-scores_TE[token][expert], token))
        for token in best[:capacity]:
            rows[token][expert] = True
    return rows


def drawn(key: int, position: int, sample: int, topk: int, experts: int) -> set[int]:
    """The experts of one token."""
    token_key = fold(fold(key, sample), position)

    def number(expert: int) -> int:
        mixed = fold(token_key, expert)
        return mixed - (1 << 64) if mixed >> 63 else mixed

    return set(sorted(range(experts), key=number)[:topk])


def balance_loss(counts_E: Sequence[int], scores_E: Sequence[float], tokens: int, topk: int) -> float:
    """E/(k·T²) · Σ_e f_e · P_e, without coefficient."""
    products = sum(Fraction(score) * count for count, score in zip(counts_E, scores_E, strict=True))
    return float(products * len(counts_E) / (topk * tokens * tokens))


def z_loss(logits_TE: Sequence[Sequence[float]]) -> float:
    """Mean squared log-sum-exp, without coefficient."""
    return sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits_TE) / len(logits_TE)
