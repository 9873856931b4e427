"""The part of a run's configuration that says how attention differs from plain causal softmax attention.

Flags, defaults and meanings are upstream's; `model.py` hands them to megatron-core, `rules/attention.py` holds their rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.flags.config_flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """attention variants"""

    window_size: tuple[int, int] | None = None
    """Attend to a window LEFT,0: the LEFT tokens before a token and itself; -1: all of them."""
    window_attn_skip_freq: int | tuple[int, ...] | None = flag(None, of="attention.window_size")
    """Which layers see everything: every N-th, or a Python list with 0 for them and 1 for a window; default none.
    Prediction layers (--mtp-num-layers) count on behind the others."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sinks: add e^0 to the softmax's denominator, or a learnt term for each head."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = flag(8.0, of="attention.use_rope_scaling")
    """By how much."""
    yarn_original_max_position_embeddings: int | None = None
    """YaRN: positions before the extension; default 4096."""
    yarn_beta_fast: float | None = None
    """YaRN: rotations above which a frequency stays; default 32."""
    yarn_beta_slow: float | None = None
    """YaRN: rotations below which a frequency is scaled in full; default 1."""
    yarn_correction_range_round_to_int: bool = flag(True, off="--no-yarn-correction-range-round-to-int")
    """Round these bounds to whole dimensions."""
