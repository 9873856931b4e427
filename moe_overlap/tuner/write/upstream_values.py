"""The flags of unmodified Megatron-LM as typed values, read from a command line or from a plan.

Terms. *Values* map the documented name of a flag to true for a switch that is present, a number, a text, or a tuple of texts; a
flag that is absent has upstream's default (`default_value`). The values of a plan (`values_of_plan`) replace those of the user's
flags (`values_of`), so that `upstream_rules.py` checks command lines and plans by one set of rules.

    parser_errors      flags that the parser refuses
    values_of          flags -> values
    values_of_plan     plan -> values
    unsayable          plan -> its fields that Megatron-LM has no flag for
    state_arguments    plan -> arguments that shard and offload states
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.readers.predicted_flags import Flags
from moe_overlap.describe.readers.upstream_flags import UpstreamFlag, load_upstream_flags
from moe_overlap.plan.plan import Offload, Plan, StagePlan

Value = bool | int | float | str | tuple[str, ...] | None
Values = Mapping[str, Value]
LAYERS_ARE_CUT = "layers are cut"
"""Key of values that come from a plan: the plan fixes the layers of every chunk, so rules on dividing layers do not apply."""
_NUMBERS: dict[str, Callable[[str], int | float]] = {"int": int, "float": float}
OLDER_SPELLINGS: dict[str, dict[str, Value]] = {
    "--recompute-activations": {"--recompute-granularity": "selective"},
    "--moe-layer-recompute": {"--recompute-granularity": "selective", "--recompute-modules": ("core_attn", "moe")},
    "--use-rotary-position-embeddings": {"--position-embedding-type": "rope"},
    "--moe-enable-deepep": {"--moe-enable-deepep": True, "--moe-flex-dispatcher-backend": "deepep"},
    "--enable-cuda-graph": {"--cuda-graph-impl": "local"},
    "--external-cuda-graph": {"--cuda-graph-impl": "transformer_engine"},
}
"""Older spelling of a flag -> the values that it stands for."""
SCOPES = "--cuda-graph-scope"
"""Documented name of the flag for the parts of a step that CUDA graphs capture; `--cuda-graph-modules` is its newer spelling."""


# The parser


def parser_errors(flags: Flags) -> list[ConfigError]:
    """An error for every flag that no release of upstream's parser has, or whose values it refuses.

    Args:
        flags: flag -> its values, as `predicted_flags.grouped` reads them.
    """
    errors = []
    upstream = load_upstream_flags()
    for name, values in flags.items():
        if name not in upstream:
            errors.append(ConfigError(name, "", "Megatron-LM has no such flag", "drop it"))
        elif (wrong := _value_error(upstream[name], name, values)) is not None:
            errors.append(wrong)
    return errors


def _value_error(flag: UpstreamFlag, name: str, values: Sequence[str]) -> ConfigError | None:
    counts = {None: len(values) == 1, "0": not values, "+": bool(values), "*": True}
    shown = " ".join(values)
    if not counts.get(flag.nargs, flag.nargs == str(len(values))):
        return ConfigError(name, shown, f"takes {_count_of(flag.nargs)}", "correct the values")
    for value in values:
        if flag.choices is not None and value not in flag.choices:
            return ConfigError(name, value, "is no choice of Megatron-LM", f"use {one_of(flag.choices)}")
        if not flag.reads(value):
            kind = "a whole number" if flag.type == "int" else "a number"
            return ConfigError(name, value, f"must be {kind}", "correct the value")
    return None


def _count_of(nargs: str | None) -> str:
    return {None: "one value", "0": "no value", "+": "one value or more"}.get(nargs, f"{nargs} values")


def values_of(flags: Flags) -> dict[str, Value]:
    """Typed values of the flags that `parser_errors` accepts, under their present spellings; other flags are left out."""
    upstream = load_upstream_flags()
    values: dict[str, Value] = {}
    for name, texts in flags.items():
        if name in upstream and _value_error(upstream[name], name, texts) is None:
            values |= OLDER_SPELLINGS.get(name) or {
                _documented(name, upstream[name]): _typed(name, upstream[name], texts)
            }
    return values


def _documented(name: str, flag: UpstreamFlag) -> str:
    # The names of one parser action mean the same, except the off spelling of a switch, which `_typed` handles.
    return flag.names[0] if name != "--cuda-graph-modules" else SCOPES


def _typed(name: str, flag: UpstreamFlag, texts: Sequence[str]) -> Value:
    if flag.kind == "BooleanOptional":
        return name == flag.names[0]
    if flag.kind != "Store":
        return True
    if flag.nargs in ("+", "*"):
        # Argument lists of upstream's tests write several values as `[a b]`.
        joined = " ".join(texts).strip()
        return tuple(joined[1:-1].replace(",", " ").split()) if joined[:1] + joined[-1:] == "[]" else tuple(texts)
    return _NUMBERS[flag.type](texts[0]) if flag.type in _NUMBERS and not texts[0].startswith("$") else texts[0]


@functools.cache
def default_value(name: str) -> Value:
    """Upstream's default of a flag; for a switch, whether it is on by default."""
    flag = load_upstream_flags()[name]
    if flag.kind == "BooleanOptional":
        return flag.default == "True"
    if flag.kind != "Store":
        return False
    if flag.default in (None, "None"):
        return None
    if flag.nargs in ("+", "*"):
        return () if flag.default == "[]" else (flag.default,)
    return _NUMBERS[flag.type](flag.default) if flag.type in _NUMBERS else flag.default


# Plans


