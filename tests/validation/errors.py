"""What a list of predictions is worth: mean error, bias, worst error and rank correlation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def figures(pairs: Sequence[tuple[float, float]]) -> str:
    """Of (relative error, measured value) pairs, as the end of a line of a summary."""
    errors, measured = np.array(pairs).T
    size = np.abs(errors)
    rank = spearman((1 + errors) * measured, measured)
    return (
        f"n={len(pairs):<4} mean |error| {size.mean():6.1%}  bias {errors.mean():+6.1%}  worst {size.max():6.1%}"
        f"  Spearman {rank:.3f}"
    )


def spearman(left: np.ndarray, right: np.ndarray) -> float:
    """Rank correlation; ties take the order of appearance."""
    if len(left) < 3:
        return float("nan")
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
