"""Measure operators into a database: the process behind `lookup.py`. Reads its request as JSON from stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moe_overlap.tuner.profile.database import Database, Device, OperatorKey
from moe_overlap.tuner.profile.measure.operators import measure_operators


def main() -> None:
    """Measure the requested keys; those in the database are skipped."""
    request = json.load(sys.stdin)
    database = Database.open(Path(request["path"]), Device(**request["device"]))
    keys = [OperatorKey(kind, direction, dtype, tuple(shape)) for kind, direction, dtype, shape in request["operators"]]
    measure_operators(database, keys, request["seconds_each"])


if __name__ == "__main__":
    main()
