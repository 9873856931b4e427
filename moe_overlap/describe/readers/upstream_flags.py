"""The flags of upstream Megatron-LM, and how this fork treats those that it does not implement.

A generated table (upstream_flags.json) lists every flag. A flag that is no field of this fork's configuration belongs to one of
three groups, with a reason:
    without effect   it selects a faster implementation of the same mathematics, concerns logging, files or robustness, or is a
                     setting of a feature whose own flag is refused
    awaited          megatron-core 0.16.1 supports it, but this fork does not execute it yet: a dry run accepts it, a start
                     refuses it
    refused          it selects mathematics that megatron-core 0.16.1 lacks, another program, or a sharding that plans decide
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class UpstreamFlag:
    """One action of upstream's parser, with its values as text."""

    names: tuple[str, ...]
    dest: str
    type: str | None
    default: str | None
    choices: tuple[str, ...] | None
    nargs: str | None
    """`0`, `+`, `*`, a number, or None for exactly one value."""
    kind: str
    """argparse's action: Store, StoreTrue, StoreFalse, BooleanOptional, Help."""
    in_core_0_16_1: bool
    in_head_2026_08: bool

    def is_default(self, values: tuple[str, ...]) -> bool:
        """Whether these values are upstream's default, or switch the feature off."""
        if self.kind == "BooleanOptional":
            return self.names[0].startswith("--no-")
        if self.kind != "Store":
            return False
        if self.default in (None, "False", "[]"):
            return values in ((), ("0",), ("none",), ("None",))
        text = values[0] if len(values) == 1 else str(list(values))
        return text == self.default or _same_number(text, self.default)

    def reads(self, text: str) -> bool:
        """Whether upstream's parser accepts a value. Only numbers are checked; `${...}` is a variable of the user's shell."""
        if self.type not in ("int", "float") or text.startswith("$"):
            return True
        try:
            int(text) if self.type == "int" else float(text)
        except ValueError:
            return False
        return True


