"""Ranks that train any layout for real, on a device that is slower than this machine: operators compute, then sleep.

A computing span ends after the profiled seconds of its operator: the executed operator takes a part of them, and the rank sleeps
for the rest. Communication is real, so tensor, pipeline, expert and data
parallelism wait as in training. Ranks need a fraction of a processor each, and there may be more of them than cores.
padded_clock.py has the sleeps.

Orders come as JSON lines, each gets one answer:

    {"do": "links", "keys": [[kind, tier, ranks, bytes], …]}                 seconds of collectives of all ranks
    {"do": "layout", "flags": […], "seconds": {operator: seconds} by stage}    assemble a run; the one before it goes
    {"do": "step"}                                                           execute one step
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moe_overlap.commands.exits import end_process
from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.profile.database import LinkKey
from tools.bench.variants import Variant
from tools.bench.worker import Rank, WorkerRun

ORDER_LINKS, ORDER_LAYOUT, ORDER_STEP = "links", "layout", "step"


class PaddedRank(Rank):
    """A rank that trains one layout after the other."""

    NAME = "layout"

    def __init__(self, job: Sequence[str], slower: float) -> None:
        super().__init__(job, emulator=False)
        self._clock: Any = None
        self._slower = slower

    def answer(self, order: dict[str, Any]) -> Any:
        """Follow an order."""
        if order["do"] == ORDER_LAYOUT:
            return self._change(order["flags"], order["seconds"])
        if order["do"] == ORDER_LINKS:
            return links_seconds([LinkKey(*values) for values in order["keys"]])
        return self._executed()

    def _change(self, flags: Sequence[str], seconds: Sequence[Mapping[str, float]]) -> None:
        """Leave the run there is, and assemble another one."""
        from tools.bench.padded_clock import PaddedClock

        if self.runs:
            self.runs.pop(self.NAME).runner.context.groups.close()
            self._clock = None
            gc.collect()
        variant = Variant(self.NAME, tuple(flags))
        job = self.assemble(variant)
        runner = job.machinery.runner
        self.runs[self.NAME] = WorkerRun(variant, runner, job.schedule.instructions, job.batches("train", 0))
        context = runner.context
        self._clock = PaddedClock(context.recorder, seconds[context.groups.stage], self._slower)
        context.recorder.clock = self._clock

    def _executed(self) -> dict[str, Any]:
        """Seconds of one step, with its update; operators that had no seconds; and how far operators were late."""
        assert self._clock is not None, "no layout was assembled"
        self._clock.reset()
        figures = self.step(self.runs[self.NAME], 1.0)
        late = self._clock.late
        latest = max(late, key=lambda name: late[name], default="")
        return figures | {"late": sum(late.values()), "latest": latest, "unknown": sorted(self._clock.unknown)}


def links_seconds(keys: Sequence[LinkKey]) -> list[float]:
    """Seconds of collectives of all ranks, as tools/profile_cluster.py measures them. All ranks call this together."""
    import torch.distributed as dist

    from moe_overlap.tuner.profile.measure.links import collective_seconds

    return [collective_seconds(key, dist.group.WORLD, "cpu", 0.0) for key in keys]


def command_of_padded(job: Sequence[str], slower: float) -> list[str]:
    """The command line of a rank.

    Args:
        job: flags of all layouts.
        slower: how many times as long as this machine the device computes.
    """
    module = [sys.executable, "-m", "tools.bench.padded_ranks"]
    return [*module, "--job", json.dumps(list(job)), "--slower", str(slower)]


def main(argv: Sequence[str]) -> int:
    """Say that the rank is there, then follow orders until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True, help="JSON: flags")
    parser.add_argument("--slower", type=float, required=True)
    parser.add_argument("--reply-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    job = json.loads(arguments.job)

    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()

    from megatron.training.cli.arguments import parse
    from megatron.training.initialize import start_process

    with os.fdopen(arguments.reply_fd, "w", buffering=1) as replies:
        try:
            # Each plan sets the micro-batch of its layout; any size will do at the start.
            start_process(parse([*job, "--micro-batch-size", "1"]).config)
            rank = PaddedRank(job, arguments.slower)
            print(json.dumps({}), file=replies)
            for line in sys.stdin:
                print(json.dumps(rank.answer(json.loads(line))), file=replies)
        except ConfigError as error:
            if os.environ["RANK"] == "0":
                print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
