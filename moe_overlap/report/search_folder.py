"""The folder of a plan search: what runs the plan, and the pictures of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.report.answer_files import put_away_others
from moe_overlap.report.html import write_report
from moe_overlap.report.search import write_search
from moe_overlap.report.search_page import competitors, search_report
from moe_overlap.report.trace import write_trace


def write_answer(
    folder: Path, search: PlanSearch, tell: Callable[[str], None], train_tokens: float | None = None
) -> list[str]:
    """Write plan, flags, script, page and trace in the place of an earlier answer.

    Args:
        tell: is told which files of an earlier answer have another name now.
    Returns:
        The names of the files.
    Raises:
        ConfigError: they cannot be written.
    """
    files = write_search(folder, search)
    report = search_report(search, competitors(search), train_tokens)
    files += ["report.html", *([] if report.step is None else ["trace.json"])]
    # Before page and trace, which are large: should they not find room, no earlier script stands beside the new plan.
    put_away_others(folder, files, tell)
    write_report(folder / "report.html", report)
    if report.step is not None:
        write_trace(folder / "trace.json", report.step, "--output", as_new_file=True)
    return files
