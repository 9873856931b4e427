"""Inputs of prices other than plan, model and links: features of a run, refined factors, and constants of GPUs.

`Features`: the flags of a run that change prices and are not in its plan: hidden communication, formats, launching.

`Refined`: factors from traces of the same job, by kind of operator. They multiply the predicted seconds of an instruction without
interference. `calibrate/observe.py` computes them; `StagePrices` applies them, so all plans of a job have the same prices.

`Constants`: efficiencies by GPU type and losses by software release, from constants.json, which `tuner/calibrate/fit` writes.
- A GPU type without constants uses those of the GPU with the nearest peak rate, of the same architecture if there is one. The
  prediction then says that it extrapolates.
- A release changes the seconds that a kernel takes beyond those at the peak rate (`effective`), so it never makes a GPU faster
  than its peak. It applies to the scopes that were measured under it (architecture, precision, dense or MoE); all other
  predictions, and those that name no release, use the median release of the architecture.
- A measured machine has `MeasuredConstants` instead of fitted ones, from its cluster description.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from moe_overlap.describe.cluster import Gpu, Measured, known_gpus
from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.plan.operators import in_backward_operator
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.links import LinkRates
from moe_overlap.tuner.cost.memory_errors import MemoryErrors, require_margin
from moe_overlap.tuner.cost.router import RouterGroups

Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
Graphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The flags of a run that change seconds or bytes."""

    precision: str = "bf16"
    flash: bool = True
    """Attention in one kernel; else its scores are written to memory and saved."""
    dropped_scores: bool = False
    """Dropout on attention's probabilities; without a fused kernel its mask and result are saved as well."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tensor: bool = False
    """Tensor-parallel collectives are sliced and overlap with their products (--tp-comm-overlap)."""
    overlap_experts: bool = False
    """All-to-alls of one micro-batch under the computation of another (--overlap-moe-expert-parallel-comm)."""
    delay_weight_gradients: bool = False
    """With `overlap_experts`: weight gradients are computed after the rest of a backward pass (--delay-wgrad-compute)."""
    overlap_shared_expert: bool = False
    overlap_transfers: bool = True
    """Transfers between the stages of an interleaved pipeline overlap with its passes."""
    context_exchange: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """Ring of keys and values under attention (p2p); all-to-all of heads, or all-gather of keys, before attention."""
    dispatcher: Dispatcher = "alltoall"
    graphs: Graphs = "none"
    """CUDA graphs: of all but the experts (partial), or of a whole step."""
    outside_graphs: tuple[str, ...] = ()
    """Operators outside of partial graphs, in addition to those of the experts, because the flags name other modules only."""
    listed_graphs: bool = False
    """Operators of instruction lists are replayed as CUDA graphs (--moe-overlap-cuda-graphs); without lists it has no effect."""
    router_groups: RouterGroups = RouterGroups()
    fused_router: bool = False
    """Scores, choice and map of the router in few kernels (--moe-router-fusion)."""
    fused_experts: bool = False
    """Products of the experts in one grouped kernel, with activation and quantization (--use-transformer-engine-op-fuser)."""
    gradient_bytes: int = 4
    """Bytes of a gradient element while it is accumulated and reduced."""
    gathered_bytes: int = 2
    """Bytes of a parameter in the gather after the step."""
    weight_bytes: float = 2.0
    """Bytes of a parameter in products."""
    optimizer_bytes: float = 12.0
    """Bytes of one parameter: master weight and moments."""
    fused_gradients: bool = True
    """Products add weight gradients to the gradient buffer directly (gradient accumulation fusion)."""
    fused_loss: bool = False
    """Transformer Engine's cross entropy, which writes its result over the logits."""
    not_modelled: tuple[str, ...] = ()
    """Flags that change seconds or bytes and that the cost model ignores."""


Kind = tuple[str, bool]
"""An operator without layer and weight numbers (`operators.kind_of`), and whether its instructions are partitions."""


