"""The result of a capture: operators, storages and collectives of each part of a model on one rank. Standard library and numpy.

A `CapturedPart` is one layer of a kind, the embedding, the head, or a multi-token-prediction layer: its forward pass, then its
backward pass, as executed. All sizes are expressions in b and s (`expression.py`). Pipeline and data parallelism, ZeRO,
offloading and the number of layers and micro-batches are not in here: the cost model adds them analytically.

`check` states the rules of a legal graph. It runs after every pass over a graph; a violation is a mistake of this project, not
of its user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from moe_overlap.tuner.capture.expression import Expression, evaluate

Phase = Literal["forward", "backward"]
CostClass = Literal["gemm", "grouped_gemm", "attention", "memory", "collective", "free"]
"""`memory`: bound by the bytes it moves. `free`: a view, or bookkeeping that launches nothing."""
Role = Literal["parameter", "gradient", "activation", "input", "constant"]
"""`input`: made by another part (hidden states, gradients of outputs, tokens). `constant`: tables and masks."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Implementation = Literal["te", "torch"]
"""`te`: Transformer Engine's fused kernels, as on a GPU. `torch`: megatron-core's own modules, as on a CPU."""

PHASES: tuple[Phase, ...] = ("forward", "backward")
OF_EXPERT = re.compile(r"(.*\bexperts\..*\.)(weight|bias)(\d+)")
"""Name of a weight of one expert: module, weight or bias, expert."""
COPIES_PER = 16
"""Copies of a token by a dispatch library are counted in sixteenths, so that the tokens of a sample batch make whole rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The parallel sizes and the precision, which determine the operators of a layer on one rank.

    Attributes:
        precision: precision of the products, as in a plan (`bf16`, `fp16`, `fp32`, `fp8`, …).
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    precision: str = "bf16"


def world_size(layout: Layout) -> int:
    """The smallest number of ranks that holds a layout."""
    return math.lcm(layout.tensor * layout.context, layout.expert * layout.expert_tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """A block of device memory.

    Attributes:
        id: its index in `CapturedPart.storages`.
        bytes: its size.
        role: its kind of content, which determines its lifetime.
        name: the parameter's name inside the part, else empty.
        replicas: for a parameter or gradient, the axis over which its copies are reduced: `dp` or `edp` (experts).
        freed_after: id of the operator after which the memory is freed, as observed: references in the model's code may hold it
            longer than its last reader. None: it outlives the part's backward pass.
        released_after: for a storage of the forward pass, the operator after which a forward pass without gradients frees it,
            since no autograd node holds it then. None: such a pass returns, keeps or never makes it.
        replaced_after: for a storage that the model's code keeps until the layer runs again, such as a map of rows, the operator
            of that next pass after which it is freed.
    """

    id: int
    bytes: Expression
    role: Role
    name: str = ""
    replicas: Literal["", "dp", "edp"] = ""
    freed_after: int | None = None
    released_after: int | None = None
    replaced_after: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Communication inside a group.

    Attributes:
        axis: tp, cp, ep, etp, tp_ep, tp_cp, dp, dp_cp, tp_dp_cp.
        size: number of ranks in the group.
        payload_bytes: the larger of the rank's two buffers: the gathered output, the input of a reduce-scatter, the buffer of
            an all-reduce or broadcast, all that is sent (to itself, too) in an all-to-all. (size - 1) / size of it crosses
            the rank's links; of an all-reduce twice that.
    """

    kind: CollectiveKind
    axis: str
    size: int
    payload_bytes: Expression


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kernel or collective.

    Attributes:
        id: its index in `CapturedPart.ops`.
        name: torch's operator (`mm`, `all_to_all`) or the registered kernel.
        operator: its operator kind in `moe_overlap/plan/operators.py`, without layer and suffix (`moe.experts`).
        module: megatron-core's module path inside the part (`self_attention.linear_qkv`); may be empty in the backward pass.
        shape: gemm (m, n, k); grouped_gemm (groups, total rows, n, k); attention (batch, heads, key/value heads, query length,
            key length, query/key width, value width, window or 0); memory (elements written); else empty. Attention is causal.
        flops: multiplications and additions; for attention only those inside causal mask and window, half the square.
        bytes: bytes read and written in device memory.
        reads, writes: storage ids.
        after: ids of operators that must end before it starts: read after write, write after read, write after write.
        is_weight_gradient: whether it is a product on which only a parameter's gradient depends.
        is_recomputed: whether it is a forward operator that runs again in the backward pass.
        needs_gradients: whether a forward pass without gradients omits it, as the operators of an auxiliary loss.
        scales_with_load: whether work and bytes grow with the rows routed to this rank's experts.
        touched: for a captured operator, the bytes of each storage that it reads, then of each that it writes: `bytes` is their
            sum, with more terms than any of them. Empty in composed graphs, and ignored in comparisons.
        elements: likewise the elements written in each storage, where `shape` is their sum.
    """

    id: int
    name: str
    phase: Phase
    operator: str
    module: str
    cost_class: CostClass
    shape: tuple[Expression, ...]
    dtype: str
    flops: Expression
    bytes: Expression
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...]
    collective: Collective | None = None
    is_weight_gradient: bool = False
    is_recomputed: bool = False
    needs_gradients: bool = False
    scales_with_load: bool = False
    touched: tuple[Expression, ...] = field(default=(), compare=False)
    elements: tuple[Expression, ...] = field(default=(), compare=False)

    @property
    def library(self) -> str:
        """The library of a registered kernel (`te` of `te.linear`); empty for torch's operators."""
        return self.name.rpartition(".")[0]

    @property
    def kernel(self) -> str:
        """The kernel's name inside its library."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedPart:
    """Forward and backward pass of one part of the model.

    Attributes:
        kind: embedding, head, dense, moe, mtp.dense, mtp.moe; kinds of layers with a window include it (`moe.window128`).
        variant: the recomputation: `none`, `full`, or the sorted modules (`core_attn+moe_act`).
        one_sample: whether it was captured at b = 1, where some copies vanish; otherwise it is valid for b > 1 (and for 1, if
            there is no one-sample graph).
        ops: in execution order, the forward pass first.
        saved: storages kept from the forward to the backward pass, without parameters and constants. The input is included if it
            is kept; it is the output of the previous part, so a stage counts it once.
        inputs, outputs: storages of the hidden states (of the embedding: tokens and positions; of the head: the loss). A
            prediction layer runs between the decoder's last norm and the head and passes its input on; its loss is attached to
            the gradient. Word embedding and output layer are constants in it: embedding and head count them.
        gradient_inputs, gradient_outputs: storages of the gradients of outputs and of inputs.
    """

    kind: str
    variant: str
    one_sample: bool
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    gradient_inputs: tuple[int, ...]
    gradient_outputs: tuple[int, ...]

    def holds(self, name: str, role: Role = "parameter") -> int | None:
        """The storage with this name and role; None if there is none."""
        return next((storage.id for storage in self.storages if (storage.name, storage.role) == (name, role)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedModel:
    """Every part of one model under one layout.

    Attributes:
        layer_kinds: kind of each decoder layer; `mtp_kinds` of each multi-token-prediction layer.
        versions: versions of torch and megatron-core, and of the capture itself.
        sha256: hash of the request: model, flags that matter, layout, implementation, versions.
    """

    parts: tuple[CapturedPart, ...]
    layer_kinds: tuple[str, ...]
    mtp_kinds: tuple[str, ...]
    layout: Layout
    implementation: Implementation
    versions: tuple[tuple[str, str], ...]
    sha256: str

    def part(self, kind: str, variant: str = "none", samples: int | None = None) -> CapturedPart:
        """The part of a kind.

        Args:
            variant: embedding and head have only `none`.
            samples: samples of a micro-batch; 1 gives the one-sample graph if there is one.
        Raises:
            KeyError: it was not captured.
        """
        matching = [part for part in self.parts if part.kind == kind and part.variant == variant]
        if not matching:
            raise KeyError(f"no part {kind} with recomputation {variant}")
        return next((part for part in matching if part.one_sample == (samples == 1)), matching[0])


SAMPLE_POINTS = ((1, 4096), (2, 512), (7, 32768))
"""Samples and tokens at which sizes must not be negative."""


def check(part: CapturedPart) -> None:
    """Raise an error for the first violated rule.

    Raises:
        AssertionError: names the part, the operator or storage, and the rule.
    """
    for complaint in complaints(part):
        raise AssertionError(f"{part.kind} ({part.variant}): {complaint}")


def complaints(part: CapturedPart) -> Iterator[str]:
    """Every violated rule of a part."""
    yield from _numbering(part)
    yield from _storages(part)
    yield from _order(part)
    yield from _dependencies(part)
    yield from _borders(part)
    yield from _sizes(part)


def _numbering(part: CapturedPart) -> Iterator[str]:
    if [op.id for op in part.ops] != list(range(len(part.ops))):
        yield "operators are not numbered 0, 1, 2, … in order"
    if [storage.id for storage in part.storages] != list(range(len(part.storages))):
        yield "storages are not numbered 0, 1, 2, … in order"


def _storages(part: CapturedPart) -> Iterator[str]:
    """Check that every read follows a write or reads an initial storage, and that nothing is used after it was freed."""
    written = {s.id for s in part.storages if s.role != "activation"}
    for op in part.ops:
        for index in (*op.reads, *op.writes):
            if not 0 <= index < len(part.storages):
                yield f"operator {op.id} {op.name} uses storage {index}, which does not exist"
                return
            freed = part.storages[index].freed_after
            if freed is not None and freed < op.id:
                yield f"operator {op.id} {op.name} uses storage {index}, freed after operator {freed}"
        for index in op.reads:
            if index not in written:
                yield f"operator {op.id} {op.name} reads storage {index} before anything has written it"
        written |= set(op.writes)


def _order(part: CapturedPart) -> Iterator[str]:
    phases = [PHASES.index(op.phase) for op in part.ops]
    if phases != sorted(phases):
        yield "a forward operator stands behind a backward operator"
    for op in part.ops:
        if (op.cost_class == "collective") != (op.collective is not None):
            yield f"operator {op.id} {op.name}: a collective has a group, nothing else has"
        elif op.collective is not None and op.collective.size < 1:
            yield f"operator {op.id} {op.name}: its group is empty"
        if op.is_weight_gradient and (op.phase != "backward" or op.cost_class not in ("gemm", "grouped_gemm")):
            yield f"operator {op.id} {op.name}: a weight gradient is a product of the backward pass"
        if op.is_recomputed and op.phase != "backward":
            yield f"operator {op.id} {op.name}: recomputed in the forward pass"


def _dependencies(part: CapturedPart) -> Iterator[str]:
    """Check that `after` names only earlier operators, and orders every pair whose order matters."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for op in part.ops:
        if any(before >= op.id or before < 0 for before in op.after):
            yield f"operator {op.id} {op.name} waits for an operator that is not before it"
        for index in (*op.reads, *op.writes):
            if index in writer and writer[index] not in op.after and writer[index] != op.id:
                yield f"operator {op.id} {op.name} does not wait for {writer[index]}, which wrote storage {index}"
        for index in op.writes:
            late = [reader for reader in readers.get(index, []) if reader != op.id and reader not in op.after]
            if late:
                yield f"operator {op.id} {op.name} does not wait for {late[0]}, which reads storage {index}"
            writer[index], readers[index] = op.id, []
        for index in op.reads:
            readers.setdefault(index, []).append(op.id)


