"""Seconds of fused kernels that send tokens and compute a product of the experts: a formula for the kernels of COMET.

Nothing here was measured, and this project does not execute such kernels yet. A prediction that uses the formula says so
(`UNMEASURED`).

Terms (COMET, section 3.2). A kernel has n thread blocks, one per multiprocessor (figure 8); n_c of them communicate, the others
compute. c: seconds of the product with all blocks. m: seconds of the all-to-all at the full rate of its links.
1. The product has n - n_c blocks: c' = c / (1 - n_c / n). Communicating blocks do not slow it down (section 3.2.1).
2. The all-to-all is limited by its links or by its blocks: m' = max(m, bytes / (n_c · r)).
3. The shared tensor between the two is cut into S steps: tiles of rows if the product follows the all-to-all, of columns if it
   precedes it (section 3.1). The steps form a two-stage pipeline of equal steps: max(c', m') + min(c', m') / S.
4. If a plan has no n_c, the best of 1 … n - 1 is used: COMET profiles the best one per shape (section 3.2.2).

Assumptions; the paper gives figures for none of them.
- r, the rate of one block, is an equal share of the memory bandwidth of streaming kernels; every byte is read and written once.
- The local rows, which COMET computes first, do not shorten the first step.
- A step takes at least one wave of tiles of TILE × TILE.
- The bytes are those of the captured dispatcher. Permutation of rows around an all-to-all counts for gate and merge, although
  COMET's kernels do some of it.
- Over several nodes blocks reach the same rate of the network through NVSHMEM as collectives; COMET was measured inside one node.
- A kernel does not share its link: a concurrent transfer between stages slows it down as it slows down computation.
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
        bytes_per_second: rate at which one block sends; r above.
    """

    count: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Joined:
    """The product and the all-to-all of one fused kernel, each priced without the other.

    Attributes:
        product_seconds, exchange_seconds: c and m above.
        moved_bytes: bytes that the blocks send, those to the same rank included.
        steps: tiles along the dimension in which the shared tensor is cut.
        tiles: tiles of the product.
    """

    product_seconds: float
    exchange_seconds: float
    moved_bytes: float
    steps: float
    tiles: float

    def seconds(self, communicating: ArrayLike, blocks: Blocks) -> Floats:
        """Seconds of the kernel, for an array of numbers of communicating blocks."""
        sending = np.asarray(communicating, dtype=np.float64)
        computing = blocks.count - sending
        product = self.product_seconds * blocks.count / computing  # 1
        exchange = np.maximum(self.exchange_seconds, self.moved_bytes / (sending * blocks.bytes_per_second))  # 2
        # 3. Every computing block processes one tile per wave, so there are at most as many steps as waves.
        steps = np.maximum(1.0, np.minimum(self.steps, self.tiles / computing))
        return np.maximum(product, exchange) + np.minimum(product, exchange) / steps

    def exposed(self, communicating: int, blocks: Blocks) -> float:
        """Seconds of the kernel minus those of its product with all blocks; 0 if it sends nothing in this pass."""
        if not self.moved_bytes:
            return 0.0
        return float(self.seconds(communicating, blocks)) - self.product_seconds

    def best_split(self, blocks: Blocks) -> int:
        """The number of communicating blocks with the shortest time; the smallest of equals."""
        # 4. At least one block communicates, and one computes.
        return 1 + int(np.argmin(self.seconds(np.arange(1, blocks.count), blocks)))


@dataclass(frozen=True, slots=True)
class FusedSeconds:
    """Seconds of a fused layer's operators.

    Attributes:
        total: all seconds; weight gradients have the names of the experts' ones.
        exposed: seconds of kernels minus those of their products.
    """

    total: Mapping[Key, float]
    exposed: Mapping[Key, float]


def fused_seconds(table: OpTable, setting: Setting, cost: PartCost, split: KernelBlocks | None) -> FusedSeconds:
    """Seconds of every operator of a fused layer.

    Args:
        cost: cost of the part in this setting, not fused.
        split: communicating blocks of each kernel; None: the best ones.
    """
    blocks, total = blocks_of(setting), operator_seconds(table, setting, cost, hides_exchanges=True)
    exposed: dict[Key, float] = {}
    computing = computing_seconds(table, setting, cost, hides_exchanges=True)
    for suffix in ("", RECOMPUTE, BACKWARD):
        # Gradients arrive by the backward pass of combine, so the backward pass has the kernels in reverse order.
        kernels = FUSED_KERNELS[:: -1 if suffix == BACKWARD else 1]
        products = _products(table, suffix)
        # The activation, and all other computation of the experts except products.
        others = _of_experts(table, computing, suffix) - sum(float(computing[index]) for index in products)
        total.pop((EXPERTS, "", suffix), None)
        for place, kernel in enumerate(kernels):
            total.pop((ALL_TO_ALL_OF[kernel], "", suffix), None)
            sent = _collectives(table, kernel, suffix, products[:1], is_first=place == 0)
            joined = _joined(table, setting, computing, products[place::2], sent, is_first=place == 0)
            if split is None:
                sending = joined.best_split(blocks)
            else:
                sending = split.combine if place else split.dispatch
            exposed[kernel, "", suffix] = joined.exposed(sending, blocks)
            total[kernel, "", suffix] = joined.product_seconds + exposed[kernel, "", suffix]
        # The activation between the kernels has no instruction of its own: it counts with the kernel before it.
        total[kernels[0], "", suffix] += others
    return FusedSeconds(total, exposed)


