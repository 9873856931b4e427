"""The buffers of one step, by the names of the instruction list, and the part of each that an instruction reads or writes.

A micro-batch may be cut into partitions along its samples. An instruction of partition p that names a buffer of the whole
micro-batch gets the p-th part of it, as does one that names all parts of a buffer with another number of partitions. An
instruction of the whole micro-batch that names the parts gets them joined. This holds for tensors [sequence, batch, hidden];
routed rows are not ordered by sample, so each part of them is read and written by its own name.
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
        """The tensor that the instruction reads under the names that begin with `stem`; None if it reads no such buffer."""
        names = [name for name in instruction.reads if stem_of(name) == stem]
        if not names:
            return None
        tensors = [self._tensors[name] for name in names]
        joined = torch.cat(tensors, dim=BATCH) if len(tensors) > 1 else tensors[0]
        # A transfer's partition numbers a piece of the boundary tensor, not a part of the batch: its region says which piece.
        is_cut = bool(instruction.partition) and instruction.kind != "point-to-point"
        if not is_cut or (len(names) == 1 and is_part(names[0])):
            return joined
        return joined.chunk(self.partitions(instruction), dim=BATCH)[instruction.partition[0]]

    def read_each(self, instruction: Instruction, stem: str) -> list[Tensor]:
        """Every buffer that the instruction reads under the names that begin with `stem`, uncut, in the order of the names."""
        return [self._tensors[name] for name in instruction.reads if stem_of(name) == stem]

    def filled_by_pieces(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor that the pieces of a buffer fill as they arrive; `make` allocates it at the first piece."""
        if name not in self._tensors:
            self._tensors[name] = make()
        return self._tensors[name]

    def write(self, instruction: Instruction, stem: str, tensor: Tensor | None) -> None:
        """Store a result under the instruction's name that begins with `stem`; without a tensor the name stays unset."""
        if tensor is not None:
            self.write_each(instruction, stem, [tensor])

    def write_each(self, instruction: Instruction, stem: str, tensors: Sequence[Tensor]) -> None:
        """Store one tensor under each of the instruction's names that begin with `stem`, in their order."""
        names = [name for name in instruction.writes if stem_of(name) == stem]
        self._tensors.update(zip(names, tensors, strict=True))

    def add(self, instruction: Instruction, stem: str, gradient: Tensor | None) -> None:
        """Add to a gradient, part by part if it is stored in parts; the first one is stored."""
        names = [name for name in instruction.writes if stem_of(name) == stem]
        if gradient is None:
            return
        for name, part in zip(names, gradient.chunk(len(names), dim=BATCH), strict=True):
            self._tensors[name] = self._tensors[name] + part if name in self._tensors else part

    def replace(self, name: str, by: Callable[[Tensor], Tensor]) -> None:
        """Replace a buffer's tensor by a function of it."""
        self._tensors[name] = by(self._tensors[name])

    def named(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors stored under these names."""
        return [self._tensors[name] for name in names if name in self._tensors]

    def drop(self, name: str) -> None:
        """Free a buffer nobody reads any more."""
        self._tensors.pop(name, None)


def is_part(name: str) -> bool:
    """Whether a name is that of one partition."""
    return parse_buffer(name).partition is not None
