"""The folder of a plan search: what runs the plan, and the pictures of it."""

from __future__ import annotations

from pathlib import Path

from moe_overlap.report.answer_files import replacing_answer
from moe_overlap.report.html import write_report
from moe_overlap.report.search import PlanSearch, write_search
from moe_overlap.report.search_page import competitors, search_report
from moe_overlap.report.trace import write_trace


def write_answer(folder: Path, search: PlanSearch, train_tokens: float | None = None) -> list[str]:
    """Write plan, flags, script, page and trace in the place of an earlier answer.

    Returns:
        The names of the files.
    Raises:
        ConfigError: they cannot be written.
    """
    with replacing_answer(folder) as files:
        files += write_search(folder, search)
        report = search_report(search, competitors(search), train_tokens)
        write_report(folder / "report.html", report)
        files.append("report.html")
        if report.step is not None:
            write_trace(folder / "trace.json", report.step, "--output")
            files.append("trace.json")
    return files