@dataclass(frozen=True, slots=True)
class Refined:
    """Factors of one job.

    Attributes:
        factors: measured over predicted seconds.
        unpriced: measured seconds of one instruction, for kinds that the cost model prices at 0.
    """

    factors: Mapping[Kind, float] = field(default_factory=dict)
    unpriced: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, is_cut: bool, predicted: float) -> float:
        """Refined seconds of an instruction whose predicted seconds are `predicted`."""
        return predicted * self.factor(kind, is_cut) if predicted else self.unpriced.get(kind, 0.0)

    def factor(self, kind: str, is_cut: bool) -> float:
        """Factor of a kind; 1 if neither it nor a substitute was measured.

        Partitions and uncut operators substitute for each other. A weight gradient or a recomputation without a span of its own
        has the factor of its backward operator, whose span includes it.
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
    """Efficiency of bf16 products; the bytes of the operands are priced separately."""
    grouped_gemm: float
    attention_forward: float
    attention_backward: float
    fp8: float
    """Efficiency of fp8 products; quantization is priced separately."""
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
    """Loss by overlap of two concurrent kernels, as a share of the shorter one."""
    step_seconds: float
    """Seconds of a step outside of all operators: clipping, logging, waiting for the slowest rank."""

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
    """Constants of a measured machine, with the latency of its collectives."""

    latency_seconds: float
    reduce_scatter: float = 1.0
    """The factor of `LinkRates`; missing in files of earlier releases."""
    latencies: tuple[tuple[str, float], ...] = ()
    """The latencies of `LinkRates`, by kind of collective."""

    @property
    def link_rates(self) -> LinkRates:
        """Efficiencies and latency of the links; the rate of copies to the host was measured, so its efficiency is 1."""
        rates = dataclasses.replace(super().link_rates, host=1.0, latency_seconds=self.latency_seconds)
        return dataclasses.replace(rates, reduce_scatter=self.reduce_scatter, latencies=self.latencies)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonConstants:
    """Constants that are the same for all GPUs: of software, and of how kernels fill a GPU.

    The first four are host work relative to launching one kernel of torch: two for calls by their implementation (`calls.py`),
    two for additional work of a call.
    """

    transformer_engine: float = 1.0
    """A module of Transformer Engine, and its backward pass."""
    fused: float = 1.0
    """A function with its own backward pass: compiled by torch, or a kernel called outside of modules."""
    low_precision: float = 0.0
    """Quantizing one operand of one product, or of one group of a grouped product."""
    extra_kernel: float = 1.0
    """Every additional kernel that a call or autograd launches without another call of Python."""
    tail: float = 0.0
    """Idle waves of tiles at the end of a product, or of each group of a grouped product."""
    grouped_low: float = 1.0
    """Rate of grouped products below bf16 over that of other products below bf16."""
    logged_seconds: float = 0.0
    """Seconds per step of upstream's tests for logging norms and zeros of every parameter. Only predictions of those tests have
    them, so that the fit does not mistake logging for launching."""


LOSSY = (
    "gemm",
    "grouped_gemm",
    "attention_forward",
    "attention_backward",
    "fp8",
    "fp4",
    "memory",
    "all_to_all_domain",
    "all_to_all_network",
)
"""Efficiencies that depend on the software release."""


def effective(efficiency: float, loss: float) -> float:
    """An efficiency under a release whose factor on the lost seconds is `loss`.

    A kernel takes 1 / efficiency times the seconds at the peak rate: 1 is inevitable, the rest is lost. Under the release it
    takes 1 + (1 / efficiency - 1) · loss, at least 1 for any loss >= 0, so no release makes a GPU faster than its peak.
    """
    return 1.0 / (1.0 + (1.0 / efficiency - 1.0) * loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseConstants:
    """The effect of a software release on one architecture that features do not explain; a loss of 1 is the reference."""

    loss: float = 1.0
    """Factor on the seconds that kernels take beyond those at the peak rate."""
    measured: tuple[str, ...] = ()
    """Scopes (`scope`) with calibration runs under this release."""

    def apply(self, constants: GpuConstants) -> GpuConstants:
        """The constants of a GPU under this release."""
        if self.loss == 1.0:
            return constants
        changed = {name: effective(getattr(constants, name), self.loss) for name in LOSSY}
        return dataclasses.replace(constants, **changed)


def precision_of(precision: str) -> str:
    """The precision for which constants are fitted: both half precisions share theirs."""
    return "bf16" if precision == "fp16" else precision


def scope(precision: str, is_moe: bool) -> str:
    """The scope of releases and errors on one GPU: `bf16 dense`, `mxfp8 MoE`."""
    return f"{precision_of(precision)} {'MoE' if is_moe else 'dense'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The release that a prediction is made for.

    Attributes:
        release: the release whose loss applies; empty if no release was measured on the architecture.
        constants: its constants.
        extrapolating: why the prediction extrapolates.
        is_median: it is the median release of the architecture, because the user named none, or one that was not measured.
    """

    release: str = ""
    constants: ReleaseConstants = ReleaseConstants()
    extrapolating: tuple[str, ...] = ()
    is_median: bool = False


