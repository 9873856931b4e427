"""Rules across flags. A rule raises and never assigns: what passes is run exactly as it was written.

Each rule is a small function; the files of rules are grouped like the flags.
"""

from __future__ import annotations

from megatron.training.attention_rules import ATTENTION_RULES
from megatron.training.config import Config
from megatron.training.model_rules import MODEL_RULES
from megatron.training.moe_rules import MOE_RULES
from megatron.training.overlap_rules import OVERLAP_RULES
from megatron.training.parallel_rules import PARALLEL_RULES, check_world
from megatron.training.precision_rules import PRECISION_RULES
from megatron.training.run_rules import RUN_RULES


def validate(config: Config, world_size: int | None) -> None:
    """Check a configuration.

    Args:
        config: what `parse` returned.
        world_size: processes of the run; None leaves out the rules that need it.
    Raises:
        ConfigError: the first rule that does not hold, with flag, value, rule and fix.
    """
    before, after = (*MODEL_RULES, *ATTENTION_RULES, *MOE_RULES), (*RUN_RULES, *PRECISION_RULES, *OVERLAP_RULES)
    for rule in (*before, *PARALLEL_RULES, *after):
        rule(config)
    if world_size is not None:
        check_world(config, world_size)
