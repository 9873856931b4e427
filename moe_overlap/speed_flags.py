"""What of a command line changes the speed or memory of a run beside its plan: read into `Features`, or named as not modelled.

Training executes some of these flags only on newer releases of Megatron-LM, or refuses them; a prediction is about any release,
so they are read here, from the words, and taken out of them where `megatron.training` refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from megatron.training.cli.config import Config
from moe_overlap.plan.plan import Precision
from moe_overlap.tuner.cost.hardware import Dispatcher, Features, Graphs

NEWER = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "--moe-expert-rank-capacity-factor",
    "--moe-paged-stash",
)
"""Speed and memory flags that this fork's parser does not take."""
NOT_MODELLED = (
    "--moe-expert-rank-capacity-factor",
    "--moe-paged-stash",
    "--moe-deepep-num-sms",
    "--moe-hybridep-num-sms",
    "--delay-wgrad-compute",
    "--fine-grained-activation-offloading",
    "--cpu-offloading-num-layers",
    "--optimizer-cpu-offload",
    "--use-nccl-ub",
    "--use-sharp",
    "--symmetric-ar-type",
    "--use-transformer-engine-op-fuser",
    "--optimizer-cuda-graph",
    "--moe-expert-capacity-factor",
)
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
STATE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}


def grouped(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flags and their values; the last mention counts."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = (value,) if equals else ()
        elif name:
            found[name] = (*found[name], word)
    return found


def without_newer(words: Sequence[str]) -> list[str]:
    """The words that `megatron.training` reads."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in NEWER
        if not dropping:
            kept.append(word)
    return kept


def zero_level(flags: Mapping[str, tuple[str, ...]]) -> int:
    """Sharding of the states over the data ranks that the flags ask for: 1, or what Megatron-FSDP's strategy says."""
    if "--use-megatron-fsdp" not in flags and "--use-torch-fsdp2" not in flags:
        return 1
    strategy = flags.get("--data-parallel-sharding-strategy", ("optim_grads_params",))
    return SHARDING[strategy[0]]


def features_of(config: Config, precision: Precision, flags: Mapping[str, tuple[str, ...]]) -> Features:
    """What the flags say about how a configuration runs.

    Args:
        precision: of the products; the plan's.
        flags: the words of the command line, grouped.
    """
    parallel, optimizer = config.parallel, config.optimizer
    low_weights = config.precision.fp8_param_gather or config.precision.fp4_param_gather
    fsdp = zero_level(flags) > 1
    in_fp32 = optimizer.accumulate_allreduce_grads_in_fp32 or precision == "fp32"
    in_fp32 = in_fp32 or (optimizer.bf16 and not optimizer.grad_reduce_in_bf16)
    return Features(
        precision=precision,
        flash=_is_fused_attention(flags),
        dropped_scores=config.model.attention_dropout > 0,
        overlap_grad_reduce=parallel.overlap_grad_reduce or fsdp,
        overlap_param_gather=parallel.overlap_param_gather or fsdp,
        overlap_tensor="--tp-comm-overlap" in flags,
        overlap_experts="--overlap-moe-expert-parallel-comm" in flags,
        overlap_shared_expert="--moe-shared-expert-overlap" in flags,
        overlap_transfers=parallel.overlap_p2p_comm,
        context_exchange=_context_exchange(flags),
        dispatcher=_dispatcher(config),
        graphs=_graphs(flags),
        gradient_bytes=4 if in_fp32 else 2,
        gathered_bytes=1 if low_weights else 4 if precision == "fp32" else 2,
        weight_bytes=4.0 if precision == "fp32" else 2.0,
        optimizer_bytes=_optimizer_bytes(config, precision),
        not_modelled=tuple(flag for flag in NOT_MODELLED if flag in flags),
    )


def _is_fused_attention(flags: Mapping[str, tuple[str, ...]]) -> bool:
    backend = flags.get("--attention-backend", ("auto",))[0]
    is_local = flags.get("--transformer-impl", ("transformer_engine",))[0] == "local"
    return backend not in ("unfused", "local") and ("--use-flash-attn" in flags or not is_local)


def _context_exchange(flags: Mapping[str, tuple[str, ...]]) -> Literal["p2p", "a2a", "all_gather"]:
    kind = flags.get("--cp-comm-type", ("p2p",))[0]
    return "a2a" if kind == "a2a" else "all_gather" if kind == "allgather" else "p2p"


def _dispatcher(config: Config) -> Dispatcher:
    kind = config.moe.moe_token_dispatcher_type
    if kind == "flex":
        return "hybridep" if config.device.moe_flex_dispatcher_backend == "hybridep" else "deepep"
    return "allgather" if kind == "allgather" else "alltoall"


def _graphs(flags: Mapping[str, tuple[str, ...]]) -> Graphs:
    implementation = flags.get("--cuda-graph-impl", ("none",))[0]
    if "--enable-cuda-graph" in flags or "--external-cuda-graph" in flags:
        implementation = "local"
    if implementation == "none":
        return "none"
    scope = flags.get("--cuda-graph-scope", ("full",))
    return "full" if implementation == "full_iteration" or {"full", "full_iteration"} & set(scope) else "partial"


def _optimizer_bytes(config: Config, precision: Precision) -> float:
    """Master weight, if the weight itself is none, and two moments."""
    chosen = config.precision
    if not chosen.use_precision_aware_optimizer:
        master = 0.0 if precision == "fp32" else 4.0
        return master + (8.0 if config.optimizer.optimizer == "adam" else 4.0)
    return (
        STATE_BYTES[chosen.main_params_dtype] + STATE_BYTES[chosen.exp_avg_dtype] + STATE_BYTES[chosen.exp_avg_sq_dtype]
    )
