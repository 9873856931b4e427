"""Predict a run from its Megatron flags: what `tools/predict.py` prints, as a function. No torch where its layouts are cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from megatron.training.arguments import expand_files, parse
from megatron.training.config import Config
from megatron.training.config_gpu import PrecisionConfig
from megatron.training.describe import describe_model, known_vocab_size
from megatron.training.plan_from_flags import plan_from_flags
from megatron.training.validation import validate
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import read_expert_loads, shares_by_layer
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.validate import validate_plan
from moe_overlap.speed_flags import features_of, grouped, without_newer, zero_level
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.constants import Constants, shipped_constants
from moe_overlap.tuner.cost.predict import Prediction
from moe_overlap.tuner.cost.predict import predict as predict_plan

Graphs = Callable[[Config, ModelDescription, Plan, Mapping[str, tuple[str, ...]]], Mapping[int, CapturedModel]]
"""Captured models by stage."""
PRECISIONS: dict[str, PrecisionConfig] = {
    "bf16": PrecisionConfig(),
    "fp16": PrecisionConfig(fp16=True),
    "fp8": PrecisionConfig(fp8="hybrid", fp8_recipe="tensorwise"),
    "mxfp8": PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"),
    "nvfp4": PrecisionConfig(fp4="e2m1"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A configuration, understood."""

    config: Config
    model: ModelDescription
    plan: Plan
    flags: Mapping[str, tuple[str, ...]]


def read_job(words: Sequence[str], num_gpus: int, precision: Precision | None = None, plan: str | None = None) -> Job:
    """A command line for a number of GPUs.

    Args:
        words: Megatron flags; `@FILE` stands for the words in a file.
        precision: in place of what the flags say.
        plan: file of a plan that decides in place of the flags.
    Raises:
        ConfigError: the flags are wrong, or do not describe the vocabulary.
    """
    written = list(expand_files(words))
    flags = grouped(written)
    named = [word for word in words if word.startswith("@")][:1]
    parsed = parse(without_newer(written))
    config = parsed.config
    if precision is not None:
        bf16 = precision != "fp16"
        optimizer = dataclasses.replace(config.optimizer, bf16=bf16)
        config = dataclasses.replace(config, optimizer=optimizer, precision=PRECISIONS[precision])
    validate(config, num_gpus)
    vocabulary = known_vocab_size(config)
    if vocabulary is None:
        raise ConfigError("--vocab-size", "", "the flags alone do not tell the vocabulary", "add --vocab-size")
    name = named[0][1:].rpartition("/")[2].partition(".")[0] if named else parsed.name
    model = describe_model(config, vocabulary, name)
    if plan is not None:
        decided = load_plan(plan)
        validate_plan(decided, model, plan)
    else:
        decided = plan_from_flags(config, model, num_gpus)
        level = zero_level(flags)
        stages = (dataclasses.replace(stage, zero_level=level) for stage in decided.stages)
        decided = dataclasses.replace(decided, stages=tuple(stages))
    return Job(config, model, decided, flags)


def predict(
    words: Sequence[str],
    cluster: Cluster,
    *,
    precision: Precision | None = None,
    software: str | None = None,
    expert_load: str | None = None,
    plan: str | None = None,
    graphs: Graphs | None = None,
    constants: Constants | None = None,
) -> Prediction:
    """Seconds and bytes of a run.

    Args:
        words: Megatron flags, or `@FILE`.
        cluster: the machines; all of their GPUs run.
        precision, plan: in place of what the flags say.
        software: release whose efficiencies count; default the newest that was measured.
        expert_load: file of --log-expert-load: the busiest ranks set the pace. Default: balanced routing.
        graphs: captured models of the stages; default the cached capture.
        constants: default those of constants.json.
    """
    job = read_job(words, cluster.gpus, precision, plan)
    features = features_of(job.config, job.plan.precision, job.flags)
    captured = (graphs or _cached)(job.config, job.model, job.plan, job.flags)
    load = _busiest(expert_load, job.plan) if expert_load is not None else 1.0
    return predict_plan(
        job.plan, job.model, captured, cluster, features, constants or shipped_constants(), software, load
    )


def _busiest(path: str, plan: Plan) -> float:
    """Rows of the busiest rank of an expert group over the mean, averaged over the layers."""
    groups = plan.stages[0].expert
    ratios = []
    for shares in shares_by_layer(read_expert_loads(path)).values():
        each = len(shares) // groups
        ratios.append(groups * max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(groups)))
    return sum(ratios) / len(ratios)
