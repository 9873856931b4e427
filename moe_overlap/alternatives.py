"""Single changes of a job, each predicted: what an answer suggests to try next.

    a larger micro-batch              twice the samples, if a step has two micro-batches or more
    no recomputation                  its flags are dropped
    model chunks                      two on every pipeline stage, if the layers divide
    hidden reductions                 gradients and parameters under computation
    overlapped all-to-alls            two partitions of every micro-batch, or two micro-batches at a time where one has one
                                      sample: the simplest of this fork's overlaps, of which --overlap-only compares all
    CUDA graphs                       those that `host_launches.py` has predicted; their memory is not known

A change is read as flags, so that one which training refuses is left out, and predicted like the job itself. An answer must not
take minutes: only layouts whose captures exist are predicted, and no change is begun after `BUDGET_SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.capabilities import GRAPHS_FLAG
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import Alternative
from moe_overlap.tuner.cost.host import Launching
from moe_overlap.tuner.write.flags_left_out import LEFT_OUT

BUDGET_SECONDS = 3.0
RECOMPUTE_FLAGS = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
    *("--recompute-activations", "--moe-layer-recompute"),
)
OVERLAPPED = ("--moe-gate", "topk", "--moe-token-dispatcher-type", "irregular")
"""Flags that every overlap of this fork needs."""
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
Predict = Callable[[Sequence[str]], Prediction]
"""Arguments -> their prediction; ConfigError for those that are refused, `NotCaptured` where a capture is missing."""


class NotCaptured(Exception):
    """A layout of which no capture exists yet."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Flags that are added to a job, and flags that are dropped with their values."""

    name: str
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def alternatives_of(
    arguments: Sequence[str],
    plan: Plan,
    launching: Launching | None,
    data_flags: Sequence[str],
    may_interleave: bool,
    predict: Predict,
) -> tuple[Alternative, ...]:
    """The single changes of a job that were predicted, the fastest first; those that do not fit come last.

    Args:
        arguments: the flags of the job, without files of flags.
        plan: the plan of these flags.
        data_flags: flags that hide reductions and gathers and that the job does not set.
        may_interleave: whether its stages may have two model chunks.
    """
    deadline, alternatives, flags = time.monotonic() + BUDGET_SECONDS, [], grouped(tuple(arguments))
    for change in _changes(plan, data_flags, may_interleave):
        if time.monotonic() >= deadline:
            break
        dropped = [name for name in change.dropped if name in flags]
        remaining = [word for name, values in flags.items() if name not in dropped for word in (name, *values)]
        try:
            prediction = predict((*remaining, *change.added))
        except (ConfigError, NotCaptured):
            continue
        alternatives.append(
            Alternative(
                name=change.name,
                flags=" ".join(change.added) or f"without {' '.join(dropped)}",
                step_seconds=prediction.predicted.step_seconds,
                high_bytes=prediction.fullest.high_bytes,
                fits=prediction.fits,
            )
        )
    if launching is not None and launching.graphed_seconds is not None:
        where = "not yet run on a GPU" if launching.graph_flags == (GRAPHS_FLAG,) else "Megatron-LM's, not this fork's"
        graphs = Alternative(
            name=f"CUDA graphs ({where})", flags=" ".join(launching.graph_flags), step_seconds=launching.graphed_seconds
        )
        alternatives.append(graphs)
    return tuple(sorted(alternatives, key=lambda alternative: (not alternative.fits, alternative.step_seconds)))


def _changes(plan: Plan, data_flags: Sequence[str], may_interleave: bool) -> list[_Change]:
    """The changes that the form of a plan leaves, those that gain most on average first."""
    stage, changes = plan.stages[0], []
    if any(other.recompute.granularity != "none" for other in plan.stages):
        changes.append(_Change("no recomputation", dropped=RECOMPUTE_FLAGS))
    if stage.gradient_accumulation_steps % 2 == 0:
        larger = 2 * stage.micro_batch_size
        changes.append(_Change("a larger micro-batch", ("--micro-batch-size", str(larger))))
    if len(plan.stages) > 1 and len(stage.chunks) == 1 and may_interleave:
        changes.append(_Change("two model chunks a stage", INTERLEAVED))
    if data_flags and stage.data * stage.context > 1:
        changes.append(_Change("hidden reductions of gradients", tuple(data_flags)))
    if stage.expert * stage.expert_tensor > 1 and not plan.is_listed:
        pairs = stage.micro_batch_size % 2
        flag = "--moe-overlap-micro-batches" if pairs else "--moe-overlap-partitions"
        # Of a pipeline, micro-batches overlap between the model chunks of a stage.
        chunks = INTERLEAVED if pairs and len(plan.stages) > 1 and len(stage.chunks) == 1 else ()
        changes.append(_Change("overlapped all-to-alls", (flag, "2", *OVERLAPPED, *chunks), tuple(LEFT_OUT)))
    return changes
