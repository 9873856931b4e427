"""On one or more GPUs: every path that a GPU takes has the CPU's losses. `python -m pytest tests/gpu`

Without a GPU each case is skipped by its name; so are cases that need more GPUs than there are. `MOE_OVERLAP_GPU_TESTS=cpu` runs
all of them with CPUs in both places, which shows that this program works, not that a GPU does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_overlap.commands.compare import read_losses, relative_differences
from tests.end_to_end.program import STANDALONE
from tests.gpu.cases import CASES, Case
from tests.gpu.train import log_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
REHEARSED = os.environ.get("MOE_OVERLAP_GPU_TESTS") == "cpu"
DEVICES = 4 if REHEARSED else torch.cuda.device_count()
LAUNCH_SECONDS = 300
"""All cases of one number of ranks."""


def launch(folder: Path, device: str, cases: list[Case]) -> str:
    """Train cases of as many ranks in one launch; what it said where it failed."""
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    # Transformer Engine multiplies fp32 in TF32, of 10 bits, unless cuBLAS is told not to.
    hidden |= {"NVIDIA_TF32_OVERRIDE": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", *STANDALONE, "--nproc-per-node", str(cases[0].ranks)]
    command += ["-m", "tests.gpu.train", str(folder), str(STEPS), *(case.name for case in cases)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | hidden
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LAUNCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{cases[0].ranks} ranks on {device}: no end within {LAUNCH_SECONDS} s"
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def train_all(home: Path, device: str, cases: list[Case]) -> dict[str, str]:
    """Train cases of as many ranks: behind one that fails the launch ends, and another one trains those behind it.

    Returns:
        name -> what was said, for each case that failed.
    """
    said = {}
    while cases:
        error = launch(home, "cpu" if REHEARSED else device, cases)
        if not error:
            break
        kind = "cpu" if REHEARSED else device
        failed = next(index for index, case in enumerate(cases) if not is_complete(log_of(home, kind, case)))
        said[cases[failed].name] = f"{device}: {error}"
        cases = cases[failed + 1 :]
    return said


def is_complete(log: Path) -> bool:
    """Whether a case has reached its last step."""
    return log.exists() and len(log.read_text().splitlines()) == STEPS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with one of losses for each device, and what was said of cases that failed."""
    folder, said = tmp_path_factory.mktemp("gpu"), {}
    for device in ("cpu", "cuda"):
        (folder / device).mkdir()
    (folder / "cuda" / "weights").symlink_to(folder / "cpu" / "weights")
    for ranks in sorted({case.ranks for case in CASES if case.ranks <= DEVICES}):
        for device in ("cpu", "cuda"):
            said |= train_all(folder / device, device, [case for case in CASES if case.ranks == ranks])
    return folder, said


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_are_those_of_the_cpu(case: Case, request: pytest.FixtureRequest) -> None:
    if case.ranks > DEVICES:
        pytest.skip(f"{case.name} needs {case.ranks} GPUs, this machine has {DEVICES}")
    folder, said = request.getfixturevalue("trained")
    assert case.name not in said, said[case.name]
    by_cpu = read_losses(log_of(folder / "cpu", "cpu", case))
    by_gpu = read_losses(log_of(folder / "cuda", "cpu" if REHEARSED else "cuda", case))
    assert len(by_cpu) == STEPS
    differences = relative_differences(by_cpu, by_gpu)
    assert len(differences) == STEPS and max(differences.values()) <= case.tolerance, differences
