"""Every test of one pytest process sees megatron-core as a run does: imported after the CPU stand-ins, if those are needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.training import cpu_backend
from megatron.training.cli.start import quiet_libraries

quiet_libraries()
if cpu_backend.is_needed():
    cpu_backend.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide tests between workers as tests/workers.py says; without workers pytest-xdist is not needed."""
    from tests.workers import Workers

    return Workers(config, log)


@pytest.fixture(scope="module", autouse=True)
def _leave_no_process_group() -> Iterator[None]:
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _leave_no_losses_of_routers() -> Iterator[None]:
    """What megatron-core keeps for the whole process: losses by layer of the first model, and a scale whose shape a run sets."""
    yield
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
