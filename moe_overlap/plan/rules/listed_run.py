"""What a run has to be beside its plan for its steps to follow instruction lists.

A plan says what overlaps; the settings below say what the layers compute and how their gradients and weights travel. Some of
them do not go with lists, or not with partitions. The flags of a run are held against these rules before it starts, and the
tuner holds every candidate against them, so that it offers nothing that a run refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import Gate


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """The settings of a run that overlap depends on and that no plan holds.

    Attributes:
        gate: of every mixture-of-experts layer; None leaves it to the router's flags.
        gradient_bucket_bytes: most bytes of one gradient reduction between all-to-alls; 0 reduces at the end of the step.
        dispatcher: how tokens reach their experts.
        overlap_param_gather: whether hooks gather weights while the next step begins.
        prediction_layers: multi-token-prediction layers, if any.
        parallel_block: how attention and MLP run side by side in a layer, if they do.
        virtual_stages: model chunks of a pipeline stage.
        recompute_granularity, recompute_modules: as Megatron's flags name them.
        refusal: why the settings do not go with a gate and a dispatcher of ours, whatever is overlapped; None where they do.
    """

    gate: Gate | None = None
    gradient_bucket_bytes: int = 0
    dispatcher: str = "irregular"
    overlap_param_gather: bool = False
    prediction_layers: int | None = None
    parallel_block: str | None = None
    virtual_stages: int = 1
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ()
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    refusal: ConfigError | None = None


def require_listable(run: ListedRun, why: str, capacity_chunks: int = 1) -> None:
    """Refuse settings that the executor of lists lacks, or does not go with.

    Args:
        why: the flag or the plan that has the executor run the step.
        capacity_chunks: of dispatch, experts and combine; 1: none.
    Raises:
        ConfigError: the first setting that disagrees.
    """
    rule = f"{why} exchanges tokens by the irregular dispatcher"
    _require(run.dispatcher == "irregular", "--moe-token-dispatcher-type", run.dispatcher, rule, "use irregular")
    fix = f"drop it or {why}"
    predicted = run.prediction_layers
    _require(not predicted, "--mtp-num-layers", predicted, f"{why} overlaps the layers of the decoder alone", fix)
    rule = f"{why} gathers weights at the end of the step; hooks would send them among the first exchanges of the next"
    _require(not run.overlap_param_gather, "--overlap-param-gather", "", rule, fix)
    rule = f"{why} runs attention and MLP one after the other"
    _require(run.parallel_block is None, "--parallel-attention-mlp", run.parallel_block, rule, fix)
    again = run.recompute_granularity
    rule = "capacity chunks that are recomputed are not executed"
    _require(again is None or capacity_chunks == 1, "--recompute-granularity", again, rule, fix)


def require_cuttable(run: ListedRun) -> None:
    """Refuse settings under which a micro-batch in partitions is another computation than the whole one.

    Raises:
        ConfigError: the first setting that disagrees.
    """
    modules = run.recompute_modules
    rule = "a layer keeps one normed input to compute again, and parts are under way together"
    _require("layernorm" not in modules, "--recompute-modules", " ".join(modules), rule, "drop layernorm")
    for flag, value in (("--hidden-dropout", run.hidden_dropout), ("--attention-dropout", run.attention_dropout)):
        _require(value == 0, flag, value, "its masks would depend on how the micro-batch is cut", "use 0")


def require_one_chunk(run: ListedRun, micro_batches: int, flag: str) -> None:
    """Refuse interleaved micro-batches in a pipeline whose model chunks are interleaved already.

    Raises:
        ConfigError: both are asked for.
    """
    rule = "the passes of an interleaved pipeline are not interleaved again"
    fix = "drop the virtual stages or the flag"
    _require(micro_batches == 1 or run.virtual_stages == 1, flag, micro_batches, rule, fix)


def _require(holds: bool, flag: str, value: object, rule: str, fix: str) -> None:
    if not holds:
        raise ConfigError(flag, value, rule, fix)
