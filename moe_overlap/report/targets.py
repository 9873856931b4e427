"""The answer of `--target both`: the best plans for unmodified Megatron-LM and for this runtime, and the gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_overlap.plan_search.results import BothTargets
from moe_overlap.report.answer import Answer, beware_lines, figure_lines, line
from moe_overlap.report.search import EARLY, closing_lines, search_json, search_sentence

UPSTREAM_FOLDER = "megatron-lm"
"""Subfolder of Megatron-LM's plan in the folder of the answer."""


def both_json(both: BothTargets, train_tokens: float | None) -> dict[str, Any]:
    """The JSON of the search for this runtime, with the other search under `megatron_lm`, and the gain."""
    runtime, upstream = (search_json(search, train_tokens) for search in (both.runtime, both.upstream))
    return runtime | {"megatron_lm": upstream, "gain": both.gain}


def both_lines(both: BothTargets, folder: Path | None, files: Sequence[str], train_tokens: float | None) -> list[str]:
    """The answer as text.

    Args:
        folder, files: the folder of this runtime's answer, None if nothing is written, and the names of its files; the other
            answer is in UPSTREAM_FOLDER.
    """
    lines = []
    for name, search in ((UPSTREAM_FOLDER, both.upstream), (both.runtime.target, both.runtime)):
        chosen = search_sentence(search) if search is both.upstream else f"{search_sentence(search)}; for this runtime"
        answer = Answer(
            plan=search.plan,
            prediction=search.prediction,
            cluster=search.cluster,
            chosen=chosen,
            train_tokens=train_tokens,
        )
        lines += figure_lines(answer, name)
    # Both plans are for one job on the same machines, so most warnings are the same.
    warnings = [*beware_lines(both.upstream.prediction), *beware_lines(both.runtime.prediction)]
    lines += dict.fromkeys(warnings)
    lines.append(line("gain", gain_sentence(both)))
    lines += closing_lines(both.runtime, folder, files)
    if folder is not None:
        at_written = next(index for index, text in enumerate(lines) if text.startswith("written "))
        lines[at_written] += f"; the same for Megatron-LM in {folder / UPSTREAM_FOLDER}"
    return lines


def gain_sentence(both: BothTargets) -> str:
    """One sentence on the gain: the reason to use this fork for this job, or that there is none."""
    upstream, runtime = (search.prediction.predicted.step_seconds for search in (both.upstream, both.runtime))
    seconds = f"{runtime:.3f} s a step in place of {upstream:.3f} s"
    early = [search.target for search in (both.upstream, both.runtime) if search.ended_early]
    if early:
        seconds += f"; but the search for {' and '.join(early)} {EARLY}"
    if both.gain > 1 + both.tie:
        reason = "" if early else ": the reason to use this fork"
        return f"{both.gain:.2f} times as fast, {seconds}{reason}"
    if both.gain < 1 - both.tie:
        return f"none: unmodified Megatron-LM is {1 / both.gain:.2f} times as fast ({upstream:.3f} s in place of {runtime:.3f} s)"
    return f"none that predictions can tell: {seconds}"
