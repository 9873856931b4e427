"""Stand-in for the module that NVIDIA apex builds under this name: the same functions and positional arguments, by plain torch.

It checks what the kernel takes for granted, and multiplies in the type of the sum: nothing is rounded on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor, /) -> None:
    """Add grad_outputᵀ · input to an fp32 sum, in place."""
    _accumulate(input_TI, grad_output_TO, main_grad_OI, (torch.float32,))


def wgrad_gemm_accum_fp16(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor, /) -> None:
    """Add grad_outputᵀ · input to a sum in fp16 or bf16, in place."""
    _accumulate(input_TI, grad_output_TO, main_grad_OI, (torch.float16, torch.bfloat16))


def _accumulate(x_TI: Tensor, dy_TO: Tensor, main_OI: Tensor, sums: tuple[torch.dtype, ...]) -> None:
    assert main_OI.dtype in sums and x_TI.dtype == dy_TO.dtype, (x_TI.dtype, dy_TO.dtype, main_OI.dtype)
    assert x_TI.dim() == dy_TO.dim() == 2 and main_OI.shape == (dy_TO.shape[1], x_TI.shape[1])
    assert x_TI.is_contiguous() and dy_TO.is_contiguous() and main_OI.is_contiguous()
    main_OI.add_(dy_TO.to(main_OI.dtype).t().matmul(x_TI.to(main_OI.dtype)))
