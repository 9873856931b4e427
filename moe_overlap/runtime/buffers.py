"""The buffers of one step, by the names of the instruction list, and the batch parts an instruction sees of them.

A micro-batch may be cut along its samples. An instruction of partition p that names a whole buffer sees the p-th part of it;
a whole instruction that names the parts sees them joined. Tensors are [sequence, batch, hidden].
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from moe_overlap.plan.instructions import Instruction

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
        """What the instruction reads under the names that begin with `stem`; None where it reads no such buffer."""
        names = [name for name in instruction.reads if stem_of(name) == stem]
        if not names:
            return None
        if len(names) > 1:
            return torch.cat([self._tensors[name] for name in names], dim=BATCH)
        tensor = self._tensors[names[0]]
        if instruction.partition and not _is_part(names[0]):
            return tensor.chunk(self.partitions(instruction), dim=BATCH)[instruction.partition[0]]
        return tensor

    def write(self, instruction: Instruction, stem: str, tensor: Tensor | None) -> None:
        """Store the result under the name the instruction gives it; names without a tensor stay unset."""
        names = [name for name in instruction.writes if stem_of(name) == stem]
        if not names or tensor is None:
            return
        if len(names) > 1:
            for name, part in zip(names, tensor.chunk(len(names), dim=BATCH), strict=True):
                self._tensors[name] = part
        elif instruction.partition and not _is_part(names[0]):
            self._write_part(names[0], tensor, instruction)
        else:
            self._tensors[names[0]] = tensor

    def _write_part(self, name: str, part: Tensor, instruction: Instruction) -> None:
        count = self.partitions(instruction)
        if name not in self._tensors:
            shape = list(part.shape)
            shape[BATCH] *= count
            self._tensors[name] = part.new_zeros(shape)
        self._tensors[name].chunk(count, dim=BATCH)[instruction.partition[0]].copy_(part)

    def add(self, instruction: Instruction, stem: str, gradient: Tensor | None) -> None:
        """Add to a gradient that an earlier instruction wrote, or store it when it is the first."""
        name = next((name for name in instruction.writes if stem_of(name) == stem), None)
        if name is None or gradient is None:
            return
        if name in self._tensors:
            self._tensors[name] = self._tensors[name] + gradient
        else:
            self._tensors[name] = gradient

    def drop(self, name: str) -> None:
        """Free a buffer nobody reads any more."""
        self._tensors.pop(name, None)


def stem_of(name: str) -> str:
    """`a.L3.m0.p1` -> `a.L3`."""
    return re.sub(r"(\.m\d+)?(\.p\d+)?$", "", name)


def _is_part(name: str) -> bool:
    return re.search(r"\.p\d+$", name) is not None
