"""The request for a capture, and the key under which its result is stored. No torch.

Layers of one kind run the same operators, so a request names kinds, and one layer of each is captured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron.training.cli.arguments import config_to_flags, parse
from megatron.training.cli.config import Config
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.serialize import as_values, read_record
from moe_overlap.tuner.capture.graph import Implementation, Layout


def layer_kinds(model: ModelDescription) -> tuple[str, ...]:
    """Kind of every decoder layer."""
    return _kinds(model.moe_layers, _windows(model)[: model.num_layers])


AHEAD = "mtp."
"""Prefix of the kinds of multi-token-prediction layers."""


def prediction_kinds(model: ModelDescription) -> tuple[str, ...]:
    """Kind of every multi-token-prediction layer: it holds a layer like the decoder's last, and its window number follows."""
    inside = model.moe_layers[-1:] * model.mtp_layers
    return tuple(f"{AHEAD}{kind}" for kind in _kinds(inside, _windows(model)[model.num_layers :]))


def _windows(model: ModelDescription) -> tuple[int | None, ...]:
    return model.windows or (None,) * (model.num_layers + model.mtp_layers)


def _kinds(moe_layers: Iterable[bool], windows: Iterable[int | None]) -> tuple[str, ...]:
    return tuple(
        ("moe" if is_moe else "dense") + (f".window{window}" if window is not None else "")
        for is_moe, window in zip(moe_layers, windows, strict=True)
    )


NO_RECOMPUTATION, FULL = "none", "full"
"""Variants besides lists of modules."""

_SOURCES = ("moe_overlap/tuner/capture", "megatron/training/model", "megatron/training/cli")
"""Folders whose sources, besides the libraries, determine the operators that run."""
_ANSWERING = (
    *("library.py", "composition.py", "names.py", "blocks.py", "scaling.py"),
    *("recomputation.py", "stretches.py"),
)
"""Files of the first folder that only read captures: a capture does not depend on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The request for one variant of one model under one layout.

    Attributes:
        config: validated flags; pipeline, data parallelism, optimizer and overlap in them do not matter.
        variant: the recomputation: `none`, `full`, or sorted modules joined by +.
    """

    config: Config
    model: ModelDescription
    layout: Layout
    implementation: Implementation
    variant: str = NO_RECOMPUTATION

    def sha256(self) -> str:
        """Hash of everything that the captured graphs depend on."""
        of_model = dataclasses.replace(self.model, name="", num_layers=0, moe_layers=(), windows=(), mtp_layers=0)
        content = {
            "model": as_values(of_model),
            # In the order of their first layer: the number of layers of each kind changes no graph.
            "kinds": list(dict.fromkeys((*layer_kinds(self.model), *prediction_kinds(self.model)))),
            "flags": {
                name: as_values(getattr(self.config, name))
                for name in ("model", "moe", "attention", "precision", "device")
            },
            "gradients": [
                self.config.optimizer.accumulate_allreduce_grads_in_fp32,
                self.config.optimizer.grad_reduce_in_bf16,
            ],
            "layout": as_values(self.layout),
            "implementation": self.implementation,
            "variant": self.variant,
            "versions": versions(),
            "sources": _sources_sha256(),
        }
        content["flags"]["model"] |= {"num_layers": None, "seq_length": None, "mtp_num_layers": None}
        content["flags"]["moe"] |= {"moe_layer_freq": None}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_values(self) -> dict[str, Any]:
        """This request as JSON values, for another process."""
        return {
            "flags": config_to_flags(self.config),
            "model": as_values(self.model),
            "layout": as_values(self.layout),
            "implementation": self.implementation,
            "variant": self.variant,
        }

    @staticmethod
    def from_values(values: dict[str, Any]) -> Request:
        """Read the JSON values that `to_values` writes."""
        return Request(
            config=parse(values["flags"]).config,
            model=read_record(ModelDescription, values["model"], "request"),
            layout=read_record(Layout, values["layout"], "request"),
            implementation=values["implementation"],
            variant=values["variant"],
        )


LIBRARIES = ("torch", "megatron-core")
"""The libraries whose operators are recorded."""
SHIPPED = Path(__file__).with_name("shipped")
"""Captures that come with a wheel, and `VERSIONS`, the libraries that they were made with; a checkout has none."""
VERSIONS = "versions.json"


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Versions of the libraries whose operators are recorded; nothing is imported.

    Without these libraries, as predictions need none, the versions are those of the shipped captures.
    """
    try:
        return tuple((name, importlib.metadata.version(name)) for name in LIBRARIES)
    except importlib.metadata.PackageNotFoundError:
        return _shipped_versions()


@cache
def _shipped_versions() -> tuple[tuple[str, str], ...]:
    try:
        shipped = json.loads((SHIPPED / VERSIONS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return tuple((name, "none") for name in LIBRARIES)
    return tuple((name, shipped[name]) for name in LIBRARIES)


def require_libraries() -> None:
    """Refuse to capture where the libraries are not installed.

    Raises:
        ConfigError: one of them is missing.
    """
    try:
        for name in LIBRARIES:
            importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        rule = f"no recording of its operators under this layout is shipped, and recording them needs {' and '.join(LIBRARIES)}"
        raise ConfigError("the model", "", rule, "pip install 'megatron-moe-overlap[train]'") from error


def captured_by() -> list[Path]:
    """The source files that a capture depends on, from the root of the project."""
    root = Path(__file__).parents[3]
    paths = [root / "megatron/training/cpu_backend.py"]
    for folder in _SOURCES:
        paths += (path for path in sorted((root / folder).rglob("*.py")) if path.name not in _ANSWERING)
    return [path.relative_to(root) for path in paths]


@cache
def _sources_sha256() -> str:
    root = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for path in captured_by():
        digest.update((root / path).read_bytes())
    return digest.hexdigest()
