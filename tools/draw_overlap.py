"""Draw one step of one rank without and with overlap, from two traces, as a self-contained SVG.

    python tools/draw_overlap.py without.json with.json --output docs/overlap.svg

Both files are traces in the format of `moe_overlap/plan/trace.py`, as `pretrain_moe.py --trace`, `tools/predict.py --trace` and
`tools/benchmark_overlap.py --traces` write them. Each step gets two lanes on one common axis of seconds. The compute lane is
coloured by the kind of work. Communication is *hidden* while a compute span of the same rank is under way, and *exposed* while
none is. The heading of each step counts exposed seconds with `communication_seconds`, as the training log does.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

if __name__ == "__main__":
    # A script finds only what stands beside it: the package `tools` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import COMPUTING, Span, communication_seconds
from moe_overlap.plan.operators import Phase, parse_operator
from moe_overlap.plan.trace import read_traces

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
"""Rectangles of one colour that are nearer to each other are drawn as one: the file stays small."""


@dataclass(frozen=True, slots=True)
class Step:
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


def step_of(spans: Sequence[Span], title: str) -> Step:
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
    # The whole length of overlapped communication is not told: a span lasts until its result is used, not until it has arrived.
    heading = f"{title}: {seconds:.2f} s a step, {communication_seconds(spans)[1]:.2f} s of it exposed communication"
    return Step(heading, compute, communication, seconds)


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
    """Intervals in order, those that touch or are at most `gap` apart joined."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: Sequence[Interval], covers: Sequence[Interval]) -> list[Interval]:
    """The parts of some intervals that no cover touches; both lists are sorted and free of overlaps."""
    left: list[Interval] = []
    for start, end in intervals:
        for cover_start, cover_end in covers:
            if cover_end <= start or cover_start >= end:
                continue
            if cover_start > start:
                left.append((start, cover_start))
            start = max(start, cover_end)
        if start < end:
            left.append((start, end))
    return left


def tick_seconds(longest: float) -> float:
    """Distance of the ticks of an axis: 1, 2 or 5 times a power of ten, at most MOST_TICKS of them."""
    power = 10.0 ** math.floor(math.log10(longest / MOST_TICKS))
    return next(factor * power for factor in (1, 2, 5, 10) if longest <= MOST_TICKS * factor * power)


def draw(steps: Sequence[Step]) -> str:
    """The picture of all steps, one below the other, on one axis."""
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
        f'role="img" aria-label="One training step without and with overlap">'
    )
    style = (
        "<style>text{font:13px 'DejaVu Sans',Verdana,sans-serif;fill:#222}"
        ".heading{font-weight:bold}.tick{text-anchor:middle}</style>"
    )
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, style, background, *shapes, "</svg>", ""])


def draw_lane(label: str, lane: dict[str, list[Interval]], top: float, scale: float, seconds: float) -> list[str]:
    """One row: its label, a light ground as long as the step, and a path for each colour."""
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


def main(argv: Sequence[str]) -> int:
    """Read both traces and write the picture; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("without", type=Path, help="trace of a step without overlap")
    parser.add_argument("overlapped", metavar="with", type=Path, help="trace of the same step with overlap")
    parser.add_argument("--output", type=Path, default=Path("overlap.svg"), help="file to write")
    parser.add_argument("--rank", type=int, default=0, help="the rank that is drawn")
    arguments = parser.parse_args(argv)
    try:
        steps = []
        for path, title in ((arguments.without, "Without overlap"), (arguments.overlapped, "With overlap")):
            spans = {rank: spans for file in read_traces(path) for rank, spans in file.spans.items()}
            if arguments.rank not in spans:
                known = ", ".join(map(str, sorted(spans)))
                raise ConfigError("--rank", arguments.rank, f"is not in {path}", f"choose among {known}")
            steps.append(step_of(spans[arguments.rank], title))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(draw(steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
