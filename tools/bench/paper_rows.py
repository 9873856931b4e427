"""Rows of the papers' comparisons: the figures of a case and the paper's figures, as data and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        case: model and GPUs.
        figures: name -> value; seconds are named so, all others are ratios or counts.
        paper: the paper's text on it.
        notes: limits of the comparison.
    """

    figure: str
    case: str
    figures: dict[str, float | None]
    paper: str
    notes: tuple[str, ...] = ()


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of one paper as a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [f"| case | {' | '.join(names)} | paper |", "|" + "---|" * (len(names) + 2)]
    for row in rows:
        shown = [_shown(row.figures.get(name)) for name in names]
        lines.append(f"| {row.case} | {' | '.join(shown)} | {row.paper} |")
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    return [*lines, "", *(f"- {note}" for note in notes)]


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.3f}"
