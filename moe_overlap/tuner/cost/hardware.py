"""Everything beside plan, model and links that prices depend on: a run's features, refined factors, and constants of GPUs.

`Features`: how a configuration runs beside its plan: which communication is hidden, in which formats, launched how.

`Refined`: prices corrected by traces of the same job, as factors by kind of operator that multiply the seconds an instruction
takes alone. `calibrate/observe.py` finds them; `StagePrices` applies them, so that every plan of a job has the same prices.

`Constants`: efficiencies by GPU type and scales by software release, from constants.json, which `tests/validation/fit.py` writes.
A GPU type without constants takes those of its nearest kin, of the same architecture if there is one: its predictions are
extrapolated, and say so. A release takes its own scales, else those of the nearest release before it, else after it. A machine
that was measured has `MeasuredConstants` in place of fitted ones: its description of the cluster holds them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from moe_overlap.describe.cluster import Gpu, Measured, known_gpus
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import in_backward_operator
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.links import LinkRates

Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
Graphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The flags of a run that change seconds or bytes."""

    precision: str = "bf16"
    flash: bool = True
    """Attention in one kernel; else its scores go through memory, and are kept."""
    dropped_scores: bool = False
    """Dropout on attention's probabilities: without a fused kernel its mask and result are kept as well."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tensor: bool = False
    """Tensor-parallel collectives run in slices beside their products (--tp-comm-overlap)."""
    overlap_experts: bool = False
    """All-to-alls of one micro-batch under the computation of another (--overlap-moe-expert-parallel-comm)."""
    overlap_shared_expert: bool = False
    overlap_transfers: bool = True
    """Transfers between the stages of an interleaved pipeline run beside its passes."""
    context_exchange: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """Keys and values go around while attention computes (p2p); an all-to-all of heads, or an all-gather of keys, precedes it."""
    dispatcher: Dispatcher = "alltoall"
    graphs: Graphs = "none"
    """CUDA graphs: of all but the experts (partial), or of a whole step."""
    gradient_bytes: int = 4
    """Bytes of one element, accumulated and reduced."""
    gathered_bytes: int = 2
    """Bytes of one parameter, gathered after the step."""
    weight_bytes: float = 2.0
    """Bytes of one parameter, as the products read it."""
    optimizer_bytes: float = 12.0
    """Bytes of one parameter: master weight and moments."""
    fused_gradients: bool = True
    """Products add weights' gradients to the buffer themselves (gradient accumulation fusion)."""
    fused_loss: bool = False
    """Transformer Engine's cross entropy, which works in the logits' place."""
    not_modelled: tuple[str, ...] = ()
    """Flags that change seconds or bytes and that no formula here knows."""


MEASURED_RELEASE = "0.0"
"""The release of a measured machine: the software that was measured is the one that runs, so its scales are 1."""

Kind = tuple[str, bool]
"""An operator without its place (`operators.kind_of`), and whether its instructions are partitions of it."""


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
        """Refined seconds of an instruction that the cost model has at `alone` seconds."""
        return alone * self.factor(kind, is_cut) if alone else self.unpriced.get(kind, 0.0)

    def factor(self, kind: str, is_cut: bool) -> float:
        """Factor of a kind; 1 where nothing like it was measured.

        A kind that was not measured in partitions has the factor of the whole, and the reverse; a weight gradient or a
        recomputation without a span of its own has the factor of its backward operator, whose span included it.
        """
        kinds = [kind]
        if (within := in_backward_operator(kind)) is not None:
            kinds.append(within)
        factors = (self.factors.get((name, cut)) for name in kinds for cut in (is_cut, not is_cut))
        return next((factor for factor in factors if factor is not None), 1.0)


