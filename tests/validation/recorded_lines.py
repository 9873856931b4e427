"""Lines of the table for runs that Mist and Aceso recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moe_overlap.tuner.calibrate.fit.recorded_figures import RunCase
from moe_overlap.tuner.calibrate.fit.recorded_runs import left_out
from moe_overlap.tuner.cost.hardware import Constants
from tests.validation.errors import figures


def recorded_lines(cases: Sequence[RunCase], constants: Constants) -> list[str]:
    """Every figure with its prediction, errors by harness, GPU and split, and what is left out."""
    lines, groups = [], defaultdict(list)
    for case in cases:
        for figure in case.compared(constants):
            where = "" if figure.stage is None else f" {figure.stage}"
            lines.append(
                f"{figure.split:<12} {case.run.name:<44} {figure.what + where:<12}"
                f"{figure.measured:10.2f} {figure.predicted:10.2f} {figure.error:+7.1%}"
            )
            groups[case.run.harness, case.run.gpu_type, figure.what, figure.split].append(
                (figure.error, figure.measured)
            )
    lines += [f"{' '.join(key):<34} {figures(pairs)}" for key, pairs in sorted(groups.items())]
    return lines + [f"left out: {name}: {why}" for name, why in left_out().items()]
