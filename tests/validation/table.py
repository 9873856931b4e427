"""Every scored row with its prediction and error, and the errors of groups: python -m tests.validation.table

Tables are pandas DataFrames. Groups are told apart by what is measured, split, GPU type, dense or MoE, and routing; the rows of a
group with fewer than 8 are listed below it, since no mean speaks for so few. `held` says whether a run lies in the interval that
runs of other models, GPU types and precisions give: its own would widen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from moe_overlap.tuner.calibrate.fit.left_out import held
from moe_overlap.tuner.calibrate.fit.measured_runs import MeasuredRun, prepared_runs
from moe_overlap.tuner.calibrate.fit.published_rows import scored_rows
from moe_overlap.tuner.calibrate.fit.recorded_figures import recorded_cases
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.expected_error import shipped_errors
from moe_overlap.tuner.cost.hardware import Constants, shipped_constants
from tests.validation.errors import spearman
from tests.validation.ranking import ranking_rows, rankings
from tests.validation.recorded_lines import recorded_lines

FEW_ROWS = 8
GROUP = ["measures", "split", "GPU", "kind", "routing"]


def main() -> None:
    """Print the table and its summary."""
    constants = shipped_constants()
    scored = scored_rows()
    wanted = {row.name: row for row in (*scored, *ranking_rows())}
    cases = prepared_runs(list(wanted.values()), cache_folder())
    frame = error_frame(cases[: len(scored)], constants)
    print(frame.drop(columns=["kind", "routing"]).to_string(index=False))
    print(f"\n{summary(frame)}")
    for text in rankings(cases, constants):
        print(text)
    print("\nRuns that Mist and Aceso recorded: seconds, and MiB of a stage's peak")
    for text in recorded_lines(recorded_cases(cache_folder()), constants):
        print(text)


def error_frame(cases: Iterable[MeasuredRun], constants: Constants) -> pd.DataFrame:
    """A row for each case: its run, what was measured and predicted, and the relative error."""
    answers = {name: is_held for run, is_held in held(shipped_errors().runs).items() for name in run.rows.split()}
    return pd.DataFrame([_record(case, constants, answers.get(case.row.name)) for case in cases])


def _record(case: MeasuredRun, constants: Constants, is_held: bool | None) -> dict[str, object]:
    row, prediction = case.row, case.predict(constants)
    if row.is_time:
        what, measured, error = "step s", row.seconds, case.relative_error(constants)
    else:
        what = "reserved GiB" if row.is_reserved else "allocated GiB"
        measured, error = row.gib, case.memory_error(constants)
    expected = prediction.expected_error
    return {
        "row": row.name,
        "split": row["split"],
        "GPU": row.gpu_type,
        "GPUs": row.gpus,
        "model": row["model"][:28],
        "layout": f"T{row['tp']} P{row['pp']} V{row['vp'] or 1} C{row['cp']} E{row['ep'] or 1} m{row['micro_batch']}",
        "kind": "MoE" if row.is_moe else "dense",
        "routing": row.routing or "-",
        "precision": row["precision_class"],
        "release": row["release"],
        "graphs": case.features.graphs,
        "measures": what,
        "measured": round(measured, 3),
        "predicted": round((1 + error) * measured, 3),
        "error %": round(100 * error, 1),
        "expected %": round(100 * expected.relative, 1) if expected is not None and row.is_time else "",
        "held": "" if is_held is None else "yes" if is_held else "no",
        "extrapolating": "yes" if prediction.extrapolating else "",
    }


def group_figures(frame: pd.DataFrame, by: Sequence[str] = tuple(GROUP)) -> pd.DataFrame:
    """Rows, mean size, bias and largest size of the errors, rank correlation, and rows in their intervals, by group."""

    def figures(group: pd.DataFrame) -> pd.Series[Any]:
        errors = group["error %"]
        rank = spearman(group["predicted"].to_numpy(), group["measured"].to_numpy())
        names = {"n": len(group), "mean |error| %": errors.abs().mean(), "bias %": errors.mean()}
        held = f"{(group['held'] == 'yes').sum()}/{(group['held'] != '').sum()}"
        return pd.Series({**names, "worst %": errors.abs().max(), "Spearman": rank, "held": held})

    table = frame.groupby(list(by))[["error %", "predicted", "measured", "held"]].apply(figures).reset_index()
    return table.astype({"n": int}).round({"mean |error| %": 1, "bias %": 1, "worst %": 1, "Spearman": 3})


def summary(frame: pd.DataFrame) -> str:
    """Errors by group, with every row of small groups of test rows, and by GPU and kind alone."""
    table = group_figures(frame)
    texts = [table.to_string(index=False), "", group_figures(frame, GROUP[:4]).to_string(index=False)]
    few = table[(table["n"] < FEW_ROWS) & (table["split"] == "test")]
    for _, group in few.iterrows():
        within = frame[(frame[GROUP] == group[GROUP]).all(axis=1)]
        shown = ["row", "model", "layout", "precision", "release", "measured", "predicted", "error %"]
        texts += ["", " ".join(str(group[name]) for name in GROUP), within[shown].to_string(index=False)]
    return "\n".join(texts)


if __name__ == "__main__":
    main()
