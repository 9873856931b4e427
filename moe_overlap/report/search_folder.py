"""The folder of a plan search: the files of the run, the report page and the trace."""

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
    """Write plan, flags, script, page and trace, replacing an earlier answer.

    Args:
        tell: receives a message about renamed files of the earlier answer.
    Returns:
        The names of the files.
    Raises:
        ConfigError: the files cannot be written.
    """
    files = write_search(folder, search)
    report = search_report(search, competitors(search), train_tokens)
    files += ["report.html", *([] if report.step is None else ["trace.json"])]
    # Before page and trace, which are large: even if the disk is full, no earlier script remains with the new plan.
    put_away_others(folder, files, tell)
    write_report(folder / "report.html", report)
    if report.step is not None:
        write_trace(folder / "trace.json", report.step, "--output", as_new_file=True)
    return files
