"""Flags of a predicted run: predictions accept flags of any release of Megatron-LM, training only those of the pinned release.

`read` sorts the arguments of a command line before `megatron.training` parses them:
    modelled        sharding by FSDP, which this fork does not execute: predictions include its ZeRO level (`zero_level`)
    not modelled    flags whose effect predictions ignore: the answer lists them with the effect
    no cost         files, data and learning rates of newer releases: removed silently, because they do not change a step
    replaced        a choice that the pinned release lacks: the nearest choice is priced, and the answer says so
Flags that select another model or program are kept, so that the parser refuses them with its reason. Flags that no release knows
are kept as well.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from types import MappingProxyType

from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.readers.upstream_flags import awaited, load_upstream_flags, refusal, without_effect_reason

Flags = Mapping[str, tuple[str, ...]]
"""Flag -> its values, as the command line has them."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect on seconds or bytes of flags that predictions ignore."""

    change: str
    patterns: tuple[str, ...]


def _effect(change: str, patterns: str) -> Effect:
    return Effect(change, tuple(f"--{name}" for name in patterns.split()))


EFFECTS = (
    _effect(
        "buffers of fixed size for a rank's experts: rows beyond them are dropped",
        "moe-expert-rank-capacity-factor",
    ),
    _effect(
        "keeps the experts' activations in pages: less memory where routing is uneven, and copies",
        "moe-paged-stash",
    ),
    _effect(
        "multiprocessors that dispatch and combine take from computation",
        "moe-deepep-num-sms moe-hybridep-num-sms moe-flex-dispatcher-num-sms moe-hybridep-num-*",
    ),
    _effect(
        "the experts' weight gradients under the dispatch of the backward pass",
        "overlap-dispatch-backward-with-experts-wgrad",
    ),
    _effect("activations on the host: less memory, copies beside the passes", "fine-grained-activation-offloading"),
    _effect(
        "optimizer states on the host between updates: less memory, copies around the update",
        "chunked-optimizer-state-offload",
    ),
    _effect("bytes of one copy of offloaded optimizer states", "optimizer-state-offload-chunk-size-mb"),
    _effect("registered buffers: faster reductions that take fewer multiprocessors", "use-nccl-ub"),
    _effect("reductions inside the network's switches", "use-sharp"),
    _effect("all-reduces over symmetric memory: faster where they are small", "symmetric-ar-type"),
    _effect("fewer launches in the update", "optimizer-cuda-graph"),
    _effect("rows beyond the capacity are dropped: less work where routing is uneven", "moe-expert-capacity-factor"),
    _effect(
        "gate and value columns interleaved for a fused kernel: fewer passes over memory",
        "moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size",
    ),
    _effect("dense products by the grouped kernel", "use-grouped-gemm-for-*"),
    _effect("the experts' weights as one tensor: fewer launches", "moe-use-grouped-tensor moe-single-grouped-*"),
    _effect("no permutation beside the dispatch: fewer passes over memory", "moe-permute-fusion-into-hybridep"),
    _effect("bytes of the dispatch in the forward pass", "moe-dispatch-fwd-dtype"),
    _effect("bytes of the combine in the backward pass", "moe-combine-bwd-dtype"),
    _effect("the head's product in 8 bits", "fp8-output-proj"),
    _effect("bytes of the logits", "output-logit-dtype"),
    _effect("the two down-projections of latent attention in one product", "mla-down-proj-fusion"),
    _effect("addition and norm in one kernel: fewer passes over memory", "fused-residual-rmsnorm"),
    _effect("prediction layers share one layer's weights: less memory", "mtp-use-repeated-layer"),
    _effect("no gradient from the prediction layers into the decoder", "mtp-detach-heads"),
    _effect("another head of the prediction layers", "mtp-hsm"),
    _effect("prediction layers on a stage of their own", "mtp-standalone"),
    _effect(
        "several residual streams: more memory, and mixing products in every layer",
        "enable-mhc-connections mhc-*",
    ),
    _effect("sparse or linear attention: less work in long sequences", "experimental-attention-variant"),
    _effect("sparse attention: less work in long sequences, and an indexer's products", "dsa-* *-dsa-*"),
    _effect("linear attention: less work in long sequences", "linear-*"),
    _effect("a gate behind attention: one more product in every layer", "attention-output-gate"),
    _effect("a norm of queries and keys: one more pass over them", "qk-l2-norm"),
    _effect("the largest score of every head, and a pass over the weights behind the update", "qk-clip*"),
    _effect("layers without rotation of queries and keys", "no-rope-freq"),
    _effect("hidden states between the layers in four bytes: more memory and traffic", "fp32-residual-connection"),
    _effect("layers of unlike shape: every layer is priced as the flags describe one", "heterogeneous-layers-*"),
    _effect("another precision of some products", "te-precision-config-file"),
    _effect("other kernels of the products", "use-kitchen-*"),
    _effect("slower kernels whose sums do not depend on the batch", "batch-invariant-*"),
    _effect("gradients sent in two bytes and added up in four", "ddp-reduce-scatter-with-fp32-accumulation"),
    _effect(
        "optimizer states on a part of the replicas: more memory, gathers inside that part",
        "num-distributed-optimizer-instances",
    ),
    _effect(
        "weights sharded further and gathered in every pass: less memory, more communication",
        "tensor-parallel-num-weight-shards gtp-* expert-tensor-parallel-num-weight-shards",
    ),
    _effect("states sharded between groups of replicas, too", "outer-dp-sharding-strategy"),
    _effect("bytes of the master weights and gradients of FSDP", "megatron-fsdp-main-*"),
    _effect("bytes of the gradients that FSDP reduces", "megatron-fsdp-grad-comm-dtype"),
    _effect("context ranks by the length of each sequence", "*hybrid-context-parallel *dynamic-context-parallel"),
    _effect("no weight gradients and no update of the layers", "freeze-all-layers"),
    _effect("the MLP in pieces of the sequence: less memory, and more launches", "mlp-chunks-for-training"),
    _effect("attention by another release's kernels", "flash-attention-version"),
    _effect(
        "priority of hidden all-to-alls over computation: more of them is hidden, and computation is slower",
        "high-priority-a2a-comm-stream",
    ),
    _effect("attention inside documents: less work", "dataloader-inter-document-masking"),
    _effect("sums of some gradients in four bytes: more memory", "ddp-param-name-patterns-for-fp32-local-accumulation"),
    _effect("attention by kernels that read a mask of documents: slower than those without", "reset-attention-mask"),
    _effect(
        "the optimizer's step on the host's cores, which takes longer; counted is a GPU's, with copies of its states",
        "optimizer-cpu-offload",
    ),
    _effect("distillation: a second loss, and logits in files", "logits-*"),
    _effect("positions in several dimensions", "mrope-section"),
    _effect("uneven loads of the experts: see --expert-load", "moe-router-force-biased"),
    _effect("weights of a dense checkpoint at the start", "moe-use-upcycling"),
    _effect("samples of unlike length", "sft"),
    _effect(
        "rows of embedding and head: see --vocab-size and --make-vocab-size-divisible-by",
        "padded-vocab-size *-pad-vocab-size",
    ),
)
"""The first pattern that matches a flag counts."""
MODELLED = (
    "--use-megatron-fsdp",
    "--cpu-offloading-num-layers",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
)
"""Flags that training refuses and predictions price (--optimizer-cpu-offload only in part: see `EFFECTS`)."""
AFTER_THE_TABLE = ("--chunked-optimizer-state-offload", "--optimizer-state-offload-chunk-size-mb")
"""Flags of published recipes for releases of Megatron-LM newer than the table of upstream's flags."""
NO_COST = (
    "--head-lr-mult",
    "--no-weight-decay-cond-type",
    "--use-mup",
    "--mup-*",
    "--moe-router-quantile-balancing-ema",
    "--fake-process-group",
)
"""Flags that training refuses and that change neither seconds nor bytes of a step."""
STAND_INS: Mapping[tuple[str, str], tuple[str | None, str]] = MappingProxyType(
    {
        **{
            ("--optimizer", name): (
                "sgd",
                "one moment as in SGD; the products that orthogonalise an update are not counted",
            )
            for name in ("muon", "dist_muon", "adaptive_muon")
        },
        ("--optimizer", "lion"): ("sgd", "one moment as in SGD"),
        ("--optimizer", "soap"): ("adam", "two moments as in Adam; preconditioners and their products are not counted"),
        ("--moe-router-load-balancing-type", "quantile_balancing"): ("none", "a router without an auxiliary loss"),
        ("--moe-router-score-function", "sqrtsoftplus"): ("sigmoid", "the score function is taken as a sigmoid"),
        ("--moe-flex-dispatcher-backend", "ncclep"): ("deepep", "NCCL's dispatcher is taken as DeepEP"),
        ("--position-embedding-type", "mrope"): ("rope", "positions are taken as those of rope"),
        ("--tokenizer-type", "SFTTokenizer"): ("HuggingFaceTokenizer", ""),
        ("--ckpt-format", "fsdp_dtensor"): (None, ""),
        ("--dataloader-type", "external"): (None, ""),
        ("--non-persistent-ckpt-type", "local"): (None, ""),
        ("--non-persistent-ckpt-type", "in_memory"): (None, ""),
        ("--dist-ckpt-strictness", "return_unexpected"): (None, ""),
        ("--dist-ckpt-strictness", "return_all"): (None, ""),
    }
)
"""Flag and choice that training refuses -> the choice priced in its place (None: the flag has no cost), and the inaccuracy."""

