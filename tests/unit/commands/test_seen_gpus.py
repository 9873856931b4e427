"""Whether a machine has a GPU, from the devices of its driver: on Linux, and in WSL2, which has one of Windows instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.cli import launch
from megatron.training.cli.start import cuda_is_there, numbered_gpus
from moe_overlap.describe.errors import ConfigError

WSL = ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")


@pytest.mark.parametrize(
    ("files", "is_there", "number"),
    [
        ((), False, 0),
        (("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), True, 2),
        (("dev/nvidiactl",), False, 0),
        (WSL, True, 0),
        (("dev/dxg", "usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1"), True, 0),
        # A GPU of another maker.
        (("dev/dxg", "usr/lib/wsl/lib/libd3d12.so"), False, 0),
    ],
)
def test_devices(tmp_path: Path, files: tuple[str, ...], is_there: bool, number: int) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert (cuda_is_there(tmp_path), numbered_gpus(tmp_path)) == (is_there, number)


def test_a_rank_for_each_gpu_needs_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cuda_is_there", lambda: True)
    monkeypatch.setattr(launch, "numbered_gpus", lambda: 0)
    with pytest.raises(ConfigError) as refused:
        launch._processes("gpu", {})
    assert str(refused.value) == "--nproc-per-node gpu: WSL2 does not number its GPUs; give a number"
    assert launch._processes("gpu", {"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    monkeypatch.setattr(launch, "cuda_is_there", lambda: False)
    with pytest.raises(ConfigError, match="no GPU is visible here"):
        launch._processes("gpu", {})
