"""What happens with upstream flags that configure nothing here: accepted without effect, or refused with the reason.

Accepted are flags that choose a faster implementation of the same mathematics, or concern logging and files. Names are
patterns (`fnmatch`); the first group that matches a flag decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Group:
    """Flags that share one answer."""

    reason: str
    patterns: tuple[str, ...]
    fix: str | None = None
    """What to do instead, for a refused group; None: the flags are accepted without effect."""


def _group(reason: str, patterns: str, fix: str | None = None) -> Group:
    return Group(reason, tuple(f"--{name}" for name in patterns.split()), fix)


WITHOUT_EFFECT = (
    _group(
        "faster GPU kernels of the same mathematics: chosen by what is installed",
        "no-bias-*-fusion no-masked-softmax-fusion no-rope-fusion no-persist-layer-norm "
        "no-gradient-accumulation-fusion no-gradient-reduce-div-fusion cross-entropy-loss-fusion "
        "cross-entropy-fusion-impl attention-backend use-flash-attn flash-attention-version "
        "attention-softmax-in-fp32 transformer-impl moe-grouped-gemm moe-use-legacy-grouped-gemm "
        "moe-permute-fusion moe-router-fusion moe-use-grouped-tensor moe-single-grouped-* use-grouped-gemm-for-* "
        "mla-down-proj-fusion fused-residual-rmsnorm use-te-activation-func disable-jit-fuser "
        "use-transformer-engine-op-fuser use-fused-weighted-squared-relu no-create-attention-mask-in-dataloader",
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
        "distributed-timeout-seconds-after-init train-sync-interval no-use-layer-wise-param-layout",
    ),
    _group(
        "overlap of Megatron-LM: this fork's own comes from --plan",
        "overlap-moe-expert-parallel-comm delay-wgrad-compute moe-shared-expert-overlap "
        "defer-embedding-wgrad-compute wgrad-deferral-limit ep-overlap-early-attn-memory-release "
        "overlap-param-gather-with-optimizer-step overlap-dispatch-backward-with-experts-wgrad",
    ),
    _group(
        "memory housekeeping of the host and of the allocator",
        "manual-gc* *-manual-gc-eval empty-unused-memory-level init-model-with-meta-device use-cpu-initialization",
    ),
    _group(
        "how checkpoints are written and read: saves are synchronous and each rank writes its own part",
        "async-* use-persistent-ckpt-worker ckpt-fully-parallel-* *-ckpt-fully-parallel-save "
        "ckpt-assume-constant-structure ckpt-drop-redundant-extra-state ckpt-pg-tensors-cache-* "
        "*-ckpt-load-validate-sharding-integrity verify-integrity dist-ckpt-strictness dist-ckpt-workers "
        "dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 use-dist-ckpt "
        "distrib-optim-fully-reshardable-mem-efficient auto-detect-ckpt-format *-save-tokenizer-assets",
    ),
    _group(
        "logging and diagnosis that this fork does not have: see --log-json, --tensorboard-dir and --profile",
        "*-log-loss-scale-to-tensorboard log-device-memory-used "
        "log-energy log-progress log-max-attention-logit log-straggler *straggler* logging-level "
        "no-one-logger one-logger-* otel-* app-tag-* no-barrier-with-level-1-timing "
        "config-logger-dir nvtx-ranges pytorch-profiler-* record-shapes "
        "record-memory-history memory-snapshot-path *flight-recorder* dump-param-to-param-group-map "
        "run-workload-inspector-server test-mode",
    ),
    _group(
        "fault detection of Megatron-LM: a run stops at a loss or gradient that is not finite",
        "rerun-mode check-weight-hash-across-dp-replicas-interval gpu-sniff-test-interval",
    ),
    _group(
        "data loading details",
        "dataloader-defer-npy-index-mmap dataloader-fast-cache-load num-dataset-builder-threads "
        "tokenizer-hf-use-fast tokenizer-hf-no-use-fast",
    ),
    _group(
        "always so here",
        "use-mcore-models deterministic-mode local-rank lazy-mpu-init exit-signal-handler-for-training",
    ),
)

_DROP = "drop the flag"
_ENGINE = "training runs in fp32 or bf16"

REFUSED = (
    _group(
        "this fork trains language models by next-token prediction, without inference",
        "inference-* no-inference-* rl-* no-rl-* grpo-* langrl-* no-langrl-* perform-rl-step refit-method "
        "flash-decode decode-only-* *-chunked-prefill mlp-chunks-for-* nccl-all-reduce-for-prefill "
        "max-tokens-to-oom use-legacy-static-engine moe-pad-experts-for-cuda-graph-inference "
        "num-speculative-tokens symmetric-* result-rejected-tracker-filename",
        _DROP,
    ),
    _group(
        "keys and values are gathered over the context ranks (Transformer Engine: sent around)",
        "cp-comm-type *context-parallel* max-seqlen-per-dp-cp-rank",
        _DROP,
    ),
    _group("use the flag of today", "use-rotary-position-embeddings", "use --position-embedding-type rope"),
    _group("latent attention rotates by YaRN, other attention as --position-embedding-type says", "rope-type", _DROP),
    _group("positions are chosen by type", "no-position-embedding", "use --position-embedding-type none"),
    _group("use the flag of today", "model-parallel-size", "use --tensor-model-parallel-size"),
    _group("use the flag of today", "batch-size", "use --micro-batch-size"),
    _group("use the flag of today", "warmup", "use --lr-warmup-fraction"),
    _group("use the flag of today", "encoder-num-layers decoder-num-layers", "use --num-layers"),
    _group("use the flag of today", "encoder-seq-length decoder-seq-length", "use --seq-length"),
    _group("use the flag of today", "persistent-save-interval", "use --save-interval"),
    _group("use the flag of today", "dist-ckpt-format", "use --ckpt-format"),
    _group("recompute has one spelling", "recompute-activations", "use --recompute-granularity selective"),
    _group("use the flag of today", "checkpoint-activations", "use --recompute-granularity full"),
    _group(
        "recompute has one spelling",
        "moe-layer-recompute",
        "use --recompute-granularity selective --recompute-modules moe",
    ),
    _group("use the flag of today", "moe-extended-tp", "use --expert-tensor-parallel-size"),
    _group("the vocabulary is padded here", "padded-vocab-size *-pad-vocab-size", "use --make-vocab-size-divisible-by"),
    _group(
        "ZeRO-2/3 come from --plan",
        "use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy outer-dp-sharding-strategy *fsdp* "
        "*-sharding-in-hsdp num-distributed-optimizer-instances",
        "drop the flag or use zero_level in a plan",
    ),
    _group(
        "offloading comes from --plan",
        "*offload* min-offloaded-tensor-size *-pin-cpu-grads *-pin-cpu-params overlap-cpu-optimizer-d2h-h2d "
        "delta-offload-*",
        "drop the flag or use offload in a plan",
    ),
    _group(
        "stages take whole layers",
        "pipeline-model-parallel-layout account-for-*",
        "use --decoder-*-pipeline-num-layers",
    ),
    _group("one rank order, tp-cp-ep-dp-pp", "use-tp-pp-dp-mapping", _DROP),
    _group(
        _ENGINE, "fp16 fp16-lm-cross-entropy loss-scale* initial-loss-scale min-loss-scale hysteresis", "use --bf16"
    ),
    _group(
        _ENGINE,
        "*fp8* *fp4* first-last-layers-bf16 num-layers-at-*-in-bf16 te-precision-config-file main-*-dtype "
        "exp-avg-* use-precision-aware-optimizer moe-router-padding-for-quantization *mxfp8* "
        "moe-dispatch-fwd-dtype moe-combine-bwd-dtype",
        _DROP,
    ),
    _group(
        "gradients are reduced in fp32 under --bf16 and in the weights' type else",
        "grad-reduce-in-bf16 ddp-reduce-scatter-with-fp32-accumulation ddp-param-name-patterns-*",
        _DROP,
    ),
    _group("multi-token prediction is not built in yet", "mtp-*", _DROP),
    _group("the optimizers are adam and sgd", "muon-* lion-* decoupled-* head-lr-mult", _DROP),
    _group(
        "the model family has no such form",
        "squared-relu openai-gelu onnx-safe quick-geglu apply-layernorm-1p "
        "apply-residual-connection-post-layernorm fp32-residual-connection attention-output-gate qk-l2-norm "
        "qk-clip* softmax-type window-* no-rope-freq activation-func-clamp-value glu-linear-offset "
        "init-method-xavier-uniform embedding-init-method-std use-mup mup-* *mhc* relative-attention-* "
        "mrope-section use-rope-scaling rope-scaling-factor yarn-* no-yarn-* moe-latent-size "
        "heterogeneous-layers-* spec experimental-attention-variant dsa-* *-dsa-* linear-* hybrid-* "
        "is-hybrid-model mamba-* *-mamba-* gdp-* cache-mla-latents output-logit-dtype apply-wd-to-qk-layernorm "
        "no-weight-decay-cond-type moe-router-force-biased moe-router-quantile-balancing-ema *glu-interleave-size",
        _DROP,
    ),
    _group(
        "routing and dispatch run on alltoall or allgather",
        "moe-enable-deepep moe-deepep-* moe-flex-* moe-hybridep-* moe-ncclep-* moe-permute-fusion-into-hybridep "
        "moe-paged-stash* moe-expert-rank-capacity-factor moe-routing-trace-* moe-enable-routing-replay",
        _DROP,
    ),
    _group(
        "checkpoints start from our own format",
        "moe-use-upcycling moe-upcycling-granularity pretrained-checkpoint",
        _DROP,
    ),
    _group("sharded weights come from --plan", "*num-weight-shards gtp-*", _DROP),
    _group(
        "batch size and data order do not change during a run",
        "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed iterations-to-skip "
        "phase-transition-iterations eval-*-batch-size start-eval-at-iter full-validation multiple-validation-sets "
        "validation-set-names",
        _DROP,
    ),
    _group(
        "datasets are blended by weight, and samples packed from whole documents in order",
        "per-dataset-sequences-path mid-level-dataset-surplus dataloader-inter-document-masking sft sft-* fim-* "
        "no-data-sharding object-storage-cache-path *-msc use-same-sampling-seed-across-dp-ranks",
        "use --data-path, or a path for each part",
    ),
    _group(
        "tokenizers are used as their files describe them",
        "tokenizer-* tiktoken-* *-tokenizer-* legacy-tokenizer vocab-extra-ids null-tokenizer-* "
        "allow-ambiguous-pad-tokens trust-remote-code use-gigatoken chat-template disable-use-tokenizer-model-*",
        "use --tokenizer-type and --tokenizer-model",
    ),
    _group(
        "every flag is given, none is taken from a checkpoint",
        "use-checkpoint-args use-mp-args-from-checkpoint-args yaml-cfg",
        "write the flags, or collect them in an @FILE",
    ),
    _group(
        "checkpoints have one format and one schedule",
        "non-persistent-* ckpt-convert-* replication* load-main-params-from-ckpt override-ckpt-iteration "
        "no-strict-fsdp-dtensor-load disable-strict-* save-*-interval dist-ckpt-*",
        "use --save, --save-interval and --save-retain-interval",
    ),
    _group("saved activations stay where they are made", "distribute-saved-activations", "use --sequence-parallel"),
    _group(
        "weights are always initialised, alike on all replicas",
        "no-initialization data-parallel-random-init freeze-all-layers",
        _DROP,
    ),
    _group("the loss is watched for NaN and infinity only", "check-for-spiky-loss check-for-large-grads", _DROP),
    _group(
        "restarts are the launcher's business",
        "inprocess-* enable-ft-package calc-ft-timeouts ft-* adlr-autoresume* error-injection-* fault-injector-* "
        "exit-signal-handler-for-dataloader fake-process-group",
        "drop the flag; torchrun --max-restarts restarts a job from its last checkpoint",
    ),
    _group("distillation is outside this fork", "logits-*", _DROP),
    _group(
        "experimental kernels are not chosen by flag",
        "enable-experimental use-kitchen-* kitchen-* batch-invariant-* disable-bf16-reduced-precision-matmul "
        "use-ring-exchange-p2p",
        _DROP,
    ),
    _group(
        "this fork trains decoder-only language models",
        "bert-* output-bert-embeddings biencoder-* ict-* block-data-path embedding-path evidence-data-path "
        "indexer-* titles-data-path query-in-block-prob retriever-* sample-rate short-seq-prob mask-* "
        "use-one-sent-docs vision-* dino-* swin-* img-* patch-dim num-channels num-classes classes-fraction "
        "data-per-class-fraction iter-per-epoch use-legacy-models",
        _DROP,
    ),
)

CHOICES = {
    ("--position-embedding-type", "yarn"): "YaRN positions come with --multi-latent-attention only",
    ("--position-embedding-type", "mrope"): "multi-modal positions need a vision model",
    ("--position-embedding-type", "relative"): "relative positions belong to encoder-decoder models",
    ("--moe-token-dispatcher-type", "flex"): "it needs DeepEP or HybridEP",
    ("--moe-router-load-balancing-type", "quantile_balancing"): "megatron-core 0.16.1 has no such balancing",
    ("--moe-router-score-function", "sqrtsoftplus"): "megatron-core 0.16.1 has no such score",
    ("--dataloader-type", "external"): "the data come from --data-path",
    ("--transformer-impl", "inference_optimized"): "this fork trains",
    ("--recompute-modules", "layernorm"): "megatron-core recomputes it with Transformer Engine only",
    ("--recompute-modules", "mla_up_proj"): "megatron-core recomputes it with Transformer Engine only",
    ("--recompute-modules", "moe_act"): "megatron-core recomputes it with grouped matrix products only",
    ("--recompute-modules", "shared_experts"): "shared experts are recomputed with the module moe",
}
CHOICE_GROUPS = {
    "--optimizer": "this fork has AdamW and SGD",
    "--tokenizer-type": "it belongs to models of another kind than GPT",
    "--ckpt-format": "checkpoints are written by megatron.core.dist_checkpointing",
}


def without_effect_reason(name: str) -> str | None:
    """Why an upstream flag is accepted without effect; None if it is not."""
    group = _first(WITHOUT_EFFECT, name)
    return group.reason if group else None


def refusal(name: str) -> tuple[str, str] | None:
    """Reason and fix of an upstream flag that is refused."""
    group = _first(REFUSED, name)
    return (group.reason, group.fix or _DROP) if group else None


def choice_refusal(name: str, value: str) -> str | None:
    """Why a choice that upstream has is not here."""
    return CHOICES.get((name, value)) or CHOICE_GROUPS.get(name)


def _first(groups: tuple[Group, ...], name: str) -> Group | None:
    return next((group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.patterns)), None)
