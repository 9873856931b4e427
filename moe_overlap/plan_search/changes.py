"""The user's own layout, and the difference between its flags and a chosen plan's, decision by decision, each predicted alone.

1. Flags are grouped by decision (`DECISIONS`); flags that are only right together, such as the numbers of stages and of model
   chunks, are one decision.
2. Every decision that differs is made alone in the user's own flags, which are read like any command line and predicted. Where
   rules across flags refuse it alone, those of Megatron-LM on what it alone executes included, the rule is kept.
3. The largest gain comes first. Gains do not add up: the plan as a whole is what the search predicts.

Nothing here changes what is trained: a plan has no such decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Unpack

from moe_overlap.api import Options, problem_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.job import ALWAYS_SHARDED, without_graphs
from moe_overlap.plan.plan import Plan
from moe_overlap.plan_search.flags import Target, as_run, flags_of
from moe_overlap.plan_search.results import Change
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.write.argument_file import layout_flags
from moe_overlap.tuner.write.upstream_rules import errors_of_upstreams_own
from moe_overlap.tuner.write.upstream_values import values_of

Flags = Mapping[str, tuple[str, ...]]

DECISIONS: Final = (
    ("tensor parallelism", ("--tensor-model-parallel-size", "--sequence-parallel", "--expert-tensor-parallel-size")),
    ("context parallelism", ("--context-parallel-size",)),
    ("expert parallelism", ("--expert-model-parallel-size",)),
    ("micro-batch", ("--micro-batch-size",)),
    ("recomputation", ("--recompute-", "--moe-layer-recompute")),
    ("offloading", ("--optimizer-cpu-offload", "--optimizer-offload", "--cpu-offloading")),
    ("overlap", ("--overlap-", "--delay-wgrad-compute")),
    ("optimizer states", ("--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy")),
)
"""Names of decisions, and prefixes of their flags; every other flag of a layout is of the pipeline."""
PIPELINE = "pipeline"
DEFAULTS: Final[Flags] = {
    "--tensor-model-parallel-size": ("1",),
    "--context-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--pipeline-model-parallel-size": ("1",),
    "--micro-batch-size": ("1",),
}
"""Flag -> the value that it stands for where it is not written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The user's own layout as the target runs it.

    Attributes:
        prediction, plan: None if the layout does not run on the cluster, or the flags have none.
        refusal: why the layout does not run; empty if it does, or if the flags have none.
    """

    prediction: Prediction | None = None
    plan: Plan | None = None
    refusal: str = ""


def baseline_of(arguments: Sequence[str], cluster: Cluster, target: Target, options: Options) -> Baseline:
    """The user's own layout, predicted."""
    refusal = ""
    # Where they overlap nothing, flags that ask for captured graphs are those of the run without them.
    for attempted in (arguments, without_graphs(arguments)[0]):
        try:
            executed = as_run(attempted, target)
            problem = problem_of(executed, cluster, options)
            prediction = predict_plan(problem.plan, problem)
        except ConfigError as error:
            refusal = str(error)
            continue
        assumed = (ALWAYS_SHARDED,) if len(executed) > len(attempted) else ()
        return Baseline(prediction=replace(prediction, assumed=assumed), plan=problem.plan)
    return Baseline(refusal=refusal if flags_of(arguments).keys() & layout_flags() else "")


def changes_of(
    flags: Flags,
    planned: Flags,
    baseline: Prediction,
    cluster: Cluster,
    added: Sequence[str] = (),
    **options: Unpack[Options],
) -> tuple[Change, ...]:
    """The decisions in which a plan differs from a user's flags.

    Args:
        flags: the user's, with their values.
        planned: the flags of the run under its plan.
        baseline: prediction of the user's flags as they are.
        added: flags that decide no layout, and were decided, too.
    """
    gone = {*layout_flags(), *added}
    before = by_decision({name: values for name, values in flags.items() if name in gone})
    after = by_decision({name: values for name, values in planned.items() if name in gone})
    # Predictions answer what Megatron-LM refuses, too; a decision that it refuses alone is no reason.
    broken = {str(error) for error in errors_of_upstreams_own(values_of(flags), cluster.gpus)}
    changes = []
    for decision in dict.fromkeys((*before, *after)):
        old, new = before.get(decision, {}), after.get(decision, {})
        if {**DEFAULTS, **old} == {**DEFAULTS, **new}:
            continue
        changed = {name: values for name, values in flags.items() if name not in old} | dict(new)
        prediction, rule = None, ""
        try:
            problem = problem_of(
                [word for name, values in changed.items() for word in (name, *values)], cluster, options
            )
            newly_broken = (
                e for e in errors_of_upstreams_own(values_of(changed), cluster.gpus) if str(e) not in broken
            )
            if (error := next(newly_broken, None)) is not None:
                raise error
            prediction = predict_plan(problem.plan, problem)
        except ConfigError as error:
            rule = (
                f"{error.subject} {error.value}: {error.rule}"
                if error.value != ""
                else f"{error.subject}: {error.rule}"
            )
        same = {name for name in old if old[name] == new.get(name)}
        changes.append(
            Change(
                name=decision,
                before={name: values for name, values in old.items() if name not in same},
                after={name: values for name, values in new.items() if name not in same},
                prediction=prediction,
                rule=rule,
            )
        )
    return tuple(sorted(changes, key=lambda change: -change.gain(baseline)))


def by_decision(flags: Flags) -> dict[str, dict[str, tuple[str, ...]]]:
    """The flags of a layout, by the decision that they belong to."""
    decided: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, values in flags.items():
        decisions = (decision for decision, prefixes in DECISIONS if name.startswith(prefixes))
        decided.setdefault(next(decisions, PIPELINE), {})[name] = values
    return decided
