"""Factors that make the simulated steps of measured plans take what was measured, kind by kind.

Terms. Ranks that send tokens to each other are a *group*. A *kind* is an operator without its layer, in partitions or whole. The
span of a collective goes from where its rank starts it to where the rank has waited for it; it is *exposed* where the rank
computes nothing at the end of it. Clocks of ranks are laid on each other at the end of the norm, where all meet.
Steps.
1. Observe (`observe`): the seconds of every kind as one rank has them, collectives alone.
   a. Computation: the mean of a stage's ranks; with the collectives inside operators, as prices of operators have them.
   b. A collective begins when the last rank of its group has started it. Where it is exposed on a rank it ends there with its
      span, and from the one to the other is what it took alone. Where it is exposed on none it may have ended before: that is a
      bound.
   c. What an exposed span has more is waiting for slower ranks. The simulator has one rank stand for all, and so the one that
      others wait for: computation is taken longer by the mean share that is waited. Transfers between stages and copies are left
      out: what their spans wait for is the pipeline's.
2. Fit (`fit`). What runs beside something else is slowed down, in the measurement as in the simulation. So the factors of prices
   alone are found by repetition: simulate at the factors so far, and multiply each by measured over simulated, until no kind
   moves. Collectives of which only a bound is known are shortened to it at most.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan.instructions import COMPUTING, DATA, EXPERT, Span, operator_spans
from moe_overlap.plan.operators import NORM, is_state_key, kind_of
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Kind, Refined

EXCHANGING = (EXPERT, DATA)
EXPOSED = 0.1
"""Share of a collective's span at its end in which its rank has to wait, from which on the end is taken for the collective's
own."""
Spans = Mapping[int, Sequence[Span]]
"""Rank -> its spans."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A measured step, as one rank has it; the stages' seconds are added.

    Attributes:
        seconds: of a step.
        bounds: kinds among them that took at most as long.
        waiting: seconds that a rank waits for slower ones, over those that it computes; `seconds` of computation have it.
        step_seconds: from the first start to the last end, of the slowest rank.
    """

    plan: Plan
    seconds: dict[Kind, float]
    bounds: frozenset[Kind]
    waiting: float
    step_seconds: float


def observe(plan: Plan, spans: Spans, cut: Iterable[str]) -> Observed:
    """Step 1: read a measured step.

    Args:
        spans: of at least one rank of every stage.
        cut: names of the operators that the plan has in partitions.
    """
    partitioned = frozenset(cut)
    spans = {rank: operator_spans(of_rank) for rank, of_rank in spans.items()}
    computed: dict[Kind, float] = defaultdict(float)
    known: dict[Kind, list[float]] = defaultdict(list)
    bounds: dict[Kind, list[float]] = defaultdict(list)
    waited = 0.0
    for stage in plan.stages:
        # 1a. Means, because the simulator has one rank stand for all of a stage.
        ranks = [spans[rank] for rank in stage.devices.ranks if rank in spans]
        for span in (span for of_rank in ranks for span in of_rank if span.channel in COMPUTING):
            computed[kind_of(span.name), span.name in partitioned] += (span.end - span.start) / len(ranks)
        groups = _groups(stage, spans)
        for group in groups:
            for name, alone, more in _exchanges(group):
                tells = bounds if more is None else known
                tells[kind_of(name), name in partitioned].append(alone / len(groups))
                waited += (more or 0.0) / len(groups)
    # 1c. Waiting is spread over all computation: which operator made a rank slow cannot be told from the spans.
    share = waited / sum(computed.values()) if computed else 0.0
    seconds = {kind: taken * (1.0 + share) for kind, taken in computed.items()}
    most = set()
    for kind in known.keys() | bounds.keys():
        exact, count = known[kind], len(known[kind]) + len(bounds[kind])
        # Where most ends were seen, their mean stands for the hidden ones, too. Else the sum may be too large, and is
        # kept as a bound.
        if 2 * len(exact) >= count:
            seconds[kind] = sum(exact) / len(exact) * count
        else:
            seconds[kind] = sum(exact) + sum(bounds[kind])
            most.add(kind)
    steps = [max(span.end for span in of_rank) - min(span.start for span in of_rank) for of_rank in spans.values()]
    return Observed(plan, seconds, frozenset(most), share, max(steps))


def _groups(stage: StagePlan, spans: Spans) -> list[list[Sequence[Span]]]:
    """The ranks of a stage that share its experts, as far as they were measured."""
    size, ranks = stage.expert * stage.expert_tensor, stage.devices.ranks
    blocks = ([spans[rank] for rank in ranks[at : at + size] if rank in spans] for at in range(0, len(ranks), size))
    return [block for block in blocks if block]


def _exchanges(group: Sequence[Sequence[Span]]) -> Iterable[tuple[str, float, float | None]]:
    """Name, seconds alone, and the mean of what the ranks of a group waited more; None where the seconds are a bound."""
    by_rank = [_taken(spans) for spans in group]
    for key in by_rank[0]:
        ends = [taken[key] for taken in by_rank if key in taken]
        # 1b. No all-to-all moves rows before the last rank has come: earlier starts are waiting, not communication.
        together = max(start for start, _, _ in ends)
        exposed = [(end - together, together - start) for start, end, waits in ends if waits and end > together]
        if exposed:
            alone = sum(seconds for seconds, _ in exposed) / len(exposed)
            waited = sum(more for _, more in exposed) / len(ends) if key[0] != NORM else 0.0
            yield key[0], alone, waited
        else:
            # Hidden on every rank: it ended somewhere before its spans did, so these seconds are a bound.
            yield key[0], sum(max(0.0, end - together) for _, end, _ in ends) / len(ends), None


def _taken(spans: Sequence[Span]) -> dict[tuple[str, int, int, int], tuple[float, float, bool]]:
    """Start, end and whether it is exposed, of every collective of a rank, by name, chunk, micro-batch and partition.

    On its channel a collective begins behind the one before, whose end is known where that one is exposed.
    """
    meeting = max((span.end for span in spans if span.name == NORM), default=max(span.end for span in spans))
    computing = sorted((span.start, span.end) for span in spans if span.channel in COMPUTING)
    free: dict[str, float] = {}
    seen: dict[tuple[str, int, int], int] = defaultdict(int)
    found = {}
    for span in sorted((span for span in spans if span.channel in EXCHANGING), key=lambda span: span.start):
        least = EXPOSED * (span.end - span.start)
        # The last computation that began before this span ended: after it the rank has only waited.
        place = bisect.bisect_left(computing, (span.end, 0.0)) - 1
        busy_until = computing[place][1] if place >= 0 else span.start
        is_exposed = span.end - max(span.start, busy_until) > least
        # A channel is a queue: a span that begins while the former collective still runs waits for that one first.
        behind = max(span.start, free.get(span.channel, span.start))
        start = behind if span.end - behind > least else span.start
        if is_exposed:
            free[span.channel] = span.end
        key = (span.name, span.chunk, span.micro_batch)
        found[*key, seen[key]] = (start - meeting, span.end - meeting, is_exposed)
        seen[key] += 1
    return found


ROUNDS = 12
CLOSE = 1e-3
"""Distance of measured over simulated from 1 at which the repetition ends."""


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds and number of the instructions of a kind in a simulated step, as one rank has it."""

    seconds: float
    instructions: float


