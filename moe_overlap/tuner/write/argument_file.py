"""`megatron_args.txt`: the flags of a run under a chosen plan, one flag with its values per line, with the reason for each.

1. Start from the user's flags, without those that the plan decides (`decided_flags`) and those that the caller drops by name.
2. Add the flags that express the plan.
3. For `megatron-lm`, check the result by upstream's parser and its rules (`upstream_rules.py`), so that no file is written that
   Megatron-LM refuses.
4. Write the flags in groups (model, layout, memory, communication, training). A comment before a flag tells the plan's decision
   and, if the caller knows it, the predicted effect. The end of the file lists the flags that were left out, with reasons.

`pretrain_moe.py @FILE` reads the file; a relative `--plan` in it is a file in the same folder. `flag_lines` also fill an array in
a shell script.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.describe.readers.upstream_flags import load_upstream_flags
from moe_overlap.plan.plan import Devices, Named, Offload, Plan, Recompute, StagePlan
from moe_overlap.tuner.write.upstream_rules import upstream_errors
from moe_overlap.tuner.write.upstream_values import (
    OLDER_SPELLINGS,
    parser_errors,
    state_arguments,
    values_of,
    values_of_plan,
)

Target = Literal["moe-overlap", "megatron-lm"]
WIDTH = 118
"""Columns of a comment."""
GROUPS: tuple[tuple[str, str], ...] = (
    (
        "layout",
        "tensor-model-* sequence-parallel pipeline-model-* num-layers-per-virtual-* num-virtual-stages-* microbatch-group-* "
        "decoder-first-* decoder-last-* account-for-* context-parallel-size expert-model-parallel-size plan "
        "expert-tensor-parallel-size use-tp-pp-dp-mapping micro-batch-size global-batch-size rampup-batch-size",
    ),
    (
        "memory",
        "recompute-* *offload* use-distributed-optimizer use-megatron-fsdp data-parallel-sharding-strategy "
        "use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-* distribute-saved-activations "
        "use-torch-fsdp2 moe-layer-recompute",
    ),
    (
        "communication",
        "overlap-* *-overlap moe-overlap-* moe-token-dispatcher-type moe-enable-deepep moe-flex-* moe-deepep-* moe-hybridep-* "
        "ddp-* defer-* max-deferred-bytes delay-wgrad-compute tp-comm-* cp-comm-type grad-reduce-in-bf16 no-overlap-* "
        "accumulate-allreduce-grads-in-fp32 moe-gate distributed-backend distributed-timeout-minutes use-nccl-ub",
    ),
    (
        "model",
        "num-layers hidden-size ffn-hidden-size num-attention-heads *query-group* group-query-* kv-channels seq-length "
        "max-position-embeddings *position-embedding* rotary-* rope-* yarn-* mscale* norm* apply-layernorm-1p swiglu *gelu "
        "squared-relu parallel-attention-mlp activation-func-* glu-* disable-bias-linear add-qkv-bias qk-* untie-* "
        "make-vocab-size-divisible-by vocab-size *-dropout init-method-* embedding-init-* multi-latent-attention *-lora-rank "
        "v-head-dim mtp-* num-experts moe-* window-* softmax-type use-rope-scaling apply-query-key-layer-scaling",
    ),
)
"""Groups and the patterns of their flags; a flag belongs to the first group that matches, or else to training."""
ORDER = ("model", "layout", "memory", "communication", "training")
NOT_SAID_BY_PLANS = (
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--encoder-seq-length",
    "--optimizer-offload-fraction",
    "--data-parallel-sharding-strategy",
)
"""Flags that a plan replaces in addition to those of `values_of_plan`."""
OF_THE_RUN = frozenset(
    "--seq-length --global-batch-size --bf16 --fp16 --fp8-format --fp4-format --encoder-seq-length".split()
)
"""Flags of a plan that define the training run and not its layout."""
SAME_AS_ROUTER = ("--moe-gate", ("topk",))
"""The gate that equals Megatron's router: Megatron-LM has no flag for it and needs none."""


