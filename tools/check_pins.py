"""Fail if on a supported Python no set of packages satisfies setup.py, constraints.txt and the Makefile's torch.

    .venv/bin/python tools/check_pins.py "torch==2.13.0"

For every Python of PYTHONS, pip resolves the packages from the package index, without local wheels, and downloads only their
metadata. A CPU build of torch depends on fewer packages, so it resolves if the CUDA build does. Without access to the index the
check prints that it is skipped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "megatron-moe-overlap"
PYTHONS = ("3.11", "3.12", "3.13")
"""Those of setup.py's `python_requires`."""
PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in range(5, 37)), "manylinux2014_x86_64", "manylinux2010_x86_64")
"""The wheels of Debian 12 and later, as pip names what such a machine accepts: glibc 2.36 and all before."""
INDEX = "https://pypi.org/simple"
REACH_SECONDS = 15.0


def requirements() -> list[str]:
    """The requirements of a developer's installation: `install_requires` and `dev` of setup.py."""
    declared = [line.partition(";") for line in requires(PROJECT) or ()]
    return [name.strip() for name, _, marker in declared if "extra" not in marker or "dev" in marker]


def index_environment() -> dict[str, str]:
    """The environment of a pip that knows the index, and no wheels or settings of this machine."""
    local = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX")
    return {name: value for name, value in os.environ.items() if name not in local} | {"PIP_CONFIG_FILE": os.devnull}


def why_unreachable(environment: Mapping[str, str]) -> str | None:
    """Why the index does not answer; None if it does."""
    try:
        with urllib.request.urlopen(f"{environment.get('PIP_INDEX_URL', INDEX)}/pip/", timeout=REACH_SECONDS):
            return None
    except (urllib.error.URLError, OSError) as error:
        return str(error)


def resolve(python: str, torch: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start pip's resolution for one Python; `log` takes what it writes."""
    command = [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--progress-bar", "off"]
    command += ["--use-feature", "fast-deps", "--only-binary", ":all:", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    # pip requires a target when it resolves for another machine; nothing is written there.
    command += ["--target", str(log.parent), "--constraint", str(ROOT / "constraints.txt")]
    full_command = [*command, *torch.split(), *requirements()]
    with log.open("wb") as file:
        return subprocess.Popen(full_command, env=dict(environment), stdout=file, stderr=subprocess.STDOUT)


def conflict(log: str) -> list[str]:
    """The lines of pip's output on packages that exclude each other, without its advice."""
    _, _, cause = log.partition("The conflict is caused by:\n")
    named = cause.partition("\n\n")[0].splitlines()
    return [line.strip() for line in named] or [line for line in log.splitlines() if line.startswith("ERROR:")]


def main(argv: Sequence[str]) -> int:
    """Resolve for all Pythons at the same time, because they wait for the network."""
    (torch,) = argv
    environment = index_environment()
    if reason := why_unreachable(environment):
        print(f"pins: not checked: the package index does not answer ({reason})")
        return 0
    # `make check` ends this process where another check fails.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        logs = {python: Path(folder, f"{python}.log") for python in PYTHONS}
        started = {python: resolve(python, torch, environment, logs[python]) for python in PYTHONS}
        for process in started.values():
            ended.callback(process.kill)
        failed = [python for python, process in started.items() if process.wait()]
        for python in failed:
            print(f"pins: Python {python}: {torch}, setup.py and constraints.txt exclude each other:")
            print("\n".join(f"  {line}" for line in conflict(logs[python].read_text(errors="replace"))))
    if not failed:
        print(f"pins: {torch}, setup.py and constraints.txt agree on Python {', '.join(PYTHONS)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
