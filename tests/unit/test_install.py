"""The first steps on a strange machine: what stops an installation, and what the check of the pins says of a conflict."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.shipped import shipped_models
from tools import check_pins, install, write_captures

ROOT = Path(__file__).resolve().parents[2]
FAILURES = {
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError(\"HTTPSConnection(host="
    "'pypi.org'): Failed to establish a new connection: [Errno -3] Temporary failure in name resolution\")': /simple/torch/\n"
    "ERROR: No matching distribution found for torch==2.13.0": "the package index cannot be reached",
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": "the disk is full",
    "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io": "these releases exclude each other",
    "error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory": "no compiler builds it",
    "ERROR: No matching distribution found for torch==9.9": "has no such release for this Python",
    "ERROR: Exception:": "failed; the lines above say why",
}
CONFLICT = """\
Collecting torch==2.13.0
ERROR: Cannot install torch==2.13.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    torch 2.13.0 depends on triton==3.7.1; platform_system == "Linux"
    The user requested (constraint) triton==3.6.0

To fix this you could try to:
"""


@pytest.mark.parametrize("errors", FAILURES)
def test_what_pip_writes_becomes_one_line_with_a_fix(errors: str) -> None:
    line = str(install.reason_of_failure("pip install torch", errors))
    assert FAILURES[errors] in line and ";" in line and "\n" not in line


def test_a_step_that_fails_shows_its_errors_and_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    source = "import sys; print('out'); sys.stderr.write('[Errno 28] No space left on device\\n'); sys.exit(1)"
    with pytest.raises(ConfigError, match=r"^pip install torch: the disk is full; free 8 GB here"):
        install.run_step("pip install torch", [sys.executable, "-c", source])
    assert capfd.readouterr() == ("out\n", "[Errno 28] No space left on device\n")


def test_room_is_asked_for_by_the_build_of_torch() -> None:
    install.require_room(8 * install.GIB, "torch==2.13.0")
    install.require_room(3 * install.GIB, "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu")
    with pytest.raises(ConfigError, match=r"the disk has 3\.0 GiB free here: an installation takes up to 8\.0 GiB"):
        install.require_room(3 * install.GIB, "torch==2.13.0")


def test_a_python_without_venv_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Debian keeps `ensurepip`, without which an environment has no pip, in a package of its own."""
    found = install.importlib.util.find_spec
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name))
    assert install.main(["nowhere/.venv", "torch"]) == 2
    line = (
        f"error: python3 {sys.executable}: lacks the module ensurepip; on Debian and Ubuntu: apt install python3-venv\n"
    )
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("python", "said"),
    [("no-such-python", "is not installed"), ("./old", "is Python 3.8.18"), ("./new", "is Python 3.14.0")],
)
def test_make_names_the_pythons_that_it_takes(python: str, said: str, tmp_path: Path) -> None:
    for name, version in (("old", (3, 8, 18)), ("new", (3, 14, 0))):
        # Stands in for another Python: it answers -V, and runs `-c` with that version.
        text = ".".join(map(str, version))
        (tmp_path / name).write_text(
            f'#!/bin/sh\n[ "$1" = -V ] && echo Python {text} && exit\n'
            f'exec {sys.executable} -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"\n'
        )
        (tmp_path / name).chmod(0o755)
    for name in ("Makefile", "setup.py", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    ended = subprocess.run(["make", "check", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    first, second = ended.stderr.splitlines()
    assert first.startswith(f"error: PYTHON {python}: {said}; use Python 3.11, 3.12 or 3.13: ") and "Error 2" in second


def test_a_wheel_is_built_without_files_of_an_earlier_build() -> None:
    ended = subprocess.run(["make", "-n", "wheel"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.index("rm -rf build\n") < ended.stdout.index("pip wheel ")


def test_pythons_and_torch_are_said_alike() -> None:
    setup, readme = (ROOT / "setup.py").read_text(), (ROOT / "README.md").read_text()
    assert 'python_requires=">=3.11,<3.14"' in setup and check_pins.PYTHONS == ("3.11", "3.12", "3.13")
    for release in check_pins.PYTHONS:
        assert f'"Programming Language :: Python :: {release}"' in setup
    assert "Python 3.11, 3.12 or 3.13" in readme and "Python 3.11, 3.12 or 3.13" in (ROOT / "Makefile").read_text()


def test_a_conflict_is_shown_by_its_packages() -> None:
    assert check_pins.conflict(CONFLICT) == [
        'torch 2.13.0 depends on triton==3.7.1; platform_system == "Linux"',
        "The user requested (constraint) triton==3.6.0",
    ]
    assert check_pins.conflict("ERROR: No matching distribution found for torch==9") == [
        "ERROR: No matching distribution found for torch==9"
    ]


def test_pins_are_resolved_without_wheels_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    environment = check_pins.index_environment()
    assert "PIP_FIND_LINKS" not in environment and environment["PIP_CONFIG_FILE"] == "/dev/null"
    assert {"torch<2.14,>=2.11", "pytest-xdist"} <= set(check_pins.requirements())
    assert not any(name.startswith("transformer-engine") for name in check_pins.requirements())


def test_pins_are_not_checked_where_no_index_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert check_pins.main(["torch==2.13.0"]) == 0
    assert capsys.readouterr().out.startswith("pins: not checked: the package index does not answer (")


def test_predictions_are_installed_without_torch_and_make_installs_all() -> None:
    """`make` installs `.[dev]`, which has what training has."""
    source = (ROOT / "setup.py").read_text()
    (needed,) = re.findall(r"install_requires=(\[.*\])", source)
    (train,) = re.findall(r"^TRAIN = (\[.*\])", source, re.MULTILINE)
    assert (
        "torch" not in needed and "megatron" not in needed and train == '["megatron-core==0.16.1", "torch>=2.11,<2.14"]'
    )
    assert '"train": TRAIN,' in source and re.search(r'"dev": \[\n\s+\*TRAIN,', source)
    assert "[dev]" in (ROOT / "tools/install.py").read_text()


def test_the_page_says_what_a_wheel_has_recorded() -> None:
    page = " ".join((ROOT / "docs" / "first_run.md").read_text(encoding="utf-8").split())
    papers = ", ".join(f"`{name}`" for name in write_captures.NOT_SEARCHED)
    assert f"not of papers ({papers}), on {write_captures.GPUS} GPUs" in page
    by_number: dict[int, list[str]] = {}
    for name, gpus in write_captures.LARGE.items():
        assert name in shipped_models()
        by_number.setdefault(gpus, []).append(name)
    large = ", ".join(f"{' and '.join(names)} on {gpus}" for gpus, names in by_number.items())
    assert f"GPUs ({large})." in page


def test_docker_leaves_out_what_make_creates() -> None:
    left_out = set((ROOT / ".dockerignore").read_text().split())
    assert {".git", ".venv", "build", "dist", "runs", "checkpoints"} <= left_out
