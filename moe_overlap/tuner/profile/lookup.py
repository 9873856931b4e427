"""What the database says of an operator: measured at this very size, else interpolated between neighbours, else nothing.

Interpolation: the rate (work per second) of the measured sizes around the wanted one, weighted by the inverse square of their
distance; distances are those of the logarithms of the sizes. It says nothing where the nearest size is more than FARTHEST away.
Elementwise kinds that were not measured themselves take what others of the same bytes take.

An operator is timed alone, again and again. In a step its operands are colder, and the host comes between it and the next one:
where a database has the rates of a step, the cost model is told IN_STEP times the seconds alone, and CALL_SECONDS for each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.keys import PRODUCTS, OperatorKey, Origin, key_of, work_of

Floats = NDArray[np.float64]
NEIGHBOURS = 4
FARTHEST = np.log(8.0)
"""Of the nearest measured size, in the logarithm of any one dimension."""
STAND_IN = "mul"
"""What operators that are bound by bytes take where they were not measured."""
IN_STEP, CALL_SECONDS = "in_step", "call_seconds"
"""Rates of a database, see above; absent: 1 and 0."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """Sizes of one kind. [N, D] logarithms of the shapes, [N] seconds per work, [N] seconds."""

    logs: Floats
    paces: Floats


class MeasuredOperators:
    """Answers from a database as it is now; later measurements need a new one."""

    def __init__(self, database: Database) -> None:
        self._exact = dict(database.operators)
        self._in_step = database.rates.get(IN_STEP, 1.0)
        self._call_seconds = database.rates.get(CALL_SECONDS, 0.0)
        groups: dict[tuple[str, str, str], list[tuple[OperatorKey, float]]] = {}
        for key, seconds in self._exact.items():
            groups.setdefault((key.kind, key.direction, key.dtype), []).append((key, seconds))
        self._groups = {
            name: _Measured(
                np.array([_logs(key) for key, _ in rows]),
                np.array([seconds / work_of(key) for key, seconds in rows]),
            )
            for name, rows in groups.items()
        }

    def seconds(self, key: OperatorKey) -> tuple[float, Origin] | None:
        """Seconds alone and their origin (`measured`, `interpolated`); None where nothing measured is near."""
        if key in self._exact:
            return self._exact[key], "measured"
        kinds = [key.kind] if key.kind in PRODUCTS else [key.kind, STAND_IN]
        for kind in kinds:
            for direction in (key.direction, "forward"):
                group = self._groups.get((kind, direction, key.dtype))
                pace = _pace(group, _logs(key)) if group is not None else None
                if pace is not None:
                    return pace * work_of(key), "interpolated"
                if key.kind in PRODUCTS:
                    break
        return None

    def __call__(self, op: Op, shape: tuple[float, ...], moved_bytes: float) -> tuple[float, Origin] | None:
        """The same for a captured operator in a step: a `Lookup` of the cost model."""
        key = key_of(op, shape, moved_bytes)
        alone = self.seconds(key) if key is not None else None
        return None if alone is None else (self._in_step * alone[0] + self._call_seconds, alone[1])


def _logs(key: OperatorKey) -> Floats:
    """Products: of every size. Others: of the bytes alone."""
    sizes = key.shape if key.kind in PRODUCTS else key.shape[1:]
    return np.log(np.maximum(np.array(sizes, dtype=np.float64), 1.0))


def _pace(group: _Measured, wanted: Floats) -> float | None:
    """Seconds per work at a size between measured ones."""
    apart = np.abs(group.logs - wanted)
    near = apart.max(axis=1) <= FARTHEST
    if not near.any():
        return None
    distances = np.sqrt((apart[near] ** 2).sum(axis=1))
    chosen = np.argsort(distances, kind="stable")[:NEIGHBOURS]
    weights = 1.0 / np.maximum(distances[chosen], 1e-9) ** 2
    return float(np.exp(np.average(np.log(group.paces[near][chosen]), weights=weights)))
