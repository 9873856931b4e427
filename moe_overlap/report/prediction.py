"""A prediction as JSON and as text: seconds, throughput, and the memory of every stage."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moe_overlap.describe.cluster import GIB, Cluster
from moe_overlap.describe.figures import VISIBLE_BYTES
from moe_overlap.describe.readers.predicted_flags import effect_of
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.expected_error import LEVEL, ExpectedError
from moe_overlap.tuner.cost.feasibility import Alternative, ChangeKind, MemoryChange, Remedy
from moe_overlap.tuner.cost.hardware import precision_of, release_order
from moe_overlap.tuner.write.memory_changes import RUN_BY_MEGATRON_LM, change_flags

WHOLE_FROM = 10.0
"""Smallest figure that is shown as a whole number."""
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """The prediction as JSON: all times in seconds, all sizes in bytes."""
    predicted = prediction.predicted
    return {
        "step_seconds": predicted.step_seconds,
        "tokens_per_second_per_gpu": predicted.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": predicted.model_tflops_per_gpu,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "does_not_fit": prediction.overflow,
        "memory_verdict": prediction.memory_verdict,
        "memory_margin": prediction.memory.margin,
        "fullest_stage": dataclasses.asdict(prediction.fullest),
        "cheapest_change_that_fits": None if prediction.remedy is None else _remedy_json(prediction.remedy),
        "alternatives": [dataclasses.asdict(change) for change in prediction.alternatives],
        "changes_tried": [change_name(change) for change in prediction.tried],
        "capacity_bytes": prediction.capacity_bytes,
        "available_bytes": prediction.available_bytes,
        "extrapolating": bool(prediction.extrapolating),
        "extrapolating_because": list(prediction.extrapolating),
        "not_modelled": list(prediction.not_modelled),
        "software": software_json(prediction),
        "expected_error": dataclasses.asdict(prediction.expected_error) if prediction.expected_error else None,
        "interval": interval_json(prediction),
        "missed": missed_texts(prediction),
        "not_modelled_effects": {flag: effect_of(flag) for flag in prediction.not_modelled},
        "assumed": list(prediction.assumed),
        "not_run": list(prediction.not_run),
        "computed_early": list(prediction.computed_early),
        "breakdown": dict(prediction.breakdown),
        "launching": None if prediction.launching is None else dataclasses.asdict(prediction.launching),
        "provenance": dataclasses.asdict(predicted.provenance),
        "stages": [dataclasses.asdict(stage) for stage in predicted.stages],
    }


def software_json(prediction: Prediction) -> dict[str, Any]:
    """The assumed software release, and its factor on the time lost beyond peak rates."""
    software = prediction.software
    return {"release": software.release, "is_median": software.is_median, "loss": software.constants.loss}


def interval_json(prediction: Prediction) -> dict[str, float] | None:
    """The interval of the step's seconds and its level; None if it is unknown."""
    expected = prediction.expected_error
    if expected is None:
        return None
    low, high = expected.interval(prediction.predicted.step_seconds)
    return {"level": LEVEL, "low_seconds": low, "high_seconds": high}


def figure(value: float) -> str:
    """A rate or a sum as a whole number, below WHOLE_FROM with two significant digits, so that a laptop's rate is not 0."""
    return f"{value:,.0f}" if value >= WHOLE_FROM or not value else f"{value:.2g}"


def interval_text(prediction: Prediction) -> str:
    """The interval as text; empty if it is unknown."""
    expected = prediction.expected_error
    if expected is None:
        return ""
    low, high = map(seconds_text, expected.interval(prediction.predicted.step_seconds))
    return f"{low} to {high} s in {LEVEL * 10:.0f} of 10 runs"


def seconds_text(seconds: float) -> str:
    """Seconds with three significant digits, from 1,000 on as a whole number: `0.0345`, `3.74`, `37.4`, `3,741`."""
    if seconds >= 999.5:
        return f"{seconds:,.0f}"
    # Not by `g` below a tenth of a millisecond, which it writes with an exponent.
    digits = 2 - math.floor(math.log10(seconds)) if seconds > 0 else 0
    return f"{seconds:.{max(0, digits)}f}"


