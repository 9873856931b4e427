"""Measurements of streams that run at the same time, and the alone seconds that go with them.

A sample is one repeated measurement on one group of devices: `nodes` × `per_node` of them all-gather, each also computes and
copies, everything begins together, and `seconds` pass until all has ended. Samples in which one stream is busy give the alone
seconds of that stream: latency and seconds per unit of size (rows of the product for computation, MB for the others).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.cost.interference import STREAMS, Floats

SIZE_KEYS = ("N", "g2g_allgather_MB", "h2d_MB", "d2h_MB")
"""Keys of the sizes in the file, in the order of STREAMS."""
HIGHEST_SPREAD = 0.1
"""Samples whose repetitions differ more (standard deviation over mean) are not used (Mist does the same)."""

Group = tuple[int, int]
"""Nodes, devices per node."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one host; N of them.

    Attributes:
        gpu: its devices.
        groups_N: nodes × devices per node, as `2x4`.
        sizes_SN: per stream, 0 where it is not busy.
        seconds_N: until all had ended.
        spread_N: standard deviation over mean of the repetitions.
        is_test_N: not to be fitted to.
    """

    gpu: str
    groups_N: NDArray[np.str_]
    sizes_SN: Floats
    seconds_N: Floats
    spread_N: Floats
    is_test_N: Mask

    def at(self, chosen: Mask) -> Samples:
        """Some of them."""
        return Samples(
            self.gpu,
            self.groups_N[chosen],
            self.sizes_SN[:, chosen],
            self.seconds_N[chosen],
            self.spread_N[chosen],
            self.is_test_N[chosen],
        )

    @property
    def busy_N(self) -> NDArray[np.int64]:
        """Busy streams."""
        return (self.sizes_SN > 0).sum(axis=0)


def read_samples(path: Path) -> dict[str, Samples]:
    """Samples of a file by host, where they were measured (`source_path`).

    The format stands in tests/validation/data/concurrency.md.

    Raises:
        ConfigError: the file is not there or a row cannot be read.
    """
    rows: dict[str, list[tuple[str, dict[str, float], float, bool]]] = {}
    gpus: dict[str, str] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    setting = {key: float(value) for key, value in json.loads(row["stage_config_json"]).items()}
                    group = f"{int(setting['inter'])}x{int(setting['intra'])}"
                    sample = (group, setting, float(row["value"]), row["split"] == "test")
                    rows.setdefault(row["source_path"], []).append(sample)
                    gpus[row["source_path"]] = row["gpu"]
                except (KeyError, TypeError, ValueError) as error:
                    rule = f"line {number} is no sample: {error!r}"
                    raise ConfigError(
                        str(path), "", rule, "give the columns of tests/validation/data/concurrency.md"
                    ) from error
    except (OSError, EOFError) as error:
        raise ConfigError(str(path), "", "no file in gzip's format", "name one") from error
    return {
        host: Samples(
            gpus[host],
            np.array([group for group, *_ in found]),
            np.array([[setting[key] for _, setting, *_ in found] for key in SIZE_KEYS]),
            np.array([seconds for *_, seconds, _ in found]),
            np.array([setting["std_over_mean"] for _, setting, *_ in found]),
            np.array([is_test for *_, is_test in found]),
        )
        for host, found in rows.items()
    }


def alone_seconds(samples: Samples) -> Floats:
    """Alone seconds of every stream of every sample, [4, N], from the calibration samples in which one stream is busy.

    A group's all-gathers and copies are its own; what a device computes does not depend on its group.
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
    """Intercept and slope with the least squared relative error; through 0 where all sizes are the same."""
    weights = 1 / seconds**2
    total, size, second = (math.fsum(weights * column) for column in (np.ones_like(sizes), sizes, seconds))
    square, product = math.fsum(weights * sizes**2), math.fsum(weights * sizes * seconds)
    if (sizes == sizes[0]).all():
        return 0.0, product / square
    per_unit = (total * product - size * second) / (total * square - size**2)
    return (second - per_unit * size) / total, per_unit


@dataclass(frozen=True, slots=True)
class Used:
    """Which samples are used, and how many were dropped why.

    Attributes:
        mixed_N: more than one stream is busy, and neither of the two below.
        noisy: spread above HIGHEST_SPREAD.
        slower_than_serial: took longer than the streams one after the other, which no factors allow.
    """

    mixed_N: Mask
    noisy: int
    slower_than_serial: int


def used_samples(samples: Samples, alone_SN: Floats) -> Used:
    """Leave out what Mist leaves out."""
    mixed_N = samples.busy_N > 1
    noisy_N = samples.spread_N > HIGHEST_SPREAD
    slower_N = mixed_N & ~noisy_N & (samples.seconds_N > alone_SN.sum(axis=0))
    return Used(mixed_N & ~noisy_N & ~slower_N, int(noisy_N.sum()), int(slower_N.sum()))
