"""Both commands of the README on a machine that has nothing of ours: Debian's stable release in a folder, with its own Python.

The folder is made by debootstrap; network, names and certificates are this machine's, no package or cache is. It downloads about
4 GB and writes twice as many. `PYTHONPATH`, `PIP_*` and the like do not enter it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.program import ROOT

SUITE, MIRROR = "stable", "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,git,make,python3,python3-venv"
"""What the README tells a visitor to install, and what HTTPS needs."""
FROM_HERE = ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt")
NEEDED_BYTES = 25 * 2**30

pytestmark = [pytest.mark.slow, pytest.mark.sweep]


def lacking() -> str:
    """Why this machine cannot make such a folder; empty where it can."""
    if os.geteuid() != 0:
        return "needs root"
    return "" if shutil.which("debootstrap") else "needs debootstrap"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root folder of a bare Debian, with a clone of this project in /project."""
    root = tmp_path_factory.mktemp("debian")
    if shutil.disk_usage(root).free < NEEDED_BYTES:
        pytest.skip("needs 25 GiB of disk")
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), MIRROR],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        shutil.rmtree(root)
        pytest.skip(f"debootstrap failed: {made.stdout.splitlines()[-1]}")
    for name in FROM_HERE:
        shutil.copyfile(f"/{name}", root / name)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / "project" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / "project" / name)
    mounts = [("proc", "proc"), ("sysfs", "sys"), ("tmpfs", "dev/shm")]
    with contextlib.ExitStack() as mounted:
        for kind, name in mounts:
            (root / name).mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", kind, kind, str(root / name)], check=True)
            mounted.callback(subprocess.run, ["umount", "--lazy", str(root / name)])
        commit = "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm bare"
        inside(root, ["sh", "-c", commit])
        yield root
    shutil.rmtree(root)


def inside(root: Path, command: Sequence[str]) -> str:
    """Run a command in /project of the machine; what it prints, errors included."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    words = ["chroot", str(root), "sh", "-c", 'cd /project && exec "$@"', "sh", *command]
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout[-20_000:]
    return ended.stdout


@pytest.mark.skipif(lacking() != "", reason=lacking())
def test_both_commands_of_the_readme(machine: Path) -> None:
    for command, expected in (("train", r"same training: over \d+ steps"), ("test", r"\d+ passed, \d+ skipped in")):
        started = time.monotonic()
        printed = inside(machine, ["make", command])
        assert re.search(expected, printed), printed[-20_000:]
        size = subprocess.run(["du", "-sm", str(machine / "project/.venv")], capture_output=True, text=True)
        minutes = (time.monotonic() - started) / 60
        print(f"make {command}: {minutes:.1f} minutes, .venv {int(size.stdout.split()[0]):,} MiB")
