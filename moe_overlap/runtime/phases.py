"""Seconds of the phases of a step, from its spans, under the names of Megatron-LM's timers."""

from __future__ import annotations

from collections.abc import Iterable

from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.plan.spans import Span

EXCHANGES = {"ep": "expert-exchange", "pp": "pipeline-exchange"}


def phase_seconds(spans: Iterable[Span], level: int) -> dict[str, float]:
    """Timers of one step on one rank.

    Args:
        level: of --timing-log-level. 1: `forward-backward`, from the first operator to the last; `all-grads-sync`;
            `optimizer`, norm and clipping included; `params-all-gather`. 2: also the parts of the first, which may overlap:
            `forward-compute` (with recomputation), `backward-compute` (with weight gradients), `expert-exchange` and
            `pipeline-exchange`; the last two have no equal upstream.
    Returns:
        Name -> seconds; a phase that the rank does not have is left out.
    """
    seconds: dict[str, float] = {}
    first, last = float("inf"), 0.0
    for span in spans if level else ():
        part = span.name.partition(".")[0]
        if part == "optimizer":
            names = ["optimizer"]
        elif part == "gradients":
            names = ["all-grads-sync"]
        elif part == "parameters":
            names = ["params-all-gather"]
        else:
            first, last = min(first, span.start), max(last, span.end)
            seconds["forward-backward"] = last - first
            names = [_part_of(span)] if level > 1 else []
        for name in names:
            seconds[name] = seconds.get(name, 0.0) + span.end - span.start
    return seconds


def _part_of(span: Span) -> str:
    if span.channel != COMPUTE:
        return EXCHANGES.get(span.channel, span.channel)
    is_backward = span.name.endswith((".backward", ".dW"))
    return "backward-compute" if is_backward else "forward-compute"
