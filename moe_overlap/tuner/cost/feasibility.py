"""Whether predicted stages fit their GPUs, with what certainty, and the largest category on the fullest stage.

1. The *needed bytes* of a stage are its predicted peak without fragmentation: before an allocation fails, the caching allocator
   frees reserved bytes without use (with `expandable_segments` also those between tensors).
2. `MemoryQuantiles` are factors on needed bytes: a run needs at most that much with 5 % certainty, and with the certainty of
   `--memory-margin` (95 %). They come from the peaks of calibration runs (`memory_errors.py`).
3. The capacity is what the driver, CUDA and NCCL leave of a GPU's memory (`library_memory.py`).
4. The verdict over all stages: *fits* if the quantile of the margin is within the capacity on every stage; *does not fit* if even
   the 5 % quantile of some stage exceeds it; else *may not fit*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from moe_overlap.describe.cluster import GIB
from moe_overlap.plan.plan import PeakBytes, PredictedStage

CERTAINTY = 0.95
"""The default margin."""
Verdict = Literal["fits", "may not fit", "does not fit"]


@dataclass(frozen=True, slots=True)
class MemoryQuantiles:
    """Quantiles of measured over predicted peaks: 5 %, and the margin."""

    low: float = 1.0
    high: float = 1.0
    margin: float = CERTAINTY

    @property
    def certainty(self) -> str:
        """The margin as text: `95 %`."""
        return f"{100 * self.margin:.10g} %"


@dataclass(frozen=True, kw_only=True, slots=True)
class FullestStage:
    """The stage that needs the most bytes, and its largest category."""

    stage: int
    needed_bytes: int
    low_bytes: int
    """The 5 % quantile of the needed bytes."""
    high_bytes: int
    """The quantile of the margin."""
    category: str
    """The largest category of PeakBytes."""
    category_bytes: int


class ChangeKind(StrEnum):
    """Decisions that lower the memory of a plan."""

    MODULES = "recompute modules"
    LAYERS = "recompute layers"
    EVERY_LAYER = "recompute every layer"
    MICRO_BATCH = "smaller micro-batch"
    SHARD_OPTIMIZER = "shard optimizer"
    SHARD_ALL = "shard parameters and gradients"
    HOST_OPTIMIZER = "optimizer in host memory"


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """One changed decision; `report/prediction.py` has its name and its flags.

    Attributes:
        modules: the recomputed modules.
        number: recomputed layers per chunk, or samples per micro-batch.
    """

    kind: ChangeKind
    modules: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A single change with which a plan is predicted to fit."""

    change: MemoryChange
    step_seconds: float
    slower_by: float
    """Increase relative to the step of the plan that does not fit."""
    high_bytes: int
    """The quantile of the margin for the fullest stage after the change."""


def needed_bytes(stage: PredictedStage) -> int:
    """The predicted peak of a stage without fragmentation."""
    return stage.peak_bytes - stage.peak_bytes_by_category.fragmentation


def verdict_of(stages: Sequence[PredictedStage], capacity: float, quantiles: MemoryQuantiles) -> Verdict:
    """Whether all stages fit a GPU of `capacity` bytes."""
    most = max(needed_bytes(stage) for stage in stages)
    if most * quantiles.high <= capacity:
        return "fits"
    return "does not fit" if most * quantiles.low > capacity else "may not fit"


def fullest_stage(stages: Sequence[PredictedStage], quantiles: MemoryQuantiles) -> FullestStage:
    """The stage that needs the most bytes; the first of equals."""
    index = max(range(len(stages)), key=lambda stage: needed_bytes(stages[stage]))
    needed = needed_bytes(stages[index])
    category, size = largest_category(stages[index].peak_bytes_by_category)
    return FullestStage(
        stage=index,
        needed_bytes=needed,
        low_bytes=round(needed * quantiles.low),
        high_bytes=round(needed * quantiles.high),
        category=category,
        category_bytes=size,
    )


def largest_category(peaks: PeakBytes) -> tuple[str, int]:
    """The largest category of the needed bytes, and its bytes."""
    needed = {name: size for name, size in dataclasses.asdict(peaks).items() if name != "fragmentation"}
    name = max(needed, key=lambda category: needed[category])
    return name, needed[name]


def overflow_counts(stages: Sequence[PredictedStage], capacity: float, quantiles: MemoryQuantiles) -> tuple[int, int]:
    """Number of stages that do not fit, and number of those that may not fit."""
    verdicts = [verdict_of([stage], capacity, quantiles) for stage in stages]
    return verdicts.count("does not fit"), verdicts.count("may not fit")


def overflow_lines(stages: Sequence[PredictedStage], capacity: float, quantiles: MemoryQuantiles) -> list[str]:
    """One line with a verdict for every stage whose quantile of the margin exceeds the capacity, fullest first."""
    lines = []
    for index in sorted(range(len(stages)), key=lambda stage: -needed_bytes(stages[stage])):
        stage = stages[index]
        verdict, needed = verdict_of([stage], capacity, quantiles), needed_bytes(stage)
        if verdict != "fits":
            name, size = largest_category(stage.peak_bytes_by_category)
            lines.append(
                f"{verdict}: stage {index} needs {needed / GIB:.1f} GiB, at most {needed * quantiles.high / GIB:.1f} "
                f"({quantiles.certainty}), of {capacity / GIB:.1f}; largest part: {name}, {size / GIB:.1f}"
            )
    return lines