def missed_texts(prediction: Prediction) -> list[str]:
    """The warning about compared runs whose steps lie outside the interval, with the step to expect; empty if predictions hold
    them."""
    missed = prediction.missed
    if missed is None:
        return []
    runs, count = missed.runs, len(missed.runs)
    number = NUMBERS[count - 1] if count <= len(NUMBERS) else f"{count}"
    kind = "MoE" if runs[0].routing else "dense"
    gpus = " and ".join(sorted({run.gpu for run in runs}))
    subject = {
        "model and GPU": "of this model on this GPU",
        "model": f"of this model on {gpus}",
        "GPU": f"of {kind} models on this GPU",
    }[missed.kind]
    named = sorted({name for run in runs for name in run.release.split()}, key=release_order)
    releases = f" (release{'s' if len(named) > 1 else ''} {', '.join(named)})" if named else ""
    precision = precision_of(runs[0].precision)
    published = f"{number} published {precision} run{'s' if count > 1 else ''} {subject}{releases}"
    expected = seconds_text(missed.ratio * prediction.predicted.step_seconds)
    return [
        f"{published} took {missed.ratio:.2g} times what is predicted: expect {expected} s rather than the interval"
    ]


def available_text(prediction: Prediction) -> str:
    """The memory that a plan may have: `73.7 GiB that CUDA and NCCL leave of 80`."""
    available, capacity = prediction.available_bytes / GIB, prediction.capacity_bytes / GIB
    if not prediction.reserved_bytes:
        return f"{capacity:.3g} GiB"
    return f"{available:.1f} GiB that CUDA and NCCL leave of {capacity:.3g}"


def expected_error_text(prediction: Prediction) -> str:
    """The expected error, to follow the seconds of a step; empty if it is unknown."""
    expected = prediction.expected_error
    return f" ± {expected.relative * 100:.0f} %" if expected is not None else ""


def prediction_text(prediction: Prediction, cluster: Cluster) -> str:
    """The prediction as text: the step, its breakdown, a row per stage, and warnings."""
    predicted, seconds = prediction.predicted, prediction.predicted.step_seconds
    lines = [
        f"step          {seconds:.3f} s{expected_error_text(prediction)} on {cluster.gpus} × {cluster.group_of(0).gpu.name}",
        f"throughput    {figure(predicted.tokens_per_second_per_gpu)} tokens/s, "
        f"{figure(predicted.model_tflops_per_gpu)} TFLOP/s per GPU, MFU {prediction.mfu:.1%}",
        "",
    ]
    if expected := prediction.expected_error:
        lines.insert(2, f"error         {_error_text(expected)}; {interval_text(prediction)}")
    if (software := prediction.software).release:
        which = f", the median release of {cluster.group_of(0).gpu.architecture}" if software.is_median else ""
        lines.insert(-1, f"software      {software.release}{which}: {_loss_text(software.constants.loss)}")
    for name, part in prediction.breakdown.items():
        lines.append(f"  {name.removesuffix('_seconds').replace('_', ' '):<20}{part:>10.3f} s {part / seconds:>7.1%}")
    lines += ["", f"  {'stage':<7}{'micro-batch s':>14}{'peak GiB':>10}  of it"]
    for index, stage in enumerate(predicted.stages):
        peaks = dataclasses.asdict(stage.peak_bytes_by_category)
        shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size in peaks.items() if size > VISIBLE_BYTES)
        lines.append(f"  {index:<7}{stage.stable_seconds:>14.4f}{stage.peak_bytes / GIB:>10.1f}  {shares}")
    lines += ["", *_alternative_lines(prediction)]
    lines += prediction.overflow
    lines += _remedy_lines(prediction)
    lines += missed_texts(prediction)
    lines += [f"extrapolating: {reason}" for reason in prediction.extrapolating]
    lines += [f"assumed: {text}" for text in prediction.assumed]
    lines += [f"not run: {text}" for text in prediction.not_run]
    lines += [f"not modelled: {flag}: {effect_of(flag)}" for flag in prediction.not_modelled]
    lines += [f"computed early: {text}" for text in prediction.computed_early]
    return "\n".join(lines).rstrip()


