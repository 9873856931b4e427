"""Fits the factors of the interference model to measurements, and writes them down with their error on rows not fitted to.

    python -m moe_overlap.tuner.cost.fit_interference tests/validation/data/concurrency.csv.gz \
        moe_overlap/tuner/cost/interference.json

Method, on calibration rows, mean absolute relative error throughout:
1. Sets of two, then of three, then of four streams, each on the rows in which exactly this set is busy at the start: what
   follows when its first stream ends is known by then (Mist, section 5.2.2).
2. All sets again, each on the rows that begin with it or with a larger set, until nothing improves: rows of larger sets tell
   about the smaller ones, too.
Each fit is a descent over multiples of 1/256 from coarse to fine, so that the same data gives the same bytes.

Factors are fitted to a whole host; to groups of devices inside a node and across nodes apart, since their all-gathers take
different ways; and to every group by itself. Each begins with those of the one before, which it keeps where it has no rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import permutations, product
from operator import itemgetter
from pathlib import Path

import numpy as np

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.serialize import as_values, format_json
from moe_overlap.tuner.cost.concurrency_samples import Mask, Samples, alone_seconds, read_samples, used_samples
from moe_overlap.tuner.cost.interference import NO_INTERFERENCE, SETS, Factors, Floats, Interference, serial_share
from moe_overlap.tuner.cost.interference_hosts import Fitted, Host, place_of

STEPS = tuple(2.0**-n for n in range(1, 9))
GRID = (1.0, 1.5, 2.5, 4.0)
"""Where a fit looks first; the error has more than one valley."""
STARTS = 3
"""Best places of the grid from which it descends."""
HIGHEST_FACTOR = 50.0
PREFERENCE = 2e-4
"""Error that a factor may be larger by 1 for. Rows in which the same stream always ends first tell only how the factors of
a set combine; of those that fit alike the most even are taken."""
FactorLists = dict[str, list[float]]


def fit_factors(alone_SN: Floats, seconds_N: Floats, start: Factors) -> FactorLists:
    """Factors with the least mean error on these rows.

    Args:
        alone_SN: alone seconds of the four streams.
        seconds_N: measured.
        start: kept for sets that no row begins with or passes through.
    """
    factors = {word: list(start[word]) for word in SETS}
    set_N = np.array([8, 4, 2, 1]) @ (alone_SN > 0)
    for word in reversed(SETS):
        exact_N = set_N == int(word, 2)
        if exact_N.any():
            _search(factors, word, alone_SN[:, exact_N], seconds_N[exact_N])
    before, now = math.inf, mean_error(Interference(factors), alone_SN, seconds_N)
    while now < before:
        for word in SETS:
            through_N = (set_N & int(word, 2)) == int(word, 2)
            if through_N.any():
                factors[word], _ = _descend(
                    factors, word, factors[word], alone_SN[:, through_N], seconds_N[through_N], STEPS[2:]
                )
        before, now = now, mean_error(Interference(factors), alone_SN, seconds_N)
    return factors


def mean_error(model: Interference, alone_SN: Floats, seconds_N: Floats) -> float:
    """Mean absolute relative error, summed exactly; 0 of no rows."""
    errors = np.abs(model.seconds(*alone_SN) / seconds_N - 1)
    return math.fsum(errors.tolist()) / max(1, len(errors))


def _search(factors: FactorLists, word: str, alone_SN: Floats, seconds_N: Floats) -> None:
    """The factors of one set, from a grid and from where they stand."""
    grid = [list(values) for values in product(GRID, repeat=word.count("1")) if serial_share(values) >= 1]
    errors = [mean_error(Interference({**factors, word: values}), alone_SN, seconds_N) for values in grid]
    starts = [grid[place] for place in sorted(range(len(grid)), key=errors.__getitem__)[:STARTS]]
    found = [_descend(factors, word, values, alone_SN, seconds_N, STEPS) for values in (factors[word], *starts)]
    factors[word], _ = min(found, key=itemgetter(1))


def _descend(
    factors: FactorLists,
    word: str,
    values: list[float],
    alone_SN: Floats,
    seconds_N: Floats,
    steps: tuple[float, ...],
) -> tuple[list[float], float]:
    """From these factors of one set to the best near them, with ever smaller steps; and their error."""

    def error_of(tried: list[float]) -> float:
        return mean_error(Interference({**factors, word: tried}), alone_SN, seconds_N) + PREFERENCE * max(tried)

    best = error_of(values)
    for step in steps:
        improved = True
        while improved:
            improved = False
            for tried in _neighbours(values, step):
                error = error_of(tried)
                if error < best:
                    values, best, improved = tried, error, True
                    break
    return values, best


def _neighbours(values: list[float], step: float) -> Iterator[list[float]]:
    """One factor more or less by a step, or one more and another less; those that the model allows."""
    places = range(len(values))
    moves = [{place: sign * step} for place in places for sign in (1, -1)]
    moves += [{more: step, less: -step} for more, less in permutations(places, 2)]
    for move in moves:
        tried = [value + move.get(place, 0.0) for place, value in enumerate(values)]
        if all(1 <= value <= HIGHEST_FACTOR for value in tried) and serial_share(tried) >= 1:
            yield tried


def fit_host(source: str, samples: Samples) -> Host:
    """Everything about one host."""
    alone_SN = alone_seconds(samples)
    used = used_samples(samples, alone_SN)

    def fitted(inside_N: Mask, start: Factors) -> Fitted:
        calibration_N = inside_N & used.mixed_N & ~samples.is_test_N
        factors = fit_factors(alone_SN[:, calibration_N], samples.seconds_N[calibration_N], start)
        kept = {word: tuple(values) for word, values in factors.items()}
        test_N = inside_N & used.mixed_N & samples.is_test_N
        return Fitted(kept, int(calibration_N.sum()), int(test_N.sum()), error_percent(factors, test_N))

    def error_percent(factors: Factors, rows_N: Mask) -> float:
        return round(100 * mean_error(Interference(factors), alone_SN[:, rows_N], samples.seconds_N[rows_N]), 3)

    whole = fitted(np.ones(len(samples.seconds_N), dtype=bool), NO_INTERFERENCE.factors)
    place_N = np.array([place_of(group) for group in samples.groups_N])
    names = [str(place) for place in np.unique(place_N)]
    places = {place: fitted(place_N == place, whole.factors) for place in names} if len(names) > 1 else {}
    groups = {
        str(group): fitted(samples.groups_N == group, places.get(place_of(group), whole).factors)
        for group in np.unique(samples.groups_N)
    }
    return Host(source, samples.gpu, used.noisy, used.slower_than_serial, whole, places, groups)


def report(host: Host, samples: Samples) -> Iterator[str]:
    """Lines: mean error on test rows in %, with the factors of the host, of the place and of the group."""
    yield f"{host.gpu} {host.source}"
    yield f"  not used: {host.noisy} noisy, {host.slower_than_serial} slower than one after the other"
    yield "  group   rows  host  place  group"
    alone_SN = alone_seconds(samples)
    test_N = used_samples(samples, alone_SN).mixed_N & samples.is_test_N
    total = np.zeros(4)
    for group, own in host.groups.items():
        rows_N = test_N & (samples.groups_N == group)
        levels = (host.whole, host.places.get(place_of(group), host.whole), own)
        errors = [
            100 * mean_error(Interference(one.factors), alone_SN[:, rows_N], samples.seconds_N[rows_N])
            for one in levels
        ]
        yield _cells(group, own.test_rows, *errors)
        total += own.test_rows * np.array([1.0, *errors])
    yield _cells("all", int(total[0]), *(total[1:] / total[0]))


def _cells(name: str, rows: int, *errors: float) -> str:
    return f"  {name:<6} {rows:>5}" + "".join(f" {error:5.2f}" for error in errors)


def main(words: list[str]) -> int:
    """Read, fit, write, print."""
    if len(words) != 2:
        print("usage: python -m moe_overlap.tuner.cost.fit_interference SAMPLES.csv.gz OUT.json", file=sys.stderr)
        return 2
    try:
        samples = dict(sorted(read_samples(Path(words[0])).items()))
        hosts = [fit_host(source, found) for source, found in samples.items()]
        Path(words[1]).write_text(format_json([as_values(host) for host in hosts]) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for host in hosts:
        print("\n".join(report(host, samples[host.source])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
