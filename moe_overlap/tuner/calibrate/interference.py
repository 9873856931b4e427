"""Fits the factors of the interference model to measurements, and writes them with their error on rows outside the fit.

    python -m moe_overlap.tuner.calibrate.interference tests/validation/data/concurrency.csv.gz \\
        moe_overlap/tuner/cost/interference.json

Method, on calibration rows, mean absolute relative error throughout:
1. Sets of two, then of three, then of four streams, each on the rows in which exactly this set is busy at the start: the smaller
   set that remains when its first stream ends has been fitted by then (Mist, section 5.2.2).
2. All sets again, each on the rows that begin with it or with a larger set, until nothing improves: rows of larger sets
   constrain the smaller ones, too.
Each fit is a descent over multiples of 1/256 from coarse to fine, so that the same data gives the same bytes.

Factors are fitted to a whole host; then separately to groups of devices inside a node and across nodes, since their all-gathers
use different links; and to every group. Each fit starts from the factors of the one before, and keeps them if it has no rows.
"""

from __future__ import annotations

import csv
import gzip
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import Unreadable, plain_json
from moe_overlap.plan.serialize import as_values, format_json
from moe_overlap.tuner.cost.interference import (
    NO_INTERFERENCE,
    SETS,
    STREAMS,
    Factors,
    Fitted,
    Floats,
    Host,
    Interference,
    place_of,
    serial_share,
)

# Measurements of streams that run at the same time, and the seconds of each stream without the others.
#
# A sample is one repeated measurement on one group of devices: `nodes` × `per_node` of them all-gather, each also computes and
# copies, everything begins together, and `seconds` pass until all has ended. Samples with only one busy stream give its seconds
# without interference: latency and seconds per unit of size (rows of the product for computation, MB for the others).

SIZE_KEYS = ("N", "g2g_allgather_MB", "h2d_MB", "d2h_MB")
"""Keys of the sizes in the file, in the order of STREAMS."""
MOST_SAMPLE_BYTES = 1 << 24
"""Unpacked bytes of the largest file of samples that is read: a hundred thousand samples."""
HIGHEST_SPREAD = 0.1
"""Samples whose repetitions differ more (standard deviation over mean) are not used (Mist does the same)."""

