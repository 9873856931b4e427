"""Write the signatures of Transformer Engine and apex that our runs rest on.

    python -m tests.stand_ins.write_signatures --apex DIR

    --apex DIR          a checkout of https://github.com/NVIDIA/apex, with its .git
    --releases R ...    of Transformer Engine; default: those of the file
    --wheels DIR        where its wheels lie, or are put; default: a folder that is removed

pip downloads each release's wheel of pure Python, 1 MB, which needs no GPU and no compiler; nothing of it is imported. The file
is `library_signatures.json` beside this one; `tests/unit/training/test_library_signatures.py` holds calls and stand-ins to it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.stand_ins import engine
from tests.stand_ins.library_calls import APEX, ENGINE, Packages, calls, imported_names
from tests.stand_ins.library_sources import Library

FILE = Path(__file__).with_name("library_signatures.json")
TEXTS = (
    "wgrad_store backward_dw delay_wgrad_compute fuse_wgrad_accumulation register_wgrad_accumulation_and_reduce_hooks "
    "skip_backward_post_hook apply_bias save_original_input grad_added_to_main_grad is_first_microbatch "
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO NVTE_BATCH_MHA_P2P_COMM"
).split()
"""Attributes of modules and parameters that our runtime reads or sets, and environment variables that it sets."""
COMPILED = {
    "amp_C": "csrc/amp_C_frontend.cpp",
    "fused_weight_gradient_mlp_cuda": "csrc/megatron/fused_weight_gradient_dense.cpp",
}
"""Compiled parts of apex -> the source that names their functions."""


def needed_names(packages: Packages) -> list[str]:
    """The names of a library that megatron-core reads or calls, and for Transformer Engine those of our stand-ins."""
    names = imported_names(packages) | {call.name for call in calls(packages)}
    if packages == ENGINE:
        names |= {name for name, _ in stand_ins()}
    return sorted(names)


def stand_ins() -> list[tuple[str, object]]:
    """(name in Transformer Engine, our stand-in for it), methods included."""
    pairs: list[tuple[str, object]] = []
    for path, content in engine.contents().items():
        for name, value in content.items():
            if name.startswith("__") or value in (None, engine._Named):
                continue
            full = f"transformer_engine.{path}.{name}"
            pairs.append((full, value))
            methods = (
                "forward",
                "backward_dw",
                "register_wgrad_accumulation_and_reduce_hooks",
                "is_fp8_enabled",
                "get_fp8_recipe",
            )
            pairs += [(f"{full}.{method}", getattr(value, method)) for method in methods if method in _own(value)]
    return [*pairs, ("transformer_engine.pytorch.module._common.WeightGradStore", engine.WeightGradStore)]


def _own(value: object) -> set[str]:
    """What a class defines itself, or by a class of the stand-in."""
    classes = value.__mro__ if isinstance(value, type) else ()
    return {name for kind in classes if kind.__module__ == engine.__name__ for name in vars(kind)}


def engine_signatures(releases: Sequence[str], wheels: Path) -> dict[str, dict[str, str | None]]:
    """Name -> release -> its signature from that release on, None where it has none; texts as names."""
    table: dict[str, dict[str, str | None]] = {}
    names = needed_names(ENGINE)
    for release in releases:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", f"transformer-engine=={release}", "--no-deps"]
            + ["--only-binary", ":all:", "--dest", str(wheels)],
            check=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(next(wheels.glob(f"transformer_engine-{release}-*.whl"))) as wheel:
                wheel.extractall(folder)
            library = Library(Path(folder))
            found = {name: library.signature(name) for name in names}
            found |= {text: "" if library.mentions(text, "transformer_engine.pytorch") else None for text in TEXTS}
        for name, signature in found.items():
            changes = table.setdefault(name, {})
            if not changes or list(changes.values())[-1] != signature:
                changes[release] = signature
    return table


def apex_signatures(checkout: Path) -> dict[str, str | None]:
    """Name -> its signature."""
    library, signatures = Library(checkout), {}
    for name in needed_names(APEX):
        package, _, function = name.partition(".")
        source = COMPILED.get(package)
        signatures[name] = compiled_signature(checkout / source, function) if source else library.signature(name)
    return signatures


def compiled_signature(source: Path, function: str) -> str | None:
    """The parameters of a C++ function that a module defines under a name; they go by position. None if it defines none."""
    text = source.read_text()
    bound = re.search(rf'm\.def\(\s*"{function}",\s*&(\w+)', text)
    declared = re.search(rf"\b{bound[1]}\(([^)]*)\)", text) if bound else None
    if declared is None:
        return None
    return ", ".join([*(re.split(r"[\s&*]+", part)[-1] for part in declared[1].split(",")), "/"])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="tests.stand_ins.write_signatures", description=__doc__.partition("\n")[0])
    parser.add_argument("--apex", type=Path, required=True)
    parser.add_argument("--releases", nargs="+")
    parser.add_argument("--wheels", type=Path)
    arguments = parser.parse_args(argv)
    releases = arguments.releases or json.loads(FILE.read_text())["releases"]
    commit = subprocess.run(
        ["git", "-C", str(arguments.apex), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        table = engine_signatures(releases, arguments.wheels or Path(folder))
    record = {
        "releases": releases,
        "transformer_engine": table,
        "apex_commit": commit,
        "apex": apex_signatures(arguments.apex),
    }
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
