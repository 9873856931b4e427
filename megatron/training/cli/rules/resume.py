"""Rules on what may change between the run that saved a checkpoint and the run that resumes it. No torch.

Tensor shapes and the fingerprint refuse another model. The flags compared here change the computation or the data of the same
tensors, without any error: a resume refuses such changes by name, or lists them with --resume-with-changes. The saved values
come from the arguments in the completion mark, and from facts of the run that no flag shows: the samples of a step, a digest of
the text, and one of the first samples.

Every field of `Config` is listed here: FUNCTION, TRAINING and SCHEDULE are compared, ELSEWHERE is checked by other means, and
FREE may change. A new field in none of them fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.training.checkpoint.folder import Stored
from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import spelling
from moe_overlap.describe.errors import ConfigError

ALLOW = "--resume-with-changes"


def _fields(**groups: str) -> tuple[str, ...]:
    """Paths "group.field" of fields that are listed by group."""
    return tuple(f"{group}.{name}" for group, names in groups.items() for name in names.split())


FUNCTION = _fields(
    model="rotary_base rotary_seq_len_interpolation_factor rope_type norm_epsilon apply_query_key_layer_scaling mscale "
    "mscale_all_dim",
    moe="moe_router_topk moe_router_pre_softmax moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
    "moe_router_force_load_balancing moe_expert_capacity_factor moe_token_drop_policy moe_apply_probs_on_input",
    attention="rope_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
    "yarn_correction_range_round_to_int",
    overlap="moe_gate",
)
"""Fields that change the function of the same weights and are not in the fingerprint."""
TRAINING = _fields(
    model="seq_length attention_dropout hidden_dropout mtp_loss_scaling_factor",
    moe="moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate moe_input_jitter_eps "
    "moe_router_dtype",
    precision="fp8 fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
    "fp8_param_gather fp8_quantizer_factory first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 "
    "fp4 fp4_recipe fp4_param_gather fp4_quantizer_factory use_precision_aware_optimizer main_grads_dtype "
    "main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    optimizer="adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad apply_wd_to_qk_layernorm grad_reduce_in_bf16",
    training="global_batch_size rampup_batch_size step_batch_size_schedule seed calculate_per_token_loss",
    data="split dataloader_type mock_data reset_position_ids reset_attention_mask eod_mask_loss tokenizer_type "
    "tiktoken_pattern tiktoken_num_special_tokens",
)
"""Fields that change the data or the method of a resumed training; new training with old weights may choose them."""
SCHEDULE = _fields(
    optimizer="lr_warmup_init decoupled_lr decoupled_min_lr lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples"
)
"""Fields of the schedule that its saved state does not hold; --override-opt-param-scheduler chooses them again."""
ELSEWHERE = {
    "the fingerprint (rules/checkpoint.py) refuses another model": _fields(
        model="num_layers hidden_size num_attention_heads group_query_attention num_query_groups kv_channels "
        "position_embedding_type rotary_percent rotary_interleaved normalization layernorm_zero_centered_gamma swiglu "
        "parallel_attention_mlp squared_relu openai_gelu quick_geglu activation_func_clamp_value glu_linear_offset "
        "qk_layernorm untie_embeddings_and_output_weights multi_latent_attention rotary_scaling_factor",
        attention="window_size window_attn_skip_freq softmax_type use_rope_scaling",
        moe="num_experts moe_layer_freq moe_shared_expert_gate moe_router_score_function",
        data="vocab_size",
    ),
    "tensors of other shapes or names are refused": _fields(
        model="ffn_hidden_size max_position_embeddings add_bias_linear add_qkv_bias q_lora_rank kv_lora_rank qk_head_dim "
        "qk_pos_emb_head_dim v_head_dim mtp_num_layers",
        moe="moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size moe_router_enable_expert_bias",
    ),
    "the saved state of the schedule is compared (rules/checkpoint.py)": _fields(
        optimizer="lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters "
        "lr_warmup_samples weight_decay start_weight_decay end_weight_decay weight_decay_incr_style",
    ),
    "name and precision of the optimizer's state are compared (rules/checkpoint.py)": _fields(
        optimizer="optimizer bf16", precision="fp16"
    ),
    "DIGEST and ORDER name the text, wherever it lies": _fields(
        data="data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path tokenizer_model "
        "vocab_file merge_file",
        training="train_iters train_samples",
    ),
    "the plan's flags are compared": _fields(overlap="plan"),
}
"""Other means that detect a change of a field -> such fields."""
FREE = {
    "what a start alone reads: initial weights, initial loss scale": _fields(
        model="init_method_std embedding_init_method_std make_vocab_size_divisible_by", precision="initial_loss_scale"
    ),
    "the loss scale is the flags' by design: an overflow skips a step, whatever the scale": _fields(
        precision="loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    "where the same numbers are computed, and in which order": _fields(
        parallel="tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank microbatch_group_size_per_vp_stage decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split use_tp_pp_dp_mapping expert_model_parallel_size expert_tensor_parallel_size "
        "context_parallel_size sequence_parallel use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
        "ddp_bucket_size overlap_p2p_comm recompute_granularity recompute_method recompute_num_layers recompute_modules "
        "distributed_backend distributed_timeout_minutes",
        moe="moe_token_dispatcher_type moe_pad_expert_input_to_capacity",
        precision="reuse_grad_buf_for_mxfp8_param_ag moe_router_padding_for_fp8 moe_router_padding_for_quantization",
        device="moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size cpu_offloading_num_layers "
        "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d "
        "pin_cpu_grads pin_cpu_params",
        # Gradients are reduced in fp32 in any case but that of grad_reduce_in_bf16.
        optimizer="accumulate_allreduce_grads_in_fp32 gradient_accumulation_fusion",
        training="micro_batch_size deterministic_mode",
        data="num_workers mmap_bin_files data_cache_path",
        overlap="moe_overlap_partitions moe_overlap_range moe_overlap_grad_reduce moe_overlap_micro_batches "
        "moe_overlap_forward_send moe_overlap_capacity_chunks defer_weight_gradients max_deferred_bytes "
        "moe_overlap_device_connections moe_overlap_nccl_ctas moe_overlap_cuda_graphs",
    ),
    "when a run evaluates, saves and ends": _fields(
        training="eval_interval eval_iters eval_global_batch_size check_for_nan_in_loss_and_grad exit_interval "
        "exit_duration_in_mins exit_signal_handler exit_signal skip_train",
    ),
    "how a checkpoint is written and read": _fields(
        checkpoint="save load save_interval async_save ckpt_fully_parallel_save ckpt_assume_constant_structure "
        "save_retain_interval keep_last_checkpoints pretrained_checkpoint non_persistent_save_interval "
        "non_persistent_ckpt_type non_persistent_global_ckpt_dir ckpt_step ckpt_format finetune no_load_optim no_load_rng "
        "no_save_optim no_save_rng resume_with_changes exit_on_missing_checkpoint use_checkpoint_args "
        "use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args ckpt_fully_parallel_load "
        "dist_ckpt_strictness",
        optimizer="override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    ),
    "what is reported": _fields(
        logging="log_interval log_json tensorboard_dir tensorboard_log_interval tensorboard_queue_size wandb_project "
        "wandb_exp_name wandb_entity wandb_save_dir log_throughput log_params_norm log_num_zeros_in_grad "
        "log_memory_to_tensorboard log_memory_interval log_loss_scale_to_tensorboard log_world_size_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_timers_to_tensorboard timing_log_level timing_log_option "
        "moe_per_layer_logging log_expert_load profile use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
        overlap="trace",
    ),
}
"""Why a field may change without a message -> such fields. Every field of `Config` is in one of the five tables here."""
DEFAULTS = {
    "data.dataloader_type": "single",
    "data.tokenizer_type": "ByteTokenizer",
    "data.tiktoken_pattern": "v2",
    "model.rope_type": "yarn",
    "attention.yarn_original_max_position_embeddings": 4096,
    "attention.yarn_beta_fast": 32.0,
    "attention.yarn_beta_slow": 1.0,
}
"""Field -> its derived value when it is not set: writing that value out is no change."""
SAMPLES, DIGEST, ORDER = "samples_per_step", "data", "order"
_FACTS = {
    SAMPLES: "--global-batch-size",
    DIGEST: "other data; a digest of",
    ORDER: "other first samples (a run of another length reads a text in other epochs); a digest of",
}
"""A fact of a run that no flag shows -> its name for the user."""


def require_same_run(
    stored: Stored, load: str, config: Config, facts: Mapping[str, Any], weights_alone: bool
) -> tuple[str, ...]:
    """Require that a run that resumes equals the run that was saved.

    Args:
        facts: SAMPLES, DIGEST and ORDER of this run; the mark's entry `run` holds those of the saved one.
        weights_alone: whether training starts from step 0 with only these weights.
    Returns:
        Lines for the user: the differences that --resume-with-changes allows, or that no comparison was possible.
    Raises:
        ConfigError: something differs.
    """
    if stored.mark.get("arguments") is None:
        return ("its flags were not compared with this run's: it carries no arguments",)
    try:
        saved = parse(stored.mark["arguments"]).config
    except ConfigError as error:
        return (f"its flags were not compared with this run's: {error.subject} is none that this version reads",)
    differing = changes(saved, config, stored.mark.get("run", {}), facts, weights_alone)
    if not differing:
        return _not_compared(stored, weights_alone)
    if config.checkpoint.resume_with_changes:
        lines = (f"{name} {_shown(before)} became {_shown(now)}" for name, (before, now) in differing.items())
        return (*lines, *_not_compared(stored, weights_alone))
    name, (before, now) = next(iter(differing.items()))
    others = list(differing)[1:]
    more = f" (also different: {'; '.join(others[:3])}{f'; and {len(others) - 3} more' if len(others) > 3 else ''})"
    rule = (
        f"step {stored.step} was saved with {name} {_shown(before)}, this run has {_shown(now)}{more if others else ''}"
    )
    raise ConfigError("--load", load, rule, f"give the saved values, or add {ALLOW}")


def changes(
    saved: Config, config: Config, saved_facts: Mapping[str, Any], facts: Mapping[str, Any], weights_alone: bool
) -> dict[str, tuple[Any, Any]]:
    """The saved value and this run's, by name, of every field that differs."""
    differing = {}
    paths = FUNCTION if weights_alone else (*FUNCTION, *TRAINING)
    if not (weights_alone or config.optimizer.override_opt_param_scheduler):
        paths += SCHEDULE
    for path in paths:
        before, now = _value(saved, path), _value(config, path)
        if path == "training.global_batch_size" and (SAMPLES in saved_facts or None in (before, now)):
            continue  # Not set, it follows from the number of replicas: `facts` has its value.
        if before != now:
            differing[spelling(path)] = (before, now)
    if not weights_alone:
        for fact, name in _FACTS.items():
            # Other text, or another order that a flag sets, has other first samples: one message is enough.
            if fact in saved_facts and saved_facts[fact] != facts[fact] and (fact != ORDER or not differing):
                differing[name] = (saved_facts[fact], facts[fact])
    return differing


def _not_compared(stored: Stored, weights_alone: bool) -> tuple[str, ...]:
    """A line on the text of a save without the entries that identify it."""
    if weights_alone or {DIGEST, ORDER} <= stored.mark.get("run", {}).keys():
        return ()
    return ("its data were not compared with this run's: it was saved by a version that kept no digest",)


def _value(config: Config, path: str) -> Any:
    group, field = path.split(".")
    value = getattr(getattr(config, group), field)
    return DEFAULTS.get(path) if value is None else value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
