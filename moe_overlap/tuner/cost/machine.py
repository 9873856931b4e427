"""The machine of a prediction: its hardware, its constants, and its measurements."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from moe_overlap.describe.cluster import GIB, Cluster, Gpu, known_gpus
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.cost.expected_error import ExpectedError, Neighbours, shipped_errors
from moe_overlap.tuner.cost.feasibility import MemoryQuantiles
from moe_overlap.tuner.cost.hardware import (
    NOT_REFINED,
    REFERENCE,
    CommonConstants,
    Constants,
    GpuConstants,
    Refined,
    Software,
    Traits,
)
from moe_overlap.tuner.cost.interference import (
    AllToAllCosts,
    Concurrent,
    Interference,
    interference_of,
    partly_concurrent,
    slowed_down,
)
from moe_overlap.tuner.cost.library_memory import reserved_bytes
from moe_overlap.tuner.cost.links import Group
from moe_overlap.tuner.cost.operators import LOW_PRECISIONS, Lookup

WITHOUT_BLOCK_SCALES = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "CDNA2", "CDNA3")
"""Architectures without units for mxfp8 (one scale per block of 32 elements); Transformer Engine refuses it there."""
RATES = ("bf16_tflops", "fp8_tflops", "fp4_tflops", "memory_gb_per_s")
"""Peak rates to which efficiencies refer; the capacity is none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine of a prediction, with its rates.

    Attributes:
        constants: constants of the GPU under the release.
        common: constants of all GPUs.
        software: the release of `constants`.
        expected_error: error of predictions for this machine, kind of model and routing.
        neighbours: the compared runs that are most like the model on this machine in this precision; None if there are none.
        beyond: factor on its interval if a prediction extrapolates beyond the calibration.
        traits: traits of the calibration runs.
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
        exchanges: costs of all-to-alls apart from their rows; None if they were not measured.
        reserved_bytes: bytes of a GPU's memory that a plan cannot have (`library_memory.py`).
        refined: factors from traces on the prices of instructions; the closed form does not use them.
    """

    cluster: Cluster
    constants: GpuConstants
    common: CommonConstants = CommonConstants()
    software: Software = REFERENCE
    expected_error: ExpectedError | None = None
    neighbours: Neighbours | None = None
    beyond: float = 1.0
    traits: Traits = field(default_factory=dict)
    fragmentation: float = 0.0
    reserved_bytes: int = 0
    memory: MemoryQuantiles = MemoryQuantiles()
    load: float = 1.0
    lookup: Lookup | None = None
    exchanges: AllToAllCosts | None = None
    refined: Refined = NOT_REFINED

    @property
    def usable_bytes(self) -> float:
        """Most bytes of a GPU that a plan may need as predicted: those that libraries leave, over the quantile of the margin."""
        return (self.cluster.group_of(0).gpu.memory_gib * GIB - self.reserved_bytes) / self.memory.high

    @property
    def queue_seconds(self) -> float:
        """Additional seconds of an all-to-all of counts that starts while rows are on the link."""
        return self.exchanges.queue_seconds if self.exchanges is not None else 0.0


def machine_of(
    cluster: Cluster,
    constants: Constants,
    release: str | None = None,
    load: float = 1.0,
    lookup: Lookup | None = None,
    precision: str = "bf16",
    is_moe: bool = False,
    model: ModelDescription | None = None,
) -> tuple[Machine, tuple[str, ...]]:
    """The machine of a prediction, and why the prediction extrapolates.

    Args:
        release: software release whose losses apply; None: the architecture's median release.
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
        precision: precision of the products.
        is_moe: whether the model has experts.
        model: the model, to find compared runs of it; None finds none.
    """
    gpu = cluster.group_of(0).gpu
    of_gpu, other_gpu = constants.of_gpu(gpu)
    software = constants.of_release(release, gpu.architecture, precision, is_moe)
    reasons = [f"no calibration run of {gpu.name}"] if other_gpu else []
    reasons += _redescribed(gpu) if cluster.measured is None else []
    reasons += [*constants.uncalibrated(gpu, precision, is_moe), *software.extrapolating]
    if len({dataclasses.replace(group, nodes=1) for group in cluster.groups}) > 1:
        reasons.append(f"groups of unlike GPUs or links: all are priced as {gpu.name}, and fit or not as {gpu.name}")
    if _lacks_units(gpu, precision):
        # Inserted first, because a short answer shows the first reason only.
        reasons.insert(0, f"no {precision} rate of {gpu.name} is known: products are priced in the next wider format")
    elif _lacks_block_scales(gpu, precision):
        reasons.insert(0, f"{gpu.name} has no units for {precision}: products are priced at its fp8 rate")
    errors, is_described = shipped_errors(), cluster.measured is None
    expected = errors.expected(gpu, is_moe, load > 1.0) if is_described else None
    nearest = errors.neighbours(gpu, precision, model) if is_described and model is not None else None
    machine = Machine(
        cluster=cluster,
        constants=software.constants.apply(of_gpu),
        common=constants.common,
        software=software,
        expected_error=expected,
        neighbours=nearest,
        beyond=errors.beyond,
        traits=constants.traits,
        fragmentation=constants.fragmentation,
        reserved_bytes=reserved_bytes(cluster, is_moe),
        memory=constants.memory,
        load=load,
        lookup=lookup,
    )
    return machine, tuple(reasons)


def _redescribed(gpu: Gpu) -> list[str]:
    """Why the constants of a GPU type do not apply: the description has its name but other peak rates."""
    shipped = known_gpus().get(gpu.name, {})
    others = [name for name in RATES if name in shipped and shipped[name] != getattr(gpu, name)]
    return [f"no calibration run of {gpu.name} with another {' and '.join(others)}"] if others else []


def _lacks_units(gpu: Gpu, precision: str) -> bool:
    return precision in LOW_PRECISIONS and not (gpu.fp4_tflops if precision == "nvfp4" else gpu.fp8_tflops)


def _lacks_block_scales(gpu: Gpu, precision: str) -> bool:
    return precision == "mxfp8" and gpu.architecture in WITHOUT_BLOCK_SCALES


def require_units(cluster: Cluster, precision: str, flag: str, value: str) -> None:
    """Refuse a precision that the described GPU has no units for: a run would stop in its first product.

    Called before a script is written. A prediction only warns, since a user may ask "what if". A measured machine is not refused,
    because its database has all rates.

    Args:
        flag, value: the user's flag for the precision, and its value.
    Raises:
        ConfigError: the description has no rate for the precision, or the architecture has no units for block scales.
    """
    gpu = cluster.group_of(0).gpu
    if _lacks_block_scales(gpu, precision) and gpu.fp8_tflops:
        rule = f"{gpu.name} ({gpu.architecture}) has no units for scales of blocks, which came with Blackwell"
        raise ConfigError(flag, value, rule, "use fp8 with another recipe, or bf16")
    if cluster.measured is not None or not _lacks_units(gpu, precision):
        return
    field, narrower = ("fp4_tflops", "fp8 or ") if precision == "nvfp4" else ("fp8_tflops", "")
    rule = f"{gpu.name} is described without such units ({field} is null)"
    fix = f"use {narrower if gpu.fp8_tflops else ''}bf16, or give its rate in a file for --cluster"
    raise ConfigError(flag, value, rule, fix)


def concurrency(machine: Machine, replicas: Group) -> tuple[Concurrent, Interference]:
    """Interference of concurrent work: measured factors of a host with these GPUs, else one constant.

    Args:
        replicas: the ranks that share a stage's states, whose collectives overlap with its computation.
    Returns:
        A function of seconds without interference, for the closed form; factors, for a simulation.
    """
    if machine.cluster.measured is None:
        # A measured cluster uses its own constant, because factors of another host with the same GPUs may differ twofold.
        fitted = interference_of(replicas.links.gpu.name, replicas.nodes, min(replicas.per_node, replicas.size))
        if fitted is not None:
            return fitted.seconds, fitted
    slowdown = machine.constants.overlap_slowdown
    return partly_concurrent(slowdown), slowed_down(slowdown)
