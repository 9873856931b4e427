"""The comparison of the plan with a free sharding of every operator: a few lines, details, and JSON.

The plan of the answer has a layout of megatron-core. The comparison has the best sharding of all, the seconds lost because
megatron-core cannot execute it, and the operators responsible, each with its separate gain.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moe_overlap.describe.cluster import GIB
from moe_overlap.plan_search.results import SearchedSharding
from moe_overlap.report.answer import line
from moe_overlap.tuner.search.layer.intra_only import NearestLayout
from moe_overlap.tuner.search.layer.sharding_losses import LostOperator, LostWay
from moe_overlap.tuner.search.layer.sharding_specs import AxisWords
from moe_overlap.tuner.search.solution import Status

SHARED = 1e-6
"""Largest difference of two shardings that count as equally fast, as a share of the step."""
SHOWN = 3
"""Most operators in the short answer."""
TERMS = "with nothing recomputed and communication exposed"
"""Assumptions of the seconds of both shardings, which therefore differ from the plan's prediction."""
SPLITS = {"expert": "experts", "output": "outputs", "input": "inputs", "flat": "elements"}
"""Dimension of an operator -> its name in answers, if different."""


def sharding_lines(searched: SearchedSharding) -> list[str]:
    """The lines of the short answer: the best sharding against the best layout, and the operators that gain most."""
    gaining, _ = _lost(searched)
    lines = [_sentence(searched), *(text for operator in gaining[:SHOWN] for text in operator_lines(*operator))]
    if len(gaining) > SHOWN:
        lines[-1] += f"; {len(gaining) - SHOWN} more: --verbose"
    # Operators may gain together even if none gains by itself.
    gains = [f"{part_words(part)} {gain * 1e3:.3g} ms" for part, gain in _gaining_parts(searched).items()]
    if gains:
        lines.append(f"all operators of a part together would gain: {', '.join(gains)}")
    return _under("sharding", lines)


def _sentence(searched: SearchedSharding) -> str:
    answer = searched.answer
    if answer is None:
        return f"not searched free for every operator: {searched.refusal}"
    solution = answer.solution
    spent = f"solver {solution.seconds:.1f} s"
    if answer.best is None and solution.status is Status.INFEASIBLE:
        return f"free for every operator nothing fits a GPU without recomputation ({spent})"
    if answer.best is None:
        return f"free for every operator none was found in time (bound {solution.bound:.4g} s, {spent})"
    proof = f"{solution.status.value}, bound {solution.bound:.4g} s, gap {solution.gap:.2%}, {spent}"
    if answer.nearest is None:
        return f"free for every operator {answer.best.seconds:.4g} s; no layout fits without recomputation ({proof})"
    layout = f"{answer.nearest.seconds:.4g} s of {layout_name(answer.nearest)}, {TERMS}"
    if not searched.is_executed:
        saved = f"{searched.lost_seconds:.3g} s or {searched.lost_seconds / answer.nearest.seconds:.1%}"
        return f"free for every operator a step loses {saved} of the {layout} ({proof})"
    if solution.status is Status.OPTIMAL:
        return f"free for every operator nothing beats the {layout} ({proof})"
    return f"free for every operator nothing better was found in time than the {layout} ({proof})"


def sharding_details(searched: SearchedSharding) -> list[str]:
    """Lines of --verbose: the problem, the other operators that gain, and differing operators without gain."""
    answer = searched.answer
    if answer is None or answer.best is None:
        return []
    n, m = answer.best.shape
    batches = f"{searched.micro_batches} micro-batch{'es' * (searched.micro_batches > 1)}"
    lines = [
        f"{batches} of {searched.samples} sample{'s' * (searched.samples > 1)} over all GPUs; best on the mesh {n} × {m}, "
        f"{answer.best.seconds:.4g} s and {answer.best.bytes / GIB:.1f} GiB; {len(answer.shapes)} shapes of the mesh searched"
    ]
    lost = answer.losses
    if lost is not None and answer.nearest is not None and lost.layout_seconds > answer.nearest.seconds * (1 + SHARED):
        lines.append(f"gains are against the best layout on that mesh, {lost.layout_seconds:.4g} s")
    gaining, without = _lost(searched)
    lines += [text for operator in gaining[SHOWN:] for text in operator_lines(*operator)]
    if without:
        names = ", ".join(f"{operator.operator} of the {part_words(operator.part)}" for operator in without)
        lines.append(f"executed otherwise, with no gain alone: {names}")
    if lost is not None and not lost.is_proven:
        lines.append("time ended before every gain was proven")
    return _under("sharding", lines)