def values_of_plan(plan: Plan) -> dict[str, Value]:
    """The values of the flags that a plan of equal stages decides; None or False for a flag that must be absent."""
    stage, virtual = plan.stages[0], len(plan.stages[0].chunks)
    return {
        LAYERS_ARE_CUT: True,
        "--seq-length": plan.sequence_length,
        "--micro-batch-size": stage.micro_batch_size,
        "--global-batch-size": plan.global_batch_size,
        "--tensor-model-parallel-size": stage.tensor,
        "--sequence-parallel": stage.tensor > 1,
        "--context-parallel-size": stage.context,
        "--expert-model-parallel-size": stage.expert,
        "--expert-tensor-parallel-size": stage.expert_tensor,
        "--pipeline-model-parallel-size": len(plan.stages),
        "--use-tp-pp-dp-mapping": stage.devices.ranks != tuple(range(len(stage.devices.ranks))),
        "--num-virtual-stages-per-pipeline-rank": virtual if virtual > 1 else None,
        "--num-layers-per-virtual-pipeline-stage": None,
        "--pipeline-model-parallel-layout": None,
        "--decoder-first-pipeline-num-layers": None,
        "--decoder-last-pipeline-num-layers": None,
        "--account-for-embedding-in-pipeline-split": False,
        "--account-for-loss-in-pipeline-split": False,
        **_recompute_values(stage),
        **_precision_values(plan),
        **_state_values(plan, stage),
    }


def _recompute_values(stage: StagePlan) -> dict[str, Value]:
    granularity, method, layers, modules = {
        "none": (None, None, None, None),
        "selective": ("selective", None, None, stage.recompute.modules),
        "full": ("full", "block", stage.recompute.layers, None),
        "uniform": ("full", "uniform", stage.recompute.layers, None),
    }[stage.recompute.granularity]
    return {
        "--recompute-granularity": granularity,
        "--recompute-method": method,
        "--recompute-num-layers": layers,
        "--recompute-modules": modules,
    }


def _precision_values(plan: Plan) -> dict[str, Value]:
    narrow = plan.precision in ("fp8", "mxfp8", "nvfp4")
    values: dict[str, Value] = {
        "--bf16": plan.precision == "bf16" or narrow,
        "--fp16": plan.precision == "fp16",
        "--fp8-format": "hybrid" if plan.precision in ("fp8", "mxfp8") else None,
        "--fp4-format": "e2m1" if plan.precision == "nvfp4" else None,
    }
    return values | ({"--fp8-recipe": "mxfp8"} if plan.precision == "mxfp8" else {})


def _state_values(plan: Plan, stage: StagePlan) -> dict[str, Value]:
    """Sharding and offloading of states; ZeRO 2 and 3 are executed by Megatron-FSDP."""
    layers = sum(last - first for first, last in stage.chunks)
    offloaded = stage.offload.optimizer
    values: dict[str, Value] = {
        "--use-distributed-optimizer": stage.zero_level > 0,
        "--use-megatron-fsdp": stage.zero_level > 1,
        "--optimizer-cpu-offload": offloaded > 0,
        "--cpu-offloading-num-layers": round(stage.offload.activations * layers),
    }
    if stage.zero_level > 1:
        strategy = "optim_grads" if stage.zero_level == 2 else "optim_grads_params"
        values |= {"--data-parallel-sharding-strategy": strategy, "--ckpt-format": "fsdp_dtensor"}
        # These let Megatron-FSDP overlap gathers and reductions with computation.
        values |= {"--overlap-grad-reduce": True, "--overlap-param-gather": True}
    if offloaded:
        values |= {"--optimizer-offload-fraction": offloaded, "--use-precision-aware-optimizer": True}
    return values


def state_arguments(plan: Plan) -> list[str]:
    """The arguments by which Megatron-LM shards and offloads states as in a plan; the flags of a plan's layout leave them out."""
    arguments: list[str] = []
    for name, value in _state_values(plan, plan.stages[0]).items():
        if value:
            arguments += [name] if value is True else [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return arguments


def unsayable(plan: Plan) -> Iterator[ConfigError]:
    """The fields of a plan that Megatron-LM has no flag for, as errors."""
    first = plan.stages[0]
    if plan.transfers:
        yield ConfigError(
            "plan transfers",
            f"({len(plan.transfers)} entries)",
            "Megatron-LM has stages of one shape only",
            "drop them",
        )
    fields = "tensor context data expert expert_tensor micro_batch_size zero_level recompute offload".split()
    for index, stage in enumerate(plan.stages[1:], 1):
        for field in fields if stage is not first else ():
            # With `selective` the number of layers may differ: it means all layers of the stage.
            is_counted = field == "recompute" and stage.recompute.granularity == "selective"
            same = stage.recompute.modules == first.recompute.modules and first.recompute.granularity == "selective"
            if getattr(stage, field) != getattr(first, field) and not (is_counted and same):
                rule = "differs from stages[0], and a flag has one value for all stages"
                yield ConfigError(f"plan stages[{index}].{field}", "", rule, "make the stages equal")
    executed = Offload(optimizer=first.offload.optimizer, activations=first.offload.activations)
    if first.offload != executed:
        rule = "Megatron-LM offloads activations and the optimizer's states only"
        yield ConfigError("plan stages[0].offload", "", rule, "keep weights and gradients on the device")
    layers = sum(last - begin for begin, last in first.chunks)
    if first.offload.activations and not float(first.offload.activations * layers).is_integer():
        rule = f"Megatron-LM offloads the activations of complete layers, and a stage has {layers}"
        fix = f"use a multiple of 1/{layers}"
        yield ConfigError("plan stages[0].offload.activations", first.offload.activations, rule, fix)
    for index, stage in enumerate(plan.stages):
        if stage.overlap.is_listed:
            rule = "Megatron-LM does not execute instruction lists"
            yield ConfigError(f"plan stages[{index}].overlap", "", rule, "overlap by Megatron-LM's own flags")
