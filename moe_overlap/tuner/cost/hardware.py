"""Everything beside plan, model and links that prices depend on: a run's features, refined factors, and constants of GPUs.

`Features`: how a configuration runs beside its plan: which communication is hidden, in which formats, launched how.

`Refined`: prices corrected by traces of the same job, as factors by kind of operator that multiply the seconds an instruction
takes alone. `calibrate/observe.py` finds them; `StagePrices` applies them, so that every plan of a job has the same prices.

`Constants`: efficiencies by GPU type and losses by software release, from constants.json, which `tuner/calibrate/fit` writes.
A GPU type without constants takes those of its nearest kin, of the same architecture if there is one: its predictions are
extrapolated, and say so. A release changes the seconds that a kernel takes beyond those at the peak rate (`effective`), so that
none makes a GPU faster than its peak; it acts only on what was measured under it (architecture, precision, dense or MoE). Every
other prediction, and every one that names no release, takes the median release of the architecture. A machine that was measured
has `MeasuredConstants` in place of fitted ones: its description of the cluster holds them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from moe_overlap.describe.cluster import Gpu, Measured, known_gpus
from moe_overlap.describe.errors import ConfigError
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
    """Attention in one kernel; else its scores go through memory, and are kept."""
    dropped_scores: bool = False
    """Dropout on attention's probabilities: without a fused kernel its mask and result are kept as well."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tensor: bool = False
    """Tensor-parallel collectives run in slices beside their products (--tp-comm-overlap)."""
    overlap_experts: bool = False
    """All-to-alls of one micro-batch under the computation of another (--overlap-moe-expert-parallel-comm)."""
    delay_weight_gradients: bool = False
    """Those compute weight gradients behind the rest of a backward pass (--delay-wgrad-compute)."""
    overlap_shared_expert: bool = False
    overlap_transfers: bool = True
    """Transfers between the stages of an interleaved pipeline run beside its passes."""
    context_exchange: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """Keys and values go around while attention computes (p2p); an all-to-all of heads, or an all-gather of keys, precedes it."""
    dispatcher: Dispatcher = "alltoall"
    graphs: Graphs = "none"
    """CUDA graphs: of all but the experts (partial), or of a whole step."""
    outside_graphs: tuple[str, ...] = ()
    """Operators that partial graphs leave to the host, beside those of the experts: flags name other modules alone."""
    listed_graphs: bool = False
    """Operators of instruction lists are replayed as CUDA graphs (--moe-overlap-cuda-graphs); nothing else heeds it."""
    router_groups: RouterGroups = RouterGroups()
    fused_router: bool = False
    """Scores, choice and map of the router in few kernels (--moe-router-fusion)."""
    fused_experts: bool = False
    """Products of the experts in one grouped kernel, with activation and quantization (--use-transformer-engine-op-fuser)."""
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
    reduce_scatter: float = 1.0
    """The factor of `LinkRates`; files of releases that did not measure it lack it."""
    latencies: tuple[tuple[str, float], ...] = ()
    """The latencies of `LinkRates`, by kind of collective."""

    @property
    def link_rates(self) -> LinkRates:
        """Efficiencies and latency of the links; copies to the host were measured, so they reach their rate."""
        rates = dataclasses.replace(super().link_rates, host=1.0, latency_seconds=self.latency_seconds)
        return dataclasses.replace(rates, reduce_scatter=self.reduce_scatter, latencies=self.latencies)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonConstants:
    """Constants that no GPU explains: of software, and of how kernels fill a GPU.

    The first four are host work over that of launching one kernel of torch: of a call by who implements it (`calls.py`), and of
    what a call does besides.
    """

    transformer_engine: float = 1.0
    """A module of Transformer Engine, and its backward pass."""
    fused: float = 1.0
    """A function with a backward pass of its own: compiled by torch, or a kernel called outside of modules."""
    low_precision: float = 0.0
    """Quantizing one operand of one product, or of one group of a grouped product."""
    further: float = 1.0
    """Every further kernel that a call launches by itself, or autograd, without going through Python again."""
    tail: float = 0.0
    """Waves of tiles that a product leaves idle at its end, of each group of a grouped product."""
    grouped_low: float = 1.0
    """Rate of grouped products below bf16 over that of plain ones."""
    logged_seconds: float = 0.0
    """Seconds of a step of upstream's tests for logging norms and zeros of every parameter. No other prediction has them; they
    keep what those small models tell of launching apart."""


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
"""Efficiencies that software decides, and releases therefore act on."""


