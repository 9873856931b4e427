"""Traces of a step: a simulated one as a file, and a predicted one compared with a measured one.

A kind of span is the name of an operator without its layer (`moe.experts.backward`) and its channel; seconds are means over the
ranks of a trace. Errors are errors of the prediction, relative to the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import INSIDE, Span, operator_spans
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.trace import PREDICTED, about_run, read_traces, write_ranks
from moe_overlap.tuner.calibrate.refine import FREE_OF_PLAN, FREE_OF_STAGE
from moe_overlap.tuner.cost.simulate.step import SimulatedStep


def write_trace(path: str | Path, step: SimulatedStep, flag: str, *, as_new_file: bool = False) -> None:
    """Write spans and held bytes of a simulated step.

    Args:
        flag: the flag with the path, for errors.
        as_new_file: as in `write_ranks`; for files of an answer.
    Raises:
        ConfigError: the file cannot be written.
    """
    ranks, first = list(step.prices), next(iter(step.prices.values()))
    try:
        write_ranks(
            Path(path),
            {rank: step.spans(rank) for rank in ranks},
            {rank: step.kept_bytes(rank) for rank in ranks},
            {**about_run(first.plan, first.model), PREDICTED: True},
            as_new_file=as_new_file,
        )
    except OSError as error:
        raise ConfigError(flag, str(path), f"cannot be written: {error.strerror}", "give another file") from None


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of a step, summed.

    Attributes:
        seconds: (kind, channel) -> seconds, the mean over the ranks.
        merged_seconds: the same with collectives inside operators counted as computation; None if there are none.
        step_seconds: from the first start to the last end, on the slowest rank.
        about: plan and model of the run from the file; empty if it has none.
    """

    seconds: dict[tuple[str, str], float]
    step_seconds: float
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)
    merged_seconds: dict[tuple[str, str], float] | None = None


def read_trace(path: Path) -> Trace:
    """The summed spans of a trace file, including the files of its other ranks.

    Raises:
        ConfigError: a file cannot be read, or has no spans.
    """
    files = read_traces(path)
    ranks = [spans for file in files for spans in file.spans.values()]
    splits = any(span.channel in INSIDE for spans in ranks for span in spans)
    merged = _sums([operator_spans(spans) for spans in ranks]) if splits else None
    steps = [max(span.end for span in spans) - min(span.start for span in spans) for spans in ranks]
    return Trace(_sums(ranks), max(steps), files[0].about, merged)


def _sums(ranks: Sequence[Sequence[Span]]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = {}
    for spans in ranks:
        for span in spans:
            kind = (kind_of(span.name), span.channel)
            sums[kind] = sums.get(kind, 0.0) + (span.end - span.start) / len(ranks)
    return sums


BATCH = frozenset({"schema_version", "global_batch_size", "gradient_accumulation_steps"})
"""Plan fields in which a simulated step may differ, because it has only enough micro-batches to show the pipeline."""


def require_one_job(predicted: Trace, measured: Trace, sources: tuple[Path, Path]) -> None:
    """Refuse a prediction and a measurement that are exchanged, and traces of different models or layouts, if both have them.

    The overlap may differ: it is compared.

    Args:
        sources: the predicted and the measured file, for the error.
    Raises:
        ConfigError: names the first field that differs.
    """
    order = "give the trace of tools/predict.py --trace, then that of pretrain_moe.py --trace"
    if predicted.about and not predicted.about.get(PREDICTED):
        raise ConfigError(str(sources[0]), "", "is a measurement, not a prediction", order)
    if measured.about.get(PREDICTED):
        raise ConfigError(str(sources[1]), "", "is a prediction, not a measurement", order)
    for place, first, second in _common_parts(predicted.about, measured.about):
        for name in (name for name in first if name in second):
            if first[name] != second[name]:
                rule = f"the prediction is of {first[name]}: the traces are of unlike jobs"
                raise ConfigError(
                    f"{sources[1]} {place} {name}", second[name], rule, "compare traces of the same flags"
                )


def _common_parts(
    predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(Place, its fields in both) for model, plan and stages, without fields in which traces of one job may differ."""
    both = predicted, measured
    if not all(isinstance(about.get(name), dict) for about in both for name in ("plan", "model")):
        return
    yield "model", *(_without(about["model"], {"name"}) for about in both)  # type: ignore[misc]
    plans = [about["plan"] for about in both]
    yield "plan", *(_without(plan, {"stages", *FREE_OF_PLAN, *BATCH}) for plan in plans)  # type: ignore[misc]
    stages = [[stage for stage in plan.get("stages", ()) if isinstance(stage, dict)] for plan in plans]
    yield "plan", {"stages": len(stages[0])}, {"stages": len(stages[1])}
    for index, pair in enumerate(zip(*stages, strict=False)):
        yield f"stages[{index}]", *(_without(stage, {*FREE_OF_STAGE, *BATCH}) for stage in pair)  # type: ignore[misc]


def _without(record: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in sorted(record.items()) if name not in names}


def comparison_json(predicted: Trace, measured: Trace) -> dict[str, Any]:
    """The step and every kind of span, predicted and measured, as JSON."""
    return {
        "step": _row("step", "", predicted.step_seconds, measured.step_seconds),
        "kinds": rows_of(predicted, measured),
    }


def rows_of(predicted: Trace, measured: Trace) -> list[dict[str, Any]]:
    """A row for each kind of span in either trace, the longest first; `error` is None without a measurement.

    Collectives inside operators have rows if both traces separate them; otherwise they count as computation in both.
    """
    rows, sums = [], [predicted.seconds, measured.seconds]
    if predicted.merged_seconds is None or measured.merged_seconds is None:
        sums = [
            trace.seconds if trace.merged_seconds is None else trace.merged_seconds for trace in (predicted, measured)
        ]
    for name, channel in sums[0].keys() | sums[1].keys():
        seconds, real = (by_kind.get((name, channel), 0.0) for by_kind in sums)
        rows.append(_row(name, channel, seconds, real))
    return sorted(rows, key=lambda row: (-max(row["measured_seconds"], row["predicted_seconds"]), row["kind"]))


def _row(kind: str, channel: str, predicted: float, measured: float) -> dict[str, Any]:
    error = predicted / measured - 1.0 if measured > 0 else None
    return {
        "kind": kind,
        "channel": channel,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "error": error,
    }


def comparison_text(comparison: dict[str, Any]) -> str:
    """The rows of `comparison_json` as a table, with the step last."""
    rows: Sequence[dict[str, Any]] = (*comparison["kinds"], comparison["step"])
    lines = [f"{'kind':<34}{'channel':<10}{'predicted ms':>14}{'measured ms':>13}{'error':>9}"]
    for row in rows:
        share = "-" if row["error"] is None else f"{row['error']:+.1%}"
        seconds = f"{row['predicted_seconds'] * 1e3:>14.2f}{row['measured_seconds'] * 1e3:>13.2f}"
        lines.append(f"{row['kind']:<34}{row['channel']:<10}{seconds}{share:>9}")
    return "\n".join(lines)
