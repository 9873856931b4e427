"""What a legal graph is. Checked after every pass over it; a violation is our own mistake."""

from __future__ import annotations

from collections.abc import Iterator

from moe_overlap.tuner.capture.expression import Expression, evaluate
from moe_overlap.tuner.capture.graph import PHASES, Part

SAMPLE_POINTS = ((1, 4096), (2, 512), (7, 32768))
"""Samples and tokens at which sizes must not be negative."""


def check(part: Part) -> None:
    """Raise for the first thing that is wrong.

    Raises:
        AssertionError: names the part, the operator or storage, and the rule.
    """
    for complaint in complaints(part):
        raise AssertionError(f"{part.kind} ({part.variant}): {complaint}")


def complaints(part: Part) -> Iterator[str]:
    """Everything that is wrong with a part."""
    yield from _numbering(part)
    yield from _storages(part)
    yield from _order(part)
    yield from _dependencies(part)
    yield from _borders(part)
    yield from _sizes(part)


def _numbering(part: Part) -> Iterator[str]:
    if [op.id for op in part.ops] != list(range(len(part.ops))):
        yield "operators are not numbered 0, 1, 2, … in order"
    if [storage.id for storage in part.storages] != list(range(len(part.storages))):
        yield "storages are not numbered 0, 1, 2, … in order"


def _storages(part: Part) -> Iterator[str]:
    """Every read has a writer before it, or is there from the start; nothing is used after it was freed."""
    known = {s.id for s in part.storages if s.role != "activation"}
    for op in part.ops:
        for index in (*op.reads, *op.writes):
            if not 0 <= index < len(part.storages):
                yield f"operator {op.id} {op.name} uses storage {index}, which does not exist"
                return
            freed = part.storages[index].freed_after
            if freed is not None and freed < op.id:
                yield f"operator {op.id} {op.name} uses storage {index}, freed after operator {freed}"
        for index in op.reads:
            if index not in known:
                yield f"operator {op.id} {op.name} reads storage {index} before anything has written it"
        known |= set(op.writes)


def _order(part: Part) -> Iterator[str]:
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


def _dependencies(part: Part) -> Iterator[str]:
    """`after` names earlier operators only, and orders every pair that must not be exchanged."""
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


def _borders(part: Part) -> Iterator[str]:
    """What goes in and out, and what is kept in between."""
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


def _sizes(part: Part) -> Iterator[str]:
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