REFERENCE = Software()
Traits = Mapping[str, tuple[str, ...]]
"""Architecture -> traits of its calibration runs (`coverage.traits`)."""
Releases = Mapping[str, Mapping[str, ReleaseConstants]]
"""Release -> architecture -> its constants."""


@dataclass(frozen=True, slots=True)
class Constants:
    """All fitted constants.

    Attributes:
        gpus: by GPU type.
        releases: by software release (`26.04`) and architecture (`Hopper`).
        fragmentation: bytes that the allocator reserves without use, as a share of activations and temporaries.
        common: constants of all GPUs.
        memory: quantiles of measured over predicted peaks of allocated bytes.
        memory_errors: distribution from which other quantiles follow; None without memory measurements.
        traits: traits of the calibration runs.
    """

    gpus: dict[str, GpuConstants]
    releases: Releases = field(default_factory=dict)
    fragmentation: float = 0.0
    common: CommonConstants = CommonConstants()
    memory: MemoryQuantiles = MemoryQuantiles()
    memory_errors: MemoryErrors | None = None
    traits: Traits = field(default_factory=dict)

    def with_margin(self, margin: float | None) -> Constants:
        """The constants with another margin of memory; unchanged for None.

        Raises:
            ConfigError: the margin is not between 0 and 1, or this machine has no `memory_errors`.
        """
        require_margin(margin)
        if margin is None or margin == self.memory.margin:
            return self
        if self.memory_errors is None:
            rule = "no errors of predicted memory were measured on this machine"
            raise ConfigError("--memory-margin", margin, rule, "drop it")
        return dataclasses.replace(self, memory=self.memory_errors.quantiles(margin))

    def of_gpu(self, gpu: Gpu) -> tuple[GpuConstants, bool]:
        """Constants of a GPU type, and whether they were taken from another type."""
        if gpu.name in self.gpus:
            return self.gpus[gpu.name], False
        gpus = known_gpus()

        def distance(name: str) -> tuple[bool, float, str]:
            row = gpus[name]
            # The name breaks ties, so that the answer does not depend on the order of the file.
            return row["architecture"] != gpu.architecture, abs(row["bf16_tflops"] - gpu.bf16_tflops), name

        return self.gpus[min(self.gpus, key=distance)], True

    def require_release(self, release: str | None) -> None:
        """Refuse a release that changes no price, because no calibration run has it.

        Raises:
            ConfigError: these constants know other releases, or, of a measured machine, none.
        """
        if release is None or release in self.releases:
            return
        if not self.releases:
            raise ConfigError("--software", release, "the prices are measured, whatever the release", "drop it")
        rule = "is no release (year.month, as 26.04 or 26.04.01) of a calibration run"
        names = one_of(tuple(sorted(self.releases, key=release_order)))
        raise ConfigError("--software", release, rule, f"use {names}, or drop it for the median one of the GPU")

    def of_release(
        self, release: str | None, architecture: str, precision: str = "bf16", is_moe: bool = False
    ) -> Software:
        """The release whose loss applies: the named one if the scope was measured under it, else the architecture's median one.

        Args:
            release: release that the user names; None for none.
            precision: precision of the products.
        """
        measured_scope = scope(precision, is_moe)
        if release is not None:
            on_gpu = self.releases.get(release, {}).get(architecture)
            if on_gpu is not None and measured_scope in on_gpu.measured:
                return Software(release=release, constants=on_gpu)
        on_architecture = {name: row[architecture] for name, row in self.releases.items() if architecture in row}
        within = {
            name: row for name, row in on_architecture.items() if measured_scope in row.measured
        } or on_architecture
        if not within:
            reasons = () if release is None else (f"no calibration run of release {release} on {architecture}",)
            return Software(extrapolating=reasons)
        ordered = sorted(within, key=lambda name: (within[name].loss, release_order(name)))
        median = ordered[(len(ordered) - 1) // 2]
        missing = f"no calibration run of release {release} on {architecture} in {measured_scope}"
        reasons = () if release is None else (f"{missing}; that of {median}, its median release, is assumed",)
        return Software(release=median, constants=within[median], extrapolating=reasons, is_median=True)

    def uncalibrated(self, gpu: Gpu, precision: str, is_moe: bool) -> tuple[str, ...]:
        """Why a prediction extrapolates beyond the calibration runs; empty if it does not."""
        measured_scope = scope(precision, is_moe)
        rows = [row[gpu.architecture] for row in self.releases.values() if gpu.architecture in row]
        if any(measured_scope in row.measured for row in rows) or not self.releases:
            return ()
        return (f"no calibration run of {measured_scope} models on {gpu.architecture}",)


def release_order(release: str) -> tuple[int, ...]:
    """Sort key: `26.04` before `26.04.01` before `26.06`; ValueError for other texts."""
    parts = tuple(int(part) for part in release.split("."))
    if len(parts) not in (2, 3):
        raise ValueError(release)
    return parts


def shipped_constants() -> Constants:
    """The constants in constants.json."""
    return constants_of(json.loads(resources.files(__package__).joinpath("constants.json").read_text(encoding="utf-8")))


def constants_of(content: dict[str, Any]) -> Constants:
    """Constants from their JSON."""
    gpus = {name: GpuConstants(**row) for name, row in content["gpus"].items()}
    releases = {
        name: {architecture: _release_of(**row) for architecture, row in rows.items()}
        for name, rows in content["releases"].items()
    }
    return Constants(
        gpus,
        releases,
        content["fragmentation"],
        common=CommonConstants(**content["common"]),
        memory=MemoryQuantiles(**content["memory"]),
        memory_errors=None if content["memory_errors"] is None else MemoryErrors(**content["memory_errors"]),
        traits={architecture: tuple(names) for architecture, names in content["traits"].items()},
    )


def _release_of(loss: float, measured: Sequence[str]) -> ReleaseConstants:
    return ReleaseConstants(loss=loss, measured=tuple(measured))


REDUCE_SCATTER = "reduce_scatter"
"""The constant that a file of a measured machine may lack."""


def measured_constants(measured: Measured, gpu: str) -> Constants:
    """The constants of a measured machine.

    Raises:
        ConfigError: a constant is missing or unknown, or a share of a rate is not greater than 0.
    """
    names = {field.name for field in dataclasses.fields(GpuConstants)}
    # A file of another version is refused, so that no constant of a fitted GPU is used unnoticed.
    for name in names ^ (set(measured.constants) - {REDUCE_SCATTER}):
        rule = "is missing" if name in names else "is unknown"
        raise ConfigError(f"measured.constants.{name}", "", rule, "run tools/profile_cluster.py again")
    # Seconds may be 0. Shares may exceed 1, because their reference was measured, too.
    for name in (*LOSSY, "domain", "network", REDUCE_SCATTER):
        if not measured.constants.get(name, 1.0) > 0:
            rule = "is a share of a rate, greater than 0"
            raise ConfigError(
                f"measured.constants.{name}", measured.constants[name], rule, "run tools/profile_cluster.py again"
            )
    constants = MeasuredConstants(
        **measured.constants,
        latency_seconds=measured.latency_seconds,
        latencies=tuple(measured.latencies.items()),
    )
    return Constants({gpu: constants})


def constants_json(constants: Constants) -> str:
    """The text of constants.json."""
    content = {
        "common": dataclasses.asdict(constants.common),
        "fragmentation": constants.fragmentation,
        "memory": {"low": constants.memory.low, "high": constants.memory.high},
        "memory_errors": dataclasses.asdict(constants.memory_errors) if constants.memory_errors is not None else None,
        "gpus": {name: dataclasses.asdict(row) for name, row in sorted(constants.gpus.items())},
        "releases": {
            name: {architecture: dataclasses.asdict(row) for architecture, row in sorted(rows.items())}
            for name, rows in sorted(constants.releases.items())
        },
        "traits": {architecture: sorted(names) for architecture, names in sorted(constants.traits.items())},
    }
    return json.dumps(content, indent=1) + "\n"
