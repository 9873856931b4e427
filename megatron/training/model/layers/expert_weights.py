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
import torch.nn.functional as F
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


def joined_with_gradients(weights: Sequence[Tensor], ends_E: Tensor) -> Tensor:
    """`joined` with gradients: each weight gets its part of the gradient, which is zero for an expert without rows.

    Args:
        ends_E: end of each expert's rows.
    """
    result: Tensor = _Joined.apply(*weights)
    if result.requires_grad and leaves_gradients_unwritten(result.device):
        # A copy: autograd forbids a hook to change its argument.
        result.register_hook(lambda gradient_EOI: gradient_EOI.masked_fill(_without_rows(ends_E), 0.0))
    return result


def expert_gradients(gradient_TO: Tensor, rows_TI: Tensor, ends_E: Tensor) -> Tensor:
    """[E, O, I] the weight gradients of a grouped product; zero for an expert without rows."""
    gradient_EOI = F.grouped_mm(gradient_TO.t(), rows_TI, offs=ends_E)
    if leaves_gradients_unwritten(gradient_EOI.device):
        gradient_EOI.masked_fill_(_without_rows(ends_E), 0.0)
    return gradient_EOI


def leaves_gradients_unwritten(device: torch.device) -> bool:
    """Whether torch's kernel may leave the weight gradient of an expert without rows unwritten: on GPUs of compute capability 10.

    Source: https://github.com/pytorch/pytorch/issues/172439, open. Not run on hardware.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _without_rows(ends_E: Tensor) -> Tensor:
    """[E, 1, 1] whether an expert has no rows, on the device: the host does not wait."""
    return (ends_E.diff(prepend=ends_E.new_zeros(1)) == 0)[:, None, None]