def _same_number(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return False


@functools.cache
def load_upstream_flags() -> Mapping[str, UpstreamFlag]:
    """Every upstream flag by name (`--num-layers`); 905 actions, some with several names."""
    table = json.loads(resources.files(__package__).joinpath("upstream_flags.json").read_text(encoding="utf-8"))
    flags = [_row(row) for row in table["flags"]]
    return MappingProxyType({name: flag for flag in flags for name in flag.names})


def _row(row: list[object]) -> UpstreamFlag:
    names, dest, kind_of_value, default, choices, nargs, kind, in_core, in_head = row
    assert isinstance(names, list) and (choices is None or isinstance(choices, list))
    return UpstreamFlag(
        names=tuple(names),
        dest=str(dest),
        type=None if kind_of_value is None else str(kind_of_value),
        default=None if default is None else str(default),
        choices=None if choices is None else tuple(choices),
        nargs=None if nargs is None else str(nargs),
        kind=str(kind),
        in_core_0_16_1=bool(in_core),
        in_head_2026_08=bool(in_head),
    )


# Groups. Names are patterns (`fnmatch`); the first group that matches a flag decides, in this order.


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that share one answer."""

    reason: str
    patterns: tuple[str, ...]
    fix: str | None = None
    """Advice for a refused group."""


def _group(reason: str, patterns: str, fix: str | None = None) -> FlagGroup:
    return FlagGroup(reason, tuple(f"--{name}" for name in patterns.split()), fix)


WITHOUT_EFFECT = (
    _group(
        "faster GPU kernels of the same mathematics: chosen by what is installed",
        "no-bias-*-fusion no-masked-softmax-fusion no-rope-fusion no-persist-layer-norm "
        "no-gradient-reduce-div-fusion "
        "attention-backend use-flash-attn flash-attention-version "
        "transformer-impl moe-grouped-gemm moe-use-legacy-grouped-gemm "
        "moe-permute-fusion moe-use-grouped-tensor moe-single-grouped-* use-grouped-gemm-for-* "
        "mla-down-proj-fusion fused-residual-rmsnorm use-te-activation-func disable-jit-fuser "
        "use-transformer-engine-op-fuser use-fused-weighted-squared-relu no-create-attention-mask-in-dataloader "
        "onnx-safe cache-mla-latents dsa-kernel-backend gdp-cutedsl-kernel disable-mamba-mem-eff-path enable-experimental",
    ),
    _group(
        "not fused: the router's scores and losses are computed by megatron-core's single operators",
        "moe-router-fusion",
    ),
    _group(
        "not fused: megatron-core's fused cross entropy rounds the logits' gradient to bf16 in every precision",
        "cross-entropy-loss-fusion cross-entropy-fusion-impl",
    ),
    _group(
        "always so: attention scores, their softmax and the cross entropy are computed in fp32, whatever the model's type",
        "attention-softmax-in-fp32",
    ),
    _group(
        "megatron-core 0.16.1 reads it nowhere and computes the cross entropy in fp32, as here",
        "fp16-lm-cross-entropy",
    ),
    _group(
        "dispatch tuning of newer releases: megatron-core 0.16.1 has its own settings",
        "moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-* moe-hybridep-num-sms-preprocessing "
        "moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-* moe-permute-fusion-into-hybridep moe-paged-stash*",
    ),
    _group(
        "offloading details of newer releases: megatron-core 0.16.1 has its own",
        "activation-offload-fraction cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph "
        "delta-offload-bytes-across-pp-ranks fine-grained-offloading-max-inflight-offloads",
    ),
    _group(
        "CUDA graphs: not captured",
        "cuda-graph-* enable-cuda-graph external-cuda-graph te-rng-tracker optimizer-cuda-graph",
    ),
    _group(
        "communication tuning: the libraries' own settings hold",
        "tp-comm-* no-tp-comm-* disable-tp-comm-* nccl-communicator-config-path use-nccl-ub *-nccl-ub use-sharp "
        "sharp-enabled-group disable-symmetric-registration symmetric-ar-type high-priority-* ddp-num-buckets "
        "ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective disable-gloo-process-groups "
        "create-all-gather-group *-align-grad-reduce no-align-param-gather suggested-communication-unit-size "
        "pipeline-model-parallel-comm-backend no-async-tensor-model-parallel-allreduce "
        "disable-async-tensor-model-parallel-allreduce no-scatter-gather-tensors-in-pipeline "
        "*-clone-scatter-output-in-embedding overlap-p2p-communication-warmup-flush "
        "distributed-timeout-seconds-after-init train-sync-interval no-use-layer-wise-param-layout use-ring-exchange-p2p",
    ),
    _group(
        "keys and values are gathered over the context ranks (Transformer Engine: sent around)",
        "cp-comm-type hierarchical-context-parallel-sizes",
    ),
    _group(
        "overlap of Megatron-LM: this fork's own comes from --plan",
        "overlap-moe-expert-parallel-comm delay-wgrad-compute moe-shared-expert-overlap "
        "defer-embedding-wgrad-compute wgrad-deferral-limit ep-overlap-early-attn-memory-release "
        "overlap-param-gather-with-optimizer-step overlap-dispatch-backward-with-experts-wgrad",
    ),
    _group(
        "memory housekeeping of the host and of the allocator",
        "manual-gc* *-manual-gc-eval empty-unused-memory-level init-model-with-meta-device use-cpu-initialization "
        "no-initialization distribute-saved-activations keep-fp8-transpose-cache",
    ),
    _group(
        "how checkpoints are written and read: by one thread of each rank, whole and checked by their sums",
        "async-ckpt-* async-strategy use-persistent-ckpt-worker ckpt-fully-parallel-*-* "
        "ckpt-drop-redundant-extra-state ckpt-pg-tensors-cache-* "
        "*-ckpt-load-validate-sharding-integrity verify-integrity dist-ckpt-workers "
        "dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 use-dist-ckpt "
        "distrib-optim-fully-reshardable-mem-efficient auto-detect-ckpt-format *-save-tokenizer-assets dist-ckpt-format "
        "*-strict-fsdp-dtensor-load",
    ),
    _group(
        "logging and diagnosis that this fork does not have: see --log-json, --tensorboard-dir and --profile",
        "log-device-memory-used log-energy log-progress log-max-attention-logit log-straggler *straggler* logging-level "
        "no-one-logger one-logger-* otel-* app-tag-* no-barrier-with-level-1-timing "
        "config-logger-dir nvtx-ranges pytorch-profiler-* record-shapes "
        "record-memory-history memory-snapshot-path *flight-recorder* dump-param-to-param-group-map "
        "run-workload-inspector-server test-mode moe-routing-trace-*",
    ),
    _group(
        "fault detection of Megatron-LM: a run stops at a loss or gradient that is not finite",
        "rerun-mode check-weight-hash-across-dp-replicas-interval gpu-sniff-test-interval error-injection-* "
        "fault-injector-* result-rejected-tracker-filename",
    ),
    _group(
        "restarts are the launcher's business: torchrun --max-restarts starts a job from its last checkpoint",
        "inprocess-* enable-ft-package calc-ft-timeouts ft-* adlr-autoresume* exit-signal-handler-for-dataloader",
    ),
    _group(
        "settings of generation and of reinforcement learning: training by next-token prediction reads none",
        "inference-* no-inference-* rl-* no-rl-* grpo-* langrl-* no-langrl-* refit-method flash-decode decode-only-* "
        "*-chunked-prefill mlp-chunks-for-* nccl-all-reduce-for-prefill max-tokens-to-oom use-legacy-static-engine "
        "moe-pad-experts-for-cuda-graph-inference num-speculative-tokens",
    ),
    _group(
        "settings of FSDP, which --use-megatron-fsdp and --use-torch-fsdp2 ask for",
        "data-parallel-sharding-strategy outer-dp-sharding-strategy megatron-fsdp-* fsdp-* torch-fsdp2-* "
        "*-sharding-in-hsdp",
    ),
    _group("settings of the optimizers muon and lion, which --optimizer asks for", "muon-* lion-*"),
    _group("settings of --use-mup", "mup-*"),
    _group(
        "data loading details",
        "dataloader-defer-npy-index-mmap dataloader-fast-cache-load num-dataset-builder-threads "
        "tokenizer-hf-use-fast tokenizer-hf-no-use-fast mid-level-dataset-surplus object-storage-cache-path *-msc "
        "use-gigatoken",
    ),
    _group(
        "always so here",
        "no-position-embedding use-mcore-models local-rank lazy-mpu-init exit-signal-handler-for-training",
    ),
)

_DROP = "drop the flag"

AWAITED = (
    _group("context parallelism that differs from sequence to sequence", "*context-parallel max-seqlen-per-dp-cp-rank"),
    _group("multi-token prediction on other stages than the loss", "mtp-standalone"),
    _group("layers without positions", "no-rope-freq"),
    _group("other norms and clips of queries and keys", "qk-l2-norm qk-clip*"),
    _group("gated attention", "attention-output-gate"),
    _group("other residual connections", "apply-residual-connection-post-layernorm fp32-residual-connection"),
    _group("layers of unlike shape", "heterogeneous-layers-*"),
    _group("sparse and linear attention", "experimental-attention-variant dsa-* linear-*"),
    _group("several optimizer instances", "num-distributed-optimizer-instances"),
    _group("precision by file", "te-precision-config-file"),
    _group("kitchen's kernels", "use-kitchen-* kitchen-*"),
    _group("matrix products of a set rounding", "batch-invariant-* disable-bf16-reduced-precision-matmul"),
    _group("fp32 sums of bf16 gradients", "ddp-reduce-scatter-with-fp32-accumulation ddp-param-name-patterns-*"),
    _group("other initial weights", "data-parallel-random-init init-method-xavier-uniform"),
    _group("sharding by torch's FSDP", "use-torch-fsdp2"),
    _group("starting from a dense checkpoint", "moe-use-upcycling moe-upcycling-granularity"),
    _group("routing by recorded choices", "moe-enable-routing-replay"),
    _group(
        "evaluation apart from training",
        "eval-micro-batch-size start-eval-at-iter full-validation multiple-validation-sets validation-set-names",
    ),
    _group("a changing order of the data", "iterations-to-skip phase-transition-iterations"),
    _group("batches that shrink to fit the ranks", "decrease-batch-size-if-needed"),
    _group("datasets of counted sequences", "per-dataset-sequences-path"),
    _group("fill-in-the-middle samples", "fim-*"),
    _group("fine-tuning samples", "sft sft-* chat-template dataloader-inter-document-masking"),
    _group("unlike data order of the replicas", "no-data-sharding use-same-sampling-seed-across-dp-ranks"),
    _group(
        "settings of other tokenizers",
        "tokenizer-* tiktoken-* *-tokenizer-sentencepiece-* legacy-tokenizer vocab-extra-ids "
        "null-tokenizer-* allow-ambiguous-pad-tokens trust-remote-code",
    ),
    _group("checkpoints on the nodes' own disks", "non-persistent-local-* replication*"),
    _group("loading other formats", "ckpt-convert-* load-main-params-from-ckpt override-ckpt-iteration"),
    _group("the watch for large losses and gradients", "check-for-spiky-loss check-for-large-grads"),
    _group("files of gradients, weights and activations", "save-*-interval"),
)
"""Features of upstream that this fork does not execute yet: a dry run accepts them, a start does not."""

_NEWER = "megatron-core 0.16.1 has no such thing"

REFUSED = (
    _group("this fork shards optimizer states alone (ZeRO-1)", "use-megatron-fsdp", _DROP),
    _group("this fork trains by next-token prediction", "perform-rl-step", _DROP),
    _group("use the flag of today", "model-parallel-size", "use --tensor-model-parallel-size"),
    _group("use the flag of today", "batch-size", "use --micro-batch-size"),
    _group("use the flag of today", "warmup", "use --lr-warmup-fraction"),
    _group("use the flag of today", "checkpoint-activations", "use --recompute-granularity full"),
    _group("use the flag of today", "moe-extended-tp", "use --expert-tensor-parallel-size"),
    _group("the vocabulary is padded here", "padded-vocab-size *-pad-vocab-size", "use --make-vocab-size-divisible-by"),
    _group("the optimizers are adam and sgd", "head-lr-mult", _DROP),
    _group(
        _NEWER,
        "mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern mtp-use-repeated-layer output-logit-dtype "
        "no-weight-decay-cond-type moe-router-force-biased moe-router-quantile-balancing-ema *glu-interleave-size "
        "use-mup *mhc* fp8-output-proj moe-dispatch-fwd-dtype moe-combine-bwd-dtype moe-expert-rank-capacity-factor "
        "*num-weight-shards gtp-* freeze-all-layers *-dsa-*",
        _DROP,
    ),
    _group("multi-modal positions need a vision model", "mrope-section", _DROP),
    _group("relative positions belong to encoder-decoder models", "relative-attention-*", _DROP),
    _group("the model family has attention in every layer", "hybrid-* is-hybrid-model mamba-* *-mamba-* gdp-*", _DROP),
    _group("layers follow from the flags, not from another module", "spec", _DROP),
    _group("this fork builds on megatron-core's models", "use-legacy-models", _DROP),
    _group("flags are read from the command line and from @FILE", "yaml-cfg", "collect the flags in an @FILE"),
    _group("distillation is outside this fork", "logits-*", _DROP),
    _group("ranks are processes here", "fake-process-group", _DROP),
    _group(
        "this fork trains decoder-only language models",
        "decoder-seq-length decoder-num-layers bert-* output-bert-embeddings biencoder-* ict-* "
        "block-data-path embedding-path evidence-data-path indexer-* titles-data-path query-in-block-prob retriever-* "
        "sample-rate short-seq-prob mask-* use-one-sent-docs vision-* dino-* swin-* img-* patch-dim num-channels "
        "num-classes classes-fraction data-per-class-fraction iter-per-epoch",
        _DROP,
    ),
)

CHOICES = {
    ("--position-embedding-type", "mrope"): "multi-modal positions need a vision model",
    ("--position-embedding-type", "relative"): "relative positions belong to encoder-decoder models",
    ("--moe-router-load-balancing-type", "quantile_balancing"): "megatron-core 0.16.1 has no such balancing",
    ("--moe-router-score-function", "sqrtsoftplus"): "megatron-core 0.16.1 has no such score",
    ("--moe-flex-dispatcher-backend", "ncclep"): "megatron-core 0.16.1 has no such backend",
    ("--dataloader-type", "external"): "the data come from --data-path",
    ("--transformer-impl", "inference_optimized"): "this fork trains",
    ("--non-persistent-ckpt-type", "local"): "checkpoints lie on a file system that all nodes share",
    ("--non-persistent-ckpt-type", "in_memory"): "checkpoints lie on a file system that all nodes share",
    ("--dist-ckpt-strictness", "return_unexpected"): "it hands the keys to a caller, and a run has none",
    ("--dist-ckpt-strictness", "return_all"): "it hands the keys to a caller, and a run has none",
    ("--tokenizer-type", "SFTTokenizer"): "fine-tuning samples are not built in yet",
}
CHOICE_GROUPS = {
    "--optimizer": "this fork has AdamW and SGD",
    "--tokenizer-type": "it reads text for encoders or images",
    "--ckpt-format": "it is Megatron-FSDP's",
}

DROPPED = {
    "--data-impl": "drop it: data are indexed datasets",
    "--DDP-impl": "drop it",
    "--no-contiguous-buffers-in-local-ddp": "drop it",
    "--activations-checkpoint-method": "use --recompute-method",
    "--activations-checkpoint-num-layers": "use --recompute-num-layers",
    "--checkpoint-num-layers": "use --recompute-num-layers",
    "--distribute-checkpointed-activations": "drop it",
    "--no-query-key-layer-scaling": "drop it: scores are scaled with --apply-query-key-layer-scaling only",
    "--fp8-hybrid": "use --fp8-format hybrid",
    "--fp8-e4m3": "use --fp8-format e4m3",
    "--enable-one-logger": "drop it",
    "--log-learning-rate-to-tensorboard": "drop it: always so",
    "--log-batch-size-to-tensorboard": "drop it: always so",
    "--standalone-embedding-stage": "use --account-for-embedding-in-pipeline-split",
    "--pipeline-model-parallel-split-rank": "drop it: there is no encoder",
    "--virtual-pipeline-model-parallel-size": "use --num-virtual-stages-per-pipeline-rank",
    "--expert-parallel": "use --expert-model-parallel-size N",
    "--num-layers-per-stage": "use --num-layers-per-virtual-pipeline-stage",
}
"""Flags that newer releases of upstream have removed -> advice."""
DROPPED_CHOICES = {("--moe-token-dispatcher-type", "alltoall_seq"): "use alltoall"}
"""Choices that newer releases of upstream have removed -> advice."""


def without_effect_reason(name: str) -> str | None:
    """Why an upstream flag is accepted without effect; None if it is not."""
    group = _first(WITHOUT_EFFECT, name)
    return group.reason if group else None


def awaited(name: str) -> str | None:
    """The feature of an upstream flag that a dry run accepts and a start refuses; None for other flags."""
    group = _first(AWAITED, name)
    return group.reason if group else None


@functools.cache
def refusal(name: str) -> tuple[str, str] | None:
    """Reason and fix for a refused upstream flag; None for other flags."""
    group = _first(REFUSED, name)
    return (group.reason, group.fix or _DROP) if group else None


def choice_refusal(name: str, value: str) -> str | None:
    """Why this fork lacks a choice of upstream; None if it has the choice."""
    return CHOICES.get((name, value)) or CHOICE_GROUPS.get(name)


def _first(groups: tuple[FlagGroup, ...], name: str) -> FlagGroup | None:
    return next((group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.patterns)), None)
