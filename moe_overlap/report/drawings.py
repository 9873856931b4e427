"""SVG drawings of a report page: stages × devices, stacked bars, points and lines over an axis.

Every drawing scales with the page, has no script, and loads nothing. Coloured shapes have a tooltip, and every drawn figure is
also in a table of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from moe_overlap.plan.plan import Plan
from moe_overlap.report.picture import text, tick_seconds

WIDTH, LEFT, RIGHT, ROW = 960, 150, 20, 26
PALETTE = ("#4a86bd", "#74b87e", "#8e6bb0", "#e4a72e", "#e4572e", "#5bb5b5", "#b5b5b5", "#9ecae1", "#c98bb0", "#7d8a3c")
CAPACITY = "#c0392b"
MOST_DEVICES = 256
"""Most devices of a stage that are drawn."""


def stages_and_devices(plan: Plan) -> str:
    """A row per stage with a cell per device; devices of one colour hold the same experts, a gap ends a tensor group."""
    shapes = []
    for index, stage in enumerate(plan.stages):
        top = 6 + index * (ROW + 8)
        if stage.layers:
            # Only the first chunk of an interleaved stage is shown; the plan as text below has all chunks.
            first, end = stage.chunks[0]
            layers = f"L{first}" if end - first == 1 else f"L{first}–L{end - 1}"
            shapes.append(text(6, top + 17, f"stage {index}: {layers}{', …' if len(stage.chunks) > 1 else ''}"))
        shown = min(len(stage.devices.ranks), MOST_DEVICES)
        width = min(22.0, (WIDTH - LEFT - RIGHT) / shown)
        for place, rank in enumerate(stage.devices.ranks[:shown]):
            experts = place // stage.expert_tensor % stage.expert
            tensor, replica = place % stage.tensor, place // (stage.tensor * stage.context)
            about = f"rank {rank}: tensor {tensor}, replica {replica}, expert rank {experts}"
            gap = min(2.0, width / 4) if (place + 1) % stage.tensor == 0 else 0.0
            x = LEFT + place * width
            shapes.append(rectangle(x, top, width - gap, ROW, PALETTE[experts % len(PALETTE)], about))
        if shown < len(stage.devices.ranks):
            shapes.append(text(WIDTH - RIGHT - 60, top + 17, f"… of {len(stage.devices.ranks)}"))
    return svg(shapes, 12 + len(plan.stages) * (ROW + 8), "stages and their devices")


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], unit: str, limit: float | None = None, about: str = "bars"
) -> str:
    """A stacked bar per row, with a legend.

    Args:
        rows: label -> part -> value, all in `unit`.
        limit: a value that is marked by a line across all bars.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    longest = max([limit or 0.0, *(sum(max(0.0, value) for value in row.values()) for row in rows.values())]) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    shapes = []
    for index, (label, row) in enumerate(rows.items()):
        x, top = float(LEFT), 6 + index * (ROW + 6)
        shapes.append(text(6, top + 17, label))
        for part, value in row.items():
            if value > 0:
                colour = PALETTE[parts.index(part) % len(PALETTE)]
                shapes.append(rectangle(x, top, value * scale, ROW, colour, f"{label}: {part} {value:.3g} {unit}"))
                x += value * scale
    bottom = 6 + len(rows) * (ROW + 6)
    if limit is not None:
        x = LEFT + limit * scale
        shapes.append(f'<path stroke="{CAPACITY}" stroke-width="2" d="M{x:.1f} 2V{bottom:g}"/>')
    shapes += axis(longest, bottom, scale, unit)
    colours = {part: PALETTE[index % len(PALETTE)] for index, part in enumerate(parts)}
    legend, lines = legend_of(colours | ({"capacity": CAPACITY} if limit is not None else {}), bottom + 40)
    return svg([*shapes, *legend], bottom + 40 + 18 * lines, about)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a chart; its label is a tooltip."""

    x: float
    y: float
    label: str
    is_marked: bool = False


def chart(points: Sequence[Point], axes: tuple[str, str], joined: bool, limit: float | None = None) -> str:
    """Points over two axes that begin at zero. Points that no lines connect have names beside them where there is room.

    Args:
        axes: names with units, of x and of y.
        joined: whether lines connect the points.
        limit: a value of x that is marked by a line.
    """
    height, bottom = 300, 250.0
    widest = max([limit or 0.0, *(point.x for point in points)]) * 1.05 or 1.0
    highest = max(point.y for point in points) * 1.1 or 1.0
    scale, rise = (WIDTH - LEFT - RIGHT) / widest, (bottom - 20) / highest
    places = [(LEFT + point.x * scale, bottom - point.y * rise) for point in points]
    shapes = [f'<path stroke="#555" d="M{LEFT} 20V{bottom:g}"/>', text(6, 16, axes[1])]
    for number in range(int(highest / tick_seconds(highest)) + 1):
        value = number * tick_seconds(highest)
        shapes.append(text(LEFT - 8, bottom - value * rise + 4, f"{value:g}", "end"))
    if joined:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        shapes.append(f'<path fill="none" stroke="{PALETTE[0]}" stroke-width="2" d="M{line}"/>')
    for point, (x, y) in zip(points, places, strict=True):
        colour, radius = (CAPACITY, 6) if point.is_marked else (PALETTE[0], 4)
        about = f"{point.label}: {point.x:.4g}, {point.y:.4g}"
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{title(about)}</circle>')
    if limit is not None:
        shapes.append(f'<path stroke="{CAPACITY}" d="M{LEFT + limit * scale:.1f} 20V{bottom:g}"/>')
        shapes.append(text(LEFT + limit * scale - 4, 16, "capacity", "end"))
    if not joined:
        shapes += _names(points, places)
    return svg([*shapes, *axis(widest, bottom, scale, axes[0])], height, f"{axes[1]} over {axes[0]}")


MOST_LETTERS = 34
"""Longest name beside a point; a longer one is cut, and whole in the tooltip."""
_LETTER, _LINE = 6.6, 13.0
"""Width of a letter and height of a line, in units of the drawing."""


def _names(points: Sequence[Point], places: Sequence[tuple[float, float]]) -> list[str]:
    """The names of points, marked ones first: right of a point, else left, above or below, where nothing is drawn yet."""
    boxes = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    shapes = []
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda pair: not pair[0].is_marked):
        name = point.label if len(point.label) <= MOST_LETTERS else f"{point.label[: MOST_LETTERS - 1]}…"
        width = _LETTER * len(name)
        for start, line in ((x + 8, y + 4), (x - 8 - width, y + 4), (x - width / 2, y - 9), (x - width / 2, y + 17)):
            box = (start, line - _LINE + 3, start + width, line + 3)
            is_inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 18
            if is_inside and not any(_overlap(box, other) for other in boxes):
                boxes.append(box)
                shapes.append(text(start, line, name))
                break
    return shapes


def _overlap(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    """Whether two boxes (left, top, right, bottom) have a point in common."""
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


# Shapes


def svg(shapes: Sequence[str], height: float, about: str) -> str:
    """A drawing as wide as the page."""
    size = f'viewBox="0 0 {WIDTH} {math.ceil(height)}"'
    return "\n".join([f'<svg {size} role="img" aria-label={quoteattr(about)}>', *shapes, "</svg>"])


def rectangle(x: float, y: float, width: float, height: float, colour: str, about: str) -> str:
    """A coloured rectangle with a tooltip."""
    size = f'x="{x:.1f}" y="{y:g}" width="{max(width, 0.5):.1f}" height="{height:g}"'
    return f'<rect {size} fill="{colour}">{title(about)}</rect>'


def title(about: str) -> str:
    """The tooltip of a shape."""
    return f"<title>{escape(about)}</title>"


def axis(longest: float, top: float, scale: float, name: str) -> list[str]:
    """An axis below a drawing, with its unit at the end."""
    distance = tick_seconds(longest)
    shapes = [f'<path stroke="#555" d="M{LEFT} {top:g}H{WIDTH - RIGHT}"/>']
    for number in range(int(longest / distance) + 1):
        x = LEFT + number * distance * scale
        shapes.append(f'<path stroke="#555" d="M{x:.1f} {top:g}v5"/>')
        shapes.append(text(x, top + 18, f"{number * distance:g}", "tick"))
    return [*shapes, text(6, top + 18, name)]


def legend_of(colours: Mapping[str, str], top: float) -> tuple[list[str], int]:
    """The shapes of a legend, a square and a name for each colour, and its number of lines."""
    shapes, x, line = [], float(LEFT), 0
    for name, colour in colours.items():
        width = 34 + 7.6 * len(name)
        if x + width > WIDTH:
            x, line = float(LEFT), line + 1
        y = top + 18 * line
        shapes.append(f'<rect x="{x:.0f}" y="{y - 11:g}" width="12" height="12" fill="{colour}"/>')
        shapes.append(text(x + 17, y, name))
        x += width
    return shapes, line + 1
