"""Seconds of fused kernels, which send tokens and compute a product of the experts: COMET's, by a formula of ours.

Nothing here was measured, and no such kernel runs in this project yet. A prediction that uses it says so (`UNMEASURED`).

Terms (COMET, section 3.2). n thread blocks, one on each multiprocessor (figure 8); n_c of them communicate, the others compute.
c and m: seconds of the product with all blocks, and of the all-to-all at the full rate of its links.
1. The product has n - n_c blocks: c' = c / (1 - n_c / n). Blocks that communicate do not disturb it (section 3.2.1).
2. The all-to-all is as fast as its links, or as its blocks: m' = max(m, bytes / (n_c · r)).
3. The shared tensor between the two is cut into S steps, by tiles of rows where the product follows the all-to-all, of columns
   where it goes before (section 3.1). A two-stage pipeline of equal steps, first one in, last one out:
   max(c', m') + min(c', m') / S.
4. Where a plan gives no n_c, the best of 1 … n - 1 is taken: COMET profiles it per shape and keeps it (section 3.2.2).

Assumptions, none of which the paper states as a figure. r, the rate of one block: an equal share of the memory bandwidth that
streaming kernels reach, every byte read once and written once. The local rows, which COMET computes first, do not shorten the
first step. A step is no shorter than one wave of tiles of TILE × TILE. The bytes are those of the dispatcher that was captured;
what permutes rows around an all-to-all stays with gate and merge, though COMET's kernels do some of it. Over several nodes blocks
reach the rate of the network through NVSHMEM as collectives do; COMET was measured inside one. A kernel's link is not shared:
a transfer between stages beside it slows it down as it does computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import (
    BACKWARD,
    COMBINE,
    DISPATCH,
    DISPATCH_FC1,
    EXPERTS,
    FC2_COMBINE,
    FUSED_KERNELS,
    RECOMPUTE,
    WEIGHT_GRADIENT,
)
from moe_overlap.plan.overlap import KernelBlocks
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.graph import Collective
from moe_overlap.tuner.cost.layer import (
    Floats,
    Key,
    PartCost,
    Setting,
    alone_seconds,
    computing_seconds,
    operator_seconds,
    suffix_of,
)
from moe_overlap.tuner.cost.operators import OpTable

Sent = tuple[int, Collective, float]
"""A collective of a part: its index, itself, and its payload in bytes."""
TILE = 128
"""Rows and columns of a tile of a product (COMET, section 2.2.1)."""
UNMEASURED = "fused kernels are priced by COMET's model, none was measured"
ALL_TO_ALL_OF: dict[str, str] = {DISPATCH_FC1: DISPATCH, FC2_COMBINE: COMBINE}
KERNEL_OF: dict[str, str] = {"fc1": DISPATCH_FC1, "fc2": FC2_COMBINE}
"""Weight -> the kernel that multiplies by it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The thread blocks of a GPU.

    Attributes:
        bytes_per_second: what one of them sends; r above.
    """

    count: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Joined:
    """The product and the all-to-all that one fused kernel joins, each alone.

    Attributes:
        product_seconds, exchange_seconds: c and m above.
        moved_bytes: that its blocks send, to their own rank, too.
        steps: tiles along the dimension in which the shared tensor is cut.
        tiles: of the product.
    """

    product_seconds: float
    exchange_seconds: float
    moved_bytes: float
    steps: float
    tiles: float

    def seconds(self, communicating: ArrayLike, blocks: Blocks) -> Floats:
        """Seconds of the kernel, for numbers of communicating blocks."""
        sending = np.asarray(communicating, dtype=np.float64)
        computing = blocks.count - sending
        product = self.product_seconds * blocks.count / computing  # 1
        exchange = np.maximum(self.exchange_seconds, self.moved_bytes / (sending * blocks.bytes_per_second))  # 2
        # 3. Tiles run in waves, one on each block that computes, so there are no more steps than waves.
        steps = np.maximum(1.0, np.minimum(self.steps, self.tiles / computing))
        return np.maximum(product, exchange) + np.minimum(product, exchange) / steps

    def exposed(self, communicating: int, blocks: Blocks) -> float:
        """Seconds by which the kernel takes longer than its product alone; 0 where it sends nothing in this pass."""
        if not self.moved_bytes:
            return 0.0
        return float(self.seconds(communicating, blocks)) - self.product_seconds

    def best_split(self, blocks: Blocks) -> int:
        """The number of communicating blocks that is fastest; of equals the smallest."""
        # 4. At least one block communicates, and one computes.
        return 1 + int(np.argmin(self.seconds(np.arange(1, blocks.count), blocks)))


@dataclass(frozen=True, slots=True)
class FusedSeconds:
    """Seconds of a fused layer's operators.

    Attributes:
        whole: seconds; weight gradients under the names of the experts'.
        exposed: of them those by which kernels take longer than their products alone.
    """

    whole: Mapping[Key, float]
    exposed: Mapping[Key, float]


def fused_seconds(table: OpTable, setting: Setting, cost: PartCost, split: KernelBlocks | None) -> FusedSeconds:
    """Seconds of every operator of a fused layer.

    Args:
        cost: of the part in this setting, not fused.
        split: the communicating blocks of each kernel; None: the best ones.
    """
    blocks, whole = blocks_of(setting), operator_seconds(table, setting, cost, hides_exchanges=True)
    exposed: dict[Key, float] = {}
    computing = computing_seconds(table, setting, cost, hides_exchanges=True)
    for suffix in ("", RECOMPUTE, BACKWARD):
        # Gradients arrive through the backward of combine, so the backward pass runs the kernels in reverse.
        kernels = FUSED_KERNELS[:: -1 if suffix == BACKWARD else 1]
        products = _products(table, suffix)
        # The activation, and what else stands beside the products.
        beside = _of_experts(table, computing, suffix) - sum(float(computing[index]) for index in products)
        whole.pop((EXPERTS, "", suffix), None)
        for place, kernel in enumerate(kernels):
            whole.pop((ALL_TO_ALL_OF[kernel], "", suffix), None)
            sent = _collectives(table, kernel, suffix, products[:1], is_first=place == 0)
            joined = _joined(table, setting, computing, products[place::2], sent, is_first=place == 0)
            if split is None:
                sending = joined.best_split(blocks)
            else:
                sending = split.combine if place else split.dispatch
            exposed[kernel, "", suffix] = joined.exposed(sending, blocks)
            whole[kernel, "", suffix] = joined.product_seconds + exposed[kernel, "", suffix]
        # The activation between the kernels has no instruction of its own: it counts with the kernel before it.
        whole[kernels[0], "", suffix] += beside
    return FusedSeconds(whole, exposed)


def kernel_of(key: Key) -> str:
    """The kernel in whose backward a weight gradient of the experts is computed; empty for other operators."""
    part, weight, suffix = key
    return KERNEL_OF.get(weight, DISPATCH_FC1) if part == EXPERTS and suffix == WEIGHT_GRADIENT else ""


def blocks_of(setting: Setting) -> Blocks:
    """The thread blocks of the GPU that a part runs on."""
    gpu = setting.gpu
    assert gpu.multiprocessors is not None, "refuse_unpriced has let it through"
    reached = gpu.memory_gb_per_s * 1e9 * setting.constants.memory
    return Blocks(gpu.multiprocessors, reached / (2 * gpu.multiprocessors))


def refuse_unpriced(plan: Plan, cluster: Cluster) -> None:
    """ConfigError for fused layers on a GPU of unknown size, and for splits that leave no block to compute."""
    for index, stage in enumerate(plan.stages):
        gpu = cluster.group_of(stage.devices.ranks[0]).gpu
        for number, layer in enumerate(stage.overlap.layers):
            if layer.mechanism != "fused":
                continue
            subject = f"plan.json stages[{index}].overlap.layers[{number}]"
            if gpu.multiprocessors is None:
                rule = f"the multiprocessors of {gpu.name}, which the kernel's blocks run on, are not known"
                fix = "give the GPU as an object with multiprocessors in a cluster file"
                raise ConfigError(f"{subject}.mechanism", layer.mechanism, rule, fix)
            for name in ("dispatch", "combine") if layer.kernel_blocks is not None else ():
                sending = getattr(layer.kernel_blocks, name)
                if sending >= gpu.multiprocessors:
                    rule = f"leaves none of the {gpu.multiprocessors} blocks of {gpu.name} to compute"
                    fix = f"write at most {gpu.multiprocessors - 1}, or null for the best split"
                    raise ConfigError(f"{subject}.kernel_blocks.{name}", sending, rule, fix)


def _products(table: OpTable, suffix: str) -> list[int]:
    """Products of the experts in one pass, weight gradients apart: those behind an all-to-all and before one take turns."""
    return [
        op.id
        for op in table.ops
        if op.operator == EXPERTS
        and op.cost_class in ("gemm", "grouped_gemm")
        and not op.is_weight_gradient
        and suffix_of(op) == suffix
    ]


def _of_experts(table: OpTable, computing: Floats, suffix: str) -> float:
    """Seconds that the experts compute in one pass, weight gradients apart."""
    computed = [
        op.id for op in table.ops if op.operator == EXPERTS and suffix_of(op) == suffix and not op.is_weight_gradient
    ]
    return sum(float(computing[index]) for index in computed)


def _collectives(table: OpTable, kernel: str, suffix: str, first_product: list[int], is_first: bool) -> list[Sent]:
    """The collectives that a kernel runs: its all-to-all, and those over the ranks that share an expert, on its side."""

    def runs(index: int) -> bool:
        op = table.ops[index]
        inside = op.operator == EXPERTS and all((index < product) == is_first for product in first_product)
        return suffix_of(op) == suffix and (op.operator == ALL_TO_ALL_OF[kernel] or inside)

    return [collective for collective in table.collectives if runs(collective[0])]


def _joined(
    table: OpTable, setting: Setting, computing: Floats, products: list[int], sent: list[Sent], is_first: bool
) -> Joined:
    """The product and the collectives of a kernel, each alone.

    Args:
        computing: [ops] seconds.
        is_first: whether it is the first of its pass, whose all-to-all goes before the product.
    """
    # Columns are cut alike in all products of a kernel, rows are those of all of them: hence the maximum and the sum.
    grids = [_grid(table, index, setting.load) for index in products]
    return Joined(
        product_seconds=sum(float(computing[index]) for index in products),
        exchange_seconds=sum(alone_seconds(table, setting, *collective) for collective in sent),
        moved_bytes=sum(payload * (setting.load if table.loaded[index] else 1.0) for index, _, payload in sent),
        steps=sum(rows for rows, _ in grids) if is_first else max((columns for _, columns in grids), default=0.0),
        tiles=sum(rows * columns for rows, columns in grids),
    )


def _grid(table: OpTable, index: int, load: float) -> tuple[float, float]:
    """Tiles of a product along its rows and columns; every expert begins a tile of its own."""
    shape = table.shapes[index]
    groups, rows, width = shape[:3] if table.ops[index].cost_class == "grouped_gemm" else (1.0, *shape[:2])
    rows *= load if table.loaded[index] else 1.0
    return groups * float(np.ceil(rows / groups / TILE)), float(np.ceil(width / TILE))
