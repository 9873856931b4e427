"""Slots of one rank's list: how long nothing computes where weight gradients stand, and what may stand there.

Read from a list in which every weight gradient that can be deferred is, in program order, and from its simulation with weight
gradients that take no time: what is idle then is what they can fill. Around a whole exchange that is the exchange itself; behind
the last part of a cut one, what the other parts leave of it; under two micro-batches in turn, what neither fills.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.instructions import COMPUTE, Instruction
from moe_overlap.plan.lower_layers import COUNT_CHANNEL, EXPERT_CHANNEL
from moe_overlap.plan.operators import parse_operator
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.simulate import Ran
from moe_overlap.tuner.search.layer.assignment import Gradient, Problem
from moe_overlap.tuner.search.layer.labels import may_run_under
from moe_overlap.tuner.search.layer.repeated_layers import LayerSpan

DIGITS = 9
"""Of seconds: below a nanosecond, equal layers differ by rounding alone."""


@dataclass(frozen=True, slots=True)
class ChunkProblem:
    """The assignment problem of one chunk.

    Attributes:
        gradients, slots: names of the problem's weight gradients and slots.
        layers: where each layer stands in the problem.
    """

    problem: Problem
    gradients: tuple[str, ...]
    slots: tuple[str, ...]
    layers: tuple[LayerSpan, ...]


def idle_seconds(ran: Sequence[Ran], slot_of: Mapping[str, str]) -> dict[str, float]:
    """Seconds of every slot in which nothing computes, the mean over micro-batches.

    Args:
        ran: of one rank.
        slot_of: weight gradient -> the slot it stands in.
    """
    total: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    free, slot = 0.0, ""
    for one in sorted(ran, key=lambda one: one.instruction.id):
        i = one.instruction
        if i.channel != COMPUTE:
            continue
        if i.kind == "weight-gradient":
            slot = slot_of[i.name]
            continue
        if slot:
            total[slot] += one.start - free
            times[slot] += 1
            slot = ""
        free = one.end
    return {slot: round(total[slot] / times[slot], DIGITS) for slot in times}


def chunk_problem(prices: StagePrices, chunk: int, idle: Mapping[str, float], max_bytes: int) -> ChunkProblem:
    """What one backward pass through a chunk leaves to decide.

    Reductions, transfers and copies are no constraints: lowering places them anew, behind what they wait for.

    Args:
        prices: of the stage, its list read.
        idle: `idle_seconds`.
    """
    made = [i for i in prices.made if (i.chunk, i.micro_batch) == (chunk, 0) and _is_decided(i)]
    last = {i.name: place for place, i in enumerate(made) if i.name in idle}
    gradients = {place: i.name for place, i in enumerate(made) if i.kind == "weight-gradient"}
    label = may_run_under(made, last.values(), gradients)
    slots = sorted(last, key=last.__getitem__)
    under = {place: tuple(j for j, slot in enumerate(slots) if place in label[last[slot]]) for place in gradients}
    names = [(place, name) for place, name in gradients.items() if under[place]]
    return ChunkProblem(
        problem=Problem(
            gradients=tuple(
                Gradient(
                    seconds=round(prices.seconds(made[place]), DIGITS),
                    bytes=round(prices.deferred_bytes(name)),
                    first=under[place][0],
                    under=under[place],
                )
                for place, name in names
            ),
            slots=tuple(idle[slot] for slot in slots),
            max_bytes=max_bytes,
        ),
        gradients=tuple(name for _, name in names),
        slots=tuple(slots),
        layers=_layers([name for _, name in names], slots),
    )


def _is_decided(i: Instruction) -> bool:
    return i.kind in ("compute", "weight-gradient") or i.channel in (EXPERT_CHANNEL, COUNT_CHANNEL)


def _layers(gradients: Sequence[str], slots: Sequence[str]) -> tuple[LayerSpan, ...]:
    """Layers in backward order; the head counts as one in front of them."""
    places = [[_layer(name) for name in names] for names in (gradients, slots)]
    spans, start = [], (0, 0)
    for layer in sorted({layer for names in places for layer in names}, reverse=True):
        end = tuple(first + names.count(layer) for first, names in zip(start, places, strict=True))
        spans.append(LayerSpan((start[0], end[0]), (start[1], end[1])))
        start = (end[0], end[1])
    return tuple(spans)


def _layer(name: str) -> float:
    layer = parse_operator(name).layer
    return float("inf") if layer is None else layer
