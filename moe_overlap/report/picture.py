"""A step of a rank as a self-contained SVG: a lane of computation, coloured by the kind of work, and one of communication.

Communication is *hidden* while a compute span of the same rank runs, and *exposed* otherwise. The heading of each step has the
exposed seconds from `communication_seconds`, as in the training log. Lanes of several steps, or of several ranks of one step,
share an axis of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from moe_overlap.plan.instructions import COMPUTING, Span, communication_seconds
from moe_overlap.plan.operators import Phase, parse_operator

Interval = tuple[float, float]

FORWARD, BACKWARDS, WEIGHTS, UPDATE = "forward", "backward", "weight gradients", "optimizer"
HIDDEN, EXPOSED = "hidden communication", "exposed communication"
COLOURS = {
    FORWARD: "#9ecae1",
    BACKWARDS: "#4a86bd",
    WEIGHTS: "#8e6bb0",
    UPDATE: "#b5b5b5",
    HIDDEN: "#74b87e",
    EXPOSED: "#e4572e",
}

WIDTH, LEFT, RIGHT = 960, 128, 16
LANE_HEIGHT, LANE_GAP, HEADING_HEIGHT, STEP_GAP = 30, 6, 26, 18
MOST_TICKS = 10
SMALLEST_GAP_PIXELS = 0.3
"""Rectangles of one colour with a smaller gap between them are drawn as one, to keep the file small."""


@dataclass(frozen=True, slots=True)
class StepPicture:
    """One step of one rank, ready to be drawn.

    Attributes:
        heading: the line above its lanes.
        compute: intervals in seconds by kind of work.
        communication: intervals in seconds, under HIDDEN and EXPOSED.
        seconds: end of the last span.
    """

    heading: str
    compute: dict[str, list[Interval]]
    communication: dict[str, list[Interval]]
    seconds: float


def step_of(spans: Sequence[Span], title: str) -> StepPicture:
    """Sort the spans of one rank into the lanes of a picture."""
    compute: dict[str, list[Interval]] = {}
    for span in spans:
        if span.channel in COMPUTING:
            compute.setdefault(kind_of_work(span.name), []).append((span.start, span.end))
    busy = union(interval for intervals in compute.values() for interval in intervals)
    communicating = union((span.start, span.end) for span in spans if span.channel not in COMPUTING)
    exposed = subtract(communicating, busy)
    communication = {HIDDEN: subtract(communicating, exposed), EXPOSED: exposed}

    seconds = max(span.end for span in spans)
    # The heading has no total of communication: a span lasts until its result is used, not until it has arrived.
    heading = f"{title}: {seconds:.2f} s a step, {communication_seconds(spans)[1]:.2f} s of it exposed communication"
    return StepPicture(heading, compute, communication, seconds)


def kind_of_work(name: str) -> str:
    """The colour group of a compute span."""
    operator = parse_operator(name, "trace")
    if operator.phase is Phase.WEIGHT_GRADIENT:
        return WEIGHTS
    if operator.in_backward_pass:
        return BACKWARDS
    if operator.is_update:
        return UPDATE
    return FORWARD


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The sorted intervals, with those that overlap or are at most `gap` apart merged."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: Sequence[Interval], covers: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` outside all `covers`; both are sorted and without overlaps."""
    remaining: list[Interval] = []
    first = 0
    for start, end in intervals:
        # Covers that end before this interval cannot touch a later one, so the time is linear in both lists.
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        place = first
        while place < len(covers) and covers[place][0] < end:
            if covers[place][0] > start:
                remaining.append((start, covers[place][0]))
            start = max(start, covers[place][1])
            place += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def tick_seconds(longest: float) -> float:
    """Distance between the ticks of an axis: 1, 2 or 5 times a power of ten, with at most MOST_TICKS ticks."""
    power = 10.0 ** math.floor(math.log10(longest / MOST_TICKS))
    return next(factor * power for factor in (1, 2, 5, 10) if longest <= MOST_TICKS * factor * power)


def draw(steps: Sequence[StepPicture], about: str = "One training step without and with overlap") -> str:
    """The picture of all steps, one below the other, on one axis.

    Args:
        about: description for screen readers.
    """
    longest = max(step.seconds for step in steps)
    scale = (WIDTH - LEFT - RIGHT) / longest
    shapes: list[str] = []
    top = 8.0
    for step in steps:
        shapes.append(text(8, top + 17, step.heading, "heading"))
        top += HEADING_HEIGHT
        for label, lane in (("computation", step.compute), ("communication", step.communication)):
            shapes += draw_lane(label, lane, top, scale, step.seconds)
            top += LANE_HEIGHT + LANE_GAP
        top += STEP_GAP
    shapes += draw_axis(longest, top - STEP_GAP, scale)
    shapes += draw_legend(top + 34)
    height = round(top + 50)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(about)}">'
    )
    style = (
        "<style>text{font:13px 'DejaVu Sans',Verdana,sans-serif;fill:#222}"
        ".heading{font-weight:bold}.tick{text-anchor:middle}</style>"
    )
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, style, background, *shapes, "</svg>", ""])


def draw_lane(label: str, lane: dict[str, list[Interval]], top: float, scale: float, seconds: float) -> list[str]:
    """One lane: its label, a light background as long as the step, and a path for each colour."""
    shapes = [text(8, top + 20, label)]
    shapes.append(f'<rect x="{LEFT}" y="{top:g}" width="{seconds * scale:.1f}" height="{LANE_HEIGHT}" fill="#f0f0f0"/>')
    for kind, intervals in lane.items():
        joined = union(intervals, SMALLEST_GAP_PIXELS / scale)
        outline = "".join(
            f"M{LEFT + start * scale:.1f} {top:g}h{(end - start) * scale:.2f}v{LANE_HEIGHT}h-{(end - start) * scale:.2f}z"
            for start, end in joined
        )
        if outline:
            shapes.append(f'<path fill="{COLOURS[kind]}" d="{outline}"><title>{kind}</title></path>')
    return shapes


def draw_axis(longest: float, top: float, scale: float) -> list[str]:
    """The axis of seconds below all lanes."""
    distance = tick_seconds(longest)
    shapes = [f'<path stroke="#555" d="M{LEFT} {top:g}H{WIDTH - RIGHT}"/>']
    for number in range(int(longest / distance) + 1):
        x = LEFT + number * distance * scale
        shapes.append(f'<path stroke="#555" d="M{x:.1f} {top:g}v5"/>')
        shapes.append(text(x, top + 18, f"{number * distance:g}" + (" s" if number == 0 else ""), "tick"))
    return shapes


def draw_legend(top: float) -> list[str]:
    """A square and a name for each colour, in one line."""
    shapes, x = [], float(LEFT)
    for kind, colour in COLOURS.items():
        shapes.append(f'<rect x="{x:.0f}" y="{top - 11:g}" width="12" height="12" fill="{colour}"/>')
        shapes.append(text(x + 17, top, kind))
        x += 34 + 7.6 * len(kind)
    return shapes


def text(x: float, y: float, content: str, style: str = "") -> str:
    """A line of text at a baseline."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:g}"{kind}>{escape(content)}</text>'