Group = tuple[int, int]
"""Nodes, devices per node."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class InterferenceSamples:
    """Samples of one host; N of them.

    Attributes:
        gpu: name of its devices.
        groups_N: nodes × devices per node, as `2x4`.
        sizes_SN: size of each stream, 0 if it is idle.
        seconds_N: seconds until all had ended.
        spread_N: standard deviation over mean of the repetitions.
        is_test_N: whether the sample is excluded from fits.
    """

    gpu: str
    groups_N: NDArray[np.str_]
    sizes_SN: Floats
    seconds_N: Floats
    spread_N: Floats
    is_test_N: Mask

    def at(self, chosen: Mask) -> InterferenceSamples:
        """The chosen samples."""
        return InterferenceSamples(
            self.gpu,
            self.groups_N[chosen],
            self.sizes_SN[:, chosen],
            self.seconds_N[chosen],
            self.spread_N[chosen],
            self.is_test_N[chosen],
        )

    @property
    def busy_N(self) -> NDArray[np.int64]:
        """Number of busy streams of every sample."""
        return (self.sizes_SN > 0).sum(axis=0)


def read_samples(path: Path) -> dict[str, InterferenceSamples]:
    """Samples of a file, by the host on which they were measured (`source_path`).

    The format is described in tests/validation/data/concurrency.md.

    Raises:
        ConfigError: the file is not there or a row cannot be read.
    """
    rows: dict[str, list[tuple[str, dict[str, float], float, bool]]] = {}
    gpus: dict[str, str] = {}
    fix = "give the columns of tests/validation/data/concurrency.md"
    try:
        table = list(csv.DictReader(_unpacked(path).splitlines()))
    except csv.Error as error:
        raise ConfigError(str(path), "", f"is no table: {error}", fix) from error
    for number, row in enumerate(table, start=2):
        try:
            written = plain_json(row["stage_config_json"])
            setting = {key: _from_zero(written[key]) for key in (*SIZE_KEYS, "inter", "intra", "std_over_mean")}
            group = f"{int(setting['inter'])}x{int(setting['intra'])}"
            sample = (group, setting, _from_zero(row["value"]), row["split"] == "test")
            rows.setdefault(row["source_path"], []).append(sample)
            gpus[row["source_path"]] = row["gpu"]
        except (Unreadable, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(str(path), "", f"line {number} is no sample: {error!r}", fix) from error
    return {
        host: InterferenceSamples(
            gpus[host],
            np.array([group for group, *_ in samples]),
            np.array([[setting[key] for _, setting, *_ in samples] for key in SIZE_KEYS]),
            np.array([seconds for *_, seconds, _ in samples]),
            np.array([setting["std_over_mean"] for _, setting, *_ in samples]),
            np.array([is_test for *_, is_test in samples]),
        )
        for host, samples in rows.items()
    }


def _unpacked(path: Path) -> str:
    """The text of a packed file."""
    if path.exists() and not path.is_file():  # Opening a pipe waits for its writer.
        raise ConfigError(str(path), "", "is no regular file", "name a table of samples")
    try:
        with gzip.open(path, "rb") as file:
            content = file.read(MOST_SAMPLE_BYTES + 1)
        if len(content) > MOST_SAMPLE_BYTES:
            raise ConfigError(str(path), "", f"holds more than {MOST_SAMPLE_BYTES} bytes", "give fewer samples")
        return content.decode()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(str(path), "", "no file in gzip's format", "name one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "", "is not UTF-8 text", "name a table of samples") from error


def _from_zero(value: object) -> float:
    if not isinstance(value, str | int | float):
        raise TypeError(value)
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(value)
    return number


def alone_seconds(samples: InterferenceSamples) -> Floats:
    """Seconds of every stream of every sample without the others, [4, N], from calibration samples with one busy stream.

    All-gathers and copies depend on the group; computation on a device does not.
    """
    alone_SN = np.zeros_like(samples.sizes_SN)
    known_N = (samples.busy_N == 1) & (samples.spread_N <= HIGHEST_SPREAD) & ~samples.is_test_N
    for group in np.unique(samples.groups_N):
        inside_N = samples.groups_N == group
        for stream, sizes_N in enumerate(samples.sizes_SN):
            fitted_N = known_N & (sizes_N > 0) & (inside_N | (stream == 0))
            if not fitted_N.any():
                rule = f"no calibration sample of {STREAMS[stream]} alone in group {group}"
                raise ConfigError("samples", "", rule, "measure one")
            latency, per_unit = _line(sizes_N[fitted_N], samples.seconds_N[fitted_N])
            at = inside_N & (sizes_N > 0)
            alone_SN[stream, at] = latency + per_unit * sizes_N[at]
    return alone_SN


def _line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Intercept and slope with the least squared relative error; through 0 if all sizes are equal."""
    # Weighted by 1/seconds², squared errors are relative ones. fsum rounds once, so that equal rows give equal bytes in
    # any order.
    weights = 1 / seconds**2
    total, size, second = (math.fsum(weights * column) for column in (np.ones_like(sizes), sizes, seconds))
    square, product = math.fsum(weights * sizes**2), math.fsum(weights * sizes * seconds)
    if (sizes == sizes[0]).all():
        return 0.0, product / square
    per_unit = (total * product - size * second) / (total * square - size**2)
    return (second - per_unit * size) / total, per_unit


@dataclass(frozen=True, slots=True)
class Used:
    """The samples that are used, and the number of those dropped, by reason.

    Attributes:
        mixed_N: whether more than one stream is busy, and no reason below applies.
        noisy: number with a spread above HIGHEST_SPREAD.
        slower_than_serial: number that took longer than the streams one after the other, which no factors allow.
    """

    mixed_N: Mask
    noisy: int
    slower_than_serial: int


