"""A plan may have what the driver, CUDA and NCCL leave of a GPU's memory, in predictions and in searches alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_overlap.describe.cluster import GIB, Cluster, Measured, known_gpus, shipped_cluster
from moe_overlap.tuner.cost.hardware import shipped_constants
from moe_overlap.tuner.cost.library_memory import MIB, library_bytes, reported_bytes, reserved_bytes
from moe_overlap.tuner.cost.machine import machine_of
from tests.unit.tuner.cost.test_cost_predict import predicted

ROOT = Path(__file__).resolve().parents[4]


def measured(device: str) -> Cluster:
    """Eight measured H100, or their host."""
    facts = Measured(database="here.json", device=device, latency_seconds=1e-5, constants={})
    return dataclasses.replace(shipped_cluster("H100", 8), measured=facts)


def test_cuda_reports_less_than_the_data_sheet() -> None:
    """An L4 of 24 GiB has 21.95; where nobody has read it, 1 % less; a measured machine was read."""
    reported = {name: reported_bytes(shipped_cluster(name, 8)) / GIB for name in ("L4", "H100", "H200")}
    assert reported == pytest.approx({"L4": 21.95, "H100": 79.11, "H200": 0.99 * 141})
    assert reported_bytes(measured("cuda")) == 80 * GIB
    for name in known_gpus():
        cluster = shipped_cluster(name, 8)
        share = reported_bytes(cluster) / (cluster.group_of(0).gpu.memory_gib * GIB)
        assert 0.9 < share < 1.0, name


def test_libraries_hold_more_where_more_peers_have_buffers() -> None:
    def held(gpu: str, gpus: int, is_moe: bool = False) -> float:
        return library_bytes(shipped_cluster(gpu, gpus), is_moe) / MIB

    assert held("H100", 1) == held("H100", 1, is_moe=True) == 426
    # Three communicators with two connections of 12 MiB in each channel.
    assert held("H100", 8) == 426 + 3 * 2 * 24 * 12
    assert held("L4", 8) == 426 + 3 * 2 * 4 * 12
    assert held("H100", 16) - held("H100", 8) == 512
    # All-to-alls: a buffer of 12 MiB in each of 32 channels for each of seven peers in the node.
    assert held("H100", 64, is_moe=True) - held("H100", 64) == 7 * 32 * 12
    assert held("L4", 64, is_moe=True) == held("L4", 64)
    assert (
        library_bytes(measured("cpu"), True) == 0
        and library_bytes(measured("cuda"), True) == held("H100", 8, True) * MIB
    )


def test_the_pages_name_what_libraries_hold() -> None:
    """docs/predicting.md and the changelog give figures of `library_bytes`."""

    def gib(gpu: str, gpus: int, is_moe: bool = False) -> str:
        return f"{library_bytes(shipped_cluster(gpu, gpus), is_moe) / GIB:.1f}"

    page = " ".join((ROOT / "docs" / "predicting.md").read_text(encoding="utf-8").split())
    on_h100 = f"{gib('H100', 64)} for a dense and {gib('H100', 64, True)} for an MoE model on several nodes of H100"
    on_l4 = f"{gib('L4', 8)} on one node of L4 and {gib('L4', 64)} on several"
    assert f"{gib('H100', 1)} GiB on one GPU, {on_h100}, {on_l4}" in page
    most = max(gib(gpu, 64, True) for gpu in known_gpus())
    assert f"({gib('H100', 1)} to {most} GiB)" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_predictions_and_searches_have_the_same_capacity() -> None:
    cluster = shipped_cluster("H100", 32)
    prediction = predicted(cluster=cluster)
    reserved = reserved_bytes(cluster, is_moe=True)
    assert prediction.available_bytes == prediction.capacity_bytes - reserved < 75 * GIB
    machine, _ = machine_of(cluster, shipped_constants(), is_moe=True)
    assert machine.usable_bytes * machine.memory.high == pytest.approx(prediction.available_bytes)


@pytest.mark.parametrize("spare, fits", [(1, True), (-1, False)])
def test_the_verdict_counts_what_libraries_hold(spare: int, fits: bool) -> None:
    prediction = predicted()
    capacity = prediction.fullest.high_bytes + prediction.reserved_bytes + spare
    assert dataclasses.replace(prediction, capacity_bytes=capacity).fits == fits
