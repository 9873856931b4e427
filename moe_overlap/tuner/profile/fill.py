"""Add to a database what a prediction needs and it lacks, if this machine has its device. Another process measures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.device import this_device
from moe_overlap.tuner.profile.keys import OperatorKey
from moe_overlap.tuner.profile.vocabulary import can_be_measured

SECONDS_EACH = 0.02


def is_here(database: Database) -> bool:
    """Whether this machine has the device, and the version, that the database was measured on."""
    try:
        here = this_device(database.device.kind)
    except ConfigError:
        return False
    return dataclasses.replace(here, threads=database.device.threads) == database.device


def fill(database: Database, keys: Sequence[OperatorKey], ranks: int) -> Database:
    """The database with every key that can be measured here; each is measured once and kept.

    Args:
        ranks: of a node. On a CPU as many processes measure at once: training loads caches and memory as they do.
    Returns:
        A database that was read again. A measuring process that fails leaves a gap, with a warning: it is interpolated.
    """
    missing = [key for key in keys if key not in database.operators and can_be_measured(key)]
    if not missing or not is_here(database):
        return database
    print(f"measuring {len(missing)} operators on {database.device}", file=sys.stderr)
    count = min(ranks, len(missing)) if database.device.kind == "cpu" else 1
    processes = [_start(database, missing[first::count]) for first in range(count)]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode:
            reason = errors.strip().splitlines()[-1] if errors.strip() else "it was killed"
            print(f"warning: measuring operators failed ({reason}); they are interpolated", file=sys.stderr)
    return Database.load(database.path)


def _start(database: Database, keys: Sequence[OperatorKey]) -> subprocess.Popen[str]:
    """A process that measures, with its request written to it."""
    request = {
        "path": str(database.path.resolve()),
        "device": dataclasses.asdict(database.device),
        "operators": [[key.kind, key.direction, key.dtype, list(key.shape)] for key in keys],
        "seconds_each": SECONDS_EACH,
    }
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(database.device.threads),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_overlap.tuner.profile.measure"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.close()
    process.stdin = None
    return process
