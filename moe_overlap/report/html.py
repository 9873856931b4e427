"""`report.html`: everything about a plan on one page, in one file that loads nothing.

The answer · stages × devices · memory of every stage by category, against the capacity · the breakdown of a step · the simulated
step · other candidates over memory and time · the step as a function of network, skew of routing and memory · every figure as
text. Each drawn figure is also in a table; the cells have the exact value in `data-value`, so that a script can read the page.
`Report` is the data of the page; sections without data are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from moe_overlap.describe.cluster import GIB
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import write_whole
from moe_overlap.report.answer import Answer, answer_lines, devices, term_words
from moe_overlap.report.drawings import Point, chart, stacked_bars, stages_and_devices
from moe_overlap.report.picture import draw, step_of
from moe_overlap.report.plan import format_plan
from moe_overlap.report.prediction import available_text, prediction_text
from moe_overlap.tuner.cost.feasibility import needed_bytes
from moe_overlap.tuner.cost.simulate.step import SimulatedStep

MOST_STAGES = 16
"""Most stages of the simulated step that are drawn."""
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ddd}
pre{background:#f6f6f6;padding:.8em;overflow-x:auto;font-size:13px;white-space:pre-wrap}
table{border-collapse:collapse;margin:.6em 0;font-size:14px}
th,td{padding:.15em .8em;text-align:right;border-bottom:1px solid #eee}
th:first-child,td:first-child{white-space:nowrap;text-align:left}.words{text-align:left}tr.chosen{background:#fdf3d8}
svg{width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:#222}
.heading{font-weight:bold}.tick{text-anchor:middle}.end{text-anchor:end}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRow:
    """A candidate of the search.

    Attributes:
        seconds: of its step; None without a prediction.
        needed_bytes: of its fullest stage; None without a prediction.
        note: why it was not chosen.
    """

    name: str
    seconds: float | None
    needed_bytes: float | None
    note: str = ""
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """The step as a function of one property of the cluster or the routing.

    Attributes:
        name: of the property, such as `network bandwidth`.
        unit: of its values.
        points: (value, seconds of the step, name of the plan chosen at that value; empty: the same plan).
        actual: the value in the prediction.
    """

    name: str
    unit: str
    points: tuple[tuple[float, float, str], ...]
    actual: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The content of a page.

    Attributes:
        step: the chosen plan, simulated with few micro-batches; None omits the timeline.
    """

    answer: Answer
    title: str
    step: SimulatedStep | None = None
    candidates: Sequence[CandidateRow] = ()
    sensitivities: Sequence[Sensitivity] = ()


def write_report(path: Path, report: Report) -> None:
    """Write the page, replacing an earlier one atomically; ConfigError if it cannot be written."""
    try:
        write_whole(path, report_html(report))
    except OSError as error:
        raise ConfigError("--output", str(path), f"cannot be written: {error.strerror}", "give another") from None


def report_html(report: Report) -> str:
    """The page as HTML."""
    body = [f"<h1>{escape(report.title)}</h1>", _preformatted("\n".join(answer_lines(report.answer)))]
    for identifier, heading, content in SECTIONS:
        section = "\n".join(content(report))
        if section:
            body.append(f'<section id="{identifier}"><h2>{escape(heading)}</h2>\n{section}\n</section>')
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{STYLE}</style>'
    page = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{page}\n</body></html>\n'


def _preformatted(content: str) -> str:
    return f"<pre>{escape(content)}</pre>"


@dataclass(frozen=True, slots=True)
class PageCell:
    """A cell of a table: the shown text, and the exact value, if it is a number."""

    shown: str
    value: float | None = None


Row = Sequence[PageCell]


def _table(identifier: str, head: Sequence[str], rows: Sequence[Row], chosen: frozenset[int] = frozenset()) -> str:
    """A table as HTML.

    Args:
        chosen: indices of the highlighted rows.
    """
    are_text = [all(row[column].value is None for row in rows) for column in range(len(head))]
    names = (
        f'<th class="words">{escape(name)}</th>' if is_text else f"<th>{escape(name)}</th>"
        for name, is_text in zip(head, are_text, strict=True)
    )
    lines = [f'<table id="{identifier}"><tr>{"".join(names)}</tr>']
    for index, row in enumerate(rows):
        cells = "".join(
            f'<td class="words">{escape(cell.shown)}</td>'
            if cell.value is None
            else f"<td data-value={quoteattr(repr(float(cell.value)))}>{escape(cell.shown)}</td>"
            for cell in row
        )
        lines.append(_row(cells, index in chosen))
    return "\n".join([*lines, "</table>"])


def _row(cells: str, is_chosen: bool) -> str:
    return f'<tr class="chosen">{cells}</tr>' if is_chosen else f"<tr>{cells}</tr>"


def _gib(size: float) -> PageCell:
    return PageCell(f"{size / GIB:.1f}", size / GIB)


def _seconds(seconds: float) -> PageCell:
    return PageCell(f"{seconds:.4f}", seconds)


# Sections


def _plan(report: Report) -> Iterator[str]:
    plan = report.answer.plan
    yield stages_and_devices(plan)
    is_split = any(stage.expert > 1 for stage in plan.stages)
    colours = "; a colour holds the same experts" if is_split else ""
    yield f"<p>{plan.world_size} ranks on {escape(devices(report.answer.cluster))}{colours}.</p>"
    yield f"<details><summary>the plan as text</summary>{_preformatted(format_plan(plan))}</details>"


