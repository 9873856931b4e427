"""Flags of a plan search: what the user's say once a plan decides the layout, and what they become for every plan.

1. `without_layout` takes from the flags what a plan decides; `with_precision` puts another precision in the place of theirs.
2. `PlansAsFlags` writes a plan as the flags of the whole run and reads them as any command line is read: rules across flags are
   asked where they stand, so that no answer is refused when it is started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, cast

from megatron.training.cli.arguments import expand_files, parse
from megatron.training.plan_flags import hold_unlike_stages
from megatron.training.plan_values import arguments_of, layout_values, says_recomputation
from moe_overlap.api import Options, arguments_to_run, problem_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import grouped, zero_level
from moe_overlap.job import read_job, with_stages_of
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan_search.results import Finalist
from moe_overlap.tuner.capture.cache import PRECISIONS
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.cost.prediction import estimate_plan, moves_states
from moe_overlap.tuner.search.pipeline.per_stage import StagedPlan
from moe_overlap.tuner.search.space import uniform_plan
from moe_overlap.tuner.search.uniform import RankedLayout
from moe_overlap.tuner.search.uniform_cost import UniformTask
from moe_overlap.tuner.write.argument_file import argument_file, is_format_of_fsdp, layout_flags
from moe_overlap.tuner.write.dispatcher_flags import FLAGS
from moe_overlap.tuner.write.flags_left_out import REPLACED
from moe_overlap.tuner.write.upstream_rules import PAIRED
from moe_overlap.tuner.write.upstream_values import unsayable

GROUPED_PRODUCTS = "--moe-grouped-gemm"
DISTRIBUTED = "--use-distributed-optimizer"
Target = Literal["moe-overlap", "megatron-lm", "any"]
DECIDED = "the search decides it"
BY_HAND = ("--moe-overlap-", "--defer-weight-gradients", "--max-deferred-bytes")
"""Flags that overlap by hand; prefixes."""
OF_DEVICE = ("--moe-overlap-device-connections", "--moe-overlap-nccl-ctas")
"""Flags of the same group that no search decides."""
PRECISION_FIELDS = {"optimizer.bf16", *(f"precision.{name}" for name in ("fp16", "fp8", "fp8_recipe", "fp4"))}
AT_THE_END = ("--overlap-grad-reduce", "--overlap-param-gather")
"""Flags that a run with stages of unlike shape goes without: its lists reduce and gather behind the passes."""
OF_PRECISION = ("--bf16", "--fp16", "--fp8-", "--fp4-")
"""Flags of the precision; prefixes."""


def flags_of(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The flags of a command line with their values, those of its files among them."""
    return grouped(tuple(expand_files(arguments)))


def flags_of_layout(plan: Plan, predictions: int) -> dict[str, tuple[str, ...]]:
    """The flags that say the layout of a plan, whose model has so many prediction layers."""
    return grouped(arguments_of(layout_values(plan, predictions)))


def without_layout(arguments: Sequence[str], target: Target) -> tuple[list[str], dict[str, str]]:
    """The user's flags without those that a plan decides, and those that the target does otherwise with the reason."""
    flags = flags_of(arguments)
    dropped = {name: reason for name, reason in REPLACED.items() if name in flags and target != "megatron-lm"}
    dropped |= {
        name: DECIDED for name in flags if name == "--plan" or (name.startswith(BY_HAND) and name not in OF_DEVICE)
    }
    gone = layout_flags()
    remaining = [
        (name, values)
        for name, values in flags.items()
        if name not in gone and name not in dropped and not is_format_of_fsdp(name, values)
    ]
    if "--global-batch-size" not in flags:
        # The default is a micro-batch on every rank: it would depend on what is searched.
        raise ConfigError("--global-batch-size", "", "is not among the flags", "add it: a plan is for one batch")
    return [word for name, values in remaining for word in (name, *values)], dropped


