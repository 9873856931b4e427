"""The machine that a prediction is made for: described hardware, the constants that hold for it, and what was measured of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from moe_overlap.describe.cluster import GIB, Cluster, Gpu, known_gpus
from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.cost.expected_error import ExpectedError, shipped_errors
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
from moe_overlap.tuner.cost.links import Group
from moe_overlap.tuner.cost.operators import LOW_PRECISIONS, Lookup

WITHOUT_BLOCK_SCALES = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "CDNA2", "CDNA3")
"""Generations without units for mxfp8, whose blocks of 32 elements have a scale each; Transformer Engine refuses it there."""
RATES = ("bf16_tflops", "fp8_tflops", "fp4_tflops", "memory_gb_per_s")
"""What efficiencies are fractions of; the capacity decides no second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine and its rates that a prediction is made for.

    Attributes:
        constants: of the GPU, under the release.
        common: constants that are the same for all GPUs.
        software: the release that `constants` are of.
        expected_error: of predictions for this machine, precision and kind of model.
        beyond: factor of its interval where a prediction reaches beyond what was calibrated.
        traits: of the runs that the constants were fitted to.
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
        exchanges: costs of all-to-alls beside their rows; None where they were not measured.
        refined: factors that traces give for the prices of instructions; the analytic cost does not read them.
    """

    cluster: Cluster
    constants: GpuConstants
    common: CommonConstants = CommonConstants()
    software: Software = REFERENCE
    expected_error: ExpectedError | None = None
    beyond: float = 1.0
    traits: Traits = field(default_factory=dict)
    fragmentation: float = 0.0
    memory: MemoryQuantiles = MemoryQuantiles()
    load: float = 1.0
    lookup: Lookup | None = None
    exchanges: AllToAllCosts | None = None
    refined: Refined = NOT_REFINED

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that a plan may be predicted to need: the capacity over the quantile of `--memory-margin`."""
        return self.cluster.group_of(0).gpu.memory_gib * GIB / self.memory.high

    @property
    def queue_seconds(self) -> float:
        """Seconds by which counts take longer that start while rows are on their way."""
        return self.exchanges.queue_seconds if self.exchanges is not None else 0.0


def machine_of(
    cluster: Cluster,
    constants: Constants,
    release: str | None = None,
    load: float = 1.0,
    lookup: Lookup | None = None,
    precision: str = "bf16",
    is_moe: bool = False,
) -> tuple[Machine, tuple[str, ...]]:
    """The machine that a prediction is made for, and why the prediction reaches beyond measured steps.

    Args:
        release: software release whose losses count; the GPU's median release where None.
        load: rows of the busiest rank of an expert group over the mean.
        lookup: the database of measured operators.
        precision: of the products.
        is_moe: whether the model has experts.
    Raises:
        ConfigError: not a release's name.
    """
    gpu = cluster.group_of(0).gpu
    of_gpu, other_gpu = constants.of_gpu(gpu)
    software = constants.of_release(release, gpu.architecture, precision, is_moe)
    reasons = [f"no measured steps of {gpu.name}"] if other_gpu else []
    reasons += _redescribed(gpu) if cluster.measured is None else []
    reasons += [*constants.uncalibrated(gpu, precision, is_moe), *software.extrapolating]
    if len({dataclasses.replace(group, nodes=1) for group in cluster.groups}) > 1:
        reasons.append(f"groups of unlike GPUs or links: all are priced as {gpu.name}, and fit or not as {gpu.name}")
    if _lacks_units(gpu, precision):
        # The first, which is the one that a short answer tells.
        reasons.insert(0, f"no {precision} rate of {gpu.name} is known: products are priced in the next wider format")
    elif _lacks_block_scales(gpu, precision):
        reasons.insert(0, f"{gpu.name} has no units for {precision}: products are priced at its fp8 rate")
    errors = shipped_errors()
    machine = Machine(
        cluster=cluster,
        constants=software.constants.apply(of_gpu),
        common=constants.common,
        software=software,
        expected_error=errors.expected(gpu, precision, is_moe) if cluster.measured is None else None,
        beyond=errors.beyond,
        traits=constants.traits,
        fragmentation=constants.fragmentation,
        memory=constants.memory,
        load=load,
        lookup=lookup,
    )
    return machine, tuple(reasons)


def _redescribed(gpu: Gpu) -> list[str]:
    """Why constants of a GPU type do not hold for a description that has its name and other peak rates."""
    known = known_gpus().get(gpu.name, {})
    others = [name for name in RATES if name in known and known[name] != getattr(gpu, name)]
    return [f"no measured steps of {gpu.name} with another {' and '.join(others)}"] if others else []


def _lacks_units(gpu: Gpu, precision: str) -> bool:
    return precision in LOW_PRECISIONS and not (gpu.fp4_tflops if precision == "nvfp4" else gpu.fp8_tflops)


def _lacks_block_scales(gpu: Gpu, precision: str) -> bool:
    return precision == "mxfp8" and gpu.architecture in WITHOUT_BLOCK_SCALES


def require_units(cluster: Cluster, precision: str, flag: str, value: str) -> None:
    """Refuse a format of products that a described GPU has no units for: a run would stop in its first product.

    A prediction answers what if, with a warning; who is handed a script to start is told before. A machine that was measured
    has all its rates in its database.

    Args:
        flag, value: by which the user says the precision.
    Raises:
        ConfigError: the description gives no such rate, or the generation has no units for block scales.
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
    """Interference of concurrent work: by the factors of a host that was measured with these GPUs, else by one constant.

    Args:
        replicas: the ranks that share a stage's states, whose collectives run beside its computation.
    Returns:
        As a function of alone seconds for analytic costs, and as factors for a simulation.
    """
    if machine.cluster.measured is None:
        # A measured cluster keeps its own constant: factors of another host with the same GPUs may differ twofold.
        fitted = interference_of(replicas.links.gpu.name, replicas.nodes, min(replicas.per_node, replicas.size))
        if fitted is not None:
            return fitted.seconds, fitted
    slowdown = machine.constants.overlap_slowdown
    return partly_concurrent(slowdown), slowed_down(slowdown)
