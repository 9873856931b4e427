"""The weights of a rank's experts as one tensor, without a copy if they are adjacent in memory.

A grouped product takes [E, O, I]. The experts' weights are separate parameters, and DDP moves them into its buffer, the last
registered first. `AscendingExperts` yields them last expert first, so that they are in ascending order there; between two
weights of one kind are those of the other kinds, always equally many. `joined` then describes them in place. They are copied if
a gradient bucket ends between two experts, and in a model without DDP.

Legend: E experts of this rank, O output width, I input width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class AscendingExperts(torch.nn.ModuleList):
    """The experts, by their numbers; a walk through all modules or parameters meets the last expert first."""

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield names and modules as any module does, with the children in reverse."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, expert in reversed(self._modules.items()):
            assert expert is not None
            yield from expert.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """[E, O, I] of E weights [O, I]: in place if they lie at equal distances, else a copy. For use without gradients."""
    first, storage = weights[0], weights[0].untyped_storage()
    step = weights[1].storage_offset() - first.storage_offset() if len(weights) > 1 else first.numel()
    start = first.storage_offset()
    for place, weight in enumerate(weights):
        same = weight.untyped_storage()._cdata == storage._cdata and weight.stride() == first.stride()
        if not same or weight.storage_offset() != start + place * step or step < first.numel():
            return torch.stack(list(weights))
    # Not as a view of the first weight: the result extends beyond it.
    return first.new_empty(0).set_(storage, start, (len(weights), *first.shape), (step, *first.stride()))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        return joined(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.unbind()


def joined_with_gradients(weights: Sequence[Tensor]) -> Tensor:
    """`joined` with gradients: each weight gets its part of the gradient."""
    result: Tensor = _Joined.apply(*weights)
    return result