def alternative_memory(alternative: Alternative) -> str:
    """The memory of a single change as text."""
    if alternative.high_bytes is None:
        return "memory not counted"
    fits = "" if alternative.fits else ": does not fit with certainty"
    return f"at most {alternative.high_bytes / GIB:.1f} GiB{fits}"


def _alternative_lines(prediction: Prediction) -> list[str]:
    """A table of the single changes that were predicted; empty if there are none."""
    seconds, lines = prediction.predicted.step_seconds, []
    for change in prediction.alternatives:
        gain = f"{change.step_seconds / seconds - 1.0:+.1%}"
        lines.append(
            f"  {change.name:<44}{change.step_seconds:>10.3f} s {gain:>7}  {alternative_memory(change)}; {change.flags}"
        )
    return [f"  {'single change':<44}{'a step':>12}", *lines, ""] if lines else []


def _error_text(expected: ExpectedError) -> str:
    """The origin of an expected error."""
    held_out = expected.rows - expected.tested
    return (
        f"average over published runs of {expected.group}, the larger of two: {expected.tested} to which nothing was fitted, "
        f"and {held_out} that were held out when the constants were fitted"
    )


def _loss_text(loss: float) -> str:
    """The efficiency of a software release."""
    if f"{loss:.2f}" == "1.00":
        return "as efficient as the reference release"
    return f"loses {loss:.2f} times as many seconds beyond peak rates as the reference release"


def _remedy_lines(prediction: Prediction) -> list[str]:
    """The line on the change that makes a plan fit; empty if none was searched."""
    remedy = prediction.remedy
    if remedy is not None:
        cost = f"{remedy.step_seconds:.3f} s a step ({remedy.slower_by:+.1%}), up to {remedy.high_bytes / GIB:.1f} GiB"
        return [f"would fit: {change_name(remedy.change)}: {cost}; {change_advice(remedy.change)}"]
    tried = "; ".join(change_name(change) for change in prediction.tried)
    return [f"no single change makes it fit: {tried}"] if tried else []


def _remedy_json(remedy: Remedy) -> dict[str, Any]:
    return {
        "change": change_name(remedy.change),
        "flags": change_flags(remedy.change),
        "step_seconds": remedy.step_seconds,
        "slower_by": remedy.slower_by,
        "high_bytes": remedy.high_bytes,
    }


def change_name(change: MemoryChange) -> str:
    """A change as text."""
    return {
        ChangeKind.MODULES: f"recompute {', '.join(change.modules)}",
        ChangeKind.LAYERS: f"recompute the first {change.number} layers of every chunk",
        ChangeKind.EVERY_LAYER: "recompute every layer",
        ChangeKind.MICRO_BATCH: f"halve the micro-batch to {change.number}",
        ChangeKind.SHARD_OPTIMIZER: "shard the optimizer's states",
        ChangeKind.SHARD_ALL: "shard parameters and gradients, too (ZeRO-3)",
        ChangeKind.HOST_OPTIMIZER: "keep the optimizer's states in host memory",
    }[change.kind]


def change_advice(change: MemoryChange) -> str:
    """The flags of a change, with a note if this fork's training refuses them."""
    if change.kind not in RUN_BY_MEGATRON_LM:
        return change_flags(change)
    longer = "; its step on the host's cores takes longer than is counted"
    note = longer if change.kind is ChangeKind.HOST_OPTIMIZER else ""
    return f"{change_flags(change)} (Megatron-LM runs it, this fork does not{note})"
