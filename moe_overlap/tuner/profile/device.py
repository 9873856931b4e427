"""The device of this machine, as measurements name it. No torch: a GPU is asked through its driver's tool."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.profile.database import Device

KINDS = ("cpu", "cuda")


def this_device(kind: str | None = None) -> Device:
    """The device that ranks of this machine compute on.

    Args:
        kind: cpu or cuda; default cuda where there is a GPU.
    Raises:
        ConfigError: no such device here.
    """
    if kind not in (None, *KINDS):
        raise ConfigError("--device", kind, "is no kind of device", f"use {' or '.join(KINDS)}")
    version = importlib.metadata.version("torch")
    gpu = _gpu_name() if kind != "cpu" else None
    if kind == "cuda" and gpu is None:
        raise ConfigError("--device", "cuda", "this machine has no GPU that nvidia-smi lists", "use --device cpu")
    if gpu is not None:
        return Device("cuda", gpu, 1, version)
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return Device("cpu", _cpu_name(), threads, version)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    names = done.stdout.strip().splitlines()
    return names[0].strip() if done.returncode == 0 and names else None
