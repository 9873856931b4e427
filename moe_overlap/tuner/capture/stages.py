"""Captured models of the stages of a plan: what is asked of the cache for a configuration, and how its answers are joined.

One request stands for one stage and one variant of recomputation; a stage that recomputes some of its layers asks for two.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.training.cli.config import Config
from megatron.training.cli.config_fields import DeviceConfig, PrecisionConfig
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.cache import CaptureError, cached_captures
from moe_overlap.tuner.capture.graph import CapturedModel, Implementation, Layout
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request, layer_kinds, prediction_kinds
from moe_overlap.tuner.cost.analytic import stage_variants

Flags = Mapping[str, tuple[str, ...]]
"""Flag -> its values, as the command line has them."""
Graphs = Callable[[Config, ModelDescription, Plan, Flags], Mapping[int, CapturedModel]]
"""Captured models by stage."""
PRECISIONS: dict[str, PrecisionConfig] = {
    "bf16": PrecisionConfig(),
    "fp16": PrecisionConfig(fp16=True),
    "fp8": PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise"),
    "mxfp8": PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": PrecisionConfig(fp4="e2m1"),
}
"""Precision of the products -> the flags that ask for it."""


def cached_graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    """Captured models of the stages from the user's cache; what is not there is captured, which takes seconds and torch.

    Raises:
        ConfigError: a part of the model cannot be captured.
    """
    return _cached(stage_requests(config, model, plan), model)


def cpu_graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    """The models that a CPU runs: megatron-core's own modules, whatever the flags choose. Raises as `cached_graphs`."""
    return _cached(stage_requests(config, model, plan, "torch"), model)


def _cached(requests: Mapping[int, list[Request]], model: ModelDescription) -> dict[int, CapturedModel]:
    asked = [request for of_stage in requests.values() for request in of_stage]
    try:
        captures = dict(zip(map(Request.sha256, asked), cached_captures(asked, cache_folder()), strict=True))
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

    Products below bf16 run the operators of bf16 and are priced otherwise; what offloads changes no operator either. On a GPU
    megatron-core's own modules run fused kernels, too: attention aside they are taken as Transformer Engine's. A CPU has no
    library that dispatches tokens: it runs all-to-alls.
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


def cache_folder() -> Path:
    """Where captured layouts are kept, as the XDG base directories say."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_overlap" / "captures"