def kernel_of(key: Key) -> str:
    """The kernel whose backward pass computes a weight gradient of the experts; empty for other operators."""
    part, weight, suffix = key
    return KERNEL_OF.get(weight, DISPATCH_FC1) if part == EXPERTS and suffix == WEIGHT_GRADIENT else ""


def blocks_of(setting: Setting) -> Blocks:
    """The thread blocks of the GPU that a part runs on."""
    gpu = setting.gpu
    assert gpu.multiprocessors is not None, "refuse_unpriced must refuse such GPUs"
    reached = gpu.memory_gb_per_s * 1e9 * setting.constants.memory
    return Blocks(gpu.multiprocessors, reached / (2 * gpu.multiprocessors))


def refuse_unpriced(plan: Plan, cluster: Cluster) -> None:
    """ConfigError for fused layers if the number of multiprocessors is unknown, or if a split leaves no computing block."""
    for index, stage in enumerate(plan.stages):
        gpu = cluster.group_of(stage.devices.ranks[0]).gpu
        for number, layer in enumerate(stage.overlap.layers):
            if layer.mechanism != "fused":
                continue
            subject = f"plan.json stages[{index}].overlap.layers[{number}]"
            if gpu.multiprocessors is None:
                rule = f"the multiprocessors of {gpu.name}, each with one block of the kernel, are not known"
                fix = "give the GPU as an object with multiprocessors in a cluster file"
                raise ConfigError(f"{subject}.mechanism", layer.mechanism, rule, fix)
            for name in ("dispatch", "combine") if layer.kernel_blocks is not None else ():
                sending = getattr(layer.kernel_blocks, name)
                if sending >= gpu.multiprocessors:
                    rule = f"leaves none of the {gpu.multiprocessors} blocks of {gpu.name} for computation"
                    fix = f"write at most {gpu.multiprocessors - 1}, or null for the best split"
                    raise ConfigError(f"{subject}.kernel_blocks.{name}", sending, rule, fix)


def _products(table: OpTable, suffix: str) -> list[int]:
    """Products of the experts in one pass, without weight gradients; those after dispatch and before combine alternate."""
    return [
        op.id
        for op in table.ops
        if op.operator == EXPERTS
        and op.cost_class in ("gemm", "grouped_gemm")
        and not op.is_weight_gradient
        and suffix_of(op) == suffix
    ]


def _of_experts(table: OpTable, computing: Floats, suffix: str) -> float:
    """Seconds of computation of the experts in one pass, without weight gradients."""
    computed = [
        op.id for op in table.ops if op.operator == EXPERTS and suffix_of(op) == suffix and not op.is_weight_gradient
    ]
    return sum(float(computing[index]) for index in computed)


def _collectives(table: OpTable, kernel: str, suffix: str, first_product: list[int], is_first: bool) -> list[Sent]:
    """The collectives of a kernel: its all-to-all, and those over ranks that share an expert, on its side of the products."""

    def runs(index: int) -> bool:
        op = table.ops[index]
        inside = op.operator == EXPERTS and all((index < product) == is_first for product in first_product)
        return suffix_of(op) == suffix and (op.operator == ALL_TO_ALL_OF[kernel] or inside)

    return [collective for collective in table.collectives if runs(collective[0])]


def _joined(
    table: OpTable, setting: Setting, computing: Floats, products: list[int], sent: list[Sent], is_first: bool
) -> Joined:
    """The product and the collectives of a kernel, each priced without the other.

    Args:
        computing: [ops] seconds.
        is_first: whether it is the first of its pass, whose all-to-all precedes the product.
    """
    # The products of a kernel have different rows and the same columns: hence the sum of rows and the maximum of columns.
    grids = [_grid(table, index, setting.load) for index in products]
    return Joined(
        product_seconds=sum(float(computing[index]) for index in products),
        exchange_seconds=sum(alone_seconds(table, setting, *collective) for collective in sent),
        moved_bytes=sum(payload * (setting.load if table.loaded[index] else 1.0) for index, _, payload in sent),
        steps=sum(rows for rows, _ in grids) if is_first else max((columns for _, columns in grids), default=0.0),
        tiles=sum(rows * columns for rows, columns in grids),
    )


def _grid(table: OpTable, index: int, load: float) -> tuple[float, float]:
    """Tiles of a product along its rows and columns; rows of different experts are never in one tile."""
    shape = table.shapes[index]
    groups, rows, width = shape[:3] if table.ops[index].cost_class == "grouped_gemm" else (1.0, *shape[:2])
    rows *= load if table.loaded[index] else 1.0
    return groups * float(np.ceil(rows / groups / TILE)), float(np.ceil(width / TILE))
