"""The end of a search: the order of the plans that are left, and the error where none is.

Plans are ordered by their simulated steps, ties by what they ask of a machine.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from moe_overlap.describe.cluster import GIB, Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.report.search import Finalist
from moe_overlap.tuner.cost.simulate.step import listed_seconds
from moe_overlap.tuner.search.dispatchers import LIBRARIES
from moe_overlap.tuner.search.solution import Status
from moe_overlap.tuner.search.uniform import UniformSearch

TIE = 0.01
"""Share of a step below which predictions tell no plan from another."""
SIMULATED = 0.1
"""Plans that are predicted to be slower than the fastest by more than this share of a step are not simulated: no simulated step
of a plan without overlap was found to differ from its prediction by a tenth (tests/unit/tuner/test_search_simulated.py)."""


def simulated_finalists(finalists: Sequence[Finalist], deadline: float = math.inf) -> list[Finalist]:
    """The finalists with the simulated steps of those that are near the fastest.

    Args:
        deadline: of `time.monotonic`, behind which nothing more is simulated.
    """
    near = min(finalist.seconds for finalist in finalists) * (1.0 + SIMULATED)
    known = []
    for finalist in finalists:
        # The prediction of a plan that overlaps, or whose stages are unlike, is of its simulated lists already.
        is_closed = not finalist.plan.transfers and not any(s.overlap.is_listed for s in finalist.plan.stages)
        if is_closed and finalist.seconds <= near and time.monotonic() < deadline:
            ratio = listed_seconds(finalist.plan, finalist.problem) / finalist.seconds
            finalist = dataclasses.replace(finalist, simulated=ratio)
        known.append(finalist)
    return known


def in_order(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The fastest first, as simulated; but of those within TIE of it the one that needs the least memory leads.

    Before that, one that needs no library of its own for dispatching tokens.
    """
    ordered = sorted(finalists, key=lambda finalist: finalist.simulated_seconds)
    fastest = ordered[0].simulated_seconds
    tied = [finalist for finalist in ordered if finalist.simulated_seconds <= fastest * (1.0 + TIE)]
    leader = min(
        tied,
        key=lambda finalist: (
            finalist.problem.features.dispatcher in LIBRARIES,
            finalist.prediction.fullest.needed_bytes,
        ),
    )
    return [leader, *(finalist for finalist in ordered if finalist is not leader)]


def does_not_fit(
    found: UniformSearch, cluster: Cluster, refused: Sequence[tuple[str, str]], certainty: str
) -> ConfigError:
    """The error where no plan fits: the plan that needs the least, and what it lacks."""
    gpu = cluster.group_of(0).gpu
    if found.solution.status is Status.TIME_LIMIT:
        rule = f"ended before a plan that fits was found, after {found.counts.evaluated} layouts"
        return ConfigError("--time-limit", "", rule, "give more time")
    subject = f"{cluster.gpus} × {gpu.name}"
    if refused:
        return ConfigError(
            "the search", "", f"every plan that fits is refused, {refused[0][0]} for: {refused[0][1]}", "change it"
        )
    if found.smallest is None and found.counts.evaluated:
        rule = f"the target refuses each of the {found.counts.evaluated} layouts that may fit"
        return ConfigError("--target", "", rule, "use another target")
    if found.smallest is None:
        rule = f"none of {found.counts.layouts:,} layouts fits {gpu.memory_gib:g} GiB, by a lower bound of their bytes"
        return ConfigError("--num-gpus", subject, rule, "use more GPUs, or GPUs with more memory")
    least = found.smallest.needed_bytes / GIB
    rule = f"no plan fits {gpu.memory_gib:g} GiB with {certainty} certainty; "
    rule += f"the smallest needs {least:.1f} ({found.smallest.name})"
    return ConfigError("--num-gpus", subject, rule, "use more GPUs, or a shorter sequence")
