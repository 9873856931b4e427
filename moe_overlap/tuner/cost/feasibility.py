"""Whether predicted stages fit their GPUs, how certain that is, and what fills the fullest one.

1. A stage *needs* its predicted peak without fragmentation: before an allocation fails, the caching allocator gives back what it
   reserves in vain (with `expandable_segments`, whatever lies between tensors, too).
2. `MemoryQuantiles` are factors on what is needed: with 5 % certainty, and with the certainty that `--memory-margin` asks for
   (95 %), a run needs no more than that. They come from the peaks of calibration runs (`memory_errors.py`).
3. The verdict, over all stages: *fits*, where the quantile of the margin is within the capacity everywhere; *does not fit*, where
   even the 5 % quantile of a stage exceeds it; *may not fit* between them.
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
"""The margin where none is asked for."""
Verdict = Literal["fits", "may not fit", "does not fit"]


@dataclass(frozen=True, slots=True)
class MemoryQuantiles:
    """Measured over predicted peaks: the 5 % quantile, and the one of the margin."""

    low: float = 1.0
    high: float = 1.0
    margin: float = CERTAINTY

    @property
    def certainty(self) -> str:
        """The margin for a reader, as `95 %`."""
        return f"{100 * self.margin:.10g} %"


@dataclass(frozen=True, kw_only=True, slots=True)
class FullestStage:
    """The stage that needs the most, and what most of it is."""

    stage: int
    needed_bytes: int
    low_bytes: int
    """The 5 % quantile of what the stage needs."""
    high_bytes: int
    """The quantile of the margin."""
    category: str
    """The largest of PeakBytes."""
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
class Change:
    """One changed decision; `report/prediction.py` has its name and its flags.

    Attributes:
        modules: that are recomputed.
        number: of layers that are recomputed in every chunk, or of samples in a micro-batch.
    """

    kind: ChangeKind
    modules: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A single change under which a plan fits, as predicted."""

    change: Change
    step_seconds: float
    slower_by: float
    """Relative to the step of the plan that does not fit."""
    high_bytes: int
    """The quantile of the margin of what the fullest stage then needs."""


def needed_bytes(stage: PredictedStage) -> int:
    """Bytes that a stage cannot do without."""
    return stage.peak_bytes - stage.peak_bytes_by_category.fragmentation


def verdict_of(stages: Sequence[PredictedStage], capacity: float, quantiles: MemoryQuantiles) -> Verdict:
    """Whether all stages fit a GPU of `capacity` bytes."""
    most = max(needed_bytes(stage) for stage in stages)
    if most * quantiles.high <= capacity:
        return "fits"
    return "does not fit" if most * quantiles.low > capacity else "may not fit"


def fullest_stage(stages: Sequence[PredictedStage], quantiles: MemoryQuantiles) -> FullestStage:
    """The stage that needs the most; the first of equals."""
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
    """The category that fills the most of what a stage needs, and its bytes."""
    needed = {name: size for name, size in dataclasses.asdict(peaks).items() if name != "fragmentation"}
    name = max(needed, key=lambda category: needed[category])
    return name, needed[name]


def overflow_counts(stages: Sequence[PredictedStage], capacity: float, quantiles: MemoryQuantiles) -> tuple[int, int]:
    """How many stages do not fit, and how many more may not."""
    verdicts = [verdict_of([stage], capacity, quantiles) for stage in stages]
    return verdicts.count("does not fit"), verdicts.count("may not fit")


def overflow_lines(stages: Sequence[PredictedStage], capacity: float, quantiles: MemoryQuantiles) -> list[str]:
    """The stages whose quantile of the margin exceeds the capacity, the fullest first, each with a verdict of its own."""
    lines = []
    for index in sorted(range(len(stages)), key=lambda stage: -needed_bytes(stages[stage])):
        stage = stages[index]
        verdict, needed = verdict_of([stage], capacity, quantiles), needed_bytes(stage)
        if verdict != "fits":
            name, size = largest_category(stage.peak_bytes_by_category)
            lines.append(
                f"{verdict}: stage {index} needs {needed / GIB:.1f} GiB of {capacity / GIB:.1f}, most of it {name} "
                f"({size / GIB:.1f}); with {quantiles.certainty} certainty no more than {needed * quantiles.high / GIB:.1f}"
            )
    return lines
