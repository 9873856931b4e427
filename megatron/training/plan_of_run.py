"""The plan a run follows: made from the flags, or read from --plan and held against them."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.training.batch_sizes import batch_sizes
from megatron.training.config import Config
from megatron.training.plan_from_flags import plan_from_flags
from megatron.training.rules.overlap import overlap_flag, require_cuttable, require_executable
from megatron.training.rules.rule import require
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.validate import validate_plan

_DESCRIPTIVE = frozenset({"model", "cluster", "predicted", "mesh", "search_limits"})
"""Fields of a plan that say where it comes from, not what runs."""


def plan_of_run(config: Config, model: ModelDescription, world_size: int) -> Plan:
    """The plan of a validated configuration.

    Raises:
        ConfigError: the file is no valid plan of this model, asks for what the runtime cannot do yet, or disagrees with the
            flags, from which the model and its layout are built.
    """
    from_flags = plan_from_flags(config, model, world_size)
    if config.overlap.plan is None:
        _require_pairs_in_every_step(config, from_flags, "--moe-overlap-micro-batches")
        return from_flags
    source = config.overlap.plan
    plan = load_plan(source)
    validate_plan(plan, model, source)
    refuse_unsupported(plan, source)
    if overlap_flag(config) is None:
        _require_gate(source, plan, config.overlap.moe_gate)
        from_flags = _with_overlap_of(plan, from_flags)
    _require_flags_of_overlap(source, plan, config)
    _require_equal(source, dataclasses.asdict(plan), dataclasses.asdict(from_flags))
    _require_pairs_in_every_step(config, plan, f"{source} micro_batches_in_flight")
    return plan


def _require_pairs_in_every_step(config: Config, plan: Plan, subject: str) -> None:
    """A batch that changes holds, at its smallest too, the micro-batches that the plan interleaves; so does an evaluation's."""
    evaluated = config.training.eval_global_batch_size
    for stage in plan.stages:
        sizes, several = batch_sizes(config, stage.data).sizes, stage.overlap.micro_batches_in_flight
        smallest = min(sizes if evaluated is None else (*sizes, evaluated))
        count = smallest // (stage.micro_batch_size * stage.data)
        rule = f"a step of {smallest} samples has {count} micro-batch on each data-parallel rank"
        fix = f"use batches of {several * stage.micro_batch_size * stage.data} samples or more"
        require(several <= count, subject, several, rule, fix)


def _require_flags_of_overlap(source: str, plan: Plan, config: Config) -> None:
    """What the executor of an overlapping plan needs of the flags that build the model."""
    overlaps = [stage.overlap for stage in plan.stages]
    layers = [layer for overlap in overlaps for layer in overlap.layers]
    if any(overlap.is_listed for overlap in overlaps):
        require_executable(config, source)
        at_the_end = not any(overlap.gradient_chunk_bytes for overlap in overlaps)
        rule = f"{source} reduces gradients at the end of the step (gradient_chunk_bytes 0)"
        require(not (config.parallel.overlap_grad_reduce and at_the_end), "--overlap-grad-reduce", "", rule, "drop it")
    if any(layer.mechanism == "partitioned" for layer in layers):
        require_cuttable(config)


def _require_gate(source: str, plan: Plan, gate: str | None) -> None:
    """The flags build the gates that a plan counts on."""
    for s, stage in enumerate(plan.stages):
        for n, layer in enumerate(stage.overlap.layers):
            _require_equal(f"{source} stages[{s}].overlap.layers[{n}].gate", layer.gate, gate)


def _with_overlap_of(plan: Plan, flagged: Plan) -> Plan:
    """The plan of flags that decide no overlap, with what another one decides for the layers."""

    def overlapped(stage: StagePlan, planned: StagePlan) -> StagePlan:
        return dataclasses.replace(stage, overlap=planned.overlap)

    if len(plan.stages) != len(flagged.stages):
        return flagged
    return dataclasses.replace(flagged, stages=tuple(map(overlapped, flagged.stages, plan.stages)))


def _require_equal(place: str, planned: Any, flagged: Any) -> None:
    if isinstance(planned, dict):
        for name, value in planned.items():
            if name not in _DESCRIPTIVE:
                _require_equal(f"{place} {name}" if " " not in place else f"{place}.{name}", value, flagged[name])
    elif isinstance(planned, (list, tuple)) and len(planned) == len(flagged):
        for index, (mine, theirs) in enumerate(zip(planned, flagged, strict=True)):
            _require_equal(f"{place}[{index}]", mine, theirs)
    elif planned != flagged:
        raise ConfigError(place, planned, f"the flags say {flagged}", "make the flags and the plan agree")
