"""Captures kept on disk under the hash of what was asked. No torch: what is missing is captured by another process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.training.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.capture.files import CorruptFileError, load_captured
from moe_overlap.tuner.capture.graph import CapturedModel, Implementation, Layout
from moe_overlap.tuner.capture.layer_kinds import layer_kinds, prediction_kinds
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request


class CaptureError(RuntimeError):
    """The capturing process failed; the message is its last line."""


def cached_capture(
    config: Config,
    model: ModelDescription,
    layout: Layout,
    implementation: Implementation,
    variants: Sequence[str] = (NO_RECOMPUTATION,),
    *,
    cache_dir: Path,
) -> CapturedModel:
    """The graphs of a model under a layout, with every variant of recomputation asked for.

    Args:
        config: validated flags.
        model: what `describe_model` made of them.
        variants: `none` is always among them.
        cache_dir: folder of the files; made if needed.
    Raises:
        CaptureError: a capture failed.
    """
    wanted = dict.fromkeys((NO_RECOMPUTATION, *variants))
    requests = [
        Request(config=config, model=model, layout=layout, implementation=implementation, variant=variant)
        for variant in wanted
    ]
    found = cached_captures(requests, cache_dir)
    parts = tuple(part for captured in found for part in captured.parts)
    return dataclasses.replace(found[0], parts=parts, layer_kinds=layer_kinds(model), mtp_kinds=prediction_kinds(model))


def cached_captures(requests: Sequence[Request], cache_dir: Path) -> list[CapturedModel]:
    """One answer for each request, in order; all that are missing are captured by one process.

    A file that is not what was written is captured again, with a line on stderr. The layers of an answer are those of the
    request that made the file: `CapturedModel.layer_kinds` and `mtp_kinds` may be another model's of the same kinds.
    """
    paths = [cache_dir / f"{request.sha256()}.json" for request in requests]
    missing: dict[Path, Request] = {}
    for path, request in zip(paths, requests, strict=True):
        try:
            load_captured(path)
        except FileNotFoundError:
            missing[path] = request
        except CorruptFileError as error:
            print(f"warning: {error}; captured again", file=sys.stderr)
            missing[path] = request
    if missing:
        _capture(missing)
    return [load_captured(path) for path in paths]


def _capture(missing: dict[Path, Request]) -> None:
    asked = [{**request.to_values(), "path": str(path.resolve())} for path, request in missing.items()]
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        # The capture pretends a machine without CUDA, and needs no threads.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    done = subprocess.run(
        [sys.executable, "-m", "moe_overlap.tuner.capture"],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CaptureError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the capture was killed")
