"""Every plan that flags can say by hand for a gate, and the judgement of a plan that was chosen among them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.gate_rules import GATE_FACTS, RANGES_BEFORE
from moe_overlap.plan.overlap import TUTEL_DEGREES
from tools.link_bed.figures import Spread
from tools.link_bed.variants import CHUNKS, DEFER, INTERLEAVE, PLAIN, SEQUENTIAL, Variant, base_flags, plain_flags

PARTITIONS = (2, 4, 8)
RANGES = ("experts", "after", "around")
BASELINES = (PLAIN, SEQUENTIAL)
CHOSEN = "chosen"


def baselines(gate: str) -> list[Variant]:
    """megatron-core's list without overlap: over its own all-to-all, and over the transport of all other plans."""
    return [Variant(PLAIN, plain_flags(gate), plain=True), Variant(SEQUENTIAL, base_flags(gate))]


def hand_set(gate: str, samples: int) -> list[Variant]:
    """Mechanism × deferral × one or two micro-batches at a time, without the sequential one and those that a plan may not have.

    Args:
        samples: of a micro-batch, which partitions divide.
    """
    cuts: list[tuple[str, tuple[str, ...]]] = [("", ())]
    cuts += [(f"tutel {degree}", (CHUNKS, str(degree))) for degree in TUTEL_DEGREES[1:]]
    for name in RANGES:
        if name in RANGES_BEFORE and not GATE_FACTS[gate].partitionable_before:
            continue
        for count in PARTITIONS:
            if samples % count == 0:
                flags = ("--moe-overlap-partitions", str(count), "--moe-overlap-range", name)
                cuts.append((f"{name} {count}", flags))
    found = []
    for together, interleaved in (("", ()), ("two micro-batches", INTERLEAVE)):
        for cut, cut_flags in cuts:
            if interleaved and CHUNKS in cut_flags:
                continue  # a plan may not have both
            for deferred, defer_flags in (("", ()), ("deferral", DEFER)):
                if words := [word for word in (cut, deferred, together) if word]:
                    flags = (*base_flags(gate), *cut_flags, *defer_flags, *interleaved)
                    found.append(Variant(" + ".join(words), flags))
    return found


def fastest(steps: Mapping[str, Sequence[float]], count: int) -> list[str]:
    """Names of the plans with the shortest step; of what disturbed a step little is left in the least of several."""
    return sorted(steps, key=lambda name: min(steps[name]))[:count]


@dataclass(frozen=True, slots=True)
class Judged:
    """What was measured of one cell.

    Attributes:
        finals: plan -> its steps of the last round: the chosen one, the baselines, the fastest hand-set ones.
        swept: hand-set plan -> its steps of the sweep.
        predicted: plan -> seconds that the tuner expects of it.
    """

    finals: Mapping[str, Sequence[float]]
    swept: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]

    @property
    def best(self) -> str:
        """The hand-set plan with the shortest median."""
        return min((name for name in self.finals if name not in (*BASELINES, CHOSEN)), key=self.median)

    def median(self, name: str) -> float:
        """Of a plan's steps: those of the last round, where it took part."""
        return statistics.median(self.finals.get(name) or self.swept[name])

    @property
    def over_best(self) -> float:
        """By what share the chosen plan is slower than the best hand-set one."""
        return self.median(CHOSEN) / self.median(self.best) - 1.0

    def gain(self, baseline: str) -> Spread:
        """Steps of a baseline over those of the chosen plan, turn by turn."""
        return Spread.of([slow / fast for slow, fast in zip(self.finals[baseline], self.finals[CHOSEN], strict=True)])

    def error(self, name: str) -> float:
        """Of the predicted step, relative to the measured one."""
        return self.predicted[name] / self.median(name) - 1.0

    @property
    def mean_error(self) -> float:
        """Of the absolute values over all hand-set plans."""
        return statistics.fmean(abs(self.error(name)) for name in self.swept)
