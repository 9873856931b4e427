"""Fits price factors so that simulated steps of measured plans take the measured seconds, for every kind of instruction.

Terms. Ranks that send tokens to each other are a *group*. A *kind* is an operator without its layer, in partitions or whole. The
span of a collective goes from its start on a rank to the end of that rank's wait for it; it is *exposed* if the rank computes
nothing at the end of it. The clocks of the ranks are aligned at the end of the norm, a collective of all ranks.
Steps.
1. Observe (`observe`): the seconds of every kind on one rank, without waiting.
   a. Computation: the mean of a stage's ranks; includes the collectives inside operators, as prices of operators do.
   b. A collective begins when the last rank of its group has started it. If its span is exposed on a rank, it ends there with
      the span, and these seconds are exact. If it is exposed on no rank, it may have ended earlier: the seconds are an upper
      bound.
   c. The rest of an exposed span is waiting for slower ranks. In the simulator one rank represents all, so it must be as slow as
      the slowest: the seconds of computation are raised by the mean share of waiting. Transfers between stages and copies are
      left out: their spans contain the waiting of the pipeline.
2. Fit (`fit`). Concurrent instructions slow each other down, in the measurement as in the simulation. So the price factors are
   found by iteration: simulate with the present factors, and multiply each factor by measured over simulated seconds, until no
   kind changes. Collectives with only an upper bound are shortened to it at most.
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
"""Share of a collective's span, at its end, in which its rank has to wait for the span's end to count as the collective's
own."""
Spans = Mapping[int, Sequence[Span]]
"""Rank -> its spans."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A measured step, as one rank sees it; the seconds of the stages are summed.

    Attributes:
        seconds: seconds of a step, by kind.
        bounds: kinds whose seconds are an upper bound.
        waiting: seconds that a rank waits for slower ones, over those that it computes; included in `seconds` of computation.
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
        spans: spans of at least one rank of every stage.
        cut: names of the operators that the plan runs in partitions.
    """
    partitioned = frozenset(cut)
    spans = {rank: operator_spans(of_rank) for rank, of_rank in spans.items()}
    computed: dict[Kind, float] = defaultdict(float)
    measured: dict[Kind, list[float]] = defaultdict(list)
    bounds: dict[Kind, list[float]] = defaultdict(list)
    waited = 0.0
    for stage in plan.stages:
        # 1a. Means, because in the simulator one rank represents all of a stage.
        ranks = [spans[rank] for rank in stage.devices.ranks if rank in spans]
        for span in (span for of_rank in ranks for span in of_rank if span.channel in COMPUTING):
            computed[kind_of(span.name), span.name in partitioned] += (span.end - span.start) / len(ranks)
        groups = _groups(stage, spans)
        for group in groups:
            for name, seconds_alone, more in _collective_seconds(group):
                tells = bounds if more is None else measured
                tells[kind_of(name), name in partitioned].append(seconds_alone / len(groups))
                waited += (more or 0.0) / len(groups)
    # 1c. Waiting is spread over all computation: the spans do not show which operator made a rank slow.
    share = waited / sum(computed.values()) if computed else 0.0
    seconds = {kind: busy_seconds * (1.0 + share) for kind, busy_seconds in computed.items()}
    most = set()
    for kind in measured.keys() | bounds.keys():
        exact, count = measured[kind], len(measured[kind]) + len(bounds[kind])
        # If most ends are exact, their mean represents the hidden ones, too. Else the sum may be too large: it is stored as a
        # bound.
        if 2 * len(exact) >= count:
            seconds[kind] = sum(exact) / len(exact) * count
        else:
            seconds[kind] = sum(exact) + sum(bounds[kind])
            most.add(kind)
    steps = [max(span.end for span in of_rank) - min(span.start for span in of_rank) for of_rank in spans.values()]
    return Observed(plan, seconds, frozenset(most), share, max(steps))


def _groups(stage: StagePlan, spans: Spans) -> list[list[Sequence[Span]]]:
    """The measured ranks of a stage that share experts, group by group."""
    size, ranks = stage.expert * stage.expert_tensor, stage.devices.ranks
    blocks = ([spans[rank] for rank in ranks[at : at + size] if rank in spans] for at in range(0, len(ranks), size))
    return [block for block in blocks if block]


def _collective_seconds(group: Sequence[Sequence[Span]]) -> Iterable[tuple[str, float, float | None]]:
    """Name, seconds without waiting, and the mean seconds of waiting in a group; None if the seconds are an upper bound."""
    by_rank = [_collectives_of(spans) for spans in group]
    for key in by_rank[0]:
        ends = [collectives[key] for collectives in by_rank if key in collectives]
        # 1b. No all-to-all moves rows before the last rank has started it: earlier ranks wait.
        together = max(start for start, _, _ in ends)
        exposed = [(end - together, together - start) for start, end, waits in ends if waits and end > together]
        if exposed:
            mean_seconds = sum(seconds for seconds, _ in exposed) / len(exposed)
            waited = sum(more for _, more in exposed) / len(ends) if key[0] != NORM else 0.0
            yield key[0], mean_seconds, waited
        else:
            # Hidden on every rank: it ended at some time before its spans did, so these seconds are an upper bound.
            yield key[0], sum(max(0.0, end - together) for _, end, _ in ends) / len(ends), None


def _collectives_of(spans: Sequence[Span]) -> dict[tuple[str, int, int, int], tuple[float, float, bool]]:
    """Start, end and whether it is exposed, of every collective of a rank, by name, chunk, micro-batch and partition.

    A channel runs its collectives in order: each begins after the previous one, whose end is known if it is exposed.
    """
    meeting = max((span.end for span in spans if span.name == NORM), default=max(span.end for span in spans))
    computing = sorted((span.start, span.end) for span in spans if span.channel in COMPUTING)
    free: dict[str, float] = {}
    seen: dict[tuple[str, int, int], int] = defaultdict(int)
    collectives = {}
    for span in sorted((span for span in spans if span.channel in EXCHANGING), key=lambda span: span.start):
        least = EXPOSED * (span.end - span.start)
        # The last computation that began before this span ended: after it the rank only waits.
        place = bisect.bisect_left(computing, (span.end, 0.0)) - 1
        busy_until = computing[place][1] if place >= 0 else span.start
        is_exposed = span.end - max(span.start, busy_until) > least
        # A channel is a queue: a span that begins while the previous collective still runs waits for that one first.
        queued = max(span.start, free.get(span.channel, span.start))
        start = queued if span.end - queued > least else span.start
        if is_exposed:
            free[span.channel] = span.end
        key = (span.name, span.chunk, span.micro_batch)
        collectives[*key, seen[key]] = (start - meeting, span.end - meeting, is_exposed)
        seen[key] += 1
    return collectives


ROUNDS = 12
CLOSE = 1e-3
"""Deviation of measured over simulated seconds from 1 at which the iteration ends."""


@dataclass(frozen=True, slots=True)
class SimulatedKind:
    """Seconds and number of the instructions of a kind in a simulated step, as one rank sees it."""

    seconds: float
    instructions: float


Simulate = Callable[[Plan, Refined], Mapping[Kind, SimulatedKind]]


@dataclass(frozen=True, slots=True)
class KindFit:
    """The fit of one kind.

    Attributes:
        predicted_seconds, measured_seconds: sums over the steps of all traces; 0 if there are none.
        is_bound: whether `measured_seconds` is an upper bound.
        factor: factor of its price; None if it has no price.
        is_taken: whether it has no price and gets the measured seconds.
    """

    kind: Kind
    predicted_seconds: float
    measured_seconds: float
    is_bound: bool
    factor: float | None
    is_taken: bool


def fit(observed: Sequence[Observed], simulate: Simulate) -> tuple[Refined, list[KindFit]]:
    """Step 2: factors of all kinds together.

    Args:
        simulate: (plan, refined prices) -> simulated seconds of each kind.
    Returns:
        The factors, and every measured or predicted kind, the longest first.
    """
    first = [simulate(step.plan, NOT_REFINED) for step in observed]
    refined = Refined({}, _unpriced(observed, first))
    factors: dict[Kind, float] = {}
    bounds: set[Kind] = set()
    for _ in range(ROUNDS):
        real, simulated, bounds = _sums(observed, [simulate(step.plan, refined) for step in observed])
        # Measured over simulated. Both include slowdown by concurrent instructions, so once they agree the ratio is that of the
        # price alone.
        moved = {kind: real[kind] / seconds for kind, seconds in simulated.items() if seconds and real.get(kind)}
        # A bound can only shorten: the kind may have taken less than the bound, but nothing shows that it took more than
        # simulated.
        moved = {kind: min(1.0, ratio) if kind in bounds else ratio for kind, ratio in moved.items()}
        # Kinds without a price have nothing to scale; they get the measured seconds.
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
    observed: Sequence[Observed], simulations: Sequence[Mapping[Kind, SimulatedKind]]
) -> tuple[dict[Kind, float], dict[Kind, float], set[Kind]]:
    """Measured and simulated seconds of every kind, over the steps that measure it; and the kinds with only a bound.

    A bound is ignored if another trace has exact seconds. A kind that no trace measures has the simulated seconds of all.
    """
    measured = {kind for step in observed for kind in step.seconds}
    exact = {kind for step in observed for kind in step.seconds if kind not in step.bounds}
    real: dict[Kind, float] = defaultdict(float)
    simulated: dict[Kind, float] = defaultdict(float)
    for step, simulation in zip(observed, simulations, strict=True):
        for kind in step.seconds.keys() | simulation.keys():
            tells = kind in step.seconds and (kind not in step.bounds or kind not in exact)
            if tells:
                real[kind] += step.seconds[kind]
            if kind in simulation and (tells or kind not in measured):
                simulated[kind] += simulation[kind].seconds
    return dict(real), dict(simulated), measured - exact


def _unpriced(observed: Sequence[Observed], simulations: Sequence[Mapping[Kind, SimulatedKind]]) -> dict[str, float]:
    """Seconds of one instruction of each kind after the passes that the model does not price."""
    real, simulated, _ = _sums(observed, simulations)
    prices = {}
    for kind, seconds in real.items():
        count = sum(simulation[kind].instructions for simulation in simulations if kind in simulation)
        # Buckets of gradients and the instruction that completes them share a name: the buckets' price is that of the kind.
        has_price = any(simulated.get((kind[0], is_cut)) for is_cut in (False, True))
        if is_state_key(kind[0]) and seconds and count and not has_price:
            prices[kind[0]] = seconds / count
    return prices