WEIGHTS_ALONE = (
    "--pretrained-checkpoint replaces it; the first start loads the same weights, a restart the run's own checkpoint"
)
"""Why --finetune, and the --load that it modifies, are left out of a job that loads its own checkpoints."""
FIRST_START = ("--no-load-optim", "--no-load-rng")
"""Flags for the first start only: a restart that repeats them would not load all of its own checkpoint."""
AT_FIRST = (
    "for the first start only, which loads your checkpoint (FIRST in launch.sbatch); a restart loads its own completely"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFlags:
    """The flags of a run.

    Attributes:
        flags: flag -> its values, ordered by group.
        text: contents of the file, comments included.
        left_out: the user's flags that were left out, each with the reason.
        first: the user's flags that apply to the first start only, which loads the user's checkpoint.
    """

    flags: Mapping[str, tuple[str, ...]]
    text: str
    left_out: tuple[tuple[str, str], ...]
    first: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The flags as a command line."""
        return [word for name, values in self.flags.items() for word in (name, *values)]


def argument_file(
    user_flags: Sequence[str],
    plan: Plan,
    arguments: Sequence[str],
    target: Target = "moe-overlap",
    *,
    effects: Mapping[str, str] | None = None,
    dropped: Mapping[str, str] | None = None,
    plan_file: str | None = None,
    in_file: Sequence[str] = (),
    head: Sequence[str] = (),
) -> WrittenFlags:
    """The flags that run a plan, and the text of their file.

    Args:
        user_flags: the user's flags, with argument files expanded; the plan replaces their layout.
        arguments: the flags that express the plan (`plan_values.arguments_of`), and those that its runtime needs in addition.
        effects: flag -> a sentence about the predicted effect of the choice.
        dropped: the user's flags to leave out, each with the reason.
        plan_file: name of the plan's JSON file in the same folder, for a plan that flags cannot express; this fork only.
        in_file: flags of the layout in that file; they are listed with their reasons in comments only.
        head: comment lines at the top.
    Raises:
        ConfigError: `megatron-lm` refuses the flags; the error is the first rule that they break.
    """
    # 1. The plan's flags, and the user's flags that stay unchanged.
    chosen = grouped([*arguments, *_state_flags(plan, target)])
    if plan_file is not None:
        chosen["--plan"] = (plan_file,)
    reasons, decided = dict(dropped or {}), decided_flags(plan)
    unchanged: dict[str, tuple[str, ...]] = {}
    for name, values in grouped(user_flags).items():
        reason = _no_flag_of_upstream(name, values) if target == "megatron-lm" else ""
        if reason:
            reasons.setdefault(name, reason)
        if name not in reasons and name not in decided and not is_format_of_fsdp(name, values):
            unchanged[name] = values
    # 2. The plan's flags over the user's. A job restarts with the same command line, so flags that would make a restart ignore
    # its own checkpoint move to the first start.
    merged = unchanged | {name: values for name, values in chosen.items() if name not in reasons}
    first = tuple(name for name in FIRST_START if name in merged)
    reasons |= dict.fromkeys(first, AT_FIRST)
    if "--finetune" in merged:
        reasons |= dict.fromkeys(("--finetune", "--load", *first), WEIGHTS_ALONE)
        merged, first = _begun_by_weights(merged), ()
    merged = {name: values for name, values in merged.items() if name not in FIRST_START}
    by_group = {name: merged[name] for group in ORDER for name in merged if group_of(name) == group}
    # 3. The rules of Megatron-LM.
    if target == "megatron-lm":
        for error in (*parser_errors(by_group), *upstream_errors(values_of(by_group), plan.world_size)):
            raise error
    # 4. The text.
    comments = {name: _comment(name, plan, effects or {}) for name in by_group}
    if plan_file is not None:
        comments["--plan"] += _layout_in_file(in_file, plan, effects or {})
    # The head has names of files; `printable` keeps a line break in one from ending the comment.
    lines = [*(f"# {printable(line, len(line))}".rstrip() for line in head), *flag_lines(by_group, comments)]
    left_out = tuple((name, reason) for name, reason in reasons.items() if name in grouped(user_flags))
    if left_out:
        lines += ["", "# left out", *(line for pair in left_out for line in _wrapped(": ".join(pair)))]
    return WrittenFlags(flags=by_group, text="\n".join(lines).strip() + "\n", left_out=left_out, first=first)


def _begun_by_weights(flags: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The flags with --finetune and --load replaced by --pretrained-checkpoint, which a restart ignores."""
    begun = {name: values for name, values in flags.items() if name not in ("--finetune", "--load")}
    return begun | ({"--pretrained-checkpoint": flags["--load"]} if "--load" in flags else {})


def decided_flags(plan: Plan) -> frozenset[str]:
    """The flags that a plan decides, in all their spellings; they replace the user's."""
    names = values_of_plan(plan).keys() | set(NOT_SAID_BY_PLANS)
    older = (name for name, values in OLDER_SPELLINGS.items() if values.keys() & names)
    return frozenset(names).union(older)


def is_format_of_fsdp(name: str, values: tuple[str, ...]) -> bool:
    """Whether a flag sets the checkpoint format of Megatron-FSDP, which the plan decides; other formats are the user's choice."""
    return (name, values) == ("--ckpt-format", ("fsdp_dtensor",))


def layout_flags() -> frozenset[str]:
    """The flags of a layout, in all their spellings: those that a plan decides, except batch and precision."""
    stage = StagePlan(
        chunks=((0, 1),),
        devices=Devices(mesh=(1, 1), ranks=(0,)),
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        tensor=1,
        context=1,
        data=1,
        expert=1,
        expert_tensor=1,
        zero_level=1,
        recompute=Recompute(),
        offload=Offload(),
    )
    nothing = Named(name="", sha256="")
    plan = Plan(
        model=nothing,
        cluster=nothing,
        sequence_length=1,
        global_batch_size=1,
        precision="bf16",
        pipeline_schedule="1f1b",
        embedding_stage=0,
        mtp_stage=None,
        loss_stage=0,
        stages=(stage,),
        transfers=(),
        predicted=None,
    )
    return decided_flags(plan) - OF_THE_RUN


def _state_flags(plan: Plan, target: Target) -> list[str]:
    """Flags that shard and offload states. On this fork more than ZeRO-1 is expressed in the plan's file, without flags."""
    stage = plan.stages[0]
    if target == "megatron-lm":
        return state_arguments(plan)
    return ["--use-distributed-optimizer"] if stage.zero_level == 1 and not stage.is_decoupled else []


def _no_flag_of_upstream(name: str, values: tuple[str, ...]) -> str:
    """Why a flag of the user is left out for Megatron-LM; empty if Megatron-LM has the flag.

    Raises:
        ConfigError: without the flag Megatron-LM would train another model.
    """
    if name in load_upstream_flags():
        return ""
    if (group_of(name) == "model" or name == "--moe-gate") and (name, values) != SAME_AS_ROUTER:
        rule = "Megatron-LM has no such flag, and would train another model"
        raise ConfigError(name, " ".join(values), rule, "use --target moe-overlap")
    return "Megatron-LM has no such flag"


@cache
def group_of(flag: str) -> str:
    """The group in which a flag is written."""
    name = flag.removeprefix("--")
    fits = (group for group, patterns in GROUPS if any(fnmatchcase(name, pattern) for pattern in patterns.split()))
    return next(fits, "training")


def flag_lines(flags: Mapping[str, tuple[str, ...]], comments: Mapping[str, Sequence[str]]) -> list[str]:
    """A flag and its values on each line, quoted for a shell, under the names of their groups.

    Args:
        comments: flag -> comment lines before it.
    """
    lines: list[str] = []
    group = ""
    for name, values in flags.items():
        if group_of(name) != group:
            group = group_of(name)
            lines += ["", f"# {group}"]
        lines += [*comments.get(name, ()), " ".join([name, *map(shlex.quote, values)])]
    return lines


def _comment(flag: str, plan: Plan, effects: Mapping[str, str]) -> list[str]:
    """Comment lines of a flag: the decision, and its effect."""
    reason = REASONS[flag](plan, plan.stages[0]) if flag in REASONS else ""
    effect = effects.get(flag, "")
    return _wrapped("; ".join(text.rstrip(".;") for text in (reason, effect) if text))


def _layout_in_file(in_file: Sequence[str], plan: Plan, effects: Mapping[str, str]) -> list[str]:
    """Comment lines: the layout in the plan's file, written as flags with their reasons."""
    lines: list[str] = []
    for name, values in grouped(in_file).items():
        reason = REASONS[name](plan, plan.stages[0]) if name in REASONS else ""
        why = "; ".join(filter(None, (reason, effects.get(name, ""))))
        lines += _wrapped(f"{' '.join([name, *values])}{f': {why}' if why else ''}", indent="#   ")
    return ["# its layout:", *lines] if lines else []


def _wrapped(text: str, indent: str = "# ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


# Reasons


def _stages(plan: Plan, stage: StagePlan) -> str:
    depths = sorted({len(other.layers) for other in plan.stages})
    layers = f"{depths[0]}" if len(depths) == 1 else f"{depths[0]} to {depths[-1]}"
    return f"{len(plan.stages)} stages of {len(stage.devices.ranks)} GPUs, with {layers} layers each"


def _experts(plan: Plan, stage: StagePlan) -> str:
    replicas = f", {stage.expert_data} replicas of each" if stage.expert_data > 1 else ""
    return f"experts spread over {stage.expert} ranks of a stage{replicas}"


def _batch(plan: Plan, stage: StagePlan) -> str:
    count = stage.gradient_accumulation_steps
    counted = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return f"{counted} a step" + (f" on each of {stage.data} replicas" if stage.data > 1 else "")


def _recomputed(plan: Plan, stage: StagePlan) -> str:
    if stage.recompute.granularity == "selective":
        return "the backward pass recomputes the outputs of these modules, which are not stored"
    return "the backward pass recomputes these layers completely; only their inputs are stored"


def _expert_shares(plan: Plan, stage: StagePlan) -> str:
    if stage.expert_tensor == 1:
        return f"experts are not split, while attention is split over {stage.tensor} ranks"
    return f"every expert's matrices are split over {stage.expert_tensor} ranks"


REASONS: Mapping[str, Callable[[Plan, StagePlan], str]] = {
    "--tensor-model-parallel-size": lambda plan, stage: f"every layer's matrices are split over {stage.tensor} ranks",
    "--sequence-parallel": lambda plan, stage: "norms and their activations are split over the tensor ranks, too",
    "--pipeline-model-parallel-size": _stages,
    "--num-virtual-stages-per-pipeline-rank": lambda plan, stage: (
        f"{len(stage.chunks)} model chunks on every stage: a shorter bubble for more transfers"
    ),
    "--pipeline-model-parallel-layout": lambda plan, stage: "layers of every stage, with embedding E and loss L",
    "--decoder-first-pipeline-num-layers": lambda plan, stage: "the first stage also holds the embedding",
    "--decoder-last-pipeline-num-layers": lambda plan, stage: "the last stage also holds the loss",
    "--context-parallel-size": lambda plan, stage: f"every sequence is split over {stage.context} ranks",
    "--expert-model-parallel-size": _experts,
    "--expert-tensor-parallel-size": _expert_shares,
    "--moe-grouped-gemm": lambda plan, stage: (
        "the products of a rank's experts are one call; the prediction assumes it"
    ),
    "--use-tp-pp-dp-mapping": lambda plan, stage: "the stages of a replica are on neighbouring ranks",
    "--micro-batch-size": _batch,
    "--recompute-granularity": _recomputed,
    "--use-distributed-optimizer": lambda plan, stage: (
        "optimizer states are split over the replicas (ZeRO-1)" if stage.data > 1 else "ZeRO-1, with one replica"
    ),
    "--use-megatron-fsdp": lambda plan, stage: f"states are split over the replicas (ZeRO-{stage.zero_level})",
    "--optimizer-cpu-offload": lambda plan, stage: (
        f"{100 * stage.offload.optimizer:.0f} % of the optimizer states in host memory"
    ),
    "--cpu-offloading-num-layers": lambda plan, stage: "the activations of these layers are in host memory meanwhile",
    "--overlap-moe-expert-parallel-comm": lambda plan, stage: (
        "all-to-alls of one micro-batch overlap with the computation of another"
    ),
    "--delay-wgrad-compute": lambda plan, stage: "weight gradients overlap with those all-to-alls, too",
    "--plan": lambda plan, stage: "a layout that flags cannot express; the file is in the same folder as this one",
}
"""Flag -> the plan's decision, for a comment."""
