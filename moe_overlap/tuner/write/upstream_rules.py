"""Rules across flags of unmodified Megatron-LM (its parser and megatron-core 0.16.1), for `--target megatron-lm`.

    upstream_errors          every rule that the values of flags break
    errors_of_upstreams_own  the same, for the rules on features that only Megatron-LM executes
    upstream_plan_errors     fields of a plan without a flag; if there are none, the rules that its values break
    is_upstream_plan         whether a plan has no such errors; takes well under a millisecond, for a search

Every rule is a function that yields errors, each with flag, value, rule and fix. Sources: the checks of `validate_args`
(megatron/training/arguments.py of Megatron-LM), and those of megatron-core's constructors: TransformerConfig,
ModelParallelConfig, OptimizerConfig, the pipeline's layout and schedules, the MoE layer and its dispatchers. Rules on a single
property of the model are left out, because no plan changes the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from moe_overlap.describe.errors import ConfigError, divisors
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.write.upstream_values import (
    LAYERS_ARE_CUT,
    SCOPES,
    Value,
    Values,
    default_value,
    unsayable,
    values_of_plan,
)


class _Run:
    """Values of flags; upstream's default for a flag that is absent."""

    __slots__ = ("_values", "world_size")

    def __init__(self, values: Values, world_size: int) -> None:
        self._values, self.world_size = values, world_size

    def __getitem__(self, flag: str) -> Value:
        return self._values[flag] if flag in self._values else default_value(flag)

    def number(self, flag: str) -> int:
        """A size; numbers of ranks and stages default to 1."""
        value = self[flag]
        assert isinstance(value, int), (flag, value)
        return value

    def text(self, flag: str) -> str:
        """A choice; empty if there is none."""
        return str(self[flag] or "")

    def texts(self, flag: str) -> tuple[str, ...]:
        """Several choices."""
        value = self[flag]
        return value if isinstance(value, tuple) else () if value is None else (str(value),)

    @property
    def are_layers_cut(self) -> bool:
        """Whether the values come from a plan, which fixes the layers of every chunk."""
        return LAYERS_ARE_CUT in self._values

    @property
    def expert_tensor(self) -> int:
        """Ranks that share an expert's matrices."""
        return int(self["--expert-tensor-parallel-size"] or self.number("--tensor-model-parallel-size"))  # type: ignore[arg-type]

    @property
    def virtual(self) -> int:
        """Model chunks of a pipeline stage; 1 without interleaving."""
        count = self["--num-virtual-stages-per-pipeline-rank"]
        if count is not None:
            return int(count)  # type: ignore[arg-type]
        layout, stages = self["--pipeline-model-parallel-layout"], self.number("--pipeline-model-parallel-size")
        if layout is not None:
            return max(1, len(_layout_parts(str(layout))) // stages)
        depth = self["--num-layers-per-virtual-pipeline-stage"]
        return 1 if depth is None else max(1, self.counted_layers // stages // int(depth))  # type: ignore[arg-type]

    @property
    def counted_layers(self) -> int:
        """Layers of the pipeline, with embedding and loss if flags count them as layers."""
        ends = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
        return self.number("--num-layers") + sum(bool(self[flag]) for flag in ends)


REQUIRED = ("--num-layers", "--num-attention-heads", "--hidden-size", "--max-position-embeddings", "--micro-batch-size")
"""Flags without a default that the parser requires."""
Errors = Iterator[ConfigError]
_E = ConfigError


def upstream_errors(values: Values, world_size: int) -> list[ConfigError]:
    """Every rule of Megatron-LM that the values break.

    Args:
        values: result of `values_of`, updated by a plan's values if there is a plan.
        world_size: processes of the run.
    """
    missing = [flag for flag in REQUIRED if values.get(flag) is None]
    if missing:
        return [_E(flag, "", "Megatron-LM needs it", "add it") for flag in missing]
    run = _Run(values, world_size)
    return [error for rule in RULES for error in rule(run)]


def errors_of_upstreams_own(values: Values, world_size: int) -> list[ConfigError]:
    """The rules on features of Megatron-LM alone that the values break; no runtime executes such a run."""
    run = _Run(values, world_size)
    return [error for rule in UPSTREAMS_OWN for error in rule(run)]


def upstream_plan_errors(plan: Plan, settings: Values) -> list[ConfigError]:
    """The reasons why Megatron-LM cannot execute a plan; empty if it can.

    Args:
        settings: `values_of` the user's flags: the model, and the settings that no plan decides.
    """
    unsaid = list(unsayable(plan))
    return unsaid or upstream_errors({**settings, **values_of_plan(plan)}, plan.world_size)


def is_upstream_plan(plan: Plan, settings: Values) -> bool:
    """Whether Megatron-LM can execute a plan."""
    # The first field without a flag settles it, so most plans of a search cost no rule.
    return next(unsayable(plan), None) is None and not upstream_errors(
        {**settings, **values_of_plan(plan)}, plan.world_size
    )


# Ranks and widths


def _world_divides(run: _Run) -> Errors:
    tensor, context = run.number("--tensor-model-parallel-size"), run.number("--context-parallel-size")
    stages, world = run.number("--pipeline-model-parallel-size"), run.world_size
    if world % (tensor * stages * context):
        rule = f"not a multiple of TP × PP × CP = {tensor} × {stages} × {context}"
        yield _E("world size", world, rule, f"use a multiple of {tensor * stages * context}")
        return
    expert, sharing = run.number("--expert-model-parallel-size"), run.expert_tensor
    if world % (sharing * expert * stages):
        rule = f"not a multiple of ETP × EP × PP = {sharing} × {expert} × {stages}"
        yield _E("world size", world, rule, f"use a multiple of {sharing * expert * stages}")
    if run["--use-tp-pp-dp-mapping"] and stages > 1 and run["--num-experts"] and tensor * context != sharing * expert:
        rule = f"stages are neighbours only if TP × CP = {tensor * context} equals ETP × EP = {sharing * expert}"
        yield _E("--use-tp-pp-dp-mapping", "", rule, "drop the flag or change the sizes")
    changing = run["--rampup-batch-size"] or run["--step-batch-size-schedule"]
    total, micro = run["--global-batch-size"], run["--micro-batch-size"]
    if changing or not isinstance(total, int) or not isinstance(micro, int):
        return
    data = world // (tensor * stages * context)
    if total % (micro * data):
        rule = f"not a multiple of micro-batch × data-parallel = {micro} × {data}"
        yield _E("--global-batch-size", total, rule, f"use a multiple of {micro * data}")
        return
    if run.virtual > 1:
        count = total // (micro * data)
        group = int(run["--microbatch-group-size-per-virtual-pipeline-stage"] or stages)  # type: ignore[arg-type]
        if not stages <= group <= count:
            rule = f"interleaving in groups of {group} micro-batches needs {stages} (stages) to {count} (all)"
            yield _E("--global-batch-size", total, rule, f"use {max(group, stages) * micro * data} or more")


def _widths_divide(run: _Run) -> Errors:
    tensor, heads = run.number("--tensor-model-parallel-size"), run.number("--num-attention-heads")
    flag = "--tensor-model-parallel-size"
    if heads % tensor:
        yield _E(flag, tensor, f"{heads} heads are not divisible by it", f"use {divisors(heads)}")
    if run["--group-query-attention"]:
        groups = run.number("--num-query-groups")
        if groups % tensor and tensor % groups:
            rule = f"{groups} query groups are neither a multiple nor a divisor of it"
            yield _E(flag, tensor, rule, f"use {divisors(groups)}")
    width, experts, sharing = run["--ffn-hidden-size"], run["--num-experts"], run.expert_tensor
    if isinstance(width, int) and width % tensor:
        yield _E(flag, tensor, f"--ffn-hidden-size {width} is not divisible by it", "change one of them")
    of_expert = run["--moe-ffn-hidden-size"] or width
    if experts and isinstance(of_expert, int) and of_expert % sharing:
        rule = f"the experts' width {of_expert} is not divisible by it"
        yield _E("--expert-tensor-parallel-size", sharing, rule, "change one of them")
    shared = run["--moe-shared-expert-intermediate-size"]
    if experts and isinstance(shared, int) and shared % tensor:
        rule = f"--moe-shared-expert-intermediate-size {shared} is not divisible by it"
        yield _E(flag, tensor, rule, "change one of them")


def _sequence_divides(run: _Run) -> Errors:
    sequence, context = run["--seq-length"] or run["--encoder-seq-length"], run.number("--context-parallel-size")
    tensor = run.number("--tensor-model-parallel-size")
    if not isinstance(sequence, int):
        return
    if context > 1 and sequence % (2 * context):
        rule = f"--context-parallel-size {context} cuts it into {2 * context} pieces"
        yield _E("--seq-length", sequence, rule, f"use a multiple of {2 * context}")
    elif run["--sequence-parallel"] and sequence // context % tensor:
        rule = f"--sequence-parallel splits it over {context * tensor} ranks"
        yield _E("--seq-length", sequence, rule, f"use a multiple of {context * tensor}")
    positions = run["--max-position-embeddings"]
    if isinstance(positions, int) and positions < sequence:
        rule = f"--max-position-embeddings is {positions}"
        yield _E("--seq-length", sequence, rule, f"use {positions} or less, or raise --max-position-embeddings")


def _sequence_parallel_fits(run: _Run) -> Errors:
    tensor, sequence_parallel = run.number("--tensor-model-parallel-size"), run["--sequence-parallel"] is True
    if run["--num-experts"] and tensor > 1 and not sequence_parallel:
        rule = "experts with tensor parallelism need sequence parallelism"
        yield _E("--tensor-model-parallel-size", tensor, rule, "add --sequence-parallel")
    # The parser turns sequence parallelism off for one tensor rank.
    effective = sequence_parallel and tensor > 1
    if run["--tp-comm-overlap"] and not effective:
        rule = "needs sequence parallelism, whose collectives it overlaps"
        yield _E("--tp-comm-overlap", "", rule, "add --sequence-parallel and two tensor ranks, or drop it")
    if run["--distribute-saved-activations"]:
        rule = "sequence parallelism already splits saved activations"
        if effective:
            yield _E("--distribute-saved-activations", "", rule, "drop it")
        elif tensor == 1 or run["--recompute-granularity"] != "full":
            rule = "needs full recomputation and several tensor ranks"
            yield _E("--distribute-saved-activations", "", rule, "drop it")


# Pipeline

_LAYOUT, _PER_VIRTUAL = "--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"
_VIRTUAL, _STAGES = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-size"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_ACCOUNTS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def _virtual_stages_fit(run: _Run) -> Errors:
    flags = [flag for flag in (_PER_VIRTUAL, _VIRTUAL, _LAYOUT) if run[flag] is not None]
    if len(flags) > 1:
        yield _E(flags[1], run[flags[1]], f"conflicts with {flags[0]}", "drop one of the two")
        return
    stages = run.number(_STAGES)
    if run[_PER_VIRTUAL] is not None and (run[_FIRST] is not None or run[_LAST] is not None):
        rule = "stages with different numbers of layers need the number of virtual stages"
        yield _E(_PER_VIRTUAL, run[_PER_VIRTUAL], rule, f"use {_VIRTUAL}")
    fewest = 3 if run["--no-overlap-p2p-communication"] else 2
    if run.virtual > 1 and stages < fewest:
        overlapped = " without overlapped transfers" if fewest == 3 else ""
        rule = f"interleaved chunks{overlapped} need {fewest} stages"
        yield _E(_STAGES, stages, rule, f"use {fewest} or more, or drop the virtual stages")
    if run["--overlap-p2p-communication-warmup-flush"] and (run.virtual == 1 or fewest == 3):
        rule = "needs overlapped transfers of an interleaved pipeline"
        yield _E("--overlap-p2p-communication-warmup-flush", "", rule, "drop it")


def _layers_divide(run: _Run) -> Errors:
    if run.are_layers_cut:
        return
    ends = [flag for flag in (_FIRST, _LAST) if run[flag] is not None]
    accounts = [flag for flag in _ACCOUNTS if run[flag]]
    if ends and accounts:
        yield _E(accounts[0], "", f"conflicts with {ends[0]}", "drop one of the two")
        return
    if run[_LAYOUT] is not None:
        yield from _layout_holds(run, [*ends, *accounts])
        return
    stages, layers, virtual = run.number(_STAGES), run.counted_layers, run.virtual
    depths = [run.number(flag) for flag in ends]
    rest, middle = layers - sum(depths), stages - len(depths)
    if bool(rest) != bool(middle) or rest < 0 or (middle and rest % middle):
        flag = ends[0] if ends else _STAGES
        rule = f"{rest} layers do not divide over {middle} stages"
        yield _E(flag, run[flag], rule, "change the stages or their layers")
        return
    per_virtual = run[_PER_VIRTUAL]
    if isinstance(per_virtual, int) and layers // stages % per_virtual:
        yield _E(
            _PER_VIRTUAL, per_virtual, f"a stage has {layers // stages} layers", f"use {divisors(layers // stages)}"
        )
        return
    for depth in [*depths, *([rest // middle] if middle else [])]:
        if depth % virtual:
            yield _E(_VIRTUAL, virtual, f"a stage has {depth} layers", f"use {divisors(depth)}")
            return


def _layout_holds(run: _Run, others: Sequence[str]) -> Errors:
    text, stages = run.text(_LAYOUT), run.number(_STAGES)
    if others:
        yield _E(others[0], "", f"conflicts with {_LAYOUT}", "drop one of the two")
    parts = _layout_parts(text)
    letters = "".join(parts)
    if len(parts) % stages:
        yield _E(_LAYOUT, text, f"names {len(parts)} chunks for {stages} stages", f"name a multiple of {stages}")
        return
    if not (letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1):
        yield _E(_LAYOUT, text, "must begin with the one embedding E and end with the one loss L", "correct it")
    layers, predictions = run.number("--num-layers"), int(run["--mtp-num-layers"] or 0)  # type: ignore[arg-type]
    if letters.count("t") != layers:
        yield _E(_LAYOUT, text, f"holds {letters.count('t')} of {layers} layers", f"name {layers} layers t")
    if letters.count("m") != predictions or "mt" in letters:
        rule = f"must have {predictions} prediction layers m after the layers t"
        yield _E(_LAYOUT, text, rule, "correct it")
    elif predictions and not any(part.count("m") == predictions for part in parts[-stages:]):
        yield _E(_LAYOUT, text, "all prediction layers m must be in one chunk, the last one of a stage", "move them")


_LETTERS, _GROUPS = re.compile(r"([A-Za-z|])\*(\d+)"), re.compile(r"\(([^()]*)\)\*(\d+)")


def _layout_parts(text: str) -> list[str]:
    """The letters of every chunk, with `t*3` and `(tt|)*2` written out."""
    written = text.replace(",", "").replace(" ", "")
    for shorthand in (_LETTERS, _GROUPS):
        written = shorthand.sub(lambda match: match[1] * min(int(match[2]), _LONGEST), written)
    return written.split("|")


_LONGEST = 10_000
"""Most repetitions of a layout's shorthand."""


# Experts and their dispatcher

_EXPERT, _DISPATCHER = "--expert-model-parallel-size", "--moe-token-dispatcher-type"


def _experts_divide(run: _Run) -> Errors:
    experts, expert = run["--num-experts"], run.number(_EXPERT)
    if expert > 1 and not experts:
        yield _E(_EXPERT, expert, "the model has no experts", "add --num-experts or use 1")
    if isinstance(experts, int) and experts and experts % expert:
        yield _E(_EXPERT, expert, f"{experts} experts are not divisible by it", f"use {divisors(experts)}")
    if expert > 1 and run["--fp16"]:
        yield _E(_EXPERT, expert, "expert parallelism does not train in fp16", "use --bf16")
    if experts and not run["--disable-bias-linear"] and run.expert_tensor > 1:
        rule, fix = "experts with biases cannot be split", "add --disable-bias-linear or use 1"
        yield _E("--expert-tensor-parallel-size", run.expert_tensor, rule, fix)


def _dispatcher_fits(run: _Run) -> Errors:
    if not run["--num-experts"]:
        return
    kind, backend = run.text(_DISPATCHER), run.text("--moe-flex-dispatcher-backend")
    if kind == "flex" and run.expert_tensor * run.number(_EXPERT) == 1:
        yield _E(_DISPATCHER, kind, "needs several expert ranks", "use alltoall or two expert ranks")
    if run["--moe-enable-deepep"] and kind != "flex":
        yield _E("--moe-enable-deepep", "", f"needs {_DISPATCHER} flex", "add it or drop this one")
    padded = run["--moe-pad-expert-input-to-capacity"]
    if padded and kind == "flex" and backend == "deepep":
        yield _E("--moe-pad-expert-input-to-capacity", "", "DeepEP cannot pad", "use alltoall or drop it")
    if padded and run["--moe-expert-capacity-factor"] is None:
        yield _E("--moe-pad-expert-input-to-capacity", "", "needs a capacity", "add --moe-expert-capacity-factor")
    quantized = ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization")
    for flag in quantized if kind == "allgather" else ():
        if run[flag]:
            yield _E(flag, "", "the allgather dispatcher cannot pad", f"use {_DISPATCHER} alltoall")
    if run["--moe-shared-expert-overlap"] and run["--moe-shared-expert-intermediate-size"] and kind != "alltoall":
        yield _E("--moe-shared-expert-overlap", "", "needs the alltoall dispatcher", f"use {_DISPATCHER} alltoall")
    if run["--moe-grouped-gemm"] and not run["--bf16"]:
        yield _E("--moe-grouped-gemm", "", "grouped products need bf16", "add --bf16 or drop it")


# Recomputation and offloading

_AGAIN, _MODULES = "--recompute-granularity", "--recompute-modules"


def _recomputation_fits(run: _Run) -> Errors:
    kind, method, layers = run[_AGAIN], run["--recompute-method"], run["--recompute-num-layers"]
    if kind == "full":
        if method is None:
            yield _E(_AGAIN, "full", "needs a method", "add --recompute-method uniform or block")
        if layers is None:
            yield _E(_AGAIN, "full", "needs a number of layers", "add --recompute-num-layers")
    if kind != "selective":
        return
    for flag, value in (("--recompute-method", method), ("--recompute-num-layers", layers)):
        if value is not None:
            yield _E(flag, value, f"needs {_AGAIN} full", "drop it")
    modules = run.texts(_MODULES) or ("core_attn",)
    unknown = set(modules) - RECOMPUTED
    if unknown:
        yield _E(_MODULES, " ".join(sorted(unknown)), "cannot be recomputed", "drop it")
    if "moe_act" in modules and not run["--moe-grouped-gemm"]:
        yield _E(_MODULES, "moe_act", "needs grouped products, whose activation it is", "add --moe-grouped-gemm")
    if "mla_up_proj" in modules and not run["--multi-latent-attention"]:
        yield _E(_MODULES, "mla_up_proj", "needs --multi-latent-attention", "drop it")
    if "shared_experts" in modules and run["--moe-shared-expert-overlap"]:
        yield _E(_MODULES, "shared_experts", "conflicts with --moe-shared-expert-overlap", "drop one of the two")
    late = {"moe_act", "layernorm"} & set(modules)
    if run["--fp8-format"] is not None and run["--fp8-recipe"] == "delayed" and late:
        rule = "cannot be recomputed under delayed scaling of fp8"
        yield _E(_MODULES, " ".join(sorted(late)), rule, "use another --fp8-recipe or drop it")


RECOMPUTED = frozenset("core_attn moe_act layernorm mla_up_proj mlp moe shared_experts".split())
"""Modules that selective recomputation supports."""


def _offloading_fits(run: _Run) -> Errors:
    flag, layers = "--cpu-offloading-num-layers", run.number("--cpu-offloading-num-layers")
    fine = "--fine-grained-activation-offloading"
    if layers:
        if not 0 < layers < run.number("--num-layers"):
            yield _E(flag, layers, f"must be between 1 and {run.number('--num-layers') - 1}", "correct the number")
        if run.number(_STAGES) > 1:
            yield _E(flag, layers, "does not work in a pipeline", f"use {fine} or drop it")
        if run[_AGAIN] is not None:
            yield _E(flag, layers, "does not go with recomputation", f"drop {_AGAIN} or this one")
        if run["--cuda-graph-impl"] != "none":
            yield _E(flag, layers, "does not go with CUDA graphs", "drop one of the two")
    if run[fine]:
        modules = run.texts("--offload-modules")
        if layers:
            yield _E(fine, "", f"does not go with {flag}", "drop one of the two")
        if not modules:
            yield _E(fine, "", "needs the modules to offload", "add --offload-modules")
        if "attn_proj" in modules and "core_attn" not in modules:
            yield _E("--offload-modules", "attn_proj", "can be offloaded only together with core_attn", "add core_attn")
    if run["--optimizer-cpu-offload"]:
        if not run["--use-precision-aware-optimizer"]:
            rule = "needs the precision-aware optimizer"
            yield _E("--optimizer-cpu-offload", "", rule, "add --use-precision-aware-optimizer")
        if run["--fp8-param-gather"] and run["--fp8-recipe"] != "delayed":
            rule = "needs delayed scaling if the optimizer is offloaded"
            yield _E("--fp8-param-gather", "", rule, "use --fp8-recipe delayed or drop it")


# Optimizer, sharding and precision

_SHARDED, _FSDP = "--use-distributed-optimizer", "--use-megatron-fsdp"


def _optimizer_fits(run: _Run) -> Errors:
    sharded, fsdp = run[_SHARDED], run[_FSDP]
    if run["--overlap-param-gather"]:
        if not (sharded or fsdp):
            yield _E("--overlap-param-gather", "", "needs sharded optimizer states", f"add {_SHARDED}")
        if not run["--overlap-grad-reduce"]:
            yield _E("--overlap-param-gather", "", "needs --overlap-grad-reduce", "add it")
    if run["--overlap-param-gather-with-optimizer-step"]:
        if not (sharded and run["--overlap-param-gather"] and run.virtual > 1):
            rule = f"needs {_SHARDED}, --overlap-param-gather and an interleaved pipeline"
            yield _E("--overlap-param-gather-with-optimizer-step", "", rule, "drop it")
        if run["--ckpt-format"] != "torch":
            rule = "does not go with distributed checkpoints"
            yield _E("--overlap-param-gather-with-optimizer-step", "", rule, "drop it or use --ckpt-format torch")
    if run["--use-precision-aware-optimizer"]:
        if not (sharded or fsdp):
            yield _E("--use-precision-aware-optimizer", "", "needs sharded optimizer states", f"add {_SHARDED}")
        if run["--optimizer"] != "adam":
            yield _E("--use-precision-aware-optimizer", "", "supports Adam only", "use --optimizer adam")
    for flag in ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"):
        if run[flag] != "fp32" and not run["--use-precision-aware-optimizer"]:
            rule = "types other than fp32 need --use-precision-aware-optimizer"
            yield _E(flag, run[flag], rule, "add it or use fp32")
    if "muon" in run.text("--optimizer") and (sharded or fsdp or run["--use-torch-fsdp2"]):
        yield _E("--optimizer", run["--optimizer"], "cannot be sharded over replicas", f"drop {_SHARDED}")


def _fsdp_fits(run: _Run) -> Errors:
    # Megatron-LM does not refuse this pipeline, but the gathers of Megatron-FSDP handle a single model chunk.
    if run[_FSDP] and run.number(_STAGES) > 1:
        yield _E(_STAGES, run.number(_STAGES), f"{_FSDP} does not support pipelines", "use 1, or drop it")
    if run[_FSDP] and run["--ckpt-format"] != "fsdp_dtensor":
        yield _E("--ckpt-format", run["--ckpt-format"], f"{_FSDP} needs fsdp_dtensor", "use fsdp_dtensor")
    if run[_FSDP] and run["--use-tp-pp-dp-mapping"]:
        yield _E("--use-tp-pp-dp-mapping", "", f"does not go with {_FSDP}", "drop one of the two")
    if run["--ckpt-format"] == "fsdp_dtensor" and not run[_FSDP]:
        yield _E("--ckpt-format", "fsdp_dtensor", f"needs {_FSDP}", "use torch_dist")
    if not run["--use-torch-fsdp2"]:
        return
    flag = "--use-torch-fsdp2"
    for other, size in ((_STAGES, run.number(_STAGES)), (_EXPERT, run.number(_EXPERT))):
        if size > 1:
            yield _E(flag, "", f"does not go with {other} {size}", "use 1")
    for other in (_SHARDED, "--fp16"):
        if run[other]:
            yield _E(flag, "", f"does not go with {other}", "drop one of the two")
    if not run["--no-gradient-accumulation-fusion"]:
        yield _E(flag, "", "does not support fused gradient accumulation", "add --no-gradient-accumulation-fusion")
    if not run["--untie-embeddings-and-output-weights"]:
        yield _E(flag, "", "does not support tied embeddings", "add --untie-embeddings-and-output-weights")
    if run["--ckpt-format"] not in ("torch_dist", "torch_dcp"):
        yield _E(flag, "", "needs the format torch_dist or torch_dcp", "use --ckpt-format torch_dist")


def _precision_fits(run: _Run) -> Errors:
    if run["--bf16"] and run["--fp16"]:
        yield _E("--fp16", "", "conflicts with --bf16", "drop one of the two")
    eight, four = run["--fp8-format"] is not None, run["--fp4-format"] is not None
    if eight and four:
        yield _E("--fp4-format", run["--fp4-format"], "conflicts with --fp8-format", "drop one of the two")
    if run["--fp4-param-gather"] and not four:
        yield _E("--fp4-param-gather", "", "needs --fp4-format", "drop it")
    if run["--fp8-param-gather"]:
        if not eight:
            yield _E("--fp8-param-gather", "", "needs --fp8-format", "drop it")
        if not (run[_SHARDED] or run[_FSDP] or run["--use-torch-fsdp2"]):
            yield _E("--fp8-param-gather", "", "needs sharded optimizer states", f"add {_SHARDED}")
    if run["--moe-router-padding-for-quantization"] and not (eight or four):
        yield _E("--moe-router-padding-for-quantization", "", "needs fp8 or fp4", "drop it")


# Overlap and CUDA graphs

PAIRED = _OVERLAP, _DELAYED = "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"
"""Flags for two micro-batches in flight: overlap of their all-to-alls, and with it weight gradients under the all-to-alls."""


def _expert_overlap_fits(run: _Run) -> Errors:
    if not run[_OVERLAP]:
        for flag in (_DELAYED, "--ep-overlap-early-attn-memory-release"):
            if run[flag]:
                yield _E(flag, "", f"needs {_OVERLAP}", "add it or drop this one")
        return
    stages, virtual = run.number(_STAGES), run.virtual
    if stages > 1 and virtual == 1:
        rule = f"needs virtual stages in a pipeline of {stages} stages"
        yield _E(_OVERLAP, "", rule, f"add {_VIRTUAL} 2 or drop it")
    if run.number(_EXPERT) == 1:
        yield _E(_OVERLAP, "", "needs several expert ranks", f"raise {_EXPERT} or drop it")
    if run[_DISPATCHER] not in ("alltoall", "flex"):
        yield _E(_OVERLAP, "", f"cannot overlap {run[_DISPATCHER]}", f"use {_DISPATCHER} alltoall or flex")
    full = ((_AGAIN, run[_AGAIN] == "full"), *((flag, run[flag] is not None) for flag in _FULL))
    for flag, is_given in full:
        if is_given:
            yield _E(_OVERLAP, "", f"does not go with {flag} {run[flag]}", f"drop {flag} or use selective")
            break
    if not (run["--bf16"] or run["--fp16"]):
        yield _E(_OVERLAP, "", "needs bf16 or fp16", "add --bf16")
    if run["--moe-shared-expert-overlap"]:
        yield _E(_OVERLAP, "", "already overlaps shared experts", "drop --moe-shared-expert-overlap")
    predictions = int(run["--mtp-num-layers"] or 0)  # type: ignore[arg-type]
    if predictions > 1:
        yield _E(_OVERLAP, "", f"supports one prediction layer, not {predictions}", "use --mtp-num-layers 1")
    if predictions == 1 and stages == 1:
        yield _E(_OVERLAP, "", "needs a pipeline if there is a prediction layer", f"raise {_STAGES} or drop it")
    graphs = run.text("--cuda-graph-impl")
    if graphs != "none" and (graphs != "transformer_engine" or {"moe", "mlp"} & set(run.texts(SCOPES))):
        rule = "supports CUDA graphs of Transformer Engine only, without moe and mlp"
        yield _E(_OVERLAP, "", rule, "use --cuda-graph-impl none")
    if run[_DELAYED]:
        if run["--transformer-impl"] != "transformer_engine":
            yield _E(_DELAYED, "", "needs Transformer Engine", "use --transformer-impl transformer_engine")
        if run["--moe-use-legacy-grouped-gemm"]:
            yield _E(_DELAYED, "", "does not go with --moe-use-legacy-grouped-gemm", "drop one of the two")


_FULL = ("--recompute-method", "--recompute-num-layers")


def _other_overlap_fits(run: _Run) -> Errors:
    if run["--defer-embedding-wgrad-compute"]:
        if run.number(_STAGES) == 1:
            yield _E("--defer-embedding-wgrad-compute", "", "needs a pipeline of several stages", "drop it")
        if run["--no-gradient-accumulation-fusion"]:
            rule = "needs fused gradient accumulation"
            yield _E("--defer-embedding-wgrad-compute", "", rule, "drop --no-gradient-accumulation-fusion")
    if run["--mtp-num-layers"] and run["--position-embedding-type"] not in ("rope", "yarn", "none"):
        rule = "prediction layers need rotary positions, or none"
        yield _E("--mtp-num-layers", run["--mtp-num-layers"], rule, "use --position-embedding-type rope")


def _graphs_fit(run: _Run) -> Errors:
    graphs, scopes = run.text("--cuda-graph-impl"), set(run.texts(SCOPES))
    if graphs == "none":
        return
    if run[_AGAIN] == "full" and "full_iteration" not in {graphs, *scopes}:
        yield _E("--cuda-graph-impl", graphs, "cannot capture full recomputation", f"drop {_AGAIN} or use none")
    if graphs == "transformer_engine" and "full_iteration" in scopes:
        yield _E(SCOPES, "full_iteration", "needs --cuda-graph-impl local", "use local")
    if {"moe", "moe_router"} <= scopes:
        yield _E(SCOPES, "moe", "already contains moe_router", "name one of the two")
    if "moe_preprocess" in scopes and "moe_router" not in scopes:
        yield _E(SCOPES, "moe_preprocess", "needs moe_router", "add moe_router")
    fixed = run["--moe-expert-capacity-factor"] is not None and run["--moe-pad-expert-input-to-capacity"]
    if "moe" in scopes and run["--num-experts"] and not fixed:
        rule = "experts can be captured only if their rows are padded to a capacity"
        yield _E(SCOPES, "moe", rule, "use moe_router, or pad")
    if graphs == "transformer_engine" and "moe_router" in scopes and _recomputes(run, "moe"):
        yield _E(SCOPES, "moe_router", "is inside the recomputed module moe", "drop one of the two")


def _recomputes(run: _Run, module: str) -> bool:
    return run[_AGAIN] == "selective" and module in run.texts(_MODULES)


UPSTREAMS_OWN = (_offloading_fits, _fsdp_fits, _expert_overlap_fits, _graphs_fit)
RULES: tuple[Callable[[_Run], Errors], ...] = (
    _world_divides,
    _widths_divide,
    _sequence_divides,
    _sequence_parallel_fits,
    _virtual_stages_fit,
    _layers_divide,
    _experts_divide,
    _dispatcher_fits,
    _recomputation_fits,
    _optimizer_fits,
    _precision_fits,
    _other_overlap_fits,
    *UPSTREAMS_OWN,
)