def with_precision(arguments: Sequence[str], precision: Precision | None) -> list[str]:
    """The flags with those of another precision in the place of their own."""
    if precision is None:
        return list(arguments)
    values = dataclasses.asdict(PRECISIONS[precision])
    fields = {f"precision.{name}": value for name, value in values.items() if name.startswith(("fp8", "fp4", "fp16"))}
    replacement = arguments_of({**fields, "optimizer.bf16": precision != "fp16"})
    others = {name: values for name, values in grouped(arguments).items() if not name.startswith(OF_PRECISION)}
    return [*(word for name, values in others.items() for word in (name, *values)), *replacement]


def as_priced(arguments: Sequence[str], target: Target) -> list[str]:
    """The flags with what prices take for granted and Megatron-LM must be told: the products of a rank's experts in one call.

    Without the flag it multiplies one expert at a time. This fork always groups them, where its libraries do.
    """
    flags = grouped(arguments)
    is_told = target != "megatron-lm" or GROUPED_PRODUCTS in flags
    return (
        [*arguments] if is_told or not flags.keys() >= {"--num-experts", "--bf16"} else [*arguments, GROUPED_PRODUCTS]
    )


def as_run(arguments: Sequence[str], target: Target) -> list[str]:
    """The user's flags as the target runs them: this fork's optimizer is always distributed, Megatron-LM's where a flag says so.

    Raises:
        ConfigError: not a strategy of FSDP.
    """
    flags = flags_of(arguments)
    is_implied = target == "moe-overlap" and "--plan" not in flags and zero_level(flags) == 0
    return [*arguments, DISTRIBUTED] if is_implied else [*arguments]


@dataclasses.dataclass(frozen=True, slots=True)
class PlanFlags:
    """A plan as flags.

    Attributes:
        arguments: the flags of the whole run, as far as flags say the plan.
        plan_arguments: those that express the plan in the written file.
        in_file: those that plan.json replaces, because flags cannot express the recomputation of single stages.
    """

    arguments: list[str]
    plan_arguments: tuple[str, ...]
    in_file: tuple[str, ...] = ()


