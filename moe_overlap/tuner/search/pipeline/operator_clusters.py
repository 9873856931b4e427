"""Clusters neighbouring operators into layers of similar FLOPs that receive few bytes from earlier layers.

Contract. K operators in topological order are cut into R layers of neighbours. C(i, k) is the bytes that operators i..k receive
from operators before i. No layer has more than (1 + δ) FLOP_total / R. Among all such cuts the answer has the smallest maximum of
C; among those, the smallest variance of the layers' FLOPs.

    G(k, r) = min over i <= k of max(G(i - 1, r - 1), C(i, k)),  FLOP(i..k) <= (1 + δ) FLOP_total / R      Alpa, section 5.2

Steps of `cluster`.
1. G(K, R) by the recursion above.
2. The same recursion over layers with C <= G(K, R), on sums of squared FLOPs: for a given number of layers and total FLOPs the
   smallest sum of squares is the smallest variance. (Alpa's code breaks ties inside one recursion, which is optimal in neither.)

K^2 R operations. Alpa's release has other rules for FLOP bounds and heavy operators, which the paper does not name.
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
    """The bytes that one operator writes, and the later operators that read them, in increasing order."""

    producer: int
    consumers: tuple[int, ...]
    size_bytes: float


def received_bytes(tensors: Sequence[Tensor], operators: int) -> Floats:
    """[K, K] bytes that operators first..last receive from earlier operators; each tensor counts once per range."""
    # added[i, k]: bytes that join when operator k joins a layer that begins with i.
    added = np.zeros((operators, operators))
    for tensor in tensors:
        begin = tensor.producer + 1
        for consumer in tensor.consumers:
            # In layers that begin after the previous consumer this one is the first reader.
            added[begin : consumer + 1, consumer] += tensor.size_bytes
            begin = max(begin, consumer + 1)
    return np.cumsum(added, axis=1)


def cluster(received: Floats, flops: Floats, layers: int, delta: float = 0.5) -> Solution[tuple[int, ...]]:
    """The first operator of every layer; the objective is the maximum over the layers of the received bytes.

    Args:
        received: [K, K] C(first, last), both inclusive.
        flops: [K] of each operator.
        layers: R.
        delta: share by which a layer may exceed the mean.
    """
    started = time.perf_counter()
    before = np.concatenate([[0.0], np.cumsum(flops)])
    range_flops = before[None, 1:] - before[:-1, None]
    # The factor allows for rounding: sums of FLOPs are not exact.
    allowed = np.triu(range_flops <= (1.0 + delta) * before[-1] / layers * (1.0 + 1e-12))
    # Step 1.
    largest = np.where(allowed, received, math.inf)
    best, _ = _cut(largest, layers, np.maximum)
    if not math.isfinite(best):
        seconds = time.perf_counter() - started
        return Solution(value=None, objective=math.inf, bound=math.inf, status=Status.INFEASIBLE, seconds=seconds)
    # Step 2.
    _, firsts = _cut(np.where(largest <= best, range_flops**2, math.inf), layers, np.add)
    seconds = time.perf_counter() - started
    return Solution(value=firsts, objective=best, bound=best, status=Status.OPTIMAL, seconds=seconds)


def _cut(costs: Floats, layers: int, combine: Callable[[Floats, Floats], Floats]) -> tuple[float, tuple[int, ...]]:
    """The smallest cost of a cut into so many layers, and the first operator of each; `combine` is the sum or the maximum."""
    operators = len(costs)
    # smallest[k]: the cost of the first k operators; each round adds a layer.
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