def used_samples(samples: InterferenceSamples, alone_SN: Floats) -> Used:
    """Drop the samples that Mist drops."""
    mixed_N = samples.busy_N > 1
    noisy_N = samples.spread_N > HIGHEST_SPREAD
    # The model's contract: concurrent streams progress at least as fast as one after the other. Such rows would only pull
    # factors to that limit.
    slower_N = mixed_N & ~noisy_N & (samples.seconds_N > alone_SN.sum(axis=0))
    return Used(mixed_N & ~noisy_N & ~slower_N, int(noisy_N.sum()), int(slower_N.sum()))


# 1/2 to 1/256: sums of them are exact in binary, whatever steps lead to a factor.
STEPS = tuple(2.0**-n for n in range(1, 9))
GRID = (1.0, 1.5, 2.5, 4.0)
"""Factors of the grid from which fits begin; the error has several local minima."""
STARTS = 3
"""Number of the best grid points from which it descends."""
HIGHEST_FACTOR = 50.0
PREFERENCE = 2e-4
"""Error that outweighs a factor larger by 1. Rows in which the same stream always ends first determine only a combination of the
factors of a set; of equally good ones the fit takes the most even."""
FactorLists = dict[str, list[float]]


def fit_factors(alone_SN: Floats, seconds_N: Floats, start: Factors) -> FactorLists:
    """Factors with the least mean error on these rows.

    Args:
        alone_SN: seconds of the four streams without the others.
        seconds_N: measured seconds.
        start: factors kept for sets that no row begins with or passes through.
    """
    factors = {word: list(start[word]) for word in SETS}
    # A set as the number that its entry in SETS is in binary.
    set_N = np.array([8, 4, 2, 1]) @ (alone_SN > 0)
    # 1. Pairs first: a set of three becomes a pair when a stream ends, whose factors must be fitted by then.
    for word in reversed(SETS):
        exact_N = set_N == int(word, 2)
        if exact_N.any():
            _search(factors, word, alone_SN[:, exact_N], seconds_N[exact_N])
    # 2. Starts at the end of step 1, hence without its coarse steps. It terminates: every round but the last lowers the error.
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
    """Mean absolute relative error, summed exactly; 0 without rows."""
    errors = np.abs(model.seconds(*alone_SN) / seconds_N - 1)
    return math.fsum(errors.tolist()) / max(1, len(errors))


def _search(factors: FactorLists, word: str, alone_SN: Floats, seconds_N: Floats) -> None:
    """Fit the factors of one set, from a grid and from their present values."""
    # The factors of smaller sets stay fixed, so that every error is a function of this set's factors alone.
    grid = [list(values) for values in product(GRID, repeat=word.count("1")) if serial_share(values) >= 1]
    model = Interference(factors)
    errors = [mean_error(model.with_set(word, values), alone_SN, seconds_N) for values in grid]
    starts = [grid[place] for place in sorted(range(len(grid)), key=errors.__getitem__)[:STARTS]]
    fits = [_descend(factors, word, values, alone_SN, seconds_N, STEPS) for values in (factors[word], *starts)]
    factors[word], _ = min(fits, key=itemgetter(1))


def _descend(
    factors: FactorLists,
    word: str,
    values: list[float],
    alone_SN: Floats,
    seconds_N: Floats,
    steps: tuple[float, ...],
) -> tuple[list[float], float]:
    """Improve the factors of one set with ever smaller steps; returns the best ones nearby and their error."""
    model = Interference(factors)

    def error_of(tried: list[float]) -> float:
        return mean_error(model.with_set(word, tried), alone_SN, seconds_N) + PREFERENCE * max(tried)

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
    """Vary one factor by a step, or one up and another down; yields the results that the model allows."""
    places = range(len(values))
    moves = [{place: sign * step} for place in places for sign in (1, -1)]
    # Often only a combination of a set's factors is determined (PREFERENCE): along that valley one must rise as another
    # falls, and a change of only one is worse.
    moves += [{more: step, less: -step} for more, less in permutations(places, 2)]
    for move in moves:
        tried = [value + move.get(place, 0.0) for place, value in enumerate(values)]
        if all(1 <= value <= HIGHEST_FACTOR for value in tried) and serial_share(tried) >= 1:
            yield tried


