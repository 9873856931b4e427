"""Make the environment that every target of the Makefile uses. A first step that fails says in one line what to do.

    python3 tools/install.py .venv "torch==2.13.0"

1. Check the needs of the later steps: Python's venv, and disk space.
2. Make the environment, or reuse it if an earlier installation stopped in the middle.
3. Install the chosen torch with pip, then this project with its tools. pip's output is shown; if it fails, PROBLEMS names the
   reason and the fix.

Only the standard library is imported: nothing else is installed yet. The Makefile has checked Python's release.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Only the folder of a script is on its path: the packages are one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.describe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
NEEDED_BYTES = {"cpu": 3 * GIB, "cuda": 8 * GIB}
"""The disk space of an installation at its peak, by the build of torch: CUDA's libraries are 4 GiB of it."""
DEBIAN = "on Debian and Ubuntu: apt install"
PROBLEMS = (
    (
        r"No space left on device|Errno 28",
        "the disk is full",
        "free 8 GB here, or name a CPU build of torch by make TORCH=…",
    ),
    (
        r"command '\S*(gcc|g\+\+|cc|clang)\S*' failed|No such file or directory: '\S*(gcc|g\+\+|cc|clang)'|Python\.h: No such",
        "a package has no wheel for this machine, and no compiler builds it",
        f"{DEBIAN} build-essential python3-dev",
    ),
    (
        r"ResolutionImpossible|conflicting dependencies",
        "these releases exclude each other",
        "pip's lines above name them; drop TORCH=…, or install what constraints.txt pins",
    ),
    (
        r"NewConnectionError|NameResolutionError|name resolution|ConnectTimeout|Network is unreachable|ProxyError|SSLError",
        "the package index cannot be reached",
        "connect this machine, set https_proxy, or name a mirror by PIP_INDEX_URL",
    ),
    (
        r"No matching distribution found",
        "the package index has no such release for this Python and machine",
        "name another one by make TORCH=… or PYTHON=…",
    ),
)
"""Patterns in the output of a failed pip, each with rule and fix; the first match counts."""


def main(argv: Sequence[str]) -> int:
    """Install; returns 0, or 2 after one line with the reason of a failure."""
    folder, torch = Path(argv[0]), argv[1]
    try:
        require_venv()
        require_room(shutil.disk_usage(folder.resolve().parent).free, torch)
        run_step("python -m venv", [sys.executable, "-P", "-m", "venv", str(folder)])
        pip = [str(folder / "bin/python"), "-P", "-m", "pip", "install", "--disable-pip-version-check"]
        pinned = [*pip, "--constraint", str(ROOT / "constraints.txt")]
        # TORCH may bring pip's own words: torch==2.11.0 --index-url https://…
        run_step("pip install torch", [*pinned, *torch.split()])
        run_step("pip install .[dev]", [*pinned, "--editable", f"{ROOT}[dev]"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def require_venv() -> None:
    """Refuse a Python whose distribution has venv, or the pip that venv installs, in a separate package."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError("python3", sys.executable, f"lacks the module {module}", f"{DEBIAN} python3-venv")


def require_room(free_bytes: int, torch: str) -> None:
    """Refuse a disk that the installation would fill."""
    build = "cpu" if "cpu" in torch else "cuda"
    if free_bytes < NEEDED_BYTES[build]:
        free, needed = (f"{count / GIB:.1f} GiB" for count in (free_bytes, NEEDED_BYTES[build]))
        raise ConfigError(
            "the disk", f"has {free} free here", f"an installation takes up to {needed}", "free some, or use another"
        )


def run_step(name: str, command: Sequence[str]) -> None:
    """Run one step; its output and errors are shown as they come.

    Raises:
        ConfigError: the step failed.
    """
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode:
        raise reason_of_failure(name, "".join(lines))


def reason_of_failure(name: str, errors: str) -> ConfigError:
    """One line about a failed step, from its stderr."""
    for pattern, rule, fix in PROBLEMS:
        if re.search(pattern, errors):
            return ConfigError(name, "", rule, fix)
    return ConfigError(name, "", "failed", "the lines above say why; then run make again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
