"""Neighbouring operators become layers: what belongs together is not cut, and layers are about as large as one another.

Contract. K operators in topological order are cut into R layers of neighbours. C(i, k) is the bytes that operators i..k receive
from operators in front of i. No layer has more than (1 + δ) FLOP_total / R. Among all such ways the answer has the smallest
largest C; among those, the smallest variance of the layers' FLOPs.

    G(k, r) = min over i <= k of max(G(i - 1, r - 1), C(i, k)),  FLOP(i..k) <= (1 + δ) FLOP_total / R      Alpa, section 5.2

Steps of `cluster`.
1. G(K, R) by the recursion above.
2. The same recursion over layers with C <= G(K, R), on sums of squared FLOPs: given their number and their total, the smallest
   sum of squares is the smallest variance. (Breaking ties inside one recursion, as Alpa's code does, is no optimum of both.)

K^2 R operations; Alpa's release has other rules for FLOP bounds and heavy operators, which the paper does not name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.search.solution import Solution, Status

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Bytes that one operator makes, and the operators that read them, increasing and behind it."""

    producer: int
    consumers: tuple[int, ...]
    size_bytes: float


def received_bytes(tensors: Sequence[Tensor], operators: int) -> Floats:
    """[K, K] bytes that operators first..last receive from operators in front; each tensor once, however many of them read it."""
    # added[i, k]: bytes that join when operator k joins a layer that begins with i.
    added = np.zeros((operators, operators))
    for tensor in tensors:
        begin = tensor.producer + 1
        for consumer in tensor.consumers:
            # A layer that begins behind the consumer before this one reads the tensor here first.
            added[begin : consumer + 1, consumer] += tensor.size_bytes
            begin = max(begin, consumer + 1)
    return np.cumsum(added, axis=1)


def cluster(received: Floats, flops: Floats, layers: int, delta: float = 0.5) -> Solution[tuple[int, ...]]:
    """The first operator of every layer; the objective is the largest bytes that a layer receives.

    Args:
        received: [K, K] C(first, last), both within.
        flops: [K] of each operator.
        layers: R.
        delta: share by which a layer may exceed the mean.
    """
    started = time.perf_counter()
    before = np.concatenate([[0.0], np.cumsum(flops)])
    own = before[None, 1:] - before[:-1, None]
    # A share of rounding: sums of FLOPs are not exact.
    allowed = np.triu(own <= (1.0 + delta) * before[-1] / layers * (1.0 + 1e-12))
    # Step 1.
    largest = np.where(allowed, received, math.inf)
    best, _ = _cut(largest, layers, np.maximum)
    if not math.isfinite(best):
        seconds = time.perf_counter() - started
        return Solution(value=None, objective=math.inf, bound=math.inf, status=Status.INFEASIBLE, seconds=seconds)
    # Step 2.
    _, firsts = _cut(np.where(largest <= best, own**2, math.inf), layers, np.add)
    seconds = time.perf_counter() - started
    return Solution(value=firsts, objective=best, bound=best, status=Status.OPTIMAL, seconds=seconds)


def _cut(costs: Floats, layers: int, combine: Callable[[Floats, Floats], Floats]) -> tuple[float, tuple[int, ...]]:
    """Cheapest way of so many layers, whose costs [K, K] add up or whose largest counts; the first operator of each."""
    operators = len(costs)
    # smallest[k] for k operators; each round adds a layer.
    smallest = np.full(operators + 1, math.inf)
    smallest[0] = 0.0
    choices = []
    for _ in range(layers):
        ways = combine(smallest[:-1, None], costs)
        choices.append(np.argmin(ways, axis=0))
        smallest = np.concatenate([[math.inf], ways.min(axis=0)])
    total = float(smallest[operators])
    if not math.isfinite(total):
        return total, ()
    firsts, end = [], operators
    for choice in reversed(choices):
        end = int(choice[end - 1])
        firsts.append(end)
    return total, tuple(reversed(firsts))
