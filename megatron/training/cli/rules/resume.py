"""What has changed between the run that saved a checkpoint and the run that resumes it. No torch.

Tensor shapes and the fingerprint refuse another model. The flags compared here change what the same tensors compute, or what
they are trained on, and would change it in silence: a resume refuses them by name, or lists them with --resume-with-changes.
The saved side comes from the arguments that the completion mark carries, and from two facts of the run that no flag shows:
the samples of a step, and a digest of the text.
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
FUNCTION = tuple(
    f"model.{name}"
    for name in (
        "rotary_base rotary_seq_len_interpolation_factor rope_type norm_epsilon apply_query_key_layer_scaling "
        "mscale mscale_all_dim"
    ).split()
) + tuple(
    f"moe.{name}"
    for name in (
        "moe_router_topk moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_scaling_factor moe_router_force_load_balancing moe_expert_capacity_factor "
        "moe_token_drop_policy moe_apply_probs_on_input"
    ).split()
)
FUNCTION += tuple(
    f"attention.{name}"
    for name in (
        "rope_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
        "yarn_correction_range_round_to_int"
    ).split()
)
FUNCTION += ("overlap.moe_gate",)
"""Fields under which the same weights are another function, and which the fingerprint does not hold."""
TRAINING = (
    "model.seq_length model.attention_dropout model.hidden_dropout model.mtp_loss_scaling_factor "
    "moe.moe_router_load_balancing_type moe.moe_aux_loss_coeff moe.moe_z_loss_coeff moe.moe_router_bias_update_rate "
    "moe.moe_input_jitter_eps optimizer.adam_beta1 optimizer.adam_beta2 optimizer.adam_eps optimizer.sgd_momentum "
    "optimizer.clip_grad optimizer.apply_wd_to_qk_layernorm training.global_batch_size training.rampup_batch_size "
    "training.step_batch_size_schedule training.seed training.calculate_per_token_loss data.split data.dataloader_type "
    "data.mock_data data.reset_position_ids data.reset_attention_mask data.eod_mask_loss"
).split()
"""Fields that change what a run that goes on is trained on, or how; new training with old weights may choose them."""
SAMPLES, DIGEST = "samples_per_step", "data"


def require_same_run(
    stored: Stored, load: str, config: Config, facts: Mapping[str, Any], weights_alone: bool
) -> tuple[str, ...]:
    """Require a run that resumes to be the run that was saved.

    Args:
        facts: SAMPLES and DIGEST of this run, as the mark's entry `run` holds those of the saved one.
        weights_alone: whether training begins anew with these weights.
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
        return ()
    if config.checkpoint.resume_with_changes:
        return tuple(f"{name} {_shown(before)} became {_shown(now)}" for name, (before, now) in differing.items())
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
    """What differs, by name: the saved value and this run's."""
    differing = {}
    for path in FUNCTION if weights_alone else (*FUNCTION, *TRAINING):
        before, now = _value(saved, path), _value(config, path)
        if path == "training.global_batch_size" and (SAMPLES in saved_facts or None in (before, now)):
            continue  # Not given, it follows from the number of replicas: `facts` says what it is.
        if before != now:
            differing[spelling(path)] = (before, now)
    if not weights_alone:
        for fact, name in ((SAMPLES, "--global-batch-size"), (DIGEST, "other data; a digest of")):
            if fact in saved_facts and saved_facts[fact] != facts[fact]:
                differing[name] = (saved_facts[fact], facts[fact])
    return differing


def _value(config: Config, path: str) -> Any:
    group, field = path.split(".")
    return getattr(getattr(config, group), field)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