def _memory(report: Report) -> Iterator[str]:
    prediction = report.answer.prediction
    peaks = [dataclasses.asdict(stage.peak_bytes_by_category) for stage in prediction.predicted.stages]
    bars = {f"stage {index}": {name: size / GIB for name, size in peak.items()} for index, peak in enumerate(peaks)}
    yield stacked_bars(bars, "GiB", prediction.available_bytes / GIB, "memory of every stage")
    rows = [
        [PageCell(f"stage {index}"), *map(_gib, peak.values()), _gib(stage.peak_bytes), _gib(needed_bytes(stage))]
        for index, (peak, stage) in enumerate(zip(peaks, prediction.predicted.stages, strict=True))
    ]
    yield _table("memory-table", ["GiB", *peaks[0], "peak", "needed"], rows)
    verdict = f"{prediction.memory_verdict}: a plan may have {available_text(prediction)}"
    most = f"{prediction.fullest.high_bytes / GIB:.1f}"
    quantile = f"with {prediction.memory.certainty} certainty the fullest stage needs no more than {most}"
    yield f"<p>{escape(verdict)}; {escape(quantile)}. Fragmentation is given back before an allocation fails.</p>"


def _breakdown(report: Report) -> Iterator[str]:
    prediction = report.answer.prediction
    total = prediction.predicted.step_seconds
    parts = {term_words(name): seconds for name, seconds in prediction.breakdown.items()}
    yield stacked_bars({"step": parts}, "s", None, "what a step is spent on")
    rows = [[PageCell(name), _seconds(seconds), _share(seconds / total)] for name, seconds in parts.items()]
    rows.append([PageCell("step"), _seconds(total), _share(1.0)])
    yield _table("step-table", ["", "seconds", "share"], rows)
    stages = [
        [PageCell(f"stage {index}"), *map(_seconds, (stage.first_seconds, stage.stable_seconds, stage.last_seconds))]
        for index, stage in enumerate(prediction.predicted.stages)
    ]
    yield _table("stage-table", ["seconds of a micro-batch", "first", "stable", "last"], stages)


def _share(part: float) -> PageCell:
    return PageCell(f"{100 * part:.1f} %", part)


def _timeline(report: Report) -> Iterator[str]:
    if report.step is None:
        return
    ranks = list(report.step.prices)
    simulation = report.step.simulation
    steps = [
        step_of(simulation.spans(rank), f"stage {index}, rank {rank}") for index, rank in enumerate(ranks[:MOST_STAGES])
    ]
    yield draw(steps, "the simulated step")
    count = len({span.micro_batch for span in simulation.spans(ranks[0])})
    left_out = f"; {len(ranks) - MOST_STAGES} further stages are left out" if len(ranks) > MOST_STAGES else ""
    yield f"<p>A simulated step of {count} micro-batch{'es' if count > 1 else ''} on one rank of every stage{left_out}.</p>"
    yield _table(
        "timeline-table",
        ["", "step", "exposed communication"],
        [
            [PageCell(f"stage {index}"), _seconds(step.seconds), _seconds(simulation.exposed_seconds(rank))]
            for index, (rank, step) in enumerate(zip(ranks, steps, strict=False))
        ],
    )


def _candidates(report: Report) -> Iterator[str]:
    if not report.candidates:
        return
    points = [
        Point(x=row.needed_bytes / GIB, y=row.seconds, label=row.name, is_marked=row.is_chosen)
        for row in report.candidates
        if row.seconds is not None and row.needed_bytes is not None
    ]
    if points:
        capacity = report.answer.prediction.available_bytes / GIB
        yield chart(points, ("GiB needed", "seconds a step"), joined=False, limit=capacity)
    rows = [
        [
            PageCell(row.name),
            PageCell("") if row.seconds is None else _seconds(row.seconds),
            PageCell("") if row.needed_bytes is None else _gib(row.needed_bytes),
            PageCell("chosen" if row.is_chosen else row.note),
        ]
        for row in report.candidates
    ]
    chosen = frozenset(index for index, row in enumerate(report.candidates) if row.is_chosen)
    yield _table("candidate-table", ["plan", "seconds a step", "GiB needed", "why not"], rows, chosen)


def _sensitivity(report: Report) -> Iterator[str]:
    for index, sensitivity in enumerate(report.sensitivities):
        yield f"<h3>{escape(sensitivity.name)}</h3>"
        points = [
            Point(x=value, y=seconds, label=note or sensitivity.name, is_marked=value == sensitivity.actual)
            for value, seconds, note in sensitivity.points
        ]
        yield chart(points, (sensitivity.unit, "seconds a step"), joined=True)
        rows = [
            [PageCell(f"{value:g}", value), _seconds(seconds), PageCell(note)]
            for value, seconds, note in sensitivity.points
        ]
        yield _table(f"sensitivity-table-{index}", [sensitivity.unit, "seconds a step", "plan"], rows)


def _details(report: Report) -> Iterator[str]:
    yield _preformatted(prediction_text(report.answer.prediction, report.answer.cluster))


SECTIONS: tuple[tuple[str, str, Callable[[Report], Iterator[str]]], ...] = (
    ("plan", "Stages and devices", _plan),
    ("memory", "Memory of every stage", _memory),
    ("step", "What a step is spent on", _breakdown),
    ("timeline", "The simulated step", _timeline),
    ("candidates", "Other plans", _candidates),
    ("sensitivity", "What would change the answer", _sensitivity),
    ("details", "Every figure", _details),
)
"""Anchor, heading and content of each section, in the order of the page."""