NOT_REFINED = Refined()


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """Constants fitted for a GPU type. Efficiencies are fractions of its peak rates."""

    gemm: float
    """Efficiency of bf16 products; the operands' bytes are paid beside."""
    grouped_gemm: float
    attention_forward: float
    attention_backward: float
    fp8: float
    """Efficiency of fp8 products; quantization is paid beside."""
    fp4: float
    memory: float
    """Fraction of the bandwidth of device memory."""
    domain: float
    """Collectives inside an NVLink domain."""
    network: float
    """Collectives between nodes."""
    all_to_all_domain: float
    all_to_all_network: float
    kernel_seconds: float
    """Least time of a kernel on the device."""
    host_seconds: float
    """Seconds of the host to launch one kernel from Python."""
    overlap_slowdown: float
    """Share of the shorter of two concurrent kernels that their overlap loses."""
    step_seconds: float
    """Seconds of a step that no operator accounts for: clipping, logging, waiting for the slowest rank."""

    @property
    def link_rates(self) -> LinkRates:
        """Efficiencies of the links."""
        return LinkRates(
            domain=self.domain,
            network=self.network,
            all_to_all_domain=self.all_to_all_domain,
            all_to_all_network=self.all_to_all_network,
        )


# Without slots: a dataclass with slots is a new class, in which `super()` without arguments fails.
@dataclass(frozen=True, kw_only=True)
class MeasuredConstants(GpuConstants):
    """Constants of a machine that was measured, not fitted; its collectives have a latency of their own."""

    latency_seconds: float

    @property
    def link_rates(self) -> LinkRates:
        """Efficiencies and latency of the links; copies to the host were measured, so they reach their rate."""
        return dataclasses.replace(super().link_rates, host=1.0, latency_seconds=self.latency_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseConstants:
    """Scales on the seconds of a release; 1 is the reference."""

    products: float = 1.0
    """Matrix products and attention."""
    memory: float = 1.0
    """Everything else that kernels do: fusions."""
    experts: float = 1.0
    """All-to-alls of tokens, permutation and grouped products: dispatchers."""


@dataclass(frozen=True, slots=True)
class Constants:
    """All fitted constants.

    Attributes:
        gpus: by GPU type.
        releases: by software release (`26.04`).
        fragmentation: what the allocator reserves in vain, as a share of activations and temporaries.
        memory: measured over predicted peaks of what is allocated.
    """

    gpus: dict[str, GpuConstants]
    releases: dict[str, ReleaseConstants]
    fragmentation: float = 0.0
    memory: MemoryQuantiles = MemoryQuantiles()

    def of_gpu(self, gpu: Gpu) -> tuple[GpuConstants, bool]:
        """Constants of a GPU type, and whether they are another type's."""
        if gpu.name in self.gpus:
            return self.gpus[gpu.name], False
        known = known_gpus()

        def distance(name: str) -> tuple[bool, float, str]:
            row = known[name]
            # The name breaks ties, so that the answer does not depend on the order of the file.
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
    return Constants(gpus, releases, content["fragmentation"], MemoryQuantiles(**content["memory"]))


def measured_constants(measured: Measured, gpu: str) -> Constants:
    """The constants of a measured machine.

    Raises:
        ConfigError: a constant is missing or unknown.
    """
    names = {field.name for field in dataclasses.fields(GpuConstants)}
    # A file of another version is refused: a missing constant must not be taken from a fitted GPU unnoticed.
    for name in names ^ set(measured.constants):
        rule = "is missing" if name in names else "is unknown"
        raise ConfigError(f"measured.constants.{name}", "", rule, "run tools/profile_cluster.py again")
    constants = MeasuredConstants(**measured.constants, latency_seconds=measured.latency_seconds)
    return Constants({gpu: constants}, {MEASURED_RELEASE: ReleaseConstants()})


def constants_json(constants: Constants) -> str:
    """The text of constants.json."""
    content = {
        "fragmentation": constants.fragmentation,
        "memory": dataclasses.asdict(constants.memory),
        "gpus": {name: dataclasses.asdict(row) for name, row in sorted(constants.gpus.items())},
        "releases": {name: dataclasses.asdict(row) for name, row in sorted(constants.releases.items())},
    }
    return json.dumps(content, indent=1) + "\n"
