"""Runs of the ranks of test_graph_ranks.py: the same job by the executor's segments and by graphs of a stand-in for CUDA's."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.multiprocess.partition_runs import Curve, assembled, uneven_step
from tests.stand_ins.cuda_graphs import RecordedGraphs

STEPS = 5


def trained(variants: dict[str, str]) -> dict[str, tuple[list[tuple[Curve, str]], int, int]]:
    """Losses, norms and last weights of every variant, without graphs and with; captures, and replays of them. Collective."""
    found = {}
    for name, flags in variants.items():
        library = RecordedGraphs()
        runs = [curve_and_weights(flags), curve_and_weights(flags, library)]
        found[name] = (runs, library.captures, library.replays)
    return found


def curve_and_weights(flags: str, library: RecordedGraphs | None = None, steps: int = STEPS) -> tuple[Curve, str]:
    """Losses and norms of a run, and a hash of its last weights."""
    from moe_overlap.runtime.executor.execute import PlanExecutor
    from moe_overlap.runtime.executor.graphs import SegmentGraphs

    job, feed = assembled(flags)
    runner: Any = job.machinery.runner
    if library is not None:
        graphs = SegmentGraphs(library, runner.context.weight_gradients, has_static_rows=True, warm_up_steps=1)
        runner = PlanExecutor(runner.context, graphs=graphs)
    curve = [uneven_step(job, step, feed, runner) for step in range(steps)]
    digest = hashlib.sha256()
    for chunk in job.machinery.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
    return curve, digest.hexdigest()