def _lost(searched: SearchedSharding) -> tuple[list[tuple[LostOperator, tuple[int, int]]], list[LostOperator]]:
    """Operators that gain by themselves, with the mesh, the largest gain first; and the others."""
    answer = searched.answer
    if answer is None or answer.best is None or answer.losses is None:
        return [], []
    # Smaller gains are rounding errors of sums.
    least, operators = SHARED * answer.losses.layout_seconds, answer.losses.operators
    gaining = [(operator, answer.best.shape) for operator in operators if operator.gain_seconds > least]
    return gaining, [operator for operator in operators if operator.gain_seconds <= least]


def _gaining_parts(searched: SearchedSharding) -> dict[str, float]:
    """Kind of part -> its gain with all of its operators free, if significant."""
    answer = searched.answer
    if answer is None or answer.losses is None:
        return {}
    least = SHARED * answer.losses.layout_seconds
    return {part: gain for part, gain in answer.losses.parts.items() if gain > least}


def _under(title: str, lines: list[str]) -> list[str]:
    return [line(title if place == 0 else "", text) for place, text in enumerate(lines)]


def layout_name(layout: NearestLayout) -> str:
    """The degrees above 1 and the ZeRO level, such as `TP2 DP4, ZeRO-1`."""
    degrees = [("TP", layout.tensor), ("CP", layout.context), ("DP", layout.data), ("EP", layout.expert)]
    shown = [f"{axis}{size}" for axis, size in degrees if size > 1]
    if layout.expert_tensor != layout.tensor:
        shown.append(f"ETP{layout.expert_tensor}")
    return f"{' '.join(shown) or 'one GPU'}, ZeRO-{layout.zero_level}"


def operator_lines(operator: LostOperator, shape: tuple[int, int]) -> list[str]:
    """The gain of an operator, and the best split of each of its passes and weights."""
    why = "no layout has that with the rest" if operator.has_layout else "no layout has that"
    gain = f"{operator.gain_seconds * 1e3:.3g} ms"
    lines = [f"{operator.operator} of the {part_words(operator.part)} would gain {gain} alone ({why})"]
    is_tied = len({way.part for way in operator.ways}) > 1
    for way in operator.ways:
        lines.append(f"  {part_words(way.part) + ' ' if is_tied else ''}{way_sentence(way, shape)}")
    return lines


def way_sentence(way: LostWay, shape: tuple[int, int]) -> str:
    """The split of one pass or weight in the best sharding, compared with megatron-core's."""
    free, executed = split_words(way.free, shape), split_words(way.executed, shape)
    if way.free_zero != way.executed_zero:
        free, executed = f"{free}, ZeRO-{way.free_zero},", f"{executed}, ZeRO-{way.executed_zero}"
    elif way.free == way.executed:
        free = f"{free} with the result {split_words(way.free_out, shape)}"
        executed = f"the result {split_words(way.executed_out, shape)}"
    return f"{way.phase}: {free} instead of {executed}"


def part_words(kind: str) -> str:
    """A kind of part as text."""
    name, _, window = kind.partition(".window")
    text = {"dense": "dense layer", "moe": "MoE layer"}.get(name, name)
    return f"{text} with window {window}" if window else text


def split_words(split: AxisWords, shape: tuple[int, int]) -> str:
    """The dimensions that the axes of a mesh split, with their numbers of ranks."""
    sizes: dict[str, int] = {}
    for axis, ranks in zip(split, shape, strict=True):
        if ranks > 1:
            sizes[axis] = sizes.get(axis, 1) * ranks
    copies, sums = sizes.pop("replicated", 1), sizes.pop("partial", 1)
    parts = [f"{SPLITS.get(axis, axis)} over {ranks}" for axis, ranks in sizes.items()]
    parts += [f"summands on {sums}"] if sums > 1 else []
    parts += [f"the same on {copies}"] if copies > 1 else []
    return " and ".join(parts) or "whole"


def sharding_json(searched: SearchedSharding) -> dict[str, Any]:
    """The comparison as JSON; missing numbers are null."""
    answer = searched.answer
    if answer is None:
        return {"not_run": searched.refusal}
    solution, best, nearest = answer.solution, answer.best, answer.nearest
    return {
        "not_run": None,
        "micro_batches": searched.micro_batches,
        "samples": searched.samples,
        "step_seconds": _number(solution.objective),
        "bound": _number(solution.bound),
        "gap": _number(solution.gap),
        "status": solution.status.value,
        "solver_seconds": solution.seconds,
        "mesh": None if best is None else list(best.shape),
        "nearest": None if nearest is None else {"name": layout_name(nearest), "step_seconds": nearest.seconds},
        "lost_seconds": _number(searched.lost_seconds),
        "parts": {} if answer.losses is None else answer.losses.parts,
        "operators": []
        if answer.losses is None
        else [_operator_json(operator) for operator in answer.losses.operators],
    }


def _operator_json(operator: LostOperator) -> dict[str, Any]:
    return {
        "part": operator.part,
        "operator": operator.operator,
        "has_layout": operator.has_layout,
        "gain_seconds": operator.gain_seconds,
        "ways": [dataclasses.asdict(way) for way in operator.ways],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
