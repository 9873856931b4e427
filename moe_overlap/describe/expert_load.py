"""Expert loads of a run: the file of --log-expert-load, which a run writes and the tuner reads.

JSON lines; each line describes one MoE layer over a range of steps:

    {"first_step": 11, "last_step": 20, "layer": 3, "tokens": 40960, "load": [9981, ...], "dropped": [0, ...], "entropy": 1.87}

    first_step, last_step   both included, numbered from 1; training steps only, no evaluations
    layer                   from 0, as in the operator names (`L3.moe.gate`); prediction layers follow the decoder's
    tokens                  routed tokens in those steps, over all ranks and micro-batches
    load                    by expert: tokens it computed, that is, routed to it and within its capacity
    dropped                 by expert: tokens routed to it beyond its capacity
    entropy                 nats: mean over the tokens of the entropy of their scores, normalised over all experts;
                            log(number of experts) for uniform scores

A resumed run appends. If it repeats steps, the later lines replace the earlier ones.
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
"""The flag with the path of such a file."""
NATURAL = "natural"
"""Value of `--routing` for a learnt router without a recorded load."""
NATURAL_LOAD = 1.1
"""Rows of the busiest of several expert ranks over the mean, under natural routing. An assumption: no published run reports it.
The one calibration run with such a router fits equally well at 1.0, which no router reaches, and worse at 1.2."""
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
        """Load of the busiest expert over the mean load: 1 is balanced; 0 without any load."""
        return max(self.load) * len(self.load) / sum(self.load) if any(self.load) else 0.0

    @property
    def dropped_share(self) -> float:
        """Dropped tokens over all routed tokens, counted per expert choice."""
        choices = sum(self.load) + sum(self.dropped)
        return sum(self.dropped) / choices if choices else 0.0

    def to_line(self) -> str:
        """The line of the file, without its line end."""
        return json.dumps(asdict(self))


def expert_load_text(path: str | Path) -> str:
    """The text of a file of expert loads; its lines are not checked.

    Raises:
        ConfigError: the file cannot be read, is no regular file, or is too large.
    """
    try:
        return bounded_text(path)
    except Unreadable as error:
        raise ConfigError(SUBJECT, path, str(error), error.fix) from error


def read_expert_loads(path: str | Path) -> tuple[ExpertLoad, ...]:
    """The valid lines of a file, in order: for repeated steps only the later lines.

    Raises:
        ConfigError: the file cannot be read, or a line has another format; the error names the line.
    """
    text = expert_load_text(path)
    loads: list[ExpertLoad] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = _load_of(plain_json(line))
        except (Unreadable, ValueError, TypeError, KeyError) as error:
            rule = f"is no record of expert loads ({error})"
            raise ConfigError(SUBJECT, f"{path}:{number}", rule, "remove the line, or log the run anew") from error
        if loads and row.first_step <= loads[-1].last_step:
            loads = [old for old in loads if old.layer != row.layer or old.last_step < row.first_step]
        loads.append(row)
    return tuple(loads)


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
    """Layer -> share of its tokens routed to each expert, dropped ones included, over all lines.

    Raises:
        ConfigError: lines of one layer have different numbers of experts, so they belong to two models.
    """
    sums: dict[int, Sequence[int]] = {}
    for row in loads:
        chosen = [computed + dropped for computed, dropped in zip(row.load, row.dropped, strict=True)]
        before = sums.get(row.layer, [0] * len(chosen))
        if len(before) != len(chosen):
            rule = f"layer {row.layer} has {len(before)} experts in one line and {len(chosen)} in another"
            raise ConfigError(SUBJECT, "", rule, "give a file of one model")
        sums[row.layer] = [total + count for total, count in zip(before, chosen, strict=True)]
    return {layer: tuple(count / max(sum(counts), 1) for count in counts) for layer, counts in sums.items()}
