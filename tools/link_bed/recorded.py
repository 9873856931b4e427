"""A simulated step as the runtime's recorder would have written it, so that the two can be laid over each other.

The executor goes through its list in order. A communication's span begins where the executor starts it, though the link may still
carry another one, and ends where the executor has waited for it, which may be later than the arrival. Computation is recorded as
it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_overlap.plan.instructions import COMPUTE, OPTIMIZER, Instruction
from moe_overlap.plan.spans import Span
from moe_overlap.tuner.cost.simulate import Simulation


def recorded(made: Sequence[Instruction], simulation: Simulation, rank: int) -> list[Span]:
    """Spans of one rank, in order of their starts.

    Args:
        made: the rank's list.
    """
    ran = {one.instruction.id: one for one in simulation.ran if one.rank == rank}
    spans: list[Span] = []
    under_way: dict[int, tuple[Instruction, float]] = {}
    now = 0.0

    def wait(number: int) -> None:
        nonlocal now
        if number not in under_way:
            return
        channel = under_way[number][0].channel
        for earlier in [n for n, (other, _) in under_way.items() if n <= number and other.channel == channel]:
            other, start = under_way.pop(earlier)
            now = max(now, ran[earlier].end)
            spans.append(_span(other, start, now))

    for i in made:
        for number in i.after:
            wait(number)
        if i.channel in (COMPUTE, OPTIMIZER):
            spans.append(_span(i, ran[i.id].start, ran[i.id].end))
            now = ran[i.id].end
        else:
            under_way[i.id] = (i, now)
    for number in list(under_way):
        wait(number)
    return sorted(spans, key=lambda span: (span.start, span.end))


def _span(i: Instruction, start: float, end: float) -> Span:
    return Span(i.name, i.channel.partition(".")[0], i.chunk or 0, i.micro_batch or 0, start, end)
