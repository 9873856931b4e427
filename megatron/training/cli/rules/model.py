"""Rules for the model: windows and positions of its attention, sizes, activations, heads, prediction layers."""

from __future__ import annotations

from megatron.training.cli.config import Config, Rule
from megatron.training.cli.sizes import dense_width
from moe_overlap.describe.errors import ConfigError, at_least, divisors, fraction, require
from moe_overlap.describe.model import require_bounded_layers

# Windows and scaled rotary positions


def windows_fit(config: Config) -> None:
    size, frequency = config.attention.window_size, config.attention.window_attn_skip_freq
    layers, ahead = config.model.num_layers, config.model.mtp_num_layers or 0
    if size is None:
        return
    shown, (before, after) = ",".join(map(str, size)), size
    require(before >= -1, "--window-size", shown, "the first number counts tokens, or is -1 for all", "use -1 or more")
    rule = "attention is causal: nothing after a token is seen"
    require(after == 0, "--window-size", shown, rule, f"use {before},0")
    if isinstance(frequency, int):
        at_least(1, (("--window-attn-skip-freq", frequency),))
    elif frequency is not None:
        listed = "[" + ",".join(map(str, frequency)) + "]"
        assert layers is not None
        predictions = f" and {ahead} behind them (--mtp-num-layers)" if ahead else ""
        rule = f"the list has {len(frequency)} entries for {layers} layers{predictions}"
        require(len(frequency) == layers + ahead, "--window-attn-skip-freq", listed, rule, "give one entry per layer")


def yarn_fits(config: Config) -> None:
    model, attention, flag = config.model, config.attention, "--position-embedding-type"
    at_least(1, (("--rotary-scaling-factor", model.rotary_scaling_factor),))
    if model.position_embedding_type != "yarn":
        return
    rule, fix = "latent attention has rotary positions of its own", "use rope, and --rope-type yarn"
    require(not model.multi_latent_attention, flag, "yarn", rule, fix)
    rule = "YaRN rotates halves"
    require(not model.rotary_interleaved, "--rotary-interleaved", "", rule, "drop one of the two flags")
    rule = "YaRN rotates whole heads"
    require(model.rotary_percent == 1, "--rotary-percent", model.rotary_percent, rule, "use 1.0")
    original = attention.yarn_original_max_position_embeddings
    at_least(1, (("--yarn-original-max-position-embeddings", original),))
    fast, slow = attention.yarn_beta_fast, attention.yarn_beta_slow
    for name, value in (("--yarn-beta-fast", fast), ("--yarn-beta-slow", slow)):
        require(value is None or value > 0, name, value, "must be positive", "correct the value")
    fast, slow = fast or 32.0, slow or 1.0
    rule = f"--yarn-beta-fast {fast:g} is not above it"
    require(slow < fast, "--yarn-beta-slow", slow, rule, "correct one of them")


def llama_scaling_fits(config: Config) -> None:
    factor = config.attention.rope_scaling_factor
    at_least(1, (("--rope-scaling-factor", factor),))


ATTENTION_RULES: tuple[Rule, ...] = (windows_fit, yarn_fits, llama_scaling_fits)


# Sizes and forms

MOST_WIDE = 100_000_000
"""Largest width, sequence or vocabulary, a hundred times those in use: anything larger is a typing mistake, and the products of
several such sizes are no exact numbers any more."""


def sizes_are_given(config: Config) -> None:
    model = config.model
    sizes = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--seq-length": model.seq_length,
        "--max-position-embeddings": model.max_position_embeddings,
    }
    if missing := [flag for flag, value in sizes.items() if value is None]:
        rule = "the model needs it" if len(missing) == 1 else "the model needs them"
        added = f"{missing[0]} N" if len(missing) == 1 else "them"
        raise ConfigError(
            ", ".join(missing), "", rule, f"add {added}, or --model NAME for a shipped model or a config.json"
        )
    at_least(
        1,
        (
            ("--num-layers", model.num_layers),
            ("--hidden-size", model.hidden_size),
            ("--ffn-hidden-size", model.ffn_hidden_size),
            ("--num-attention-heads", model.num_attention_heads),
            ("--num-query-groups", model.num_query_groups),
            ("--kv-channels", model.kv_channels),
            ("--seq-length", model.seq_length),
            ("--max-position-embeddings", model.max_position_embeddings),
            ("--make-vocab-size-divisible-by", model.make_vocab_size_divisible_by),
            ("--rotary-base", model.rotary_base),
            ("--rotary-seq-len-interpolation-factor", model.rotary_seq_len_interpolation_factor),
        ),
    )
    require(
        dense_width(config) > 0, "--hidden-size", model.hidden_size, "too small for --swiglu's width", "use 24 or more"
    )


