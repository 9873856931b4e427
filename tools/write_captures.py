"""Record the operators of the shipped models for a wheel, whose users may predict and search without torch: `make wheel`.

    .venv/bin/python tools/write_captures.py [MODEL ...]

Every model is predicted under its own layout, and searched on GPUS of a type; what these record is written beside the code
(`moe_overlap/tuner/capture/shipped`, not in git), with the versions of the libraries. Other layouts, flags that change operators,
and other versions of the libraries need torch and megatron-core.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import smallest_world
from moe_overlap.commands import autotune, predict
from moe_overlap.describe.shipped import shipped_models
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.capture.request import SHIPPED, VERSIONS, versions

GPUS = 64
LARGE = {"deepseek-v3": 512, "deepseek-v3-mtp": 512, "qwen3-235b-a22b": 256}
"""Models that need more GPUs -> their number."""
NOT_SEARCHED = ("mist-", "alpa-", "gpt2-")
"""Beginnings of models of papers: predicted only."""


def record(name: str) -> None:
    """Record one model into the cache.

    Raises:
        RuntimeError: a command failed; its line is on stderr.
    """
    options = ["--model", name, "--gpu", "H100", "--num-gpus"]
    world = smallest_world(parse(["--model", name]).config)
    commands = [(predict.main, [*options, str(world if world <= 8 else -8 * (-world // 8))])]
    if not name.startswith(NOT_SEARCHED):
        commands.append((autotune.main, [*options, str(LARGE.get(name, GPUS))]))
    for main, arguments in commands:
        with contextlib.redirect_stdout(sys.stderr):
            status = main(arguments)
        if status:
            raise RuntimeError(f"{name}: {main.__module__} ended with status {status}")


def main(argv: Sequence[str]) -> int:
    """Record the named models, or all that are not tiny, in place of earlier captures; a run that fails leaves those.

    Raises:
        RuntimeError: a command failed.
    """
    names = argv or [name for name in shipped_models() if not name.startswith("tiny-")]
    with tempfile.TemporaryDirectory(prefix=f"{SHIPPED.name}.", dir=SHIPPED.parent) as folder:
        earlier = Path(folder) / "earlier"
        os.environ["XDG_CACHE_HOME"] = folder
        # Out of sight: earlier captures would answer, and not be recorded again.
        if SHIPPED.exists():
            SHIPPED.rename(earlier)
        try:
            for name in names:
                record(name)
            (cache_folder() / VERSIONS).write_text(json.dumps(dict(versions())) + "\n", encoding="utf-8")
            cache_folder().rename(SHIPPED)
        except BaseException:
            if earlier.exists():
                earlier.rename(SHIPPED)
            raise
    count = len(list(SHIPPED.iterdir())) - 1
    print(f"{SHIPPED}: {count} captures of {len(names)} models")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
