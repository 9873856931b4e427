"""The constants of the time model, by GPU type and by software release: constants.json, written by `fit.py`.

A GPU type without constants of its own takes those of its nearest kin, of the same architecture if there is one: its
predictions are extrapolated, and say so. A release takes its own scales, else those of the nearest release before it, else
after it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from moe_overlap.describe.cluster import Gpu, known_gpus
from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.cost.links import LinkRates


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """What was fitted for a GPU type. Fractions are of its peak rates."""

    gemm: float
    """Of bf16 products; the operands' bytes are paid beside."""
    grouped_gemm: float
    attention_forward: float
    attention_backward: float
    fp8: float
    """Of fp8 products; quantization is paid beside."""
    fp4: float
    memory: float
    """Of the bandwidth of device memory."""
    domain: float
    """Collectives inside an NVLink domain."""
    network: float
    """Collectives between nodes."""
    all_to_all_domain: float
    all_to_all_network: float
    kernel_seconds: float
    """Least time of a kernel on the device."""
    host_seconds: float
    """Of the host, to launch one kernel from Python."""
    overlap_slowdown: float
    """Of two things that run at the same time, the part of the shorter that is lost."""
    step_seconds: float
    """Of a step, beside what is counted: clipping, logging, waiting for the slowest rank."""

    @property
    def link_rates(self) -> LinkRates:
        """Efficiencies of the links."""
        return LinkRates(
            domain=self.domain,
            network=self.network,
            all_to_all_domain=self.all_to_all_domain,
            all_to_all_network=self.all_to_all_network,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseConstants:
    """Scales on the seconds of a release; 1 is the reference."""

    products: float = 1.0
    """Matrix products and attention."""
    memory: float = 1.0
    """Everything else that kernels do: fusions."""
    experts: float = 1.0
    """Exchange of tokens, permutation and grouped products: dispatchers."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Everything that was fitted.

    Attributes:
        gpus: by GPU type.
        releases: by software release (`26.04`).
        fragmentation: what the allocator reserves in vain, as a part of activations and temporaries.
    """

    gpus: dict[str, GpuConstants]
    releases: dict[str, ReleaseConstants]
    fragmentation: float = 0.0

    def of_gpu(self, gpu: Gpu) -> tuple[GpuConstants, bool]:
        """Constants of a GPU type, and whether they are another type's."""
        if gpu.name in self.gpus:
            return self.gpus[gpu.name], False
        known = known_gpus()

        def distance(name: str) -> tuple[bool, float, str]:
            row = known[name]
            return row["architecture"] != gpu.architecture, abs(row["bf16_tflops"] - gpu.bf16_tflops), name

        return self.gpus[min(self.gpus, key=distance)], True

    def of_release(self, release: str | None, subject: str = "--software") -> tuple[ReleaseConstants, bool]:
        """Scales of a release (None: the newest), and whether they are another release's.

        Raises:
            ConfigError: not a release's name.
        """
        known = sorted(self.releases, key=release_order)
        if release is None:
            return self.releases[known[-1]], False
        try:
            wanted = release_order(release)
        except ValueError:
            rule = "is no release (year.month, as 26.04 or 26.04.01)"
            raise ConfigError(subject, release, rule, f"known: {', '.join(known)}") from None
        before = [name for name in known if release_order(name) <= wanted]
        nearest = before[-1] if before else known[0]
        return self.releases[nearest], nearest != release


def release_order(release: str) -> tuple[int, ...]:
    """Sorts `26.04` before `26.04.01` before `26.06`; ValueError for anything else."""
    parts = tuple(int(part) for part in release.split("."))
    if len(parts) not in (2, 3):
        raise ValueError(release)
    return parts


def shipped_constants() -> Constants:
    """The constants of constants.json."""
    return constants_of(json.loads(resources.files(__package__).joinpath("constants.json").read_text(encoding="utf-8")))


def constants_of(content: dict[str, Any]) -> Constants:
    """Constants from their JSON."""
    gpus = {name: GpuConstants(**row) for name, row in content["gpus"].items()}
    releases = {name: ReleaseConstants(**row) for name, row in content["releases"].items()}
    return Constants(gpus, releases, content["fragmentation"])


def constants_json(constants: Constants) -> str:
    """The text of constants.json."""
    content = {
        "fragmentation": constants.fragmentation,
        "gpus": {name: dataclasses.asdict(row) for name, row in sorted(constants.gpus.items())},
        "releases": {name: dataclasses.asdict(row) for name, row in sorted(constants.releases.items())},
    }
    return json.dumps(content, indent=1) + "\n"
