"""Captured models of the stages of a plan, cached on disk under the hash of their requests. No torch: another process captures.

1. One request is made for each stage and variant of recomputation (`stage_requests`); a stage that recomputes some of its layers
   has two.
2. Answers are read from files (`CaptureFiles`); other processes capture the missing ones (`processes.py`). In a file, each
   distinct expression is written once; the first line is the hash of the rest, so that a damaged file is noticed.
3. The variants of a stage are joined to one captured model (`joined`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.cli.config import Config
from megatron.training.cli.config_fields import DeviceConfig, PrecisionConfig
from moe_overlap.describe.errors import ConfigError, OutOfTime
from moe_overlap.describe.files import Unreadable, bounded_text, printable
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import read_record
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Collective, Implementation, Layout, Op, Storage
from moe_overlap.tuner.capture.processes import CaptureError, CaptureProcesses
from moe_overlap.tuner.capture.request import (
    NO_RECOMPUTATION,
    SHIPPED,
    Request,
    layer_kinds,
    prediction_kinds,
    require_libraries,
)
from moe_overlap.tuner.cost.stage_parts import stage_variants

Flags = Mapping[str, tuple[str, ...]]
"""Flag -> its values on the command line."""
Graphs = Callable[[Config, ModelDescription, Plan, Flags], Mapping[int, CapturedModel]]
"""Captured models by stage."""
Tell = Callable[[str], None]
"""Prints a line for the user."""
PRECISIONS: dict[str, PrecisionConfig] = {
    "bf16": PrecisionConfig(),
    "fp16": PrecisionConfig(fp16=True),
    "fp8": PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise"),
    "mxfp8": PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": PrecisionConfig(fp4="e2m1"),
}
"""Precision of the products -> the flags that select it."""
_OP_FIELDS = tuple(field.name for field in dataclasses.fields(Op))
_STORAGE_FIELDS = tuple(field.name for field in dataclasses.fields(Storage))


MOST_CAPTURE_BYTES = 64 << 20
"""Largest size of a capture that is read; those of the largest shipped models have some two million bytes."""


class CorruptFileError(ValueError):
    """The content of a file differs from what was written."""


UNREADABLE = (
    ConfigError,
    Unreadable,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
"""Errors of reading values that another program may have written."""


def save_captured(captured: CapturedModel, path: Path) -> None:
    """Write a capture; a killed writer leaves a complete file or none."""
    table: dict[Expression, int] = {}
    values = {
        "parts": [_part_values(part, table) for part in captured.parts],
        "layer_kinds": captured.layer_kinds,
        "mtp_kinds": captured.mtp_kinds,
        "layout": dataclasses.asdict(captured.layout),
        "implementation": captured.implementation,
        "versions": captured.versions,
        "sha256": captured.sha256,
    }
    values["expressions"] = [str(expression) for expression in table]
    body = json.dumps(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.write_text(f"{_digest(body)}\n{body}\n", encoding="utf-8")
    temporary.replace(path)


def load_captured(path: Path, key: str | None = None) -> CapturedModel:
    """Read what `save_captured` wrote.

    Args:
        key: hash of the request that the file must answer; None: any.
    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: its content is damaged, answers another request, or was written by another release.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        digest, _, body = bounded_text(path, MOST_CAPTURE_BYTES).partition("\n")
        if digest != _digest(body.rstrip("\n")):
            raise CorruptFileError(f"{path}: its content does not have the hash in its first line")
        values = json.loads(body)
        if key is not None and values["sha256"] != key:
            raise CorruptFileError(f"{path}: it is the capture of another request")
        table = [Expression.parse(text) for text in values.pop("expressions")]
        values["parts"] = [_part(part, table) for part in values["parts"]]
        return read_record(CapturedModel, values, path.name)
    except CorruptFileError:
        raise
    except UNREADABLE as error:
        raise CorruptFileError(f"{path}: {printable(str(error), 200)}") from error


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _part_values(part: CapturedPart, table: dict[Expression, int]) -> dict[str, Any]:
    def number(expression: Expression) -> int:
        return table.setdefault(expression, len(table))

    def encoded(name: str, value: Any) -> Any:
        if isinstance(value, Expression):
            return number(value)
        if name in ("shape", "touched", "elements"):
            return [number(size) for size in value]
        if isinstance(value, Collective):
            return [value.kind, value.axis, value.size, number(value.payload_bytes)]
        return value

    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    values["ops"] = [[encoded(name, getattr(op, name)) for name in _OP_FIELDS] for op in part.ops]
    values["storages"] = [
        [encoded(name, getattr(storage, name)) for name in _STORAGE_FIELDS] for storage in part.storages
    ]
    return values