def sizes_are_bounded(config: Config) -> None:
    model, moe = config.model, config.moe
    require_bounded_layers("--num-layers", model.num_layers)
    for flag, size in (
        ("--hidden-size", model.hidden_size),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--num-attention-heads", model.num_attention_heads),
        ("--kv-channels", model.kv_channels),
        ("--seq-length", model.seq_length),
        ("--max-position-embeddings", model.max_position_embeddings),
        ("--vocab-size", config.data.vocab_size),
        ("--num-experts", moe.num_experts),
        ("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size),
        ("--moe-shared-expert-intermediate-size", moe.moe_shared_expert_intermediate_size),
    ):
        require((size or 0) <= MOST_WIDE, flag, size, f"is more than {MOST_WIDE}", "correct the value")


def values_are_in_range(config: Config) -> None:
    model = config.model
    rule, fix = "--swiglu chooses another activation", "drop one of the two flags"
    require(not (model.squared_relu and model.swiglu), "--squared-relu", "", rule, fix)
    require(not (model.openai_gelu and model.swiglu), "--openai-gelu", "", rule, fix)
    require(not (model.quick_geglu and model.swiglu), "--quick-geglu", "", rule, fix)
    rule = "--squared-relu chooses another activation"
    require(not (model.openai_gelu and model.squared_relu), "--openai-gelu", "", rule, fix)
    require(not (model.quick_geglu and model.squared_relu), "--quick-geglu", "", rule, fix)
    rule = "--quick-geglu chooses another activation"
    require(not (model.openai_gelu and model.quick_geglu), "--openai-gelu", "", rule, fix)
    limit = model.activation_func_clamp_value
    fits = limit is None or limit > 0
    require(fits, "--activation-func-clamp-value", limit, "must be positive", "use for example 7.0")
    width = model.embedding_init_method_std
    require(
        width is None or width > 0, "--embedding-init-method-std", width, "must be positive", "use for example 0.02"
    )
    dropouts = (("--attention-dropout", model.attention_dropout), ("--hidden-dropout", model.hidden_dropout))
    fraction(dropouts, includes_one=False)
    rotated = model.rotary_percent
    require(0 < rotated <= 1, "--rotary-percent", rotated, "must lie in (0, 1]", "correct the value")
    require(model.norm_epsilon > 0, "--norm-epsilon", model.norm_epsilon, "must be positive", "use for example 1e-5")
    require(
        model.init_method_std > 0,
        "--init-method-std",
        model.init_method_std,
        "must be positive",
        "use for example 0.02",
    )


def heads_divide(config: Config) -> None:
    model = config.model
    heads, hidden = model.num_attention_heads, model.hidden_size
    assert heads is not None and hidden is not None
    tensor = config.parallel.tensor_model_parallel_size
    if model.kv_channels is None and not model.multi_latent_attention:
        rule = f"hidden size {hidden} is not divisible by {heads} heads"
        require(hidden % heads == 0, "--num-attention-heads", heads, rule, "change one of them or give --kv-channels")
    rule = f"{heads} attention heads are not divisible by {tensor}"
    require(heads % tensor == 0, "--tensor-model-parallel-size", tensor, rule, f"use {divisors(heads)}")
    groups = model.num_query_groups
    if not model.group_query_attention:
        return
    rule = f"{heads} attention heads are not divisible by {groups}"
    require(heads % groups == 0, "--num-query-groups", groups, rule, f"use {divisors(heads)}")
    rule = f"{groups} query groups are neither a multiple nor a divisor of {tensor}"
    fits = groups % tensor == 0 or tensor % groups == 0
    require(fits, "--tensor-model-parallel-size", tensor, rule, f"use {divisors(groups)}")


def positions_cover_the_sequence(config: Config) -> None:
    model = config.model
    sequence, longest = model.seq_length, model.max_position_embeddings
    assert sequence is not None and longest is not None
    rule = f"--max-position-embeddings covers {longest} positions"
    require(
        sequence <= longest,
        "--seq-length",
        sequence,
        rule,
        f"use {longest} or less, or raise --max-position-embeddings",
    )


def latent_attention_fits(config: Config) -> None:
    model = config.model
    if not model.multi_latent_attention:
        return
    widths = (
        ("--q-lora-rank", model.q_lora_rank),
        ("--kv-lora-rank", model.kv_lora_rank),
        ("--qk-head-dim", model.qk_head_dim),
        ("--qk-pos-emb-head-dim", model.qk_pos_emb_head_dim),
        ("--v-head-dim", model.v_head_dim),
    )
    at_least(1, widths)
    rule, fix = "latent attention has no query groups", "drop one of the two flags"
    require(not model.group_query_attention, "--multi-latent-attention", "", rule, fix)
    rule = "latent attention rotates halves"
    require(not model.rotary_interleaved, "--rotary-interleaved", "", rule, "drop one of the two flags")
    tensor, latents = config.parallel.tensor_model_parallel_size, model.kv_lora_rank + model.qk_pos_emb_head_dim
    rule = f"--kv-lora-rank + --qk-pos-emb-head-dim = {latents} is not divisible by {tensor}"
    require(latents % tensor == 0, "--tensor-model-parallel-size", tensor, rule, "change it or the ranks")
    rule = f"is not divisible by --tensor-model-parallel-size {tensor}"
    require(
        not model.q_lora_rank or model.q_lora_rank % tensor == 0, "--q-lora-rank", model.q_lora_rank, rule, "change one"
    )
    split = config.parallel.sequence_parallel or tensor == 1
    rule = "latent attention needs the sequence split as well"
    require(split, "--tensor-model-parallel-size", tensor, rule, "add --sequence-parallel")
    width = model.qk_pos_emb_head_dim
    require(width % 2 == 0, "--qk-pos-emb-head-dim", width, "is rotated in pairs", "use an even number")


def prediction_layers_fit(config: Config) -> None:
    model, parallel = config.model, config.parallel
    flag, count = "--mtp-num-layers", model.mtp_num_layers
    at_least(0, ((flag, count), ("--mtp-loss-scaling-factor", model.mtp_loss_scaling_factor)))
    if not count:
        return
    positions = model.position_embedding_type
    rule = "prediction layers have rotary positions or none"
    require(positions != "learned_absolute", "--position-embedding-type", positions, rule, "use rope")
    groups = parallel.recompute_num_layers if parallel.recompute_granularity == "full" else None
    rule, fix = f"{flag} {count} recomputes uniformly layer by layer", "use 1, or --recompute-method block"
    fits = groups in (None, 1) or parallel.recompute_method != "uniform"
    require(fits, "--recompute-num-layers", groups, rule, fix)


def widths_divide_by_tensor_size(config: Config) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    width = dense_width(config)
    rule = f"the MLP width {width} is not divisible by {tensor}"
    require(width % tensor == 0, "--tensor-model-parallel-size", tensor, rule, "change it or --ffn-hidden-size")


def parallel_block_is_dense(config: Config) -> None:
    flag, block = "--parallel-attention-mlp", config.model.parallel_attention_mlp
    if block is None:
        return
    require(config.moe.num_experts is None, flag, block, "joins attention with a dense MLP", "drop --num-experts or it")
    again = [name for name in config.parallel.recompute_modules or () if name != "core_attn"]
    rule = f"{flag} recomputes core_attn or whole layers"
    require(not again, "--recompute-modules", " ".join(again), rule, "use core_attn or --recompute-granularity full")


MODEL_RULES: tuple[Rule, ...] = (
    sizes_are_given,
    sizes_are_bounded,
    values_are_in_range,
    heads_divide,
    positions_cover_the_sequence,
    latent_attention_fits,
    prediction_layers_fit,
    parallel_block_is_dense,
    widths_divide_by_tensor_size,
)
