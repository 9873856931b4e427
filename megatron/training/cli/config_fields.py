"""Groups of `Config` whose flags need more than name, type and default, and the function that adds it (`flag`).

Attention variants, number formats, offloading and GPU dispatchers: flags, defaults and meanings are upstream's,
`model/stage_config.py` and `optimizer.py` pass the values to megatron-core. A field names its need (`needs=`) or the field whose
setting it is (`of=`): a dry run accepts it anywhere and reports the need; a start on a machine without it is refused
(`start.py`). Attention variants and fp16 run anywhere; nothing that needs a GPU has run on one so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Need = Literal["CUDA", "Transformer Engine"]


def flag(
    default: Any,
    *names: str,
    off: str | None = None,
    needs: Need | None = None,
    of: str | None = None,
) -> Any:
    """A field whose flag is not just `--field-name`.

    Args:
        default: the field's default.
        names: the flag's names, the documented one first; none for `--field-name`.
        off: for a field that is true by default: the flag that turns it off.
        needs: the device or library that a machine must have for any value but the default.
        of: the field ("group.field") whose setting this is: without effect while that field has its default.
    """
    return field(default=default, metadata={"names": names, "off": off, "needs": needs, "of": of})


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """attention variants"""

    window_size: tuple[int, int] | None = None
    """Attend to a window LEFT,0: the LEFT tokens before a token and itself; -1: all of them."""
    window_attn_skip_freq: int | tuple[int, ...] | None = flag(None, of="attention.window_size")
    """Which layers see everything: every N-th, or a Python list with 0 for them and 1 for a window; default none.
    Prediction layers (--mtp-num-layers) continue the count after the others."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sinks: add e^0 to the softmax's denominator, or a learnt term for each head."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = flag(8.0, of="attention.use_rope_scaling")
    """Factor by which --use-rope-scaling extends the context."""
    yarn_original_max_position_embeddings: int | None = None
    """YaRN: positions before the extension; default 4096."""
    yarn_beta_fast: float | None = None
    """YaRN: rotations above which a frequency stays; default 32."""
    yarn_beta_slow: float | None = None
    """YaRN: rotations below which a frequency is scaled in full; default 1."""
    yarn_correction_range_round_to_int: bool = flag(True, off="--no-yarn-correction-range-round-to-int")
    """Round YaRN's two bounds to integer dimensions."""


