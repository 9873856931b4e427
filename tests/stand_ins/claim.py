"""Makes this process believe in a GPU with apex's kernel, whose stand-in lies beside this file."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.tensor_parallel import layers

from megatron.training import optimizer
from megatron.training.cli.fused_gradients import KERNEL
from megatron.training.cli.start import this_machine


def claim_kernel(patch: pytest.MonkeyPatch) -> list[int]:
    """Install the stand-in where megatron-core looks for the kernel; the list gets an entry for every product it adds."""
    patch.syspath_prepend(str(Path(__file__).resolve().parent))
    stand_in = importlib.import_module(KERNEL)
    calls: list[int] = []

    def counted(kernel: Callable[..., None]) -> Callable[..., None]:
        def add(*tensors: Any) -> None:
            calls.append(1)
            kernel(*tensors)

        return add

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    kernels = SimpleNamespace(**{name: counted(getattr(stand_in, name)) for name in names})
    patch.setattr(layers, KERNEL, kernels, raising=False)
    patch.setattr(optimizer, "machine_of_process", lambda: dataclasses.replace(this_machine(), cuda=True))
    return calls
