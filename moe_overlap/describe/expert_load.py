"""Loads of a run's experts: the file behind --log-expert-load, written by a run and read by a tuner.

JSON lines; each line is one MoE layer over a range of steps, complete in itself:

    {"first_step": 11, "last_step": 20, "layer": 3, "tokens": 40960, "load": [9981, ...], "dropped": [0, ...], "entropy": 1.87}

    first_step, last_step   both included, numbered from 1; training only, evaluations are left out
    layer                   from 0, as in the operator names (`L3.moe.gate`); prediction layers count on behind the decoder's
    tokens                  tokens that met the router in those steps, over all ranks and micro-batches
    load                    by expert: tokens it computed, that is, chosen and within capacity
    dropped                 by expert: tokens that chose it and found it full
    entropy                 nats: mean over the tokens of the entropy of their scores, normalised over all experts;
                            log(number of experts) when the router does not prefer any

A resumed run appends. Steps that were executed again stand in the file twice; the later lines are the run's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, bounded_text, plain_json

SUBJECT = "--expert-load"
"""The flag by which the commands that read such a file are given it."""
NATURAL = "natural"
"""The word of `--routing` for a router that decides by itself, and whose loads nobody has recorded."""
NATURAL_LOAD = 1.1
"""Rows of the busiest of several expert ranks over the mean, under natural routing: an assumption, as no published run tells it.
The constants fit the one calibration run with such a router as well at 1.0, which no router reaches, and worse at 1.2."""
COUNTS = ("first_step", "last_step", "layer", "tokens")
BY_EXPERT = ("load", "dropped")


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """One line of the file."""

    first_step: int
    last_step: int
    layer: int
    tokens: int
    load: tuple[int, ...]
    dropped: tuple[int, ...]
    entropy: float

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert over the mean load: 1 is even; 0 where nothing was computed."""
        return max(self.load) * len(self.load) / sum(self.load) if any(self.load) else 0.0

    @property
    def dropped_share(self) -> float:
        """Part of all choices that found their expert full."""
        choices = sum(self.load) + sum(self.dropped)
        return sum(self.dropped) / choices if choices else 0.0

    def to_line(self) -> str:
        """The line of the file, without its end."""
        return json.dumps(asdict(self))


def expert_load_text(path: str | Path) -> str:
    """The text of a file of expert loads, whose lines nobody has checked.

    Raises:
        ConfigError: the file cannot be read, is none, or is too large.
    """
    try:
        return bounded_text(path)
    except Unreadable as error:
        raise ConfigError(SUBJECT, path, str(error), error.fix) from error


def read_expert_loads(path: str | Path) -> tuple[ExpertLoad, ...]:
    """The lines of a file that count, in its order: for steps that were executed twice, the later ones.

    Raises:
        ConfigError: the file cannot be read, or a line is none of this format; it names the line.
    """
    text = expert_load_text(path)
    kept: list[ExpertLoad] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = _load_of(plain_json(line))
        except (Unreadable, ValueError, TypeError, KeyError) as error:
            rule = f"is no record of expert loads ({error})"
            raise ConfigError(SUBJECT, f"{path}:{number}", rule, "remove the line, or log the run anew") from error
        if kept and row.first_step <= kept[-1].last_step:
            kept = [old for old in kept if old.layer != row.layer or old.last_step < row.first_step]
        kept.append(row)
    return tuple(kept)


def _load_of(row: Any) -> ExpertLoad:
    if not isinstance(row, dict) or set(row) != {*COUNTS, *BY_EXPERT, "entropy"}:
        raise ValueError(f"expected the fields {', '.join((*COUNTS, *BY_EXPERT, 'entropy'))}")
    numbers = [row[name] for name in COUNTS] + [count for name in BY_EXPERT for count in row[name]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("steps, layer, tokens and loads must be whole numbers, none negative")
    if not row["load"] or len(row["load"]) != len(row["dropped"]):
        raise ValueError("load and dropped must name the same experts")
    entropy = row["entropy"]
    if type(entropy) not in (int, float) or not 0 <= entropy < math.inf:
        raise ValueError("entropy must be a number from 0")
    return ExpertLoad(**{**row, **{name: tuple(row[name]) for name in BY_EXPERT}, "entropy": float(row["entropy"])})


def shares_by_layer(loads: Iterable[ExpertLoad]) -> dict[int, tuple[float, ...]]:
    """Each layer's share of choices that fell on each expert, dropped ones included, over all lines.

    Raises:
        ConfigError: lines of one layer differ in their number of experts: the file holds two models.
    """
    sums: dict[int, Sequence[int]] = {}
    for row in loads:
        chosen = [kept + dropped for kept, dropped in zip(row.load, row.dropped, strict=True)]
        before = sums.get(row.layer, [0] * len(chosen))
        if len(before) != len(chosen):
            rule = f"layer {row.layer} has {len(before)} experts in one line and {len(chosen)} in another"
            raise ConfigError(SUBJECT, "", rule, "give a file of one model")
        sums[row.layer] = [left + right for left, right in zip(before, chosen, strict=True)]
    return {layer: tuple(count / max(sum(counts), 1) for count in counts) for layer, counts in sums.items()}
