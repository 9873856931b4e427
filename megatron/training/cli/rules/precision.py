"""Rules for fp16, fp8 and fp4.

Those of fp8 and fp4 are megatron-core's (transformer_config.py, distributed_data_parallel_config.py; sizes: fp8_utils.py,
fp4_utils.py), checked here because a dry run needs neither it nor Transformer Engine. No fp8 or fp4 product has run here so far.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.cli.config import Config, Rule
from megatron.training.cli.sizes import dense_width, expert_tensor_size, moe_layers, uses_sequence_parallel
from moe_overlap.describe.errors import at_least, require


def one_type_holds_the_weights(config: Config) -> None:
    precision, optimizer = config.precision, config.optimizer
    rule, fix = "--bf16 chooses another type", "drop one of the two flags"
    require(not (precision.fp16 and optimizer.bf16), "--fp16", "", rule, fix)
    require(not (precision.fp8 and precision.fp4), "--fp4-format", precision.fp4, "--fp8-format chooses another", fix)
    rule = "gradients are reduced in bf16 where they are bf16"
    require(not (precision.fp16 and optimizer.grad_reduce_in_bf16), "--grad-reduce-in-bf16", "", rule, "drop the flag")


def loss_scale_is_a_number_that_can_move(config: Config) -> None:
    precision = config.precision
    if not precision.fp16:
        return
    scales = (
        ("--loss-scale", precision.loss_scale),
        ("--initial-loss-scale", precision.initial_loss_scale),
        ("--min-loss-scale", precision.min_loss_scale),
    )
    for flag, value in scales:
        fits = value is None or 0 < value < float("inf")
        require(fits, flag, value, "must be positive and finite", "use for example 65536")
    least, first = precision.min_loss_scale, precision.initial_loss_scale
    rule = f"is above --initial-loss-scale {first:g}"
    require(least <= first, "--min-loss-scale", least, rule, f"use {first:g} or less")
    at_least(1, (("--hysteresis", precision.hysteresis), ("--loss-scale-window", precision.loss_scale_window)))
    window = precision.loss_scale_window
    require(window % 1 == 0, "--loss-scale-window", window, "counts steps", f"use {window:.0f}")


def quantized_weights_are_gathered_as_they_are_made(config: Config) -> None:
    precision = config.precision
    at_least(
        1, (("--fp8-amax-history-len", precision.fp8_amax_history_len), ("--fp8-interval", precision.fp8_interval))
    )
    for kind, active, recipe, factory in (
        ("fp8", precision.fp8, precision.fp8_recipe, precision.fp8_quantizer_factory),
        ("fp4", precision.fp4, precision.fp4_recipe, precision.fp4_quantizer_factory),
    ):
        rule, fix = "needs the quantizers' factory", f"add --{kind}-quantizer-factory PACKAGE.MODULE.FUNCTION"
        require(not active or recipe != "custom" or factory, f"--{kind}-recipe", recipe, rule, fix)
    if precision.fp8 is None:
        return
    flag, gathers = "--reuse-grad-buf-for-mxfp8-param-ag", precision.fp8_param_gather
    fits = not precision.reuse_grad_buf_for_mxfp8_param_ag or (gathers and precision.fp8_recipe == "mxfp8")
    rule = "gathers mxfp8 weights through the gradient buffer"
    require(fits, flag, "", rule, "add --fp8-recipe mxfp8 --fp8-param-gather")


def delayed_scaling_covers_whole_layers(config: Config) -> None:
    precision, parallel = config.precision, config.parallel
    if precision.fp8 is None:
        return
    delayed, fix = precision.fp8_recipe == "delayed", "use another --fp8-recipe"
    rule = "delayed scaling has no layers in bf16"
    require(not (delayed and precision.first_last_layers_bf16), "--first-last-layers-bf16", "", rule, fix)
    again = [name for name in parallel.recompute_modules or () if name in ("moe_act", "layernorm")]
    rule = "delayed scaling does not recompute them"
    require(not (delayed and again), "--recompute-modules", " ".join(again), rule, fix)
    if precision.first_last_layers_bf16:
        most = (config.model.num_layers or 0) // parallel.pipeline_model_parallel_size
        for flag, layers in (
            ("--num-layers-at-start-in-bf16", precision.num_layers_at_start_in_bf16),
            ("--num-layers-at-end-in-bf16", precision.num_layers_at_end_in_bf16),
        ):
            require(0 <= layers <= most, flag, layers, f"a stage has {most} layers", f"use 0 to {most}")


def padded_routing_has_a_dispatcher_that_pads(config: Config) -> None:
    precision, dispatcher = config.precision, config.moe.moe_token_dispatcher_type
    for flag, pads in (
        ("--moe-router-padding-for-quantization", precision.moe_router_padding_for_quantization),
        ("--moe-router-padding-for-fp8", precision.moe_router_padding_for_fp8),
    ):
        rule, fix = "pads rows for fp8 or fp4", "add --fp8-format or --fp4-format, or drop the flag"
        require(not pads or precision.fp8 or precision.fp4, flag, "", rule, fix)
        rule, fix = f"the {dispatcher} dispatcher does not pad", "use --moe-token-dispatcher-type alltoall"
        require(not pads or dispatcher in ("alltoall", "flex"), flag, "", rule, fix)


def quantized_products_have_whole_blocks(config: Config) -> None:
    """Both sides of every matrix of a layer, and the tokens it is multiplied with; rows of experts are padded."""
    precision = config.precision
    if precision.fp8 is None and precision.fp4 is None:
        return
    flag, value = ("--fp8-format", precision.fp8) if precision.fp8 else ("--fp4-format", precision.fp4)
    block = block_size(config)
    for name, width in _widths(config):
        rule = f"{name} = {width} is not divisible by {block}"
        require(width % block == 0, flag, value, rule, "change the size or the ranks")


def block_size(config: Config) -> int:
    """Elements that one scale or one 16-byte load covers: 32 in mxfp8 and fp4, 16 in the other recipes."""
    return 32 if config.precision.fp4 or config.precision.fp8_recipe == "mxfp8" else 16


def _widths(config: Config) -> Iterator[tuple[str, int]]:
    model, moe, parallel, training = config.model, config.moe, config.parallel, config.training
    assert model.hidden_size is not None and model.num_attention_heads is not None and model.seq_length is not None
    assert training.micro_batch_size is not None
    tensor = parallel.tensor_model_parallel_size
    yield "--hidden-size", model.hidden_size
    if not all(moe_layers(config)):
        yield "the MLP's width on a rank", dense_width(config) // tensor
    if model.multi_latent_attention:
        yield "the heads' values on a rank", model.num_attention_heads * model.v_head_dim // tensor
        yield "--kv-lora-rank", model.kv_lora_rank
        if model.q_lora_rank is not None:
            yield "--q-lora-rank", model.q_lora_rank
    else:
        width = model.kv_channels or model.hidden_size // model.num_attention_heads
        yield "the heads' width on a rank", model.num_attention_heads * width // tensor
    if moe.num_experts is not None:
        yield (
            "an expert's width on a rank",
            (moe.moe_ffn_hidden_size or dense_width(config)) // expert_tensor_size(config),
        )
    if moe.moe_shared_expert_intermediate_size is not None:
        yield "the shared experts' width on a rank", moe.moe_shared_expert_intermediate_size // tensor
    split = parallel.context_parallel_size * (tensor if uses_sequence_parallel(config) else 1)
    yield "the tokens of a micro-batch on a rank", model.seq_length * training.micro_batch_size // split


PRECISION_RULES: tuple[Rule, ...] = (
    one_type_holds_the_weights,
    loss_scale_is_a_number_that_can_move,
    quantized_weights_are_gathered_as_they_are_made,
    delayed_scaling_covers_whole_layers,
    padded_routing_has_a_dispatcher_that_pads,
    quantized_products_have_whole_blocks,
)