_STRATEGY, _CONTEXT = "--data-parallel-sharding-strategy", "--cp-comm-type"
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Strategy of FSDP -> ZeRO level."""
CONTEXT_KINDS = ("p2p", "a2a", "allgather", "all_gather", "a2a+p2p")
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizer with a fixed vocabulary -> its size."""
VOCABULARIES_OF_NAMES: Mapping[str, int] = MappingProxyType(
    {
        r"qwen": 151936,
        r"llama-?4|scout|maverick": 202048,
        r"llama-?3": 128256,
        r"mixtral-?8x22b": 32768,
        r"llama-?2|mi[sx]tral": 32000,
        r"deepseek-?(v2|moe)": 102400,
        r"deepseek": 129280,
        r"gpt-?oss|o200k": 201088,
        r"kimi|moonlight": 163840,
        r"glm-?4": 151552,
        r"phi-?3": 32064,
        r"olmoe": 50304,
        r"minimax": 200064,
        r"gpt-?2": 50257,
    }
)
"""Pattern of a model's name -> rows of the embedding in its published config.json. The first match counts."""
USUAL_VOCABULARY = 131072
"""Vocabulary of a model about which nothing is known; those published since 2024 have 100,000 to 200,000 tokens."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sorted command line.

    Attributes:
        arguments: the arguments for the parser of `megatron.training`.
        flags: all flags of the command line, with their values.
        assumed: sentences on assumptions that replace a flag's value or fill in a missing one.
    """

    arguments: tuple[str, ...]
    flags: Flags
    assumed: tuple[str, ...]


