"""A run as dataclasses. Each field is a flag: name, type, default and choices stand here once, its help below it.

Field names are the attribute names of upstream Megatron-LM, defaults are upstream's; `flags/table.py` makes the flags of them.
Attention variants and the groups that need a GPU's libraries are in `config_fields.py`. Nothing here derives or repairs a value:
`sizes.py` computes derived sizes, rules are in `validation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron.training.cli.config_fields import AttentionConfig, DeviceConfig, PrecisionConfig, flag


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """model"""

    num_layers: int | None = None
    """Transformer layers."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the dense MLP; default 4 × hidden size, with --swiglu 8/3 × rounded down to a multiple of 64."""
    num_attention_heads: int | None = None
    """Attention heads."""
    group_query_attention: bool = False
    """Share keys and values among groups of heads (--num-query-groups)."""
    num_query_groups: int = flag(1, of="model.group_query_attention")
    """Key/value groups; takes effect with --group-query-attention."""
    kv_channels: int | None = None
    """Width of one head; default hidden size / heads."""
    seq_length: int | None = None
    """Tokens of a sample."""
    max_position_embeddings: int | None = None
    """Longest sequence the positions cover, at least --seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: int = 10000
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of a head that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring elements instead of halves."""
    rotary_seq_len_interpolation_factor: int | None = None
    """Linear interpolation of rotary positions."""
    rope_type: Literal["rope", "yarn"] | None = flag(None, of="model.multi_latent_attention")
    """Latent attention: plain rotary positions, or scaled by YaRN (default)."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm of the layers and of the block's end."""
    norm_epsilon: float = 1e-5
    """Added to the variance in a norm."""
    layernorm_zero_centered_gamma: bool = flag(False, "--apply-layernorm-1p")
    """Store a norm's weight less 1, so that weight decay draws it to 1."""
    swiglu: bool = False
    """Gated SiLU in the MLPs instead of GELU."""
    parallel_attention_mlp: Literal["one-norm", "two-norms"] | None = None
    """Attention and MLP side by side, x + attention(norm(x)) + mlp(norm(x)), with a norm for both or one each (Falcon)."""
    squared_relu: bool = False
    """Squared ReLU in the MLPs instead of GELU."""
    openai_gelu: bool = False
    """GELU by its tanh approximation, as GPT-2 has it."""
    quick_geglu: bool = False
    """GELU by the sigmoid of 1.702 x, gated, in the MLPs instead of GELU."""
    activation_func_clamp_value: float | None = None
    """Gated activations: clamp the gate from above and the linear half on both sides."""
    glu_linear_offset: float = 0.0
    """Gated activations: added to the linear half."""
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """Biases in the linear layers."""
    add_qkv_bias: bool = False
    """A bias in the query/key/value projection, also where the other linears have none."""
    qk_layernorm: bool = False
    """Norm queries and keys."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout on what attention and MLP add to the residual stream."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    embedding_init_method_std: float | None = None
    """Standard deviation of the initial word embedding; default --init-method-std."""
    apply_query_key_layer_scaling: bool = False
    """Divide attention scores by the layer's number and multiply them again in the softmax; without effect, as they are fp32."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (DeepSeek)."""
    q_lora_rank: int | None = flag(None, of="model.multi_latent_attention")
    """Latent width of queries; without it queries are projected directly."""
    kv_lora_rank: int = flag(32, of="model.multi_latent_attention")
    """Latent width of keys and values."""
    qk_head_dim: int = flag(128, of="model.multi_latent_attention")
    """Head width of queries and keys without positions."""
    qk_pos_emb_head_dim: int = flag(64, of="model.multi_latent_attention")
    """Head width of the rotary part of queries and keys."""
    v_head_dim: int = flag(128, of="model.multi_latent_attention")
    """Head width of values."""
    rotary_scaling_factor: float = 1.0
    """YaRN: by how much the context is extended."""
    mscale: float = 1.0
    """YaRN: scale of the attention temperature."""
    mscale_all_dim: float = 0.0
    """YaRN: scale of the attention temperature over all dimensions."""
    mtp_num_layers: int | None = None
    """Multi-token prediction: layers after the decoder, each of which predicts one token further ahead (DeepSeek-V3)."""
    mtp_loss_scaling_factor: float = flag(0.1, of="model.mtp_num_layers")
    """Weight of the prediction layers' mean loss, which is added to the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """mixture of experts"""

    num_experts: int | None = None
    """Routed experts of a MoE layer; without it the model is dense."""
    moe_layer_freq: int | tuple[int, ...] = 1
    """Which layers are MoE: every N-th, or a Python list of 0 and 1 such as "([0]*3+[1]*5)"."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; default the dense MLP's width."""
    moe_latent_size: int | None = None
    """Width of the routed experts' input and output: tokens are projected to it before the dispatch, back after the combine."""
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts."""
    moe_shared_expert_gate: bool = False
    """Gate the shared experts' output."""
    moe_router_topk: int = 2
    """Experts per token."""
    moe_router_load_balancing_type: tuple[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], ...
    ] = ("aux_loss",)
    """How load is balanced; several losses can be combined."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Coefficient of each auxiliary loss."""
    moe_z_loss_coeff: float | None = None
    """Coefficient of the router's z-loss."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    moe_router_pre_softmax: bool = False
    """Softmax before the top-k instead of after it."""
    moe_router_num_groups: int | None = None
    """Group-limited routing: groups of experts."""
    moe_router_group_topk: int | None = None
    """Group-limited routing: groups a token may reach."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the chosen scores."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router's logits and scores; default the activations'."""
    moe_router_enable_expert_bias: bool = False
    """Balance by a bias on the choice, moved after each step (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = 1e-3
    """Step by which --moe-router-enable-expert-bias moves the bias."""
    moe_router_force_load_balancing: bool = False
    """Random balanced routing, for benchmarks."""
    moe_input_jitter_eps: float | None = None
    """Multiply the router's input by noise in [1 - eps, 1 + eps]."""
    moe_expert_capacity_factor: float | None = None
    """Tokens an expert takes: ceil(tokens · top-k / experts · factor); default no limit."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad each expert's input to its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens an expert over capacity drops."""
    moe_apply_probs_on_input: bool = False
    """Apply the scores before the experts instead of after them (top-1 only)."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "irregular", "flex"] = "allgather"
    """How tokens reach their experts; irregular: counts first, then exactly the routed rows, point to point; flex: DeepEP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """parallelism and memory"""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (PP)."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved pipeline: layers of one virtual stage."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved pipeline: virtual stages per rank."""
    microbatch_group_size_per_vp_stage: int | None = flag(None, "--microbatch-group-size-per-virtual-pipeline-stage")
    """Interleaved pipeline: micro-batches a virtual stage runs before the next one; default the pipeline size."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage."""
    pipeline_model_parallel_layout: str | None = None
    """Content of each (virtual) stage, separated by |: E embedding, t layer, m prediction layer, L loss: "Et*3|(tt|)*6tmL"."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as a layer of the last stage."""
    use_tp_pp_dp_mapping: bool = False
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp: a replica's stages are neighbours."""
    expert_model_parallel_size: int = 1
    """Ranks over which the experts are spread (EP)."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices (ETP); default the tensor-parallel size."""
    context_parallel_size: int = 1
    """Ranks that share a sequence (CP)."""
    sequence_parallel: bool = False
    """Split norms and dropout along the sequence over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks (ZeRO-1); always on here."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket during the backward pass; with overlapped all-to-alls, between those."""
    overlap_param_gather: bool = False
    """Gather the updated weights during the next forward pass."""
    ddp_bucket_size: int | None = None
    """Parameters per gradient bucket; default 40 million, or a million per data-parallel rank where that is more."""
    overlap_p2p_comm: bool = flag(True, off="--no-overlap-p2p-communication")
    """Overlap the interleaved pipeline's transfers with computation."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers, or chosen modules, in the backward pass."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Full recompute: every group of layers, or the first layers of each stage."""
    recompute_num_layers: int | None = None
    """Full recompute: layers per group, or layers per stage."""
    recompute_modules: (
        tuple[Literal["core_attn", "moe", "mlp", "layernorm", "mla_up_proj", "moe_act", "shared_experts"], ...] | None
    ) = None
    """Selective recompute: which modules; default core_attn."""
    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Communication library; a machine without CUDA runs gloo."""
    distributed_timeout_minutes: int = 10
    """How long a collective may wait for a peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """optimizer"""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW or SGD with momentum."""
    lr: float | None = None
    """Peak learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate of the schedule."""
    decoupled_lr: float | None = None
    """Peak learning rate of word embedding and output layer, where it differs."""
    decoupled_min_lr: float | None = flag(None, of="optimizer.decoupled_lr")
    """Lowest learning rate of word embedding and output layer, with --decoupled-lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the schedule."""
    lr_decay_iters: int | None = None
    """Steps of the decay; default --train-iters."""
    lr_decay_samples: int | None = None
    """Samples of the decay; default --train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay."""
    lr_warmup_iters: int = 0
    """Warm-up steps."""
    lr_warmup_samples: int = 0
    """Warm-up samples."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay of --lr-decay-style WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the decay of --lr-decay-style WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the decay of --lr-decay-style WSD."""
    weight_decay: float = 0.01
    """Decoupled weight decay; norms and biases have none."""
    apply_wd_to_qk_layernorm: bool = False
    """Weight decay on the norms of queries and keys as well."""
    start_weight_decay: float | None = None
    """Weight decay at the start, with a --weight-decay-incr-style other than constant."""
    end_weight_decay: float | None = None
    """Weight decay at the end."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from start to end."""
    clip_grad: float = 1.0
    """Clip the global gradient norm; 0 turns it off."""
    adam_beta1: float = 0.9
    """Adam: decay of the first moment."""
    adam_beta2: float = 0.999
    """Adam: decay of the second moment."""
    adam_eps: float = 1e-8
    """Adam: added to the denominator."""
    sgd_momentum: float = 0.9
    """SGD: momentum."""
    bf16: bool = False
    """Train in bfloat16 with fp32 master weights."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32; the default with --bf16."""
    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bf16, with --bf16."""
    gradient_accumulation_fusion: bool = flag(True, off="--no-gradient-accumulation-fusion")
    """Products add weight gradients to fp32 sums themselves, where a GPU has Transformer Engine's or apex's kernel."""
    override_opt_param_scheduler: bool = flag(False, "--override-opt-param-scheduler", "--override-opt_param-scheduler")
    """On load: take the schedule from the flags, not from the checkpoint."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"
    )
    """On load: take the schedule from the checkpoint where the flags differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """training"""

    micro_batch_size: int | None = None
    """Samples per forward pass and data-parallel rank."""
    global_batch_size: int | None = None
    """Samples per step; default micro-batch × data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = None
    """Start, increment and samples: the global batch grows evenly from the start to --global-batch-size over these samples."""
    step_batch_size_schedule: tuple[str, ...] | None = None
    """Steps of the global batch by trained tokens, such as "0:384 200B:768"; instead of --global-batch-size."""
    train_iters: int | None = None
    """Steps to train."""
    train_samples: int | None = None
    """Samples to train, instead of --train-iters."""
    eval_interval: int | None = None
    """Steps between evaluations; default at the end only."""
    eval_iters: int = 100
    """Steps of one evaluation; 0 turns it off."""
    eval_global_batch_size: int | None = None
    """Samples per step of an evaluation; default --global-batch-size, the largest of one that changes."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    deterministic_mode: bool = False
    """The same bits in every run on a GPU: rows are summed in a fixed order, and operators that have none are refused."""
    calculate_per_token_loss: bool = False
    """Weigh every token of the global batch equally, also when micro-batches hold unequal numbers of them."""
    check_for_nan_in_loss_and_grad: bool = flag(True, off="--no-check-for-nan-in-loss-and-grad")
    """Stop at a loss or gradient norm that is not finite."""
    exit_interval: int | None = None
    """Stop after a step divisible by this."""
    exit_duration_in_mins: int | None = None
    """Save and stop after this many minutes."""
    exit_signal_handler: bool = False
    """On a signal: finish the step, save and stop."""
    exit_signal: int = 15
    """Number of the signal that --exit-signal-handler acts on."""
    skip_train: bool = False
    """Evaluate only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """data"""

    data_path: tuple[str, ...] | None = None
    """Prefixes of indexed datasets, or weights and prefixes in turn; default the built-in corpus."""
    data_args_path: str | None = None
    """File with the values of --data-path."""
    train_data_path: tuple[str, ...] | None = None
    """Like --data-path, for training only; a split without a path of its own is left out."""
    valid_data_path: tuple[str, ...] | None = None
    """Like --data-path, for validation only."""
    test_data_path: tuple[str, ...] | None = None
    """Like --data-path, for the test only."""
    per_split_data_args_path: str | None = None
    """JSON file with the values of --train-data-path and the other two as lists under train, valid and test."""
    split: str | None = None
    """Parts for training, validation and test, such as 969,30,1."""
    mock_data: bool = False
    """Random tokens instead of a dataset."""
    data_cache_path: str | None = None
    """Folder for dataset indices and the built-in corpus."""
    tokenizer_type: (
        Literal[
            "ByteTokenizer",
            "NullTokenizer",
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
        ]
        | None
    ) = None
    """Tokenizer; default bytes."""
    tokenizer_model: str | None = None
    """Folder of a Hugging Face tokenizer, or file of the other types that read one."""
    vocab_file: str | None = None
    """GPT-2's vocab.json, for GPT2BPETokenizer; without --tokenizer-type its entries are the vocabulary of tokenized data."""
    merge_file: str | None = None
    """GPT-2's merges.txt, for GPT2BPETokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """How TikTokenizer cuts text into words; default v2."""
    tiktoken_num_special_tokens: int = 1000
    """Special tokens of TikTokenizer, the first of its ids."""
    vocab_size: int | None = None
    """Vocabulary before padding; default the tokenizer's."""
    reset_position_ids: bool = False
    """Restart positions at 0 after an end of document."""
    reset_attention_mask: bool = False
    """No attention across documents."""
    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""
    num_workers: int = 2
    """Data loader processes; 0 loads in the training process."""
    dataloader_type: Literal["single", "cyclic"] | None = None
    """One pass in order, or shuffled epochs; default single."""
    mmap_bin_files: bool = flag(True, off="--no-mmap-bin-files")
    """Map dataset files into memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """checkpoints"""

    save: str | None = None
    """Folder to save checkpoints to."""
    load: str | None = None
    """Folder to load the last complete checkpoint from; if it is empty, training starts from step 0."""
    save_interval: int | None = None
    """Steps between saves; with --save one more at the end."""
    async_save: bool = False
    """Write during training, which waits only while each rank copies its part of the state."""
    ckpt_fully_parallel_save: bool = flag(True, "--ckpt-fully-parallel-save", off="--no-ckpt-fully-parallel-save")
    """Share the writing of replicated weights among the data-parallel ranks."""
    ckpt_assume_constant_structure: bool = False
    """Check and distribute what ranks write in the first save only."""
    save_retain_interval: int | None = None
    """Keep checkpoints at multiples of this."""
    keep_last_checkpoints: int | None = None
    """Delete all but the last N; --save-retain-interval wins."""
    pretrained_checkpoint: str | None = None
    """Folder whose last weights the run starts from, as with --finetune, if --load holds nothing."""
    non_persistent_save_interval: int | None = None
    """Steps between non-persistent saves, of which only the last one is kept, in a separate folder."""
    non_persistent_ckpt_type: Literal["global"] | None = None
    """Kind of the non-persistent checkpoints: like the others. A load takes the later of both kinds."""
    non_persistent_global_ckpt_dir: str | None = flag(None, of="checkpoint.non_persistent_ckpt_type")
    """Folder for the non-persistent checkpoints; default `non_persistent` in that of --save, or of --load."""
    ckpt_step: int | None = None
    """Load this step instead of the last one."""
    ckpt_format: Literal["torch_dist", "torch", "torch_dcp"] = "torch_dist"
    """Format of the files; only torch_dist is written."""
    finetune: bool = False
    """Load only the weights and start at step 0."""
    no_load_optim: bool = False
    """Do not load optimizer state."""
    no_load_rng: bool = False
    """Do not load random-number states."""
    no_save_optim: bool = False
    """Do not save optimizer state."""
    no_save_rng: bool = False
    """Do not save random-number states."""
    resume_with_changes: bool = False
    """Resume although data, batch size, seed or other flags differ from the checkpoint's; the differences are listed."""
    exit_on_missing_checkpoint: bool = False
    """An empty --load is an error."""
    use_checkpoint_args: bool = False
    """Take model and vocabulary from the checkpoint's arguments; flags of sizes that are given stay, others give way."""
    use_mp_args_from_checkpoint_args: bool = flag(False, of="checkpoint.use_checkpoint_args")
    """Take tensor, pipeline and expert parallel sizes from the checkpoint's arguments as well."""
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True, "--use-tokenizer-model-from-checkpoint-args", off="--no-use-tokenizer-model-from-checkpoint-args"
    )
    """Take the tokenizer from the checkpoint's arguments as well."""
    ckpt_fully_parallel_load: bool = False
    """Each data-parallel rank reads a part of the replicated weights and sends it to the others."""
    dist_ckpt_strictness: (
        Literal["assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "ignore_all"]
        | None
    ) = None
    """Treatment of weights that only the run (unexpected) or only the checkpoint has; default raise_all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """logging"""

    log_interval: int = 100
    """Steps between console lines; losses and times of a line are the mean of its steps."""
    log_json: str | None = None
    """Append one JSON line per step to this file; ranks other than the writer append .rankN."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = 1
    """Steps between points of TensorBoard and W&B."""
    tensorboard_queue_size: int = 1000
    """Points that TensorBoard keeps before it writes them."""
    wandb_project: str | None = None
    """Project at Weights & Biases that gets the same points as TensorBoard."""
    wandb_exp_name: str | None = flag(None, of="logging.wandb_project")
    """Name of the run at Weights & Biases."""
    wandb_entity: str | None = flag(None, of="logging.wandb_project")
    """Team or user at Weights & Biases; default the account's own."""
    wandb_save_dir: str | None = flag(None, of="logging.wandb_project")
    """Folder for the local files of Weights & Biases; default the working folder."""
    log_throughput: bool = False
    """Add model TFLOP/s per device to the log."""
    log_params_norm: bool = False
    """Add the norm of all parameters to the log."""
    log_num_zeros_in_grad: bool = False
    """Add the number of zero gradients to the log."""
    log_memory_to_tensorboard: bool = False
    """Memory to TensorBoard: mem-max-allocated-bytes, on CUDA also reserved and allocated bytes."""
    log_memory_interval: int | None = None
    """Steps between console lines with the memory of every rank."""
    log_loss_scale_to_tensorboard: bool = flag(True, off="--no-log-loss-scale-to-tensorboard", of="precision.fp16")
    """Draw a curve of the loss scale."""
    log_world_size_to_tensorboard: bool = False
    """Number of processes to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = False
    """Perplexity of evaluations to TensorBoard."""
    log_timers_to_tensorboard: bool = False
    """Step time, and the timers of --timing-log-level, to TensorBoard: the slowest rank's."""
    timing_log_level: Literal["0", "1", "2"] = "0"
    """Timers: only the step's; also its phases; also parts of the phases."""
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax", of="logging.timing_log_level")
    """Which ranks' timers the console shows."""
    moe_per_layer_logging: bool = False
    """Every MoE layer to TensorBoard and W&B: its balancing losses; every --log-interval steps its load, drops, score entropy."""
    log_expert_load: str | None = None
    """Append tokens per expert, drops and score entropy of every MoE layer to this file, every --log-interval steps."""
    profile: bool = False
    """Profile the steps of --profile-step-start to --profile-step-end (needs --use-pytorch-profiler)."""
    use_pytorch_profiler: bool = False
    """Write a torch trace, to be opened in Perfetto, to --tensorboard-dir."""
    profile_step_start: int = flag(10, of="logging.profile")
    """First profiled step."""
    profile_step_end: int = flag(12, of="logging.profile")
    """Step after the last profiled one."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that write a trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapConfig:
    """overlap"""

    plan: str | None = None
    """A plan.json made by tools/autotune.py or by hand: it decides layout, batch, precision, recomputation and overlap."""
    moe_gate: Literal["topk", "switch", "batch_prioritized", "random", "hash", "expert_choice"] | None = None
    """The gate; default: Megatron's router, and for partitions without a capacity topk, which decides as that router does."""
    moe_overlap_partitions: int | None = None
    """Cut each micro-batch into this many partitions around the MoE layers: one computes during the all-to-all of another."""
    moe_overlap_range: Literal["experts", "after", "around"] = "around"
    """Operators that run in partitions: gate to merge, gate to the next layer's attention, or attention to merge."""
    moe_overlap_grad_reduce: Literal["gaps", "at-once"] = "gaps"
    """When gradients are reduced: in gaps between all-to-alls; at once, where these stay inside nodes and replicas do not."""
    moe_overlap_micro_batches: int = 1
    """With 2, a micro-batch's backward pass is interleaved with another's forward pass, each under the other's all-to-all."""
    moe_overlap_forward_send: Literal["early", "late"] = "early"
    """When the forward pass of a pair sends to the next stage: early, before the last computation of the backward pass; late,
    after it, so that this computation hides the forward pass's last all-to-all: for long ones, as between nodes."""
    moe_overlap_capacity_chunks: int | None = None
    """Run dispatch, experts and combine in 2, 4 or 8 chunks of each expert's rows, in place of partitions (Tutel's pipeline)."""
    defer_weight_gradients: bool = False
    """Compute weight gradients while a backward all-to-all is under way."""
    max_deferred_bytes: int = 1 << 30
    """Largest number of bytes that deferred weight gradients may hold; the instruction list computes the excess early."""
    moe_overlap_device_connections: int | None = None
    """Hardware queues that the streams of a GPU share; default CUDA_DEVICE_MAX_CONNECTIONS where that is set, else 32 with
    --plan or flags that overlap something, and CUDA's 8 without."""
    moe_overlap_nccl_ctas: int | None = None
    """Thread blocks of an NCCL kernel that runs at the same time as others; default NCCL_MAX_CTAS if that is set, else the
    largest number at which the kernels of all communicators of a rank fit the GPU together; without overlap NCCL's own number."""
    moe_overlap_cuda_graphs: bool = flag(False, needs="CUDA")
    """Replay the operators of overlapping layers whose shapes never change as CUDA graphs: attention and gates; experts
    too, with --moe-pad-expert-input-to-capacity. Captured once, in the fourth step. Predicted, not yet run on hardware."""
    trace: str | None = None
    """Write the measured spans of the last step as a Perfetto trace, all ranks in one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A run. Every flag belongs to exactly one of these groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)


Rule = Callable[[Config], None]
"""A check of a configuration: it raises ConfigError and assigns nothing."""
