"""Every scored row with its prediction, error and whether it is extrapolated: python -m tests.validation.table"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants
from tests.validation.errors import figures
from tests.validation.evaluate import Case, cases_of
from tests.validation.ranking import ranking_rows, rankings
from tests.validation.recorded_cases import recorded_cases, recorded_lines
from tests.validation.rows import Row, scored_rows


def calibration_cases(times: bool) -> list[Case]:
    """Runs that constants may be fitted to: their step times, or their peaks of memory."""
    rows = [row for row in scored_rows() if row["split"] == "calibration" and is_time(row) == times]
    return cases_of(rows, cache_folder())


def is_time(row: Row) -> bool:
    """Whether a row measures seconds."""
    return row["metric"] != "peak_mem_gib"


def main() -> None:
    """Print the table and its summary."""
    constants = shipped_constants()
    scored = scored_rows()
    wanted = {row.number: row for row in (*scored, *ranking_rows())}
    cases = cases_of(list(wanted.values()), cache_folder())
    of_scored = cases[: len(scored)]
    for case in of_scored:
        print(line(case, constants))
    for text in (*summary(of_scored, constants), *rankings(cases, constants)):
        print(text)
    print("\nRuns that Mist and Aceso recorded: seconds, and MiB of a stage's peak")
    for text in recorded_lines(recorded_cases(cache_folder()), constants):
        print(text)


def line(case: Case, constants: Constants) -> str:
    """One row."""
    row = case.row
    extrapolating = "extrapolating" if case.predict(constants).extrapolating else ""
    layout = f"T{row['tp']} P{row['pp']} V{row['vp'] or 1} C{row['cp']} E{row['ep']} m{row['micro_batch']}"
    head = f"{row.number:>4} {row['split']:<12} {row['gpu']:<8} {row['n_gpus']:>5} {row['model'][:28]:<28} {layout:<22}"
    kind = f"{row['precision_class']:<6} {row['release']:<9}"
    if is_time(row):
        error = case.relative_error(constants)
        return f"{head} {kind} {row.seconds:9.3f} s   {(1 + error) * row.seconds:9.3f} {error:+7.1%} {extrapolating}"
    error = case.memory_error(constants)
    return f"{head} {kind} {row.gib:9.2f} GiB {(1 + error) * row.gib:9.2f} {error:+7.1%} {extrapolating}"


def summary(cases: Iterable[Case], constants: Constants) -> list[str]:
    """Errors by GPU type and split."""
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        row = case.row
        if is_time(row):
            error, measured = case.relative_error(constants), row.seconds
            groups[("step time", row["split"], row.gpu_type)].append((error, measured))
        else:
            kind = "reserved" if row.is_reserved else "allocated"
            groups[(kind, row["split"], row.gpu_type)].append((case.memory_error(constants), row.gib))
    lines = []
    for key, pairs in sorted(groups.items()):
        lines.append(f"{' '.join(key):<34} {figures(pairs)}")
    return lines


if __name__ == "__main__":
    main()