class PlansAsFlags:
    """Plans as flags, which are read again before a plan is kept: rules across flags are asked where they stand.

    Attributes:
        refused: names of plans that a rule refuses, with the rule.
    """

    def __init__(self, task: UniformTask, bare: Sequence[str], target: Target, gpus: int) -> None:
        self._task, self._bare, self._gpus = task, bare, gpus
        self._target: Literal["moe-overlap", "megatron-lm"] = (
            "megatron-lm" if target == "megatron-lm" else "moe-overlap"
        )
        self._known: dict[str, bool] = {}
        self.refused: list[tuple[str, str]] = []

    def flags(self, ranked: RankedLayout) -> PlanFlags:
        """The flags of a uniform plan.

        Raises:
            ConfigError: Megatron-LM refuses them.
        """
        template, model = self._task.templates(ranked.layout.tensor)
        plan = uniform_plan(template, model.num_layers, ranked.layout, ranked.memory)
        return self.of_plan(ranked.layout.dispatcher, plan, model, ranked.layout.paired)

    def of_plan(self, dispatcher: str, plan: Plan, model: ModelDescription, paired: bool = False) -> PlanFlags:
        """The same of any plan whose stages have one shape.

        Raises:
            ConfigError: Megatron-LM refuses them, or has none for what single stages recompute.
        """
        if plan.transfers:
            return self._in_file(plan, model)
        values = layout_values(plan, model.mtp_layers)
        layout = arguments_of({path: value for path, value in values.items() if path not in PRECISION_FIELDS})
        # The precision keeps the user's flags: a plan has no recipe.
        precise = [(name, values) for name, values in grouped(self._bare).items() if name.startswith(OF_PRECISION)]
        others = [word for name, values in precise for word in (name, *values)]
        # Plans with parameter stores run on instruction lists, whatever dispatcher was priced.
        on_lists = plan.has_stores and self._target != "megatron-lm"
        others += FLAGS[cast(Dispatcher, dispatcher)] if dispatcher and not on_lists else ()
        others += PAIRED if paired else ()
        bare: Sequence[str] = self._bare
        if self._target == "megatron-lm":
            for error in unsayable(plan):
                raise error
        elif on_lists:
            bare = self._on_lists(plan, model)
        arguments = argument_file(bare, plan, [*layout, *others], self._target).arguments
        if says_recomputation(plan) and not on_lists:
            return PlanFlags(arguments, (*layout, *others))
        return PlanFlags(arguments, tuple(others), tuple(layout))

    def _in_file(self, plan: Plan, model: ModelDescription) -> PlanFlags:
        """The flags of a run whose stages have unlike shapes: its plan's file says the layout.

        Raises:
            ConfigError: Megatron-LM runs no such stages, or a stage breaks a rule across flags.
        """
        if self._target == "megatron-lm":
            for error in unsayable(plan):
                raise error
        arguments = self._on_lists(plan, model)
        size = (*arguments, "--micro-batch-size", str(plan.stages[0].micro_batch_size))
        hold_unlike_stages(plan, "plan.json", parse(list(size)).config, model)
        return PlanFlags(list(arguments), (), ("--pipeline-model-parallel-size", str(len(plan.stages))))

    def _on_lists(self, plan: Plan, model: ModelDescription) -> tuple[str, ...]:
        """The user's flags for a run that follows lists, which reduce and gather where the plan says."""
        arguments = tuple(self._bare)
        if model.num_experts:
            arguments, _ = arguments_to_run(arguments, plan, parse(list(arguments)).config)
        return tuple(word for word in arguments if word not in AT_THE_END)

    def read(self, dispatcher: str, plan: Plan, model: ModelDescription) -> PlanFlags:
        """The same, read as any command line is.

        Raises:
            ConfigError: Megatron-LM or rules across flags refuse them.
        """
        flags = self.of_plan(dispatcher, plan, model)
        if plan.transfers:
            return flags
        job = read_job(flags.arguments, self._gpus)
        if flags.in_file:
            with_stages_of(job, plan)
        return flags

    def is_read(self, ranked: RankedLayout) -> bool:
        """Whether a plan's flags are accepted; what refuses it is noted."""
        if ranked.name not in self._known:
            try:
                read_job(self.flags(ranked).arguments, self._gpus)
                self._known[ranked.name] = True
            except ConfigError as error:
                self._known[ranked.name] = False
                self.refused.append((ranked.name, str(error)))
        return self._known[ranked.name]

    def finalist(self, ranked: RankedLayout, cluster: Cluster, options: Options) -> Finalist:
        """A ranked plan, read from its flags and predicted, though not yet by lists of states that move.

        Raises:
            ConfigError: rules across flags refuse it.
        """
        return self._predicted(ranked.name, self.flags(ranked), cluster, options)

    def staged_finalist(self, staged: StagedPlan, cluster: Cluster, options: Options) -> Finalist:
        """The same of a plan whose stages differ in layers and recomputation.

        Raises:
            ConfigError: rules across flags refuse it, or Megatron-LM has no flags for it.
        """
        template, model = self._task.templates(staged.layout.tensor)
        plan = staged.plan(template, model.num_layers)
        validate_plan(plan, model)
        flags = self.of_plan(staged.layout.dispatcher, plan, model)
        return self._predicted(staged.name, flags, cluster, Options(**{**options, "decided": plan}), is_staged=True)

    def _predicted(
        self, name: str, flags: PlanFlags, cluster: Cluster, options: Options, is_staged: bool = False
    ) -> Finalist:
        problem = problem_of(flags.arguments, cluster, options)
        return Finalist(
            name=name,
            problem=problem,
            prediction=estimate_plan(problem.plan, problem),
            arguments=tuple(flags.arguments),
            plan_arguments=flags.plan_arguments,
            in_file=flags.in_file,
            is_staged=is_staged,
            lacks_lists=moves_states(problem.plan),
        )
