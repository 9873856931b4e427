"""Rules across flags. A rule raises and never assigns: a configuration that passes runs exactly as it was written.

Each rule is a small function whose name states what must hold; the files of rules are grouped like the flags.
"""

from __future__ import annotations

from megatron.training.cli.config import Config
from megatron.training.cli.rules.graphs import graphs_capture_what_repeats
from megatron.training.cli.rules.model import ATTENTION_RULES, MODEL_RULES
from megatron.training.cli.rules.moe import MOE_RULES, OVERLAP_RULES
from megatron.training.cli.rules.parallel import PARALLEL_RULES, check_world, sizes_are_positive
from megatron.training.cli.rules.precision import PRECISION_RULES
from megatron.training.cli.rules.run import RUN_RULES

OF_MODELS = (*MODEL_RULES, *ATTENTION_RULES, *MOE_RULES)


def validate_model(config: Config) -> None:
    """Check only the model of a configuration.

    Raises:
        ConfigError: see `validate`.
    """
    for rule in OF_MODELS:
        rule(config)


def validate(config: Config, world_size: int | None) -> None:
    """Check a configuration.

    Args:
        config: result of `parse`.
        world_size: number of processes of the run; None skips the rules that need it.
    Raises:
        ConfigError: the first rule that is broken, with flag, value, rule and fix.
    """
    after = (*RUN_RULES, *PRECISION_RULES, *OVERLAP_RULES, graphs_capture_what_repeats)
    for rule in (sizes_are_positive, *OF_MODELS, *PARALLEL_RULES, *after):
        rule(config)
    if world_size is not None:
        check_world(config, world_size)