def _part(values: dict[str, Any], table: list[Expression]) -> dict[str, Any]:
    """Fields of a part, with expressions in place of their numbers."""
    operators = [_op(row, table) for row in values["ops"]]
    storages = [dict(zip(_STORAGE_FIELDS, row, strict=True)) for row in values["storages"]]
    return {
        **values,
        "ops": operators,
        "storages": [{**storage, "bytes": table[storage["bytes"]]} for storage in storages],
    }


def _op(row: list[Any], table: list[Expression]) -> dict[str, Any]:
    fields = dict(zip(_OP_FIELDS, row, strict=True))
    if fields["collective"] is not None:
        kind, axis, size, payload = fields["collective"]
        fields["collective"] = {"kind": kind, "axis": axis, "size": size, "payload_bytes": table[payload]}
    for name in ("shape", "touched", "elements"):
        fields[name] = [table[index] for index in fields[name]]
    return {**fields, "flops": table[fields["flops"]], "bytes": table[fields["bytes"]]}


class CaptureFiles:
    """Captures in a folder, and behind it those that a wheel ships; a file is read once.

    Args:
        folder: created if it is missing.
        tell: called while processes capture missing layouts, which may occupy the machine for minutes; an exception that it
            raises ends them.
        capture: writes the missing captures; default: processes of its own.
    """

    def __init__(
        self,
        folder: Path,
        tell: Tell | None = None,
        capture: Callable[[Mapping[Path, Request]], None] | None = None,
    ) -> None:
        self._folder, self._tell = folder, tell
        self._capture = capture or CaptureProcesses(report=self._report).capture
        self._started, self._deadline = 0.0, math.inf
        self._read: dict[Path, CapturedModel] = {}

    def captures(self, requests: Sequence[Request]) -> list[CapturedModel]:
        """The captured model of each request, in order; other processes capture all that are missing.

        A damaged file is captured again, with a line on stderr. The layers of an answer are those of the request that made the
        file: `CapturedModel.layer_kinds` and `mtp_kinds` may be those of another model with the same kinds.

        Raises:
            CaptureError: a capture failed.
            ConfigError: the folder cannot be written.
        """
        paths = [self._folder / f"{request.sha256()}.json" for request in requests]
        missing: dict[Path, Request] = {}
        for path, request in zip(paths, requests, strict=True):
            try:
                self._load(path)
            except FileNotFoundError:
                missing[path] = request
            except CorruptFileError as error:
                print(f"warning: {error}; captured again", file=sys.stderr)
                missing[path] = request
        if missing:
            require_libraries()
            _require_writable(self._folder)
            self._started = time.monotonic()
            self._report(0, len(missing))
            self._capture(missing)
        return [self._load(path) for path in paths]

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """A context in which captures end with `OutOfTime` at a deadline of `time.monotonic`."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = math.inf

    def _report(self, done: int, total: int) -> None:
        """Tell which capture is under way, and how long the others will take if they take as long as those before.

        Raises:
            OutOfTime: the deadline has passed.
        """
        if time.monotonic() > self._deadline:
            rule = "passed while layers of the model were captured for the first time"
            raise OutOfTime("--time-limit", "", rule, "give more time; finished captures are kept")
        if self._tell is None or done == total:
            return
        seconds = (time.monotonic() - self._started) / done * (total - done) if done else 0.0
        rest = f", about {seconds:.0f} s left" if done else ""
        self._tell(f"first use of this model: capturing layout {done + 1} of {total} (cached afterwards){rest}")

    def graphs(self, config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
        """Captured models of the stages from this folder, as `cached_graphs`."""
        return _cached(stage_requests(config, model, plan), model, self)

    def _load(self, path: Path) -> CapturedModel:
        if path not in self._read:
            shipped = SHIPPED / path.name
            is_shipped = shipped.exists() and not path.exists()
            self._read[path] = load_captured(shipped if is_shipped else path, path.stem)
        return self._read[path]


def cached_graphs(
    config: Config, model: ModelDescription, plan: Plan, flags: Flags, tell: Tell | None = None
) -> Mapping[int, CapturedModel]:
    """Captured models of the stages from the user's cache; missing ones are captured, which takes seconds and needs torch.

    Args:
        tell: see `CaptureFiles`.
    Raises:
        ConfigError: a part of the model cannot be captured.
    """
    return CaptureFiles(cache_folder(), tell).graphs(config, model, plan, flags)


def cpu_graphs(
    config: Config, model: ModelDescription, plan: Plan, flags: Flags, tell: Tell | None = None
) -> Mapping[int, CapturedModel]:
    """The models that a CPU runs: megatron-core's own modules, whatever the flags choose. Otherwise like `cached_graphs`."""
    return _cached(stage_requests(config, model, plan, "torch"), model, CaptureFiles(cache_folder(), tell))