def fit_host(source: str, samples: InterferenceSamples) -> Host:
    """Factors of one host: of all its groups, of the groups of a place, and of each group, with their errors."""
    alone_SN = alone_seconds(samples)
    used = used_samples(samples, alone_SN)

    def fitted(inside_N: Mask, start: Factors) -> Fitted:
        calibration_N = inside_N & used.mixed_N & ~samples.is_test_N
        factors = fit_factors(alone_SN[:, calibration_N], samples.seconds_N[calibration_N], start)
        fitted_factors = {word: tuple(values) for word, values in factors.items()}
        # Test rows enter neither the seconds without interference nor the factors: the error is that of unseen rows.
        test_N = inside_N & used.mixed_N & samples.is_test_N
        return Fitted(fitted_factors, int(calibration_N.sum()), int(test_N.sum()), error_percent(factors, test_N))

    def error_percent(factors: Factors, rows_N: Mask) -> float:
        return round(100 * mean_error(Interference(factors), alone_SN[:, rows_N], samples.seconds_N[rows_N]), 3)

    of_host = fitted(np.ones(len(samples.seconds_N), dtype=bool), NO_INTERFERENCE.factors)
    place_N = np.array([place_of(group) for group in samples.groups_N])
    names = [str(place) for place in np.unique(place_N)]
    places = {place: fitted(place_N == place, of_host.factors) for place in names} if len(names) > 1 else {}
    groups = {
        str(group): fitted(samples.groups_N == group, places.get(place_of(group), of_host).factors)
        for group in np.unique(samples.groups_N)
    }
    return Host(source, samples.gpu, used.noisy, used.slower_than_serial, of_host, places, groups)


def report(host: Host, samples: InterferenceSamples) -> Iterator[str]:
    """Lines: mean error on test rows in %, with the factors of the host, of the place and of the group."""
    yield f"{host.gpu} {host.source}"
    yield f"  not used: {host.noisy} noisy, {host.slower_than_serial} slower than one after the other"
    yield "  group   rows  host  place  group"
    alone_SN = alone_seconds(samples)
    test_N = used_samples(samples, alone_SN).mixed_N & samples.is_test_N
    total = np.zeros(4)
    for group, of_group in host.groups.items():
        rows_N = test_N & (samples.groups_N == group)
        levels = (host.all_groups, host.places.get(place_of(group), host.all_groups), of_group)
        errors = [
            100 * mean_error(Interference(level.factors), alone_SN[:, rows_N], samples.seconds_N[rows_N])
            for level in levels
        ]
        yield _cells(group, of_group.test_rows, *errors)
        total += of_group.test_rows * np.array([1.0, *errors])
    yield _cells("all", int(total[0]), *(total[1:] / total[0]))


def _cells(name: str, rows: int, *errors: float) -> str:
    return f"  {name:<6} {rows:>5}" + "".join(f" {error:5.2f}" for error in errors)


def main(arguments: list[str]) -> int:
    """Read, fit, write, print."""
    if len(arguments) != 2:
        print("usage: python -m moe_overlap.tuner.calibrate.interference SAMPLES.csv.gz OUT.json", file=sys.stderr)
        return 2
    try:
        samples = dict(sorted(read_samples(Path(arguments[0])).items()))
        hosts = [fit_host(source, host_samples) for source, host_samples in samples.items()]
        Path(arguments[1]).write_text(format_json([as_values(host) for host in hosts]) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for host in hosts:
        print("\n".join(report(host, samples[host.source])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
