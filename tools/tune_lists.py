"""Search plans for argument lists of real MoE jobs, and record the answers.

    python -m tools.tune_lists --write examples/records/2026-11-22_lists_tuned [--only NAME …]

Every MoE list of `tests/golden/argument_lists.json` that a dry run accepts is given to `tools/autotune.py`, one after the other,
on the fewest whole nodes of H100 that its layout runs on. A list that takes longer than `--seconds` is recorded as such.
The folder keeps `answers.json`: lists that were answered are not searched again, so a recording that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_overlap.describe.errors import ConfigError
from moe_overlap.job import read_job
from tools.bench.real_lists import LISTS, ROOT, answer

GPU = "H100"
NUMBERS = (8, 16, 32, 64, 128, 256)
"""Numbers of GPUs that are tried, the fewest first."""
ANSWERS = "answers.json"


def smallest(flags: Sequence[str]) -> int:
    """The fewest GPUs of `NUMBERS` on which the list's own layout runs.

    Raises:
        ConfigError: the flags are wrong, or all of them are too few.
    """
    for gpus in NUMBERS:
        try:
            read_job(flags, gpus)
        except ConfigError as error:
            if error.subject != "world size" or gpus == NUMBERS[-1]:
                raise
        else:
            return gpus
    raise AssertionError("unreachable")


def tuned(flags: Sequence[str], space: str, limit_seconds: float) -> dict[str, Any]:
    """The answer of tools/autotune.py to a list, or how it ended without one."""
    gpus = smallest(flags)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "list.args")
        file.write_text(shlex.join(flags), encoding="utf-8")
        options = f"--gpu {GPU} --num-gpus {gpus} --search-space {space} --json --output".split()
        command = [sys.executable, str(ROOT / "tools/autotune.py"), "--megatron-args", str(file), *options]
        begun = time.monotonic()
        # The search starts a process that captures: both end together.
        with subprocess.Popen(
            [*command, str(Path(folder, "tuned"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=limit_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return {"gpus": gpus, "ended": f"no answer after {limit_seconds:.0f} s"}
        seconds = time.monotonic() - begun
    if process.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip()]
        return {"gpus": gpus, "seconds": seconds, "ended": lines[-1] if lines else f"status {process.returncode}"}
    result = json.loads(out)
    changes = [
        change
        for change in result["changes"]
        if change["alone_step_seconds"] is not None and change["alone_step_seconds"] < result["baseline_step_seconds"]
    ]
    return {
        "gpus": gpus,
        "seconds": seconds,
        "before": result["baseline_step_seconds"],
        "after": result["step_seconds"],
        "plan": result["chosen"],
        "overlap": result["overlap"],
        "change": changes[0] if changes else None,
        "without": result["dropped_flags"],
    }


def record(answers: Mapping[str, Mapping[str, Any]], refused: Mapping[str, str], command: str) -> str:
    """The record's text."""
    answered = [name for name, result in answers.items() if "after" in result]
    lines = [
        "# Plans for the argument lists of real MoE jobs",
        "",
        f"Written by `{command}`: every MoE list of `tests/golden/argument_lists.json` that a dry run accepts, searched by",
        f"`tools/autotune.py` for the fewest {GPU} on which the list's own layout runs. Steps are predicted, none ran on a GPU.",
        "Seconds are those of the whole command, with the captures that were not cached.",
        "",
        f"Of {len(answers)} lists {len(answered)} were answered; a dry run refuses {len(refused)} more.",
        "",
        "| list | GPUs | seconds | step before | step after | plan | first change, alone | without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in answers.items():
        seconds = f"{result['seconds']:.0f}" if "seconds" in result else ""
        if "after" not in result:
            lines.append(f"| {name} | {result['gpus']} | {seconds} | | | {result['ended']} | | |")
            continue
        before = "-" if result["before"] is None else f"{result['before']:.3f} s"
        overlap = f", {result['overlap']}" if result["overlap"] else ""
        cells = (name, str(result["gpus"]), seconds, before, f"{result['after']:.3f} s", f"{result['plan']}{overlap}")
        lines.append(f"| {' | '.join((*cells, _change(result), ', '.join(result['without']) or '-'))} |")
    lines += ["", "Refused by a dry run, and so by a search for this runtime:", ""]
    lines += [f"- {name}: {reason}" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


def _change(result: Mapping[str, Any]) -> str:
    """The flags of the change that gains most alone, and its gain."""
    change = result["change"]
    if change is None:
        return "-"
    sentence = f"{' '.join(change['before']) or 'nothing'} → {' '.join(change['after']) or 'nothing'}".replace(
        "|", "\\|"
    )
    sentence = sentence if len(sentence) <= 120 else f"{sentence[:117]}…"
    return f"{change['name']}: {sentence} ({change['alone_step_seconds'] - result['before']:+.3f} s)"


def main() -> int:
    """Run the command; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FOLDER", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=(), help="lists to search; default all")
    parser.add_argument("--search-space", metavar="NAME", default="recompute", help="as of tools/autotune.py")
    parser.add_argument("--seconds", metavar="S", type=float, default=600.0, help="after which a list is given up")
    arguments = parser.parse_args()
    file: Path = arguments.write / ANSWERS
    answers: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    refused = {}
    arguments.write.mkdir(parents=True, exist_ok=True)
    command = f"python -m tools.tune_lists --write {arguments.write}"
    command += "" if arguments.search_space == "recompute" else f" --search-space {arguments.search_space}"
    for entry in json.loads(LISTS.read_text(encoding="utf-8")):
        name = entry["name"]
        if not entry["moe"]:
            continue
        refusal = answer(entry).refused
        if refusal is not None:
            refused[name] = refusal
        elif "after" not in answers.get(name, {}) and (not arguments.only or name in arguments.only):
            answers[name] = tuned(entry["arguments"], arguments.search_space, arguments.seconds)
            print(f"{name}: {answers[name].get('ended', 'answered')}", flush=True)
            file.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    (arguments.write / "README.md").write_text(record(answers, refused, command), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
