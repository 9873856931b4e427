"""The constants of the time model, by GPU type and by software release: constants.json, written by `fit.py`.

A GPU type without constants of its own takes those of its nearest kin, of the same architecture if there is one: its
predictions are extrapolated, and say so. A release takes its own scales, else those of the nearest release before it, else
after it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from moe_overlap.describe.cluster import Gpu, known_gpus
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import in_backward_operator
from moe_overlap.tuner.cost.links import LinkRates

# How a configuration runs, beside its plan: what hides what, in which formats, launched how.

Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
Graphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What of a run's flags changes seconds or bytes."""

    precision: str = "bf16"
    flash: bool = True
    """Attention in one kernel; else its scores go through memory, and are kept."""
    dropped_scores: bool = False
    """Dropout on attention's probabilities: without a fused kernel its mask and result are kept as well."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tensor: bool = False
    """Tensor-parallel collectives run in pieces beside their products (--tp-comm-overlap)."""
    overlap_experts: bool = False
    """Exchanges of one micro-batch under the computation of another (--overlap-moe-expert-parallel-comm)."""
    overlap_shared_expert: bool = False
    overlap_transfers: bool = True
    """Of an interleaved pipeline's stages."""
    context_exchange: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """Keys and values go around while attention computes, heads are exchanged before it, or keys are gathered before it."""
    dispatcher: Dispatcher = "alltoall"
    graphs: Graphs = "none"
    """CUDA graphs: of all but the experts (partial), or of a whole step."""
    gradient_bytes: int = 4
    """Of one element, accumulated and reduced."""
    gathered_bytes: int = 2
    """Of one parameter, gathered after the step."""
    weight_bytes: float = 2.0
    """Of one parameter, as the products read it."""
    optimizer_bytes: float = 12.0
    """Of one parameter: master weight and moments."""
    not_modelled: tuple[str, ...] = ()
    """Flags that change seconds or bytes and that no formula here knows."""


# Prices corrected by what was measured of the same job: factors by kind of operator that multiply what instructions take alone.
#
# `observe.py` finds them from traces; `StagePrices` applies them, so that every plan of a job is priced with the same ones.

Kind = tuple[str, bool]
"""An operator without its place (`operators.kind_of`), and whether its instructions are pieces of it."""


@dataclass(frozen=True, slots=True)
class Refined:
    """Factors of one job.

    Attributes:
        factors: measured over predicted.
        unpriced: seconds of one instruction of a kind that the cost model has at nothing.
    """

    factors: Mapping[Kind, float] = field(default_factory=dict)
    unpriced: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, is_cut: bool, alone: float) -> float:
        """Of an instruction, refined."""
        return alone * self.factor(kind, is_cut) if alone else self.unpriced.get(kind, 0.0)

    def factor(self, kind: str, is_cut: bool) -> float:
        """Of a kind; 1 where nothing like it was measured.

        What was not measured in pieces counts as the whole did, and the reverse; a weight gradient or a recomputation that had
        no span of its own stood in the span of its backward operator.
        """
        kinds = [kind]
        if (within := in_backward_operator(kind)) is not None:
            kinds.append(within)
        found = (self.factors.get((one, cut)) for one in kinds for cut in (is_cut, not is_cut))
        return next((factor for factor in found if factor is not None), 1.0)


NOT_REFINED = Refined()


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