Play = Callable[[Plan, Refined], Mapping[Kind, Played]]


@dataclass(frozen=True, slots=True)
class KindFit:
    """The fit of one kind.

    Attributes:
        predicted_seconds, measured_seconds: of the steps of all traces; 0 where there are none.
        is_bound: it took at most as long.
        factor: of its price; None where that has none.
        is_taken: it has no price, and takes what was measured.
    """

    kind: Kind
    predicted_seconds: float
    measured_seconds: float
    is_bound: bool
    factor: float | None
    is_taken: bool


def fit(observed: Sequence[Observed], play: Play) -> tuple[Refined, list[KindFit]]:
    """Step 2: factors of all kinds together.

    Args:
        play: simulates a plan at refined prices.
    Returns:
        The factors, and every kind that was measured or predicted, the longest first.
    """
    first = [play(step.plan, NOT_REFINED) for step in observed]
    refined = Refined({}, _unpriced(observed, first))
    factors: dict[Kind, float] = {}
    bounds: set[Kind] = set()
    for _ in range(ROUNDS):
        real, simulated, bounds = _sums(observed, [play(step.plan, refined) for step in observed])
        # Measured over simulated. Slowdown by neighbours is in both, so that the ratio is of the price alone once they
        # agree.
        moved = {kind: real[kind] / seconds for kind, seconds in simulated.items() if seconds and real.get(kind)}
        # A bound can only shorten: what took at most as long may have taken less than simulated, never shown to take
        # more.
        moved = {kind: min(1.0, ratio) if kind in bounds else ratio for kind, ratio in moved.items()}
        # These have no price that a factor could scale; they take what was measured.
        moved = {kind: ratio for kind, ratio in moved.items() if kind[0] not in refined.unpriced}
        factors = {kind: factors.get(kind, 1.0) * ratio for kind, ratio in moved.items()}
        refined = Refined(factors, refined.unpriced)
        if all(abs(ratio - 1.0) < CLOSE for ratio in moved.values()):
            break
    real, predicted, bounds = _sums(observed, first)
    kinds = [
        KindFit(
            kind,
            predicted.get(kind, 0.0),
            real.get(kind, 0.0),
            kind in bounds,
            factors.get(kind),
            kind[0] in refined.unpriced,
        )
        for kind in real.keys() | predicted.keys()
    ]
    return refined, sorted(
        kinds, key=lambda fitted: (-max(fitted.predicted_seconds, fitted.measured_seconds), fitted.kind)
    )


def _sums(
    observed: Sequence[Observed], played: Sequence[Mapping[Kind, Played]]
) -> tuple[dict[Kind, float], dict[Kind, float], set[Kind]]:
    """Measured and simulated seconds of the steps that tell of a kind, and kinds of which only bounds are known.

    A bound tells nothing where another trace has more. A kind of which no trace tells has the simulated seconds of all.
    """
    measured = {kind for step in observed for kind in step.seconds}
    told = {kind for step in observed for kind in step.seconds if kind not in step.bounds}
    real: dict[Kind, float] = defaultdict(float)
    simulated: dict[Kind, float] = defaultdict(float)
    for step, simulation in zip(observed, played, strict=True):
        for kind in step.seconds.keys() | simulation.keys():
            tells = kind in step.seconds and (kind not in step.bounds or kind not in told)
            if tells:
                real[kind] += step.seconds[kind]
            if kind in simulation and (tells or kind not in measured):
                simulated[kind] += simulation[kind].seconds
    return dict(real), dict(simulated), measured - told


def _unpriced(observed: Sequence[Observed], played: Sequence[Mapping[Kind, Played]]) -> dict[str, float]:
    """Seconds of one instruction of the kinds behind the passes that the model does not price."""
    real, simulated, _ = _sums(observed, played)
    found = {}
    for kind, seconds in real.items():
        count = sum(simulation[kind].instructions for simulation in played if kind in simulation)
        # Buckets of gradients and the instruction that completes them share a name: the price of the ones is that of the kind.
        has_price = any(simulated.get((kind[0], is_cut)) for is_cut in (False, True))
        if is_state_key(kind[0]) and seconds and count and not has_price:
            found[kind[0]] = seconds / count
    return found
