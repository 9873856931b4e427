"""Runs of the ranks of test_expert_loads.py: the same steps in every layout, with the routers' decisions counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tests.multiprocess.partition_runs import BASE

STEPS = 2


def loads(variants: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Loads of every variant, with its flags added to BASE, evaluated in between, which must not count. Collective.

    With the load of a layer stands its z-loss in the last step, as that step reports it.
    """
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands import train as pretrain_moe
    from moe_overlap.describe.expert_load import read_expert_loads

    found = {}
    for name, flags in variants.items():
        base = BASE if "alltoall" in flags else f"{BASE} --moe-gate topk"
        parsed = parse([*base.split(), *flags.split()])
        validate(parsed.config, dist.get_world_size())
        assert parsed.config.logging.log_expert_load is not None
        job = pretrain_moe.assemble(parsed, dist.get_rank()).job
        runner = job.machinery.runner
        feed, held_out = job.batches("train", 0), job.batches("valid", 0)
        assert feed is not None and held_out is not None
        z_losses: Mapping[int, float] = {}
        for step in range(STEPS):
            result = runner.run(job.schedule.instructions, feed, step)
            z_losses = result.balance["z_loss"]
            runner.evaluate(job.schedule.instructions, held_out, step)
            job.reporting.reports.after_step(step + 1, 0, 0)
        job.reporting.reports.flush_loads(STEPS)
        job.reporting.log.close()
        dist.barrier()
        counted = read_expert_loads(parsed.config.logging.log_expert_load)
        found[name] = [asdict(load) | {"z_loss": z_losses[load.layer]} for load in counted]
    return found
