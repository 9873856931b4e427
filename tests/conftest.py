"""Every test of one pytest process sees megatron-core as a run does: imported after the CPU stand-ins, if those are needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.training import cpu_backend
from megatron.training.quiet import quiet_libraries

quiet_libraries()
if cpu_backend.is_needed():
    cpu_backend.install()


@pytest.fixture(scope="module", autouse=True)
def _leave_no_process_group() -> Iterator[None]:
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
