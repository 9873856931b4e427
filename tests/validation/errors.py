"""What a list of predictions is worth: mean error, bias, worst error and rank correlation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def figures(pairs: Sequence[tuple[float, float]]) -> str:
    """Of (relative error, measured value) pairs, as the end of a line of a summary."""
    errors, measured = np.array(pairs).T
    size = np.abs(errors)
    rank = spearman((1 + errors) * measured, measured)
    return (
        f"n={len(pairs):<4} mean |error| {size.mean():6.1%}  bias {errors.mean():+6.1%}  worst {size.max():6.1%}"
        f"  Spearman {rank:.3f}"
    )


def spearman(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Rank correlation; equal values share the mean of their ranks. Not a number for less than three, or where all are equal."""
    if len(left) < 3 or left.min() == left.max() or right.min() == right.max():
        return float("nan")
    ranks = [(values[:, None] > values).sum(1) + 0.5 * (values[:, None] == values).sum(1) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])
