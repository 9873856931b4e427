"""Published runs that are predicted not to fit in what CUDA and NCCL leave, by how much, and what fills them:
python -m tests.validation.feasibility

All of these runs were executed, so every line but the counts is an error of the prediction, or of what is known of the run:
its row may not say what it recomputes or offloads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from moe_overlap.describe.cluster import GIB
from moe_overlap.tuner.calibrate.fit.measured_runs import MeasuredRun, prepared_runs
from moe_overlap.tuner.calibrate.fit.published_rows import scored_rows
from moe_overlap.tuner.calibrate.fit.rows import MeasuredRow
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.feasibility import needed_bytes
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants


def executed_runs() -> list[MeasuredRow]:
    """One row for each configuration that was executed, whatever was measured of it how often."""
    runs: dict[tuple[object, ...], MeasuredRow] = {}
    for row in scored_rows():
        if row.is_time:
            runs.setdefault((row.gpu_type, row.gpus, *row.flags), row)
    return list(runs.values())


def feasibility_lines(cases: Sequence[MeasuredRun], constants: Constants) -> list[str]:
    """Runs that are not said to fit, the fullest first, and how many runs have which verdict."""
    predictions = [(case, case.predict(constants)) for case in cases]
    counts = Counter(prediction.memory_verdict for _, prediction in predictions)
    lines = []
    for case, prediction in sorted(
        predictions, key=lambda pair: -pair[1].fullest.needed_bytes / pair[1].available_bytes
    ):
        if prediction.fits:
            continue
        fullest, available = prediction.fullest, prediction.available_bytes
        peaks = prediction.predicted.stages[fullest.stage].peak_bytes_by_category
        row = case.row
        layout = f"T{row['tp']} P{row['pp']} V{row['vp'] or 1} C{row['cp']} E{row['ep']} m{row['micro_batch']}"
        lines.append(
            f"{row.number:>4} {row.gpu_type:<6}{row.gpus:>5} {row['model'][:24]:<24} {row['precision_class']:<6} {layout:<24}"
            f"{prediction.memory_verdict:<13}{needed_bytes(prediction.predicted.stages[fullest.stage]) / GIB:7.1f} of "
            f"{available / GIB:5.1f} GiB ({fullest.needed_bytes / available - 1.0:+.0%}), {fullest.category} "
            f"{fullest.category_bytes / GIB:.1f}, states {(peaks.parameters + peaks.gradients + peaks.optimizer) / GIB:.1f}"
        )
    return [*lines, *_counts(len(cases), counts)]


def _counts(runs: int, counts: Counter[str]) -> Iterable[str]:
    yield f"{runs} runs: " + ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("fits", "may not fit", "does not fit")
    )


def main() -> None:
    """Print the list."""
    for line in feasibility_lines(prepared_runs(executed_runs(), cache_folder()), shipped_constants()):
        print(line)


if __name__ == "__main__":
    main()
