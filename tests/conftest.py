"""Every test of one pytest process sees megatron-core as a run does: imported after the CPU stand-ins, if those are needed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.training import cpu_backend
from megatron.training.cli.start import quiet_libraries

quiet_libraries()
if cpu_backend.is_needed():
    cpu_backend.install()


class FailuresAtOnce:
    """Shows a failure when it happens: what pytest shows at the end is lost where a long run is stopped before."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} ({report.when})", red=True)
            self._terminal.write_line(report.longreprtext)
            self._terminal.write_line(report.capstderr)


@pytest.hookimpl(trylast=True)  # behind pytest's own, which makes the reporter
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_finish() -> None:
    """What imports have made stays: half a million objects, which every full collection would walk through."""
    gc.collect()
    gc.freeze()


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
        # Models stand in reference cycles and hold groups: without this a worker kept 865 of them, with three threads each.
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _leave_no_losses_of_routers() -> Iterator[None]:
    """Cleanup of megatron-core's process-wide values: losses by layer of the first model, and a scale whose shape a run sets."""
    yield
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.fixture
def whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may have all of a GPU's memory: for tests that choose it so that some plans fit and others do not."""
    monkeypatch.setattr("moe_overlap.tuner.cost.machine.reserved_bytes", lambda cluster, is_moe: 0)
