"""Decide the overlap of a run from its Megatron flags: what `tools/autotune.py --overlap-only` writes, as a function.

1. Every mechanism becomes a plan of its own, whose step is predicted (overlap_candidates.py): Tutel's chunks of capacity, ranges
   in partitions, two micro-batches at a time; each as it is, and with weight gradients under backward exchanges.
2. From the best of them on, classes of layers are given the mechanisms of the others (overlap_mixes.py).
3. The plan with the shortest step that fits is chosen, and the plain one where none is shorter by `WORTH`. Traces of earlier runs
   refine all prices (refining.py); then what was measured stays, unless another is shorter by `WORTH`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.overlap_candidates import PLAIN, WHOLE, Candidate, Candidates, few_micro_batches, run_alike
from moe_overlap.overlap_mixes import mixed
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.predicting import Options, Task, predicted_of, task_of
from moe_overlap.refining import Refinement, refine
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.search.layer.mechanisms import Mix
from moe_overlap.tuner.search.layer.partition_ranges import check_limits

WORTH = 0.01
"""Share of the plain step by which another must be shorter: predictions are no better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen.

    Attributes:
        others: what else was looked at: the predicted ones from the fastest on, then the refused ones.
        mix: what was decided by class of layers from the best mechanism on; None where no plan with overlap fits.
        step: of the chosen plan, simulated with a micro-batch or more for every stage.
        refinement: what traces changed; None without.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    mix: Mix | None
    step: SimulatedStep
    plain_seconds: float
    search_seconds: float
    refinement: Refinement | None = None


def tune_overlap(
    words: Sequence[str],
    cluster: Cluster,
    limits: SearchLimits,
    solver_seconds: float = 5.0,
    traces: Sequence[str | Path] = (),
    **options: Unpack[Options],
) -> Tuned:
    """Choose the overlap of a run.

    Args:
        words: Megatron flags, or `@FILE`, without a plan and without overlap decided by hand.
        cluster: the machines; all of their GPUs run.
        solver_seconds: of the weight-gradient schedules, each.
        traces: of runs of this job, which refine its prices.
    Raises:
        ConfigError: as `predict` and `refine`; or the flags decide an overlap themselves, or the run exchanges no tokens.
    """
    begun = time.perf_counter()
    check_limits(limits)
    if not solver_seconds > 0:
        raise ConfigError("--time-limit", solver_seconds, "must be greater than 0 seconds", "use 5")
    task = task_of(words, cluster, options)
    _require_open(task)
    refinement = None
    if traces:
        task, refinement = refine(task, traces)
    plain = Candidate(name=PLAIN, words=tuple(words), plan=task.job.plan, prediction=predicted_of(task, task.job.plan))
    search = Candidates(task, tuple(words), cluster, limits, solver_seconds)
    uniform = list(search.uniform())
    mix, mixes = mixed(search, uniform)
    found = [plain, *(one for one in uniform if one.name != WHOLE or one.refused), *mixes]
    if refinement is not None:
        found = with_measured(search, found, refinement)
    predicted = sorted((one for one in found if one.prediction is not None), key=lambda one: one.seconds)
    chosen = keep_measured(found[0], predicted)
    others = [one for one in predicted if one is not chosen] + [one for one in found if one.refused]
    step = simulate_step(few_micro_batches(chosen.decided), task.job.model, task.graphs, task.machine, task.features)
    return Tuned(chosen, tuple(others), mix, step, plain.seconds, time.perf_counter() - begun, refinement)


def choose(plain: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest that fits, the plain one where it fits and is not slower by WORTH, or where nothing fits.

    Args:
        predicted: from the fastest on, the plain one among them.
    """
    fitting = [one for one in predicted if one.prediction is not None and one.prediction.fits]
    if not fitting or (plain in fitting and fitting[0].seconds > plain.seconds * (1.0 - WORTH)):
        return plain
    return fitting[0]


def keep_measured(plain: Candidate, predicted: Sequence[Candidate]) -> Candidate:
    """The fastest that was measured, unless others that fit are predicted to be faster by WORTH: then what `choose` says of them.

    Faster than what was measured and than what the same prices predict of that: they may miss something of both.
    """
    measured = [one for one in predicted if one.measured_seconds is not None]
    if not measured:
        return choose(plain, predicted)
    best = min(measured, key=lambda one: one.measured_seconds or 0.0)
    bar = (1.0 - WORTH) * min(best.measured_seconds or 0.0, best.seconds)
    fitting = [one for one in predicted if one.prediction is not None and one.prediction.fits]
    faster = [one for one in fitting if one.measured_seconds is None and one.seconds < bar]
    return choose(plain, faster) if faster else best


def _require_open(task: Task) -> None:
    if any(stage.overlap.is_listed for stage in task.job.plan.stages):
        raise ConfigError(
            "--overlap-only", "", "the flags decide an overlap by hand", "drop --moe-overlap-* and --plan"
        )
    if all(stage.expert * stage.expert_tensor == 1 for stage in task.job.plan.stages):
        rule = "nothing to hide: one expert rank exchanges no tokens"
        raise ConfigError("--overlap-only", "", rule, "use --expert-model-parallel-size 2 or more")


def with_measured(search: Candidates, found: Sequence[Candidate], refinement: Refinement) -> list[Candidate]:
    """The candidates with the measured steps of those that ran, and what ran beside them."""
    result = list(found)
    for step in refinement.steps:
        same = next((n for n, one in enumerate(result) if one.plan and run_alike(one.plan, step.plan)), None)
        if same is None:
            listed = any(stage.overlap.is_listed for stage in step.plan.stages)
            one = search.one(f"the plan of {step.path}", step.plan)
            result.append(one if listed else dataclasses.replace(one, words=search.words, dropped=()))
        at = len(result) - 1 if same is None else same
        fastest = min(step.seconds, result[at].measured_seconds or step.seconds)
        result[at] = dataclasses.replace(result[at], measured_seconds=fastest)
    return result
