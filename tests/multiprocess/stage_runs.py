"""Plans of the ranks of test_stage_recomputation.py: the flags' stages, each with a recomputation of its own."""

from __future__ import annotations

from pathlib import Path

from moe_overlap.plan.plan import Recompute
from tests.multiprocess.partition_runs import BASE


def write_stages(path: Path, flags: str, recomputes: tuple[Recompute, ...], base: str = BASE) -> str:
    """The plan of flags, with what each stage recomputes, on two ranks a stage under expert parallelism, else on one.

    Returns:
        The flags with the plan's file.
    """
    import dataclasses

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.plan_flags import plan_from_flags
    from moe_overlap.plan.serialize import save_plan

    config = parse([*base.split(), *flags.split()]).config
    ranks = len(recomputes) * config.parallel.expert_model_parallel_size
    plan = plan_from_flags(config, describe_model(config, 257), ranks)
    pairs = zip(plan.stages, recomputes, strict=True)
    stages = tuple(dataclasses.replace(stage, recompute=recompute) for stage, recompute in pairs)
    save_plan(dataclasses.replace(plan, stages=stages), path)
    return f"{flags} --plan {path}"
