"""Profiles: the CPU seconds of each operator of a list, measured in steps without partitions.

With deferred weight gradients a backward operator and its weight gradients are measured separately. A list with a separate weight
gradient spends its seconds there, another list spends them in the backward operator. One of K partitions takes 1/K of the uncut
operator: these figures leave out the loss of efficiency by partitioning, which real computation shows.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.lowering.deferral import backward_of
from moe_overlap.plan.operators import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRADIENT, is_state_key, parse_operator
from moe_overlap.tuner.profile.database import Database, OperatorKey

# Orders to ranks; measuring.py follows them. They stand here because no torch is imported here.

ORDER_OPERATORS, ORDER_LINKS, ORDER_SLOWDOWN, ORDER_COUNTS = "operators", "links", "slowdown", "counts"
ORDERS = (ORDER_OPERATORS, ORDER_LINKS, ORDER_SLOWDOWN, ORDER_COUNTS)
TRANSFERS = "point_to_point"
"""The kind of link that leads to the next stage."""


def order_of(database: Database, keys: Sequence[OperatorKey], seconds_each: float) -> dict[str, Any]:
    """The order to measure operators into a database."""
    return {
        "do": ORDER_OPERATORS,
        "path": str(database.path.resolve()),
        "device": dataclasses.asdict(database.device),
        "operators": [[key.kind, key.direction, key.dtype, list(key.shape)] for key in keys],
        "seconds_each": seconds_each,
    }


LATE_SECONDS = 1e-4
"""Delay of the end of a sleep (0.07 to 0.14 ms here)."""
COMPUTING_KINDS = ("compute", "weight-gradient")


def median_seconds(steps: Iterable[Sequence[Any]]) -> dict[str, float]:
    """Median seconds of one micro-batch of every operator over several steps' spans; updates left out.

    An operator with several spans counts with their sum.
    """
    by_name: dict[str, list[float]] = {}
    for spans in steps:
        sums: dict[tuple[str, int], float] = {}
        for span in spans:
            if span.channel == COMPUTE and not is_state_key(span.name):
                key = (span.name, span.micro_batch)
                sums[key] = sums.get(key, 0.0) + span.end - span.start
        for (name, _), seconds in sums.items():
            by_name.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) for name, values in by_name.items()}


def mean_of_ranks(profiles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One profile for all ranks: the mean of each operator over the ranks that have it."""
    names = dict.fromkeys(name for profile in profiles for name in profile)
    return {name: statistics.fmean(profile[name] for profile in profiles if name in profile) for name in names}


def step_seconds(seconds: Mapping[str, float], micro_batches: int) -> float:
    """Seconds of computation of a complete step."""
    return sum(seconds.values()) * micro_batches


@dataclass(frozen=True, slots=True)
class ListSeconds:
    """A profile applied to the instructions of one list.

    Attributes:
        uncut: operator -> seconds of an uncut micro-batch.
        partitions: operator -> number of partitions in the list; 1 if missing.
    """

    uncut: Mapping[str, float]
    partitions: Mapping[str, int]

    def of(self, i: Instruction) -> float:
        """Seconds of one instruction."""
        share = len(i.partition) / self.partitions.get(i.name, 1) if i.partition else 1.0
        return self.uncut[i.name] * share


@dataclass(frozen=True, slots=True)
class GivenSeconds:
    """Seconds of every instruction of one list, by its number."""

    by_id: Mapping[int, float]

    def of(self, i: Instruction) -> float:
        """Seconds of one instruction."""
        return self.by_id[i.id]


def given_seconds(sleeps: Sequence[tuple[str, float]], instructions: Sequence[Instruction]) -> GivenSeconds:
    """Seconds that were given for the computation of a list, in its order.

    Args:
        sleeps: name and seconds of every operator of the passes.
    Raises:
        ValueError: the seconds belong to another list.
    """
    computed = computation_of(instructions)
    if [name for name, _ in sleeps] != [i.name for i in computed]:
        raise ValueError(f"seconds of {len(sleeps)} operators for another list of {len(computed)}")
    return GivenSeconds({i.id: seconds for i, (_, seconds) in zip(computed, sleeps, strict=True)})


def computation_of(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Instructions that compute in the passes of a list, without the update."""
    return [i for i in instructions if i.kind in COMPUTING_KINDS and i.micro_batch is not None]


def apply_profile(profile: Mapping[str, float], instructions: Sequence[Instruction]) -> ListSeconds:
    """Spread a profile over a list.

    Raises:
        KeyError: the list has an operator that was not measured.
    """
    computed = computation_of(instructions)
    listed = {i.name for i in computed}
    partitions: dict[str, int] = {}
    for i in computed:
        partitions[i.name] = max([partitions.get(i.name, 1), *(number + 1 for number in i.partition)])
    return ListSeconds({name: _whole_seconds(name, profile, listed) for name in listed}, partitions)


def _whole_seconds(name: str, profile: Mapping[str, float], listed: set[str]) -> float:
    operator = parse_operator(name)
    if operator.phase == RECOMPUTE:
        return profile[str(replace(operator, phase=FORWARD))]
    if operator.phase != BACKWARD:
        return profile[name]
    inside = (other for other in profile if other not in listed and _is_gradient_of(other, name))
    return profile[name] + sum(profile[n] for n in inside)


def _is_gradient_of(name: str, backward: str) -> bool:
    """True if an operator is a weight gradient of a backward operator."""
    return parse_operator(name).phase is WEIGHT_GRADIENT and backward_of(name) == backward