_TE: Need = "Transformer Engine"
_StateType = Literal["fp32", "fp16", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """fp16, fp8 and fp4"""

    fp16: bool = False
    """Train in float16 with fp32 master weights and a loss scale; a step whose gradients overflow is skipped."""
    loss_scale: float | None = flag(None, of="precision.fp16")
    """fp16: a constant loss scale instead of a dynamic one."""
    initial_loss_scale: float = flag(4294967296, of="precision.fp16")
    """fp16: first value of the dynamic loss scale."""
    min_loss_scale: float = flag(1.0, of="precision.fp16")
    """fp16: lowest value of the dynamic loss scale."""
    loss_scale_window: float = flag(1000, of="precision.fp16")
    """fp16: steps without overflow after which the loss scale doubles."""
    hysteresis: int = flag(2, of="precision.fp16")
    """fp16: the overflow from which on each one halves the loss scale, counted since it last doubled."""
    fp8: Literal["e4m3", "hybrid"] | None = flag(None, "--fp8-format", needs=_TE)
    """Matrix products in fp8: e4m3 everywhere, or e5m2 for gradients (hybrid)."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = flag("delayed", of="precision.fp8")
    """fp8: how scales are chosen."""
    fp8_margin: int = flag(0, of="precision.fp8")
    """fp8: margin of the scales."""
    fp8_interval: int = flag(1, of="precision.fp8")
    """fp8: steps between updates of the scales."""
    fp8_amax_history_len: int = flag(1, of="precision.fp8")
    """fp8: steps whose maxima are kept (delayed scaling)."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag("most_recent", of="precision.fp8")
    """fp8: which of the kept maxima counts (delayed scaling)."""
    fp8_wgrad: bool = flag(True, off="--no-fp8-wgrad", of="precision.fp8")
    """fp8 for weight gradients as well."""
    fp8_param_gather: bool = flag(False, of="precision.fp8")
    """Keep the weights in fp8, and gather them in fp8."""
    fp8_quantizer_factory: str | None = flag(None, of="precision.fp8")
    """fp8: Python name of the quantizers' factory, with --fp8-recipe custom."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(False, of="precision.fp8")
    """mxfp8: gather the weights through the gradient buffer."""
    first_last_layers_bf16: bool = flag(False, of="precision.fp8")
    """fp8: keep the first and last layers in bf16."""
    num_layers_at_start_in_bf16: int = flag(1, of="precision.fp8")
    """First layers that --first-last-layers-bf16 keeps in bf16."""
    num_layers_at_end_in_bf16: int = flag(1, of="precision.fp8")
    """Last layers that --first-last-layers-bf16 keeps in bf16."""
    fp4: Literal["e2m1"] | None = flag(None, "--fp4-format", needs=_TE)
    """Matrix products in fp4."""
    fp4_recipe: Literal["nvfp4", "custom"] = flag("nvfp4", of="precision.fp4")
    """fp4: how scales are chosen."""
    fp4_param_gather: bool = flag(False, of="precision.fp4")
    """Keep the weights in fp4, and gather them in fp4."""
    fp4_quantizer_factory: str | None = flag(None, of="precision.fp4")
    """fp4: Python name of the quantizers' factory, with --fp4-recipe custom."""
    moe_router_padding_for_fp8: bool = flag(False, needs=_TE)
    """Pad the routing map so that each expert's rows fit fp8 blocks; older name of --moe-router-padding-for-quantization."""
    moe_router_padding_for_quantization: bool = flag(False, needs=_TE)
    """Pad the routing map so that each expert's rows fit quantized blocks."""
    use_precision_aware_optimizer: bool = flag(False, needs=_TE)
    """Keep optimizer states in the types of --main-grads-dtype to --exp-avg-sq-dtype, by Transformer Engine's Adam."""
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32", of="precision.use_precision_aware_optimizer")
    """Type of the gradients the optimizer reads."""
    main_params_dtype: Literal["fp32", "fp16"] = flag("fp32", of="precision.use_precision_aware_optimizer")
    """Type of the master weights."""
    exp_avg_dtype: _StateType = flag("fp32", of="precision.use_precision_aware_optimizer")
    """Type of Adam's first moment."""
    exp_avg_sq_dtype: _StateType = flag("fp32", of="precision.use_precision_aware_optimizer")
    """Type of Adam's second moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """offloading and GPU dispatchers"""

    moe_enable_deepep: bool = flag(False, of="moe.moe_token_dispatcher_type")
    """The flex dispatcher sends tokens by DeepEP."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag("deepep", of="moe.moe_token_dispatcher_type")
    """Library by which the flex dispatcher sends tokens."""
    moe_deepep_num_sms: int | None = flag(None, of="moe.moe_token_dispatcher_type")
    """Streaming multiprocessors DeepEP may use; default megatron-core's."""
    moe_hybridep_num_sms: int | None = flag(None, of="moe.moe_token_dispatcher_type")
    """Streaming multiprocessors HybridEP may use; default megatron-core's."""
    fine_grained_activation_offloading: bool = flag(False, needs=_TE)
    """Move the inputs of --offload-modules to the host until their backward pass."""
    offload_modules: tuple[
        Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"], ...
    ] = flag((), of="device.fine_grained_activation_offloading")
    """Modules whose inputs --fine-grained-activation-offloading moves."""
    min_offloaded_tensor_size: int = flag(1048576, of="device.fine_grained_activation_offloading")
    """Elements below which a tensor stays on the GPU."""
    cpu_offloading_num_layers: int = flag(0, needs=_TE)
    """Layers whose activations are moved to the host."""
    optimizer_cpu_offload: bool = flag(False, needs="CUDA")
    """Keep optimizer states and step on the host."""
    optimizer_offload_fraction: float = flag(1.0, of="device.optimizer_cpu_offload")
    """Share of the optimizer states that --optimizer-cpu-offload keeps on the host."""
    use_torch_optimizer_for_cpu_offload: bool = flag(False, of="device.optimizer_cpu_offload")
    """Step the offloaded states by torch's optimizer."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, of="device.optimizer_cpu_offload")
    """Overlap the copies of --optimizer-cpu-offload with the step."""
    pin_cpu_grads: bool = flag(True, off="--no-pin-cpu-grads", of="device.optimizer_cpu_offload")
    """Pin the offloaded gradients' memory."""
    pin_cpu_params: bool = flag(True, off="--no-pin-cpu-params", of="device.optimizer_cpu_offload")
    """Pin the offloaded weights' memory."""