def _borders(part: CapturedPart) -> Iterator[str]:
    """Check the storages at the part's borders, and those that are kept between the passes."""
    forward = [op for op in part.ops if op.phase == "forward"]
    backward = [op for op in part.ops if op.phase == "backward"]
    written = {index for op in forward for index in op.writes}
    read = {index for op in backward for index in op.reads}
    for index in part.saved:
        storage = part.storages[index]
        if storage.role not in ("activation", "input"):
            yield f"storage {index} is saved, but of role {storage.role}"
        if storage.role == "activation" and index not in written:
            yield f"storage {index} is saved, but not written in the forward pass"
        if index not in read and storage.freed_after is not None and storage.freed_after < len(forward):
            yield f"storage {index} is saved, but gone when the backward pass starts"
    for index in read & {storage.id for storage in part.storages if storage.role == "activation"} & written:
        if index not in part.saved and index not in part.outputs:
            yield f"storage {index} is read in the backward pass, but not saved"
    for index in part.outputs:
        if index not in written and index not in part.inputs:
            yield f"storage {index} is an output, but neither an input nor written in the forward pass"


def _sizes(part: CapturedPart) -> Iterator[str]:
    named: list[tuple[str, Expression]] = [(f"storage {s.id}", s.bytes) for s in part.storages]
    for op in part.ops:
        named += [(f"operator {op.id} {op.name}", size) for size in (op.bytes, op.flops, *op.shape)]
        if op.collective is not None:
            named.append((f"operator {op.id} {op.name}", op.collective.payload_bytes))
    samples, tokens = zip(*SAMPLE_POINTS, strict=True)
    values = evaluate([size for _, size in named], samples, tokens)
    for (name, size), row in zip(named, values, strict=True):
        if (row < 0).any():
            yield f"{name}: its size {size} is negative at one of {SAMPLE_POINTS}"
