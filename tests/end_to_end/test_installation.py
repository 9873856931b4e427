"""A wheel and an editable install, each in a fresh environment that sees the packages installed here: nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.program import ROOT
from tests.spawn import HANGS_SECONDS

pytestmark = pytest.mark.slow

LOOK = """
import importlib, json, pkgutil, sys

class NoGpuPackages:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer_engine", "apex", "triton", "flash_attn", "cupy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoGpuPackages())
import megatron.training, moe_overlap
from moe_overlap.describe.readers.upstream_flags import load_upstream_flags
from megatron.training import cpu_backend

flags = len(load_upstream_flags())
if cpu_backend.is_needed():
    cpu_backend.install()
import megatron.core
for package in (megatron.training, moe_overlap):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
files = {name: sys.modules[name].__file__ for name in ("megatron.core", "megatron.training", "moe_overlap")}
print(json.dumps({"files": files, "flags": flags, "portion": megatron.training.PORTION}))
"""
"""Imports every module, in a process where no GPU package can be imported."""


def environment(folder: Path) -> Path:
    """A fresh environment; its interpreter finds torch and the rest where this one does, behind what is installed into it."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "installed_here.pth").write_text("\n".join(sorted(others)) + "\n")
    return folder / "bin/python"


def pip(*words: str) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", *words]
    ended = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def look(python: Path, folder: Path) -> dict[str, object]:
    """The facts that LOOK prints of an installed copy, seen from a folder that holds no sources."""
    ended = subprocess.run([python, "-W", "ignore", "-c", LOOK], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds: building leaves files behind."""
    copy = tmp_path_factory.mktemp("clone") / "project"
    anywhere = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")

    def left_out(folder: str, names: list[str]) -> set[str]:
        made_by_runs = {"checkpoints", "runs"} if Path(folder) == ROOT else set()
        return {*anywhere(folder, names), *made_by_runs}

    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


def test_wheel(sources: Path, tmp_path: Path) -> None:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "wheels"), str(sources))
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    python = environment(tmp_path / "venv")
    pip("--python", str(python), "install", "--no-deps", str(wheel))
    found = look(python, tmp_path)
    files = found["files"]
    assert isinstance(files, dict)
    assert files["megatron.training"].startswith(str(tmp_path / "venv"))
    assert files["moe_overlap"].startswith(str(tmp_path / "venv"))
    assert "site-packages/megatron/core" in files["megatron.core"]
    assert found["portion"] == "moe-overlap"
    assert isinstance(found["flags"], int) and found["flags"] > 800
    check_commands(python, tmp_path)
    check_metadata(wheel)


def check_metadata(wheel: Path) -> None:
    """The examples are inside, and torch is an extra."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    for example in ("models/mixtral-8x7b.json", "mixtral-8x7b.args", "clusters/a100.json"):
        assert f"moe_overlap/examples/{example}" in names
    assert re.search(r"^Requires-Python: (>=3.11,<3.14|<3.14,>=3.11)$", metadata, re.MULTILINE)
    assert "Description-Content-Type: text/markdown" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert needed == ["numpy", "ortools", "pandas"]


SMALL_JOB = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --num-experts 4
--expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 --bf16 --position-embedding-type rope
"""


ENTRIES = """
from importlib.metadata import distribution

for entry in distribution("megatron-moe-overlap").entry_points:
    assert callable(entry.load()), entry
    print(entry.name)
"""


def check_commands(python: Path, folder: Path) -> None:
    """Run the commands of an installation, from a folder that holds no sources: they need files beside the code.

    A prediction reads the table of GPUs and all calibration tables, and captures a model in a process of its own.
    """
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    (folder / "job.args").write_text(SMALL_JOB)

    def printed(name: str, *words: str) -> str:
        command = [python.parent / name, *words]
        ended = subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, timeout=HANGS_SECONDS)
        assert ended.returncode == 0, f"{name}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    scripts = sorted(path.name for path in python.parent.glob("moe-*"))
    assert len(scripts) == 9 and sorted(printed("python", "-W", "ignore", "-c", ENTRIES).split()) == scripts
    predicted = printed("moe-predict", "--megatron-args", "job.args", "--gpu", "H100", "--num-gpus", "8")
    assert re.search(r"^step +[\d.]+ s ± ", predicted, re.MULTILINE), predicted
    assert "2 layers, hidden 64" in printed("moe-train", "@job.args", "--dry-run")
    assert "tiny-mixtral-8x7b" in printed("moe-predict", "--list-models").splitlines()
    assert "4 layers, hidden 128" in printed(
        "moe-train", "--model", "tiny-mixtral-8x7b", "--dry-run", "--world-size", "2"
    )


def test_editable(sources: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    pip("--python", str(python), "install", "--no-deps", "--no-build-isolation", "--editable", str(sources))
    files = look(python, tmp_path)["files"]
    assert isinstance(files, dict)
    assert Path(files["megatron.training"]) == sources / "megatron/training/__init__.py"
    assert Path(files["moe_overlap"]) == sources / "moe_overlap/__init__.py"
    assert "site-packages/megatron/core" in files["megatron.core"]
