"""`--list-gpus` and `--list-models`: the types of GPU and the shipped models that commands accept by name."""

from __future__ import annotations

import argparse
from typing import Any

from moe_overlap.describe.cluster import known_gpus
from moe_overlap.describe.shipped import shipped_models


class ListGpus(argparse.Action):
    """Prints the table and ends the program, without checking other arguments."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the table; status 0."""
        print("\n".join(gpu_lines()))
        parser.exit()


class ListModels(argparse.Action):
    """Prints the names of the shipped models and ends the program, without checking other arguments."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print one name per line; status 0."""
        print("\n".join(shipped_models()))
        parser.exit()


def gpu_lines() -> list[str]:
    """A table of the known GPUs: peak rates, memory, the usual node, links, and whether measured steps calibrate their prices."""
    # Loaded for the table alone: every `--help` imports this file.
    from moe_overlap.tuner.cost.hardware import shipped_constants

    calibrated = shipped_constants().gpus
    rows: list[tuple[str, ...]] = [
        ("GPU", "bf16", "fp8", "fp4", "GiB", "node", "NVLink", "network", "calibrated", "also called")
    ]
    for name, row in known_gpus().items():
        if name != row["name"]:
            continue
        rates = [_number(row[f"{precision}_tflops"]) for precision in ("bf16", "fp8", "fp4")]
        links = [_number(row[f"{link}_gb_per_s"]) for link in ("domain", "network")]
        measured = "yes" if name in calibrated else "no"
        size = [_number(row["memory_gib"]), _number(row["gpus_per_node"])]
        rows.append((name, *rates, *size, *links, measured, ", ".join(row["aliases"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = "bf16, fp8, fp4: peak TFLOP/s of dense products; node: GPUs; NVLink, network: GB/s per GPU and direction."
    return [*lines, "", notes, "Prices of a GPU that is not calibrated come from the nearest one that is."]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