def _cached(
    requests: Mapping[int, list[Request]], model: ModelDescription, files: CaptureFiles
) -> dict[int, CapturedModel]:
    all_requests = [request for of_stage in requests.values() for request in of_stage]
    try:
        captures = dict(zip(map(Request.sha256, all_requests), files.captures(all_requests), strict=True))
    except CaptureError as error:
        raise ConfigError("the model", "", f"cannot be captured: {error}", "report these flags") from error
    return {
        index: joined([captures[request.sha256()] for request in of_stage], model)
        for index, of_stage in requests.items()
    }


def stage_requests(
    config: Config, model: ModelDescription, plan: Plan, implementation: Implementation = "te"
) -> dict[int, list[Request]]:
    """The captures that each stage needs, one for each variant of recomputation.

    Products below bf16 run the operators of bf16 at another price; offloading changes no operator either. On a GPU
    megatron-core's own modules run fused kernels, too: except for attention they are captured as Transformer Engine's. A CPU has
    no library that dispatches tokens: it runs all-to-alls.
    """
    precision = plan.precision if plan.precision in ("fp32", "fp16") else "bf16"
    dispatcher, backend = config.moe.moe_token_dispatcher_type, config.device.moe_flex_dispatcher_backend
    if dispatcher == "flex" and implementation == "torch":
        dispatcher = "alltoall"
    config = dataclasses.replace(
        config,
        precision=PRECISIONS.get(precision, PrecisionConfig()),
        device=DeviceConfig(moe_flex_dispatcher_backend=backend) if dispatcher == "flex" else DeviceConfig(),
        moe=dataclasses.replace(config.moe, moe_token_dispatcher_type=dispatcher),
    )
    requests = {}
    for index, stage in enumerate(plan.stages):
        layout = Layout(
            tensor=stage.tensor,
            context=stage.context,
            expert=stage.expert,
            expert_tensor=stage.expert_tensor if model.num_experts else 1,
            sequence_parallel=config.parallel.sequence_parallel and stage.tensor > 1,
            precision=precision,
        )
        requests[index] = [
            Request(config=config, model=model, layout=layout, implementation=implementation, variant=variant)
            for variant in sorted(stage_variants(stage), key=lambda name: (name != NO_RECOMPUTATION, name))
        ]
    return requests


def joined(variants: Sequence[CapturedModel], model: ModelDescription) -> CapturedModel:
    """One captured model with the parts of several variants."""
    parts = tuple(part for captured in variants for part in captured.parts)
    return dataclasses.replace(
        variants[0], parts=parts, layer_kinds=layer_kinds(model), mtp_kinds=prediction_kinds(model)
    )


def _require_writable(folder: Path) -> None:
    """Refuse a folder that cannot store captures, before minutes are spent on one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        rule = f"captured layouts cannot be kept there: {error.strerror}"
        raise ConfigError(str(folder), "", rule, "set XDG_CACHE_HOME to a folder that can be written") from None


def cache_folder() -> Path:
    """The folder of captured layouts, as the XDG base directories say."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_overlap" / "captures"
