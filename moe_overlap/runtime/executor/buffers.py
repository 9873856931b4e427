"""The buffers of one step, by the names of the instruction list, and the batch parts an instruction sees of them.

A micro-batch may be cut along its samples. An instruction of partition p that names a whole buffer, or all parts of one that is
cut otherwise than the instruction, sees the p-th part of the whole; a whole instruction that names the parts sees them joined.
Tensors that are read and added to are [sequence, batch, hidden]; rows that travel are not, and are taken apart by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moe_overlap.plan.instructions import Instruction, parse_buffer, stem_of

BATCH = 1


class Buffers:
    """Named tensors of one step.

    Args:
        partitions_of: number of parts the batch is cut into at an instruction.
    """

    def __init__(self, partitions_of: Callable[[Instruction], int]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.partitions = partitions_of

    def read(self, instruction: Instruction, stem: str) -> Tensor | None:
        """The tensor that the instruction reads under the names that begin with `stem`; None where it reads no such buffer."""
        names = [name for name in instruction.reads if stem_of(name) == stem]
        if not names:
            return None
        tensors = [self._tensors[name] for name in names]
        whole = torch.cat(tensors, dim=BATCH) if len(tensors) > 1 else tensors[0]
        # The number of a piece that crosses a boundary is no part of the batch: its region says what of the tensor it is.
        is_cut = bool(instruction.partition) and instruction.kind != "point-to-point"
        if not is_cut or (len(names) == 1 and is_part(names[0])):
            return whole
        return whole.chunk(self.partitions(instruction), dim=BATCH)[instruction.partition[0]]

    def read_each(self, instruction: Instruction, stem: str) -> list[Tensor]:
        """Every buffer that the instruction reads under the names that begin with `stem`, as it stands, in their order."""
        return [self._tensors[name] for name in instruction.reads if stem_of(name) == stem]

    def filled_by_pieces(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a name whose pieces arrive one by one, made for the first of them."""
        if name not in self._tensors:
            self._tensors[name] = make()
        return self._tensors[name]

    def write(self, instruction: Instruction, stem: str, tensor: Tensor | None) -> None:
        """Store the result under the name the instruction gives it; a name without a tensor stays unset."""
        if tensor is not None:
            self.write_each(instruction, stem, [tensor])

    def write_each(self, instruction: Instruction, stem: str, tensors: Sequence[Tensor]) -> None:
        """Store one tensor under each of the instruction's names that begin with `stem`, in their order."""
        names = [name for name in instruction.writes if stem_of(name) == stem]
        self._tensors.update(zip(names, tensors, strict=True))

    def add(self, instruction: Instruction, stem: str, gradient: Tensor | None) -> None:
        """Add to a gradient, part by part where it stands in parts, or store it when it is the first."""
        names = [name for name in instruction.writes if stem_of(name) == stem]
        if gradient is None:
            return
        for name, part in zip(names, gradient.chunk(len(names), dim=BATCH), strict=True):
            self._tensors[name] = self._tensors[name] + part if name in self._tensors else part

    def replace(self, name: str, by: Callable[[Tensor], Tensor]) -> None:
        """Put what a function makes of a tensor in its place."""
        self._tensors[name] = by(self._tensors[name])

    def named(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors that stand under these names now."""
        return [self._tensors[name] for name in names if name in self._tensors]

    def drop(self, name: str) -> None:
        """Free a buffer nobody reads any more."""
        self._tensors.pop(name, None)


def is_part(name: str) -> bool:
    """Whether a name is that of one partition."""
    return parse_buffer(name).partition is not None