def read(arguments: Sequence[str]) -> Reading:
    """Sort the arguments of a command line with files already expanded. Checks only flags that it removes."""
    flags = grouped(arguments)
    parsed: list[str] = []
    assumed: list[str] = []
    for name, values in mentions(arguments):
        stand_in = STAND_INS.get((name, values[0])) if len(values) == 1 else None
        if stand_in is not None:
            chosen, missed = stand_in
            parsed += [] if chosen is None else [name, chosen]
            assumed += [f"{name} {values[0]}: {missed}"] if missed else []
        elif not _left_out(name, values):
            parsed += [name, *values] if name else values
    return Reading(tuple(parsed), flags, tuple(dict.fromkeys(assumed)))


def grouped(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag -> its values; the last mention counts."""
    return {name: values for name, values in mentions(arguments) if name}


def mentions(arguments: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Every mention of a flag with its values; values before the first flag have the empty name."""
    listed: list[tuple[str, tuple[str, ...]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            listed.append((name, (value,) if equals else ()))
        elif listed:
            name, values = listed[-1]
            listed[-1] = (name, (*values, argument))
        else:
            listed.append(("", (argument,)))
    return listed


def without(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """The arguments without every mention of these flags and its values."""
    remaining: list[str] = []
    is_kept = True
    for argument in arguments:
        if argument.startswith("--"):
            is_kept = argument.partition("=")[0] not in names
        remaining += [argument] if is_kept else []
    return remaining


def not_modelled(flags: Flags) -> tuple[str, ...]:
    """The flags whose effect on seconds or bytes predictions ignore, in the order of `EFFECTS`."""
    upstream = load_upstream_flags()
    unpriced = dict.fromkeys(flag for effect in EFFECTS for flag in flags if _fits(flag, effect.patterns))
    return tuple(flag for flag in unpriced if flag not in upstream or not upstream[flag].is_default(flags[flag]))


def effect_of(flag: str) -> str:
    """The effect of a flag that is not modelled; empty if unknown."""
    return next((effect.change for effect in EFFECTS if _fits(flag, effect.patterns)), "")


@functools.cache
def _left_out(name: str, values: tuple[str, ...]) -> bool:
    """Whether to remove a flag that training refuses, because predictions price it, ignore it, or it has no cost."""
    if name in AFTER_THE_TABLE:
        return True
    upstream = load_upstream_flags().get(name)
    if upstream is None or without_effect_reason(name) or awaited(name) or refusal(name) is None:
        return False
    if any(not upstream.reads(value) or (upstream.choices and value not in upstream.choices) for value in values):
        return False  # The parser reports the wrong value.
    return _fits(name, (*MODELLED, *NO_COST)) or bool(effect_of(name))


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_sharded_by_fsdp(flags: Flags) -> bool:
    """Whether Megatron-FSDP or torch's FSDP shards the states."""
    return "--use-megatron-fsdp" in flags or "--use-torch-fsdp2" in flags


def zero_level(flags: Flags) -> int:
    """ZeRO level of the states: from FSDP's strategy, otherwise 1 with the distributed optimizer and 0 without.

    Raises:
        ConfigError: not a strategy of FSDP.
    """
    if not is_sharded_by_fsdp(flags):
        return int("--use-distributed-optimizer" in flags)
    strategy = " ".join(flags.get(_STRATEGY, ("optim_grads_params",)))
    if strategy not in SHARDING:
        raise ConfigError(_STRATEGY, strategy, "unknown choice", f"use {one_of(tuple(SHARDING))}")
    return SHARDING[strategy]


def require_context_heads(flags: Flags, context: int, key_value_heads: int) -> None:
    """Refuse all-to-alls between context ranks if the ranks do not divide the heads.

    Args:
        context: ranks that share a sequence.
        key_value_heads: of one tensor-parallel rank.
    Raises:
        ConfigError: an unknown kind of communication, or the ranks do not divide the heads.
    Source: Transformer Engine, attention with context parallelism: `a2a` distributes full heads over the context ranks.
    """
    kinds = flags.get(_CONTEXT, ())
    for kind in kinds:
        if kind not in CONTEXT_KINDS:
            raise ConfigError(_CONTEXT, kind, "unknown choice", f"use {one_of(CONTEXT_KINDS)}")
    sizes = flags.get("--hierarchical-context-parallel-sizes", ())
    for kind in kinds if context > 1 else ():
        # Of two levels the inner one is the all-to-all. Without sizes, which upstream refuses, it spans all ranks.
        inner = int(sizes[0]) if kind == "a2a+p2p" and sizes and sizes[0].isdigit() else context
        if kind.startswith("a2a") and (inner == 0 or key_value_heads % inner):
            rule = f"{inner} context ranks cannot deal out the {key_value_heads} key-value heads of a tensor rank"
            raise ConfigError(_CONTEXT, kind, rule, "use p2p, or fewer --context-parallel-size")


def assumed_vocabulary(tokenizer: str | None, file: str | None, model: str = "") -> tuple[int, str]:
    """The assumed size of a vocabulary whose files are missing, and a sentence on the assumption.

    Args:
        tokenizer: value of --tokenizer-type; None means GPT-2's, which needs no type.
        file: value of --tokenizer-model: a file, or the id of a published model.
        model: name of the model.
    """
    type_name = tokenizer or "GPT2BPETokenizer"
    size, why = VOCABULARIES.get(type_name), f"the size of every {type_name}"
    if size is None and file is not None:
        # Names of vocabulary files may contain the size in thousands: nemotron_2_256k.model.
        thousands = re.search(
            r"(?<![0-9A-Za-z])([0-9]{1,6})k(?![0-9A-Za-z])", PurePosixPath(file).stem.replace("_", "-")
        )
        size, why = (int(thousands[1]) * 1000, f"as {PurePosixPath(file).name} is called") if thousands else (None, "")
    for name in (file, model) if size is None else ():
        pattern = next((pattern for pattern in VOCABULARIES_OF_NAMES if re.search(pattern, (name or "").lower())), None)
        if pattern is not None:
            size, why = (
                VOCABULARIES_OF_NAMES[pattern],
                f"as published with models like {PurePosixPath(name or '').name}",
            )
            break
    if size is None:
        size, why = USUAL_VOCABULARY, "as recent models have, since the tokenizer's files are not read"
    return size, f"a vocabulary of {size} tokens, {why}; --vocab-size says another"