def effective(efficiency: float, loss: float) -> float:
    """An efficiency under a release that multiplies the seconds lost beyond the peak rate.

    A kernel takes 1 / efficiency of the seconds at the peak rate, 1 of them inevitably: 1 + (1 / efficiency - 1) · loss is at
    least 1 for every loss that is not negative, so that no release makes a GPU faster than its peak.
    """
    return 1.0 / (1.0 + (1.0 / efficiency - 1.0) * loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseConstants:
    """The remainder of a software release on one architecture where features are priced; a loss of 1 is the reference."""

    loss: float = 1.0
    """Factor of the seconds that kernels take beyond those at the peak rate."""
    measured: tuple[str, ...] = ()
    """Scopes that were calibrated under it, as `scope` writes them."""

    def apply(self, constants: GpuConstants) -> GpuConstants:
        """The constants of a GPU under this release."""
        if self.loss == 1.0:
            return constants
        changed = {name: effective(getattr(constants, name), self.loss) for name in LOSSY}
        return dataclasses.replace(constants, **changed)


def precision_of(precision: str) -> str:
    """The class of a precision that constants tell apart: both half precisions are one."""
    return "bf16" if precision == "fp16" else precision


def scope(precision: str, is_moe: bool) -> str:
    """Releases and errors are told apart by this beside the GPU: `bf16 dense`, `mxfp8 MoE`."""
    return f"{precision_of(precision)} {'MoE' if is_moe else 'dense'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The release that a prediction is made for.

    Attributes:
        release: whose loss counts; empty where nothing was measured on the architecture.
        constants: its constants.
        extrapolating: why they reach beyond what was measured.
        is_median: the median release of the architecture, because no release was asked for, or not one that was measured.
    """

    release: str = ""
    constants: ReleaseConstants = ReleaseConstants()
    extrapolating: tuple[str, ...] = ()
    is_median: bool = False


REFERENCE = Software()
Traits = Mapping[str, tuple[str, ...]]
"""Architecture -> what calibration runs on it had (`coverage.traits`)."""
Releases = Mapping[str, Mapping[str, ReleaseConstants]]
"""Release -> architecture -> its constants."""


@dataclass(frozen=True, slots=True)
class Constants:
    """All fitted constants.

    Attributes:
        gpus: by GPU type.
        releases: by software release (`26.04`) and architecture (`Hopper`).
        fragmentation: what the allocator reserves in vain, as a share of activations and temporaries.
        common: the same for all GPUs.
        memory: measured over predicted peaks of what is allocated.
        memory_errors: what other quantiles of them come from; None where no run is known.
        traits: of the runs that they were fitted to.
    """

    gpus: dict[str, GpuConstants]
    releases: Releases = field(default_factory=dict)
    fragmentation: float = 0.0
    common: CommonConstants = CommonConstants()
    memory: MemoryQuantiles = MemoryQuantiles()
    memory_errors: MemoryErrors | None = None
    traits: Traits = field(default_factory=dict)

    def with_margin(self, margin: float | None) -> Constants:
        """The constants with another margin of memory; None and the margin that they have change nothing.

        Raises:
            ConfigError: the margin is no quantile, or errors of memory are not known for this machine.
        """
        require_margin(margin)
        if margin is None or margin == self.memory.margin:
            return self
        if self.memory_errors is None:
            rule = "how far peaks of memory are off is not known for this machine"
            raise ConfigError("--memory-margin", margin, rule, "drop it")
        return dataclasses.replace(self, memory=self.memory_errors.quantiles(margin))

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

    def of_release(
        self,
        release: str | None,
        architecture: str,
        precision: str = "bf16",
        is_moe: bool = False,
        subject: str = "--software",
    ) -> Software:
        """The release that counts: the one asked for, if this was measured under it, else the architecture's median release.

        Args:
            release: None asks for none.
            precision: of the products.
        Raises:
            ConfigError: not a release's name.
        """
        wanted = scope(precision, is_moe)
        if release is not None:
            self._require_release(release, subject)
            on_gpu = self.releases.get(release, {}).get(architecture)
            if on_gpu is not None and wanted in on_gpu.measured:
                return Software(release=release, constants=on_gpu)
        known = {name: row[architecture] for name, row in self.releases.items() if architecture in row}
        within = {name: row for name, row in known.items() if wanted in row.measured} or known
        if not within:
            reasons = () if release is None else (f"no measured steps of release {release} on {architecture}",)
            return Software(extrapolating=reasons)
        ordered = sorted(within, key=lambda name: (within[name].loss, release_order(name)))
        median = ordered[(len(ordered) - 1) // 2]
        asked = (
            f"no measured steps of release {release} on {architecture} in {wanted}; taken: {median}, its median release"
        )
        reasons = () if release is None else (asked,)
        return Software(release=median, constants=within[median], extrapolating=reasons, is_median=True)

    def _require_release(self, release: str, subject: str) -> None:
        try:
            release_order(release)
        except ValueError:
            rule = "is no release (year.month, as 26.04 or 26.04.01)"
            known = ", ".join(sorted(self.releases, key=release_order))
            raise ConfigError(subject, release, rule, f"known: {known}") from None

    def uncalibrated(self, gpu: Gpu, precision: str, is_moe: bool) -> tuple[str, ...]:
        """Why a prediction reaches beyond the runs that constants were fitted to; empty where it does not."""
        wanted = scope(precision, is_moe)
        rows = [row[gpu.architecture] for row in self.releases.values() if gpu.architecture in row]
        if any(wanted in row.measured for row in rows) or not self.releases:
            return ()
        return (f"no measured steps of {wanted} models on {gpu.architecture}",)


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
"""The constant of measured machines that a file may lack."""


def measured_constants(measured: Measured, gpu: str) -> Constants:
    """The constants of a measured machine.

    Raises:
        ConfigError: a constant is missing or unknown, or a share of a rate is 0.
    """
    names = {field.name for field in dataclasses.fields(GpuConstants)}
    # A file of another version is refused: a missing constant must not be taken from a fitted GPU unnoticed.
    for name in names ^ (set(measured.constants) - {REDUCE_SCATTER}):
        rule = "is missing" if name in names else "is unknown"
        raise ConfigError(f"measured.constants.{name}", "", rule, "run tools/profile_cluster.py again")
    # Seconds may be 0. Shares may exceed 1: what they are of was measured, too.
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
