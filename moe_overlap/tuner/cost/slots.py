"""Slowdowns of work that starts together: a use of a part, the loads of the next use, and what the use before leaves.

Terms. A slot is the time of one use. Its tasks are

    compute    the use itself; tokens travel in a share of it
    weights    from the host for the next use, then `gather` among ranks
    rest       what else the next use needs from the host, behind the weights on their channel
    scatter    of what the use before left, then `out` to the host; the gather waits for it on their channel

Method. All tasks that may start do so at once. Whatever runs is slowed down by the factors of the streams that are busy
(interference.py); while tokens travel, they and collectives of states halve each other. When a task ends the rates are new, until none
is left: at most as many rounds as tasks. A slot's tasks are slower than alone by the ratio that is returned.

Legend: P slots, N strategies.
Source: Mist, algorithm 1, with the order of tasks on a channel beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.cost.interference import Interference

Floats = NDArray[np.float64]
TASKS = ("compute", "weights", "rest", "scatter", "gather", "out")
COMPUTE, WEIGHTS, REST, SCATTER, GATHER, OUT = range(len(TASKS))
BETWEEN_RANKS = 4
"""Bit of the collectives among the streams of interference.py; computation is 8, copies to the device 2 and to the host 1."""


def slowdowns(
    seconds: Mapping[str, Floats], sent: Floats, out_waits: NDArray[np.bool_], factors: Interference
) -> dict[str, Floats]:
    """How many times as long each task of a slot takes as alone; 1 where there is none.

    Args:
        seconds: TASKS -> [P, N] seconds alone.
        sent: [P, N] share of `compute` in which tokens travel.
        out_waits: [P, 1] whether `out` waits for `scatter`.
    """
    alone = np.stack([seconds[name] for name in TASKS])
    left, passed, table = alone.copy(), np.zeros_like(alone), factors.table
    active = np.empty(alone.shape, dtype=np.bool_)
    while True:
        waiting = left > 0
        if not waiting.any():
            break
        active[:] = waiting
        active[REST] &= ~waiting[WEIGHTS]
        active[GATHER] &= ~waiting[WEIGHTS] & ~waiting[SCATTER]
        active[OUT] &= ~(waiting[SCATTER] & out_waits)
        rates = _rates(active, sent, table)
        # A task that is not active has no rate; dividing by 1 keeps numpy quiet and infinity keeps it out of the minimum.
        ends = np.where(active, left / np.where(active, rates, 1.0), np.inf).min(axis=0)
        ends = np.where(np.isfinite(ends), ends, 0.0)
        passed += np.where(active, ends, 0.0)
        left -= np.where(active, rates * ends, 0.0)
        # Rounding leaves a little of what has ended.
        left[left <= 1e-12 * alone] = 0.0
    ratio = np.where(alone > 0, passed / np.where(alone > 0, alone, 1.0), 1.0)
    return dict(zip(TASKS, ratio, strict=True))


def _rates(active: NDArray[np.bool_], sent: Floats, table: Floats) -> Floats:
    """Seconds of its own work that each task does in a second."""
    computes = active[COMPUTE]
    collective = active[SCATTER] | active[GATHER]
    others = 4 * collective + 2 * (active[WEIGHTS] | active[REST]) + active[OUT]
    alone, with_compute = others.astype(np.intp), (others + 8).astype(np.intp)
    # A use alternates between computation and sending: its rate is the mean over its own work, the others' over time.
    computing = (1.0 - sent) * table[0].take(with_compute)
    sending = sent * table[1].take(alone | BETWEEN_RANKS) * (1.0 + collective)
    slow = computing + sending
    share = np.where(computes, computing / np.where(slow > 0, slow, 1.0), 1.0)
    state, sends = np.where(computes, with_compute, alone), alone | BETWEEN_RANKS
    rates = np.empty(active.shape)
    rates[COMPUTE] = 1.0 / np.where(slow > 0, slow, 1.0)
    between = share / table[1].take(state) + (1.0 - share) / (2.0 * table[1].take(sends))
    rates[SCATTER] = rates[GATHER] = between
    rates[WEIGHTS] = rates[REST] = share / table[2].take(state) + (1.0 - share) / table[2].take(sends)
    rates[OUT] = share / table[3].take(state) + (1.0 - share) / table[3].take(sends)
    return rates
